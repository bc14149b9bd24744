import math

import numpy as np
import pytest

from trl_drgrpo.check.stop_push import decision_scores, stop_push


def simulated(objective, seed=0, prompts=400, size=8, go=0.9):
    """One coin decides lengths, another one correctness; nothing links them."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 - go, size=prompts * size)
    correct = rng.random(prompts * size) < 0.5
    group, batch = np.arange(prompts * size) // size, np.arange(prompts * size) // (10 * size)
    rewards = correct.astype(float).reshape(-1, size)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
    weights = advantages / lengths if objective == "mean per row" else advantages
    scores = decision_scores(lengths, np.ones(len(lengths), bool), group, batch)
    return stop_push(weights, scores, ~correct, group), stop_push(weights, scores, correct, group)


def test_a_mean_per_row_pushes_incorrect_answers_to_go_on_and_correct_ones_to_stop():
    incorrect, correct = simulated("mean per row")
    assert incorrect.value > 5 * incorrect.standard_error > 0
    assert correct.value < -5 * correct.standard_error
    assert incorrect.value == pytest.approx(-correct.value, rel=0.2)


def test_a_constant_divisor_does_not():
    for push in simulated("constant"):
        assert abs(push.value) < 3 * push.standard_error
        assert push.groups > 390


def test_scores_by_hand():
    # The second group has 3 + 1 tokens and both rows stopped: 2 of 4 decisions were to go on.
    lengths, stopped = np.array([4, 2, 3, 1]), np.array([True, False, True, True])
    scores = decision_scores(lengths, stopped, np.array([0, 0, 1, 1]), np.zeros(4, int))
    assert scores[:2].tolist() == [3 - 0.5 * 4, 2 - 0.5 * 2]
    assert scores[2:].tolist() == pytest.approx([2 - 5 / 6 * 3, 0 - 5 / 6 * 1])
    weights, chosen = np.array([0.5, -0.5, 0.0, 0.0]), np.array([True, False, True, False])
    push = stop_push(weights, scores, chosen, np.array([0, 0, 1, 1]))
    assert push.value == pytest.approx(0.5 * 1.0 / 1.0)
    assert push.groups == 1
    assert math.isnan(push.standard_error)


def test_a_batch_of_one_group_says_nothing():
    scores = decision_scores(np.array([3, 4]), np.array([True, True]), np.array([0, 0]), np.zeros(2, int))
    assert np.isnan(scores).all()
    assert stop_push(np.array([1.0, -1.0]), scores, np.array([True, False]), np.array([0, 0])).groups == 0
