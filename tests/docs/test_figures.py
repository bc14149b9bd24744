"""What the notebooks draw: worked numbers, and what must hold for any group."""

import json

import numpy as np
import pytest
from figures import (
    ExampleGroup,
    counterfactual_weights,
    drift_table,
    length_drift,
)
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.check.bias import OBJECTIVES
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import STD_FLOOR
from trl_drgrpo.report.run_folders import read_run

pytest.importorskip("matplotlib")
lengths = st.integers(1, 400)


def test_a_worked_group():
    """4 of 8 right, 50 and 200 tokens, 125 on average: GRPO weighs a token 125/50 and 125/200, ours 1."""
    group = ExampleGroup(right=4, length_right=50, length_wrong=200)
    for name in ("grpo", "grpo_without_std"):
        assert group.token_weights(name) == pytest.approx([2.5] * 4 + [-0.625] * 4)
    for name in ("dr_grpo", "dr_grpo_with_std", "dapo"):
        assert group.token_weights(name) == pytest.approx([1.0] * 4 + [-1.0] * 4)
        assert group.pulls(name) == pytest.approx([0.4] * 4 + [-1.6] * 4)
    assert group.pulls("grpo") == pytest.approx([1.0] * 4 + [-1.0] * 4)
    # 1 of 8: advantage 7/8 against 1/2 of the even group, with std 2.4749 against 0.9354 (both up to the floor)
    uneven = ExampleGroup(right=1, length_right=100, length_wrong=100)
    assert uneven.token_weights("dr_grpo")[0] == pytest.approx(0.875 / 0.5)
    assert uneven.token_weights("grpo")[0] == pytest.approx(2.4749 / 0.9354, rel=1e-3)


@given(st.integers(2, 12), st.integers(0, 12), lengths, lengths, lengths)
def test_pulls_of_any_group_keep_their_invariants(size, right, length_right, length_wrong, cut):
    group = ExampleGroup(min(right, size), length_right, length_wrong, size, cut)
    for name, objective in OBJECTIVES.items():
        weights = group.token_weights(name)
        if group.right in (0, size):
            assert (weights == 0).all()
        elif objective.divisor == "row":  # the length divisor makes the pulls of a group sum to 0
            assert group.pulls(name).sum() == pytest.approx(0, abs=1e-6)
        else:  # a divisor that all rows share makes the token weights sum to 0
            assert weights.sum() == pytest.approx(0, abs=1e-6)


def line(step, group, rewards=(1.0, 0.0, 0.0, 1.0), tokens=(2, 4, 3, 6), mode="train"):
    rows = [
        {"spans": [], "rewards": {}, "reward": r, "advantage": None if r is None else r - 0.5, "length": n}
        | {"truncated": False, "right": r == 1}
        for r, n in zip(rewards, tokens, strict=True)
    ]
    return {"step": step, "time": 1.0, "mode": mode, "group": group, "prompt": "", "rows": rows, "columns": {}}


def recorded(folder, lines):
    log = folder / "_drgrpo"
    log.mkdir()
    (log / "run.json").write_text(json.dumps({"format": 1, "objective": {"loss_normalizer": 8}}))
    (log / "completions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return read_run(folder)


def test_recorded_groups_under_every_objective(tmp_path):
    lines = [line(2, 0, tokens=(1, 1, 1, 1)), line(1, 1, rewards=(1.0, None, 0.0, 0.0)), line(1, 0)]
    found = counterfactual_weights(recorded(tmp_path, [*lines, line(1, 0, mode="eval")]))
    assert (found.steps.tolist(), found.groups_left_out) == ([1] * 4 + [2] * 4, 1)
    half, std, first = np.array([0.5, -0.5, -0.5, 0.5]), 1 / 3**0.5 + STD_FLOOR, slice(4)
    assert found.token_weights["dr_grpo"][first] == pytest.approx(half / 32)
    assert found.token_weights["dapo"][first] == pytest.approx(half / 15 / std)
    assert found.token_weights["grpo"][first] == pytest.approx(half / np.array((2, 4, 3, 6)) / 4 / std)
    assert found.advantages[first].tolist() == half.tolist()
    incorrect = ~found.right & (found.steps == 1)
    assert found.share("grpo", incorrect) / found.share("grpo", found.steps == 1) == pytest.approx(0.5)
    assert found.share("dr_grpo", incorrect) / found.share("dr_grpo", found.steps == 1) == pytest.approx(7 / 15)


def test_a_run_without_groups_is_refused(tmp_path):
    with pytest.raises(InputError, match="0 complete groups recorded"):
        counterfactual_weights(recorded(tmp_path, []))


def test_the_expected_update_moves_two_rates_apart_under_a_divisor_per_row_alone():
    found, noise = length_drift(prompts=16, batches=200), 1 / 200**0.5
    for name in ("grpo", "grpo_without_std"):
        correct, incorrect, shared = found[name]
        assert correct > 1
        assert incorrect < -1
        assert abs(shared) < 4 * noise
    assert np.abs([found["dr_grpo"], found["dr_grpo_with_std"]]).max() < 4 * noise
    assert f"| grpo | {found['grpo'][0]:+.2f} | {found['grpo'][1]:+.2f} |" in drift_table(found, found)
