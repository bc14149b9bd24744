import random

import pytest
import torch

from trl_drgrpo.objective.value_baseline import ValueBaseline, value_differences

OUTCOME = torch.tensor([0.5, -0.5, 0.5, -0.5])
VALUES = [[0.9, 0.8], [0.1], [0.6, 0.9], [0.4, 0.2]]
ENDS = [[0, 1, 2], [0, 1], [0, 1, 2], [0, 3, 4]]


def with_last(values, ends):
    return [[*row, *[None] * (len(e) - len(row))] for row, e in zip(values, ends, strict=True)]


def test_a_score_that_is_missing_leaves_the_one_before():
    got = value_differences([[0.9, None, 0.1], [0.5, 0.7, 0.1]], 2)
    torch.testing.assert_close(got[0, 0], torch.tensor([0.0, 0.2, 0.1], dtype=torch.float64))
    assert value_differences([[None, 0.4], [None, 0.2]], 2).abs().sum() == 0


def test_the_coefficient_of_a_group_does_not_look_at_the_group():
    values = with_last(VALUES, ENDS)
    first, _ = ValueBaseline().subtract(OUTCOME, values, ENDS, 2, update=False)
    changed = OUTCOME.clone()
    changed[2:] *= 3
    second, _ = ValueBaseline().subtract(changed, values, ENDS, 2, update=False)
    slope = [(row[1] - row[0]) for row in first]
    again = [(row[1] - row[0]) for row in second]
    assert again[0] == pytest.approx(3 * slope[0])  # fitted on the other group
    assert again[2] == pytest.approx(slope[2])  # its own outcome changed, its coefficient did not


def test_a_perfect_value_is_found_and_removes_variance():
    rng = random.Random(0)
    baseline, removed = ValueBaseline(), []
    for _ in range(30):
        early = [rng.choice([0.0, 1.0]) for _ in range(16)]  # settles the outcome at step 1
        outcome = torch.tensor(early).view(-1, 4)
        outcome = (outcome - outcome.mean(dim=1, keepdim=True)).flatten()
        _, metrics = baseline.subtract(outcome, [[v, v, None] for v in early], [[0, 9, 10]] * 16, 4, update=True)
        removed.append(metrics.get("removes", 0.0))
    assert metrics["coefficient"] == pytest.approx(1.0)
    assert removed[-1] == pytest.approx(10 / 11)  # all tokens but the one that was written without knowing


def test_a_value_that_says_nothing_gets_a_small_coefficient():
    rng = random.Random(0)
    baseline = ValueBaseline()
    for _ in range(60):
        outcome = torch.tensor([rng.choice([-0.5, 0.5]) for _ in range(32)])
        values = [[rng.random(), rng.random(), None] for _ in range(32)]
        _, metrics = baseline.subtract(outcome, values, [[4, 9, 10]] * 32, 4, update=True)
    assert abs(metrics["coefficient"]) < 0.15
    assert metrics["removes"] > -0.05


def test_rows_without_an_outcome_get_nothing_and_teach_nothing():
    values = with_last(VALUES, ENDS)
    outcome = OUTCOME.clone()
    outcome[3] = float("nan")
    advantages, _ = ValueBaseline().subtract(outcome, values, ENDS, 2, update=False)
    assert advantages[3] == [0.0, 0.0, 0.0]
    assert advantages[0][0] == 0.5


def test_rows_without_an_outcome_are_in_nobodys_mean():
    values, outcome = [[0.9, None], [0.1, None], [0.8, None]], torch.tensor([0.5, -0.5, float("nan")])
    baseline = ValueBaseline()
    baseline.load_state_dict({"squares": 1e9, "products": 1e9})  # c = 1
    advantages, _ = baseline.subtract(outcome, values, [[0, 1]] * 3, 3, update=False)
    assert [row[1] for row in advantages] == pytest.approx([0.5 - 0.4, -0.5 + 0.4, 0.0])


def test_state_is_restored():
    baseline = ValueBaseline()
    baseline.subtract(OUTCOME, with_last(VALUES, ENDS), ENDS, 2, update=True)
    restored = ValueBaseline()
    restored.load_state_dict(baseline.state_dict())
    assert restored.state_dict() == baseline.state_dict() != ValueBaseline().state_dict()
    kept = baseline.state_dict()
    baseline.subtract(OUTCOME, with_last(VALUES, ENDS), ENDS, 2, update=False)
    assert baseline.state_dict() == kept  # an evaluation teaches nothing


def test_without_steps_there_is_nothing_to_subtract():
    assert ValueBaseline().subtract(OUTCOME, [[]] * 4, [[]] * 4, 2, update=True) == ([[]] * 4, {})
