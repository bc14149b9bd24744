"""The weights of other objectives for recorded groups: a run log written by hand, with worked numbers."""

import json

import numpy as np
import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.counterfactual import counterfactual_weights
from trl_drgrpo.labs.study.objectives import OBJECTIVES, STD_FLOOR
from trl_drgrpo.report.reading import read_run

REWARDS, LENGTHS = (1.0, 0.0, 0.0, 1.0), (2, 4, 3, 6)


def line(step, group, rewards=REWARDS, lengths=LENGTHS, mode="train"):
    mean = sum(r or 0.0 for r in rewards) / len(rewards)
    rows = [
        {"spans": [], "rewards": {}, "reward": r, "advantage": None if r is None else r - mean, "length": n}
        | {"truncated": False, "right": None if r is None else r == 1}
        for r, n in zip(rewards, lengths, strict=True)
    ]
    return {"step": step, "time": 1.0, "mode": mode, "group": group, "prompt": "", "rows": rows, "columns": {}}


@pytest.fixture
def recorded(tmp_path):
    def write(lines, normalizer=8):
        log = tmp_path / "_drgrpo"
        log.mkdir(exist_ok=True)
        (log / "run.json").write_text(json.dumps({"format": 1, "objective": {"loss_normalizer": normalizer}}))
        (log / "completions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        return read_run(tmp_path)

    return write


def test_the_worked_example(recorded):
    found = counterfactual_weights(recorded([line(1, 0)]))
    half, std = np.array([0.5, -0.5, -0.5, 0.5]), 1 / 3**0.5 + STD_FLOOR
    assert found.token_weights["dr_grpo"] == pytest.approx(half / 32)
    assert found.token_weights["dapo"] == pytest.approx(half / 15 / std)
    assert found.token_weights["grpo"] == pytest.approx(half / np.array(LENGTHS) / 4 / std)
    assert found.pulls("dr_grpo").sum() == pytest.approx(0.015625)
    assert found.advantages.tolist() == half.tolist()
    assert found.right.tolist() == [True, False, False, True]
    wrong = ~found.right
    assert found.share("grpo", wrong) == pytest.approx(0.5)
    assert found.share("dr_grpo", wrong) == pytest.approx(7 / 15)


def test_every_step_is_a_batch_of_its_own_in_the_order_of_the_run(recorded):
    lines = [line(2, 0, lengths=(1, 1, 1, 1)), line(1, 1), line(1, 0), line(1, 0, mode="eval")]
    found = counterfactual_weights(recorded(lines))
    assert found.steps.tolist() == [1] * 8 + [2] * 4
    assert found.groups.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    first = found.steps == 1
    expected = OBJECTIVES["dapo"].token_weights(np.array(REWARDS * 2), np.array(LENGTHS * 2), 4, 8)
    assert found.token_weights["dapo"][first] == pytest.approx(expected)
    assert np.abs(found.token_weights["grpo_without_std"][~first]) == pytest.approx(0.5 / 4)


def test_groups_with_a_missing_reward_are_left_out_and_counted(recorded):
    found = counterfactual_weights(recorded([line(1, 0), line(1, 1, rewards=(1.0, None, 0.0, 0.0))]))
    assert (len(found.steps), found.groups_left_out) == (4, 1)


def test_where_the_run_does_not_say_what_is_right_nothing_is(recorded):
    unjudged = line(1, 0)
    for row in unjudged["rows"]:
        row["right"] = None
    assert not counterfactual_weights(recorded([unjudged])).right.any()


def test_a_run_in_which_nothing_pulls_has_no_shares(recorded):
    found = counterfactual_weights(recorded([line(1, 0, rewards=(1.0,) * 4)]))
    assert np.isnan(found.share("grpo", found.right))


def test_a_run_without_groups_or_without_l_is_refused(recorded):
    with pytest.raises(InputError, match="0 complete groups recorded and loss_normalizer=8"):
        counterfactual_weights(recorded([]))
    with pytest.raises(InputError, match="loss_normalizer=None.*record_groups=-1"):
        counterfactual_weights(recorded([line(1, 0)], normalizer=None))
