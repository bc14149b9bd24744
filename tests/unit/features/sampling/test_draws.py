"""What is logged of a batch's draws."""

import pytest

from trl_drgrpo.features.sampling.prompt_stream import Draw, cap_warning, sampling_metrics
from trl_drgrpo.objective.group_selection import Selection


def draw(place=None, live=False, reward=float("nan"), **fields):
    return Draw({}, "", place=place, live=live, reward=reward, **fields)


def test_the_metrics():
    drawn = [
        draw((0, 0), live=True, reward=0.5, estimate=0.5, probability=1.0),
        draw(estimate=0.1, probability=0.5),
        draw((0, 1), reward=0.0, estimate=0.2, probability=0.75),
        draw((0, 2), live=True, reward=0.5, estimate=0.6, probability=0.5),
        draw((1, 0), live=True, reward=0.5, estimate=0.4, probability=1.0),
    ]
    found = sampling_metrics(drawn, Selection([0, 3], [0.5, 1.0], 4, False), rounds=2, tokens=90)
    assert found == {
        "sampling/draws": 5,
        "sampling/groups_generated": 4,
        "sampling/groups_live": 3,
        "sampling/groups_trained": 2,
        "sampling/groups_dropped": 1,
        "sampling/rounds": 2,
        "sampling/capped_frac": 0.0,
        "sampling/tokens_per_live_group": 30.0,
        "sampling/weight_mean": 0.75,
        "sampling/weight_max": 1.0,
        "sampling/effective_groups": pytest.approx(1.5**2 / 1.25),
        "sampling/keep_probability": 0.75,
        "sampling/keep_probability/0-25": 0.625,
        "sampling/keep_probability/25-50": 1.0,
        "sampling/keep_probability/50-75": 0.5,
    }


def test_a_batch_without_a_signal_has_no_weights():
    found = sampling_metrics([draw((0, 0), reward=1.0)], Selection([], [], 1, True), rounds=1, tokens=5, dapo=True)
    assert found["sampling/capped_frac"] == 1.0
    assert not {"sampling/weight_mean", "sampling/tokens_per_live_group", "sampling/dapo_factor"} & set(found)
    assert "sampling/keep_probability" not in found


def test_the_warning_says_which_side_the_rewards_are_on():
    drawn = [draw((0, 0), live=True, reward=0.5), draw((0, 1), reward=0.0), draw((0, 2), reward=1.0), draw()]
    said = cap_warning(drawn, wanted=2, rounds=2)
    assert "1 of 2 groups carried a signal after the 4 prompts that max_sampling_rounds=2 allows" in said
    assert "rewards from 0 to 1, 50% of them at the highest." in said
    assert "Groups without" not in cap_warning([draw()], 2, 2)
