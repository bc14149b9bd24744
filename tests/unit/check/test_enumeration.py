"""The engine behind `check --credit`, on gradients that can be had by hand."""

import pytest
import torch

from trl_drgrpo.check.policies import (
    Trajectory,
    compare,
    lowest,
    outcome,
    reasoning,
    shared_states,
    stop_or_go,
    total,
    two_turns,
)

POLICIES = [stop_or_go(0.2), stop_or_go(0.8), stop_or_go(0.2, at_once=True), reasoning(), two_turns(), shared_states()]


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_that_can_happen_is_listed_once(policy):
    assert policy.probabilities().sum().item() == pytest.approx(1.0, abs=1e-15)
    for row in policy.rows:
        assert list(row.step_ends) == sorted(set(row.step_ends))
        assert len(row.step_rewards) == len(row.step_ends)
        assert row.step_ends[-1] == len(row.log_probs) - 1


@pytest.mark.parametrize("q", [0.2, 0.8])
def test_the_exact_gradient_of_stop_or_go(q):
    """`q (1 + p + p^2)` with p = 1/2: q (1 + 2p) p (1 - p) in the logit of p, and (1 + p + p^2) q (1 - q) in q's."""
    assert stop_or_go(q).gradient(total).tolist() == pytest.approx([q / 2, 1.75 * q * (1 - q)], abs=1e-15)


def test_the_exact_gradient_of_the_worst_step():
    """`q / 2 + q^2 / 4 + q^3 / 4`, the chance that all steps are good; the stopping chances move as p (1 - p) does."""
    q, p = 0.8, 0.5
    go = (-q + (1 - 2 * p) * q**2 + 2 * p * q**3) * p * (1 - p)
    good = (1 / 2 + q / 2 + 3 * q**2 / 4) * q * (1 - q)
    assert stop_or_go(q).gradient(lowest).tolist() == pytest.approx([go, good], abs=1e-15)


def test_the_outcome_is_not_the_sum_of_the_steps():
    policy = reasoning(max_steps=2)  # stops after one step, or goes on: good after good 0.75, after bad 0.3
    worth = 0.5 * 0.75 + 0.5 * (0.75 * 0.75 + 0.25 * 0.3)
    got = sum(p * row.outcome for p, row in zip(policy.probabilities().tolist(), policy.rows, strict=True))
    assert got == pytest.approx(worth, abs=1e-15)
    assert not torch.allclose(policy.gradient(outcome), policy.gradient(total))


def test_an_eos_can_be_paid_with_the_step_before_it():
    row = Trajectory(torch.zeros(5), (1, 3, 4), (1.0, 0.5, 0.0), text="+\n-\n", closing=True)
    merged = row.with_eos_in_last_step()
    assert (merged.step_ends, merged.step_rewards, merged.closing) == ((1, 4), (1.0, 0.5), False)
    assert merged.with_eos_in_last_step() is merged


def whole_row(rows, num_generations):
    """What each row earns, on all of its tokens: no baseline."""
    returns = torch.tensor([total(row) for row in rows], dtype=torch.float64)
    return returns.unsqueeze(1).expand(-1, max(len(row.log_probs) for row in rows))


@pytest.mark.parametrize("prompts", [None, 1, 2])
def test_reinforce_is_exact_however_it_is_batched(prompts):
    policy = shared_states() if prompts != 2 else reasoning(max_steps=2)
    ((gradient, exact),) = compare([policy], whole_row, group_sizes=(2,), prompts=prompts)
    assert gradient.tolist() == pytest.approx(exact.tolist(), abs=1e-13)


def test_rows_need_not_be_independent():
    """Two copies of one row: drawn with the row's probability, each weighs half."""
    policy = two_turns()
    batches = [(i, i) for i in range(len(policy.rows))]
    rows = [policy.rows[i] for batch in batches for i in batch]
    advantages = whole_row(rows, 2).reshape(len(batches), 2, -1)
    gradient = policy.expected_gradient(batches, advantages, policy.probabilities())
    assert gradient.tolist() == pytest.approx(policy.gradient(total).tolist(), abs=1e-13)


def test_a_shrinking_mean_is_known_by_its_factor():
    def minus_group_mean(rows, num_generations):
        returns = whole_row(rows, num_generations)
        means = returns.view(-1, num_generations, returns.size(1)).mean(dim=1, keepdim=True)
        return returns - means.expand(-1, num_generations, -1).flatten(0, 1)

    for share in (lambda size: (size - 1) / size, lambda size: 1.0):
        for (gradient, exact), group_size in zip(
            compare([two_turns()], minus_group_mean, share=share), (2, 3), strict=True
        ):
            factor = (group_size - 1) / group_size / share(group_size)
            assert gradient.tolist() == pytest.approx((exact * factor).tolist(), abs=1e-13)
