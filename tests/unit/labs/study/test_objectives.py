"""The family of objectives as token weights: against the specification's gradient, and against worked numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo import dr_grpo_loss, group_advantages
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.objectives import OBJECTIVES, STD_FLOOR, gradient_weight

REWARDS, LENGTHS = np.array([1.0, 0.0, 0.0, 1.0]), np.array([2, 4, 3, 6])


def weights(name):
    return OBJECTIVES[name].token_weights(REWARDS, LENGTHS, num_generations=4, loss_normalizer=8)


def test_ours_is_the_gradient_of_the_specification():
    logps = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)
    dr_grpo_loss(logps, None, group_advantages(REWARDS.tolist(), 4).double(), mask, loss_normalizer=8).backward()
    assert torch.allclose(-logps.grad, torch.tensor(weights("dr_grpo")).unsqueeze(1) * mask, atol=1e-15)


def test_the_worked_example():
    assert weights("dr_grpo") == pytest.approx([0.5 / 32, -0.5 / 32, -0.5 / 32, 0.5 / 32])
    assert weights("grpo_without_std") == pytest.approx([0.5 / 8, -0.5 / 16, -0.5 / 12, 0.5 / 24])
    std = 1 / 3**0.5 + STD_FLOOR  # of (1, 0, 0, 1) with n - 1
    assert weights("grpo") == pytest.approx(np.array([0.5 / 8, -0.5 / 16, -0.5 / 12, 0.5 / 24]) / std)
    assert weights("dapo") == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / 15 / std)
    assert weights("dr_grpo_with_std") == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / 32 / std)
    # Token losses of the example: the loss is minus the weighted sum of tokens.
    assert -(weights("dr_grpo") * LENGTHS).sum() == -0.015625
    assert (weights("grpo_without_std") * LENGTHS).sum() == pytest.approx(0, abs=1e-15)


@given(st.lists(st.sampled_from([0.0, 1.0, 0.7]), min_size=8, max_size=8))
def test_advantages_of_a_group_sum_to_zero_and_equal_rewards_give_exactly_none(rewards):
    for objective in OBJECTIVES.values():
        advantages = objective.advantages(np.array(rewards), 4).reshape(-1, 4)
        assert advantages.sum(axis=1) == pytest.approx([0, 0], abs=1e-9)
        for group, values in zip(np.array(rewards).reshape(-1, 4), advantages, strict=True):
            assert (values == 0).all() == (len(set(group)) == 1)


def test_gradient_weight_without_std_is_a_parabola_and_with_std_its_root():
    assert gradient_weight(8, False) == pytest.approx([2 * k * (8 - k) / 8 for k in range(9)])
    with_std, without = gradient_weight(8, True), gradient_weight(8, False)
    for k in range(1, 8):  # std of k ones and 8 - k zeros: sqrt(k (8 - k) / 56)
        assert with_std[k] == pytest.approx(without[k] / ((k * (8 - k) / 56) ** 0.5 + STD_FLOOR))
    assert with_std[1] / with_std[4] > without[1] / without[4]  # the difficulty bias


@pytest.mark.parametrize("group", [1, 3])
def test_groups_that_do_not_fit_are_refused(group):
    with pytest.raises(InputError, match="num_generations"):
        OBJECTIVES["dr_grpo"].advantages(REWARDS, group)
