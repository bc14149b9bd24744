"""The one-step measurement, on the policy of two numbers where the truth is known."""

import numpy as np
import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.direction import QUANTITIES, Rollouts, changes_per_step, measure
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.labs.study.tabular import expected_length, length_scores

GROUP, LONGEST, LOGITS = 8, 64, np.array([-2.0, -2.0])  # of the right and of the wrong state
P_RIGHT = 0.4


def drawn(rng, prompts=32):
    """A batch of the tabular policy, and the score of each row for the two logits, `(B, 2)`."""
    rows = prompts * GROUP
    states = np.where(rng.random(rows) < P_RIGHT, 0, 1)
    stop = (1 / (1 + np.exp(-LOGITS)))[states]
    lengths = rng.geometric(stop)
    stopped = lengths <= LONGEST
    lengths = np.minimum(lengths, LONGEST)
    scores = np.eye(2)[states] * length_scores(lengths, stopped, stop)[:, None]
    batch = Rollouts((states == 0).astype(float), states == 0, lengths, GROUP, LONGEST)
    return batch, scores


def measured(batches, seed=0):
    rng = np.random.default_rng(seed)
    found = [drawn(rng) for _ in range(batches)]
    return measure((batch, lambda weights, scores=scores: weights @ scores) for batch, scores in found)


def test_it_sees_the_bias_of_a_divisor_per_row_and_none_of_a_constant_one():
    changes = measured(40).changes
    for name in ("grpo", "grpo_without_std"):
        assert changes[name]["length_wrong"].z > 10
        assert changes[name]["length_right"].z < -10
    for name in ("dr_grpo", "dr_grpo_with_std"):
        assert abs(changes[name]["length_wrong"].z) < 3
        assert abs(changes[name]["length_right"].z) < 3


def test_it_agrees_with_a_step_that_is_taken():
    """The mean over many single steps of length `epsilon` along a batch's direction, lengths computed exactly."""
    rng, epsilon = np.random.default_rng(1), 1e-3
    grpo = list(OBJECTIVES).index("grpo")
    taken = []
    for _ in range(2000):
        batch, scores = drawn(rng)
        direction = batch.direction_weights()[grpo] @ scores
        moved = LOGITS + epsilon * direction / np.linalg.norm(direction)
        taken.append((expected_length(moved, LONGEST) - expected_length(LOGITS, LONGEST)) / epsilon)
    right, wrong = np.mean(taken, axis=0)
    found = measured(60, seed=2).changes["grpo"]
    assert found["length_wrong"].value == pytest.approx(wrong, abs=4 * found["length_wrong"].standard_error)
    assert found["length_right"].value == pytest.approx(right, abs=4 * found["length_right"].standard_error)
    assert found["length_wrong"].standard_error < 0.2 * wrong


def test_the_pass_rate_of_a_policy_that_cannot_learn_it_does_not_change():
    for name in OBJECTIVES:
        assert abs(measured(20).changes[name]["pass_rate"].value) < 0.01


def test_standard_errors_are_those_of_repetition():
    values = [measured(10, seed).changes["grpo"]["length_wrong"] for seed in range(60)]
    spread = np.std([v.value for v in values], ddof=1)
    assert np.mean([v.standard_error for v in values]) == pytest.approx(spread, rel=0.3)


def test_differences_are_paired():
    found = measured(20)
    ours, theirs = found.changes["dr_grpo"]["length_wrong"], found.changes["grpo"]["length_wrong"]
    difference = found.differences["grpo"]["length_wrong"]
    assert difference.value == pytest.approx(theirs.value - ours.value)
    assert found.differences["dr_grpo"]["length_wrong"].value == 0


def test_in_one_and_the_same_batch_the_product_would_be_wrong():
    """Why batches are kept apart: with the diagonal, Dr. GRPO would seem to change the pass rate of pure noise."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(12, 50, 256))  # scores of rows that have nothing to do with the reward

    def batch(k):
        right = np.random.default_rng(k).random(256) < P_RIGHT
        return Rollouts(right.astype(float), right, np.full(256, 5), GROUP, LONGEST)

    batches = [batch(k) for k in range(12)]
    scores = [noise[k] for k in range(12)]
    pairs = [(b, lambda weights, s=s: weights @ s.T) for b, s in zip(batches, scores, strict=True)]
    found = measure(pairs).changes["dr_grpo"]["pass_rate"]
    assert abs(found.z) < 3.5
    ours, passed = list(OBJECTIVES).index("dr_grpo"), QUANTITIES.index("pass_rate")
    within = []
    for k, each in enumerate(batches):
        direction = each.direction_weights()[ours] @ scores[k].T
        within.append(each.quantity_weights()[passed] @ scores[k].T @ direction / np.linalg.norm(direction))
    assert np.mean(within) > 10 * found.standard_error


def test_a_batch_without_a_right_answer_makes_that_quantity_unknown_and_no_other():
    rng = np.random.default_rng(0)
    directions, gradients = rng.normal(size=(5, len(OBJECTIVES), 3)), rng.normal(size=(5, 4, 3))
    gradients[2, 0] = np.nan
    found = changes_per_step(directions, gradients).changes["dr_grpo"]
    assert np.isnan(found["length_right"].value)
    assert np.isfinite(found["length_wrong"].value)


def test_a_batch_without_signal_is_a_step_of_length_zero():
    rng = np.random.default_rng(0)
    directions, gradients = rng.normal(size=(4, len(OBJECTIVES), 3)), rng.normal(size=(4, 4, 3))
    directions[1] = 0
    assert np.isfinite(changes_per_step(directions, gradients).changes["grpo"]["length"].value)


def test_two_batches_are_too_few():
    with pytest.raises(InputError, match="batches: got 2; expected at least 3"):
        changes_per_step(np.zeros((2, 5, 1)), np.zeros((2, 4, 1)))
