"""`check --credit`: enumerations agree with arithmetic by hand; green here, red when credit is bent."""

import dataclasses
import json
from itertools import product

import pytest
import torch

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.check import credit, enumerated_groups
from trl_drgrpo.check.credit import (
    CONTROL_FLOOR,
    TOLERANCE,
    CreditCase,
    adversarial_value,
    credit_cases,
    exact_value,
    run_credit_case,
)
from trl_drgrpo.check.enumerated_groups import LATER, NOW, TrainerCredit, chosen_prompts, retried_until_mixed
from trl_drgrpo.check.tabular_policies import (
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
from trl_drgrpo.objective.advantages import select_groups
from trl_drgrpo.objective.step_advantages import with_closings

CASES = credit_cases()


def named(environment, name):
    """The case of that name, anew: its trainer is not built yet."""
    return next(case for case in credit_cases() if (case.environment, case.credit) == (environment, name))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.environment}: {case.credit}")
def test_the_expected_gradient_is_the_exact_one_or_must_differ(case):
    result = run_credit_case(case)
    if case.control:
        assert result.difference > CONTROL_FLOOR
    else:
        assert result.difference <= TOLERANCE
    assert result.passed


# Credit of the decision to go on, for q = 0.2 and q = 0.8, as in the design's table; all else by the real trainer.
@pytest.mark.parametrize(
    ("baseline", "eos_in_last_step", "expected"),
    [
        ("to_go", False, [0.1, 0.4]),
        ("deepseekmath", False, [0.0, 0.0]),
        ("none", True, [0.025, 0.1]),
    ],
)
def test_the_credit_of_going_on(baseline, eos_in_last_step, expected):
    policies = [stop_or_go(0.2), stop_or_go(0.8)]
    if eos_in_last_step:
        policies = [policy.map(Trajectory.with_eos_in_last_step) for policy in policies]
    trainer = TrainerCredit(step_baseline=baseline)
    seen = [gradient[0].item() for gradient, _ in compare(policies, trainer, group_sizes=(2,))]
    assert seen == pytest.approx(expected, abs=1e-12)


def test_steps_come_from_the_tokens_as_in_training():
    """What the policy says of its own steps is not looked at."""
    policy = stop_or_go(0.2)
    unsaid = policy.map(lambda row: dataclasses.replace(row, step_ends=(0,), step_rewards=(9.0,), closing=row.closing))
    trainer = TrainerCredit()
    rows = [*policy.rows, *unsaid.rows]
    advantages = trainer(rows[:14] * 2, 2)
    assert torch.equal(trainer(rows[14:] * 2, 2), advantages)
    assert advantages.abs().sum() > 0


def test_the_coefficient_is_not_zero_where_it_is_said_to_be_fitted():
    policy = reasoning(max_steps=2)
    trainer = TrainerCredit(adversarial_value, process_role="baseline", advantage_baseline="leave_one_out")
    plain = TrainerCredit(None, advantage_baseline="leave_one_out")
    rows = [policy.rows[i] for i in (0, 5, 1, 4)]
    assert not torch.allclose(trainer(rows, 2), plain(rows, 2))


def test_the_exact_value_is_that_of_the_prefix():
    value = exact_value(reasoning(max_steps=2))  # good after good 0.75, after bad 0.3; stops with probability 1/2
    assert value(["+\n", "-\n"]) == pytest.approx([0.5 + 0.5 * 0.75, 0.0])
    assert value(["-\n"]) == pytest.approx([0.5 * 0.3])


def bent(monkeypatch, bend):
    right = DrGRPOTrainer.compute_advantages
    monkeypatch.setattr(DrGRPOTrainer, "compute_advantages", lambda self, batch: bend(right(self, batch), batch))


def own_row_in_the_mean(advantages, batch):
    """As if the baseline counted the row itself, in the longer half of the rows."""
    factor = (batch.num_generations - 1) / batch.num_generations
    longer = batch.completion_mask.sum(dim=1, keepdim=True) > 4
    return torch.where(longer, advantages * factor, advantages)


def without_the_decision_to_stop(advantages, batch):
    ended = batch.completion_mask.sum(dim=1)
    advantages = advantages.clone()
    advantages[torch.arange(len(ended)), ended - 1] = 0.0
    return advantages


def divided_by_a_std(advantages, batch):
    groups = advantages.view(-1, batch.num_generations, advantages.size(1))
    return (groups / groups.std(dim=(1, 2), keepdim=True).clamp(min=0.1)).view_as(advantages)


@pytest.mark.parametrize("bend", [own_row_in_the_mean, without_the_decision_to_stop, divided_by_a_std])
def test_bent_credit_turns_the_check_red(bend, monkeypatch):
    bent(monkeypatch, bend)
    result = run_credit_case(named("stop or go", "to_go"))
    assert not result.passed
    assert result.difference > 1e-3


def test_an_eos_paid_with_the_step_before_it_turns_the_check_red(monkeypatch):
    monkeypatch.setattr(
        "trl_drgrpo.objective.step_advantages.with_closings", lambda rewards, ends, *, apart: joined(rewards, ends)
    )
    assert run_credit_case(named("stop or go", "to_go")).difference > 1e-2


def joined(rewards, ends):
    return with_closings(rewards, ends, apart=False)


def test_keys_that_are_dropped_are_seen(monkeypatch):
    """Both baselines are unbiased, so it is the advantages that tell them apart."""
    policy, trainer = shared_states(), TrainerCredit(step_separator="turn")
    unkeyed = policy.map(lambda row: dataclasses.replace(row, state_keys=()))
    with_keys = trainer([row for pair in product(policy.rows, repeat=2) for row in pair], 2)
    assert not torch.allclose(with_keys, trainer([row for pair in product(unkeyed.rows, repeat=2) for row in pair], 2))


def test_a_control_that_agrees_is_a_failure():
    policies = [stop_or_go(0.2)]
    exact = policies[0].gradient(total)
    for factor in (1.0, 3.0):  # a multiple is a learning rate
        case = CreditCase("stop or go", "no control", lambda factor=factor: [(factor * exact, exact)], control=True)
        assert not run_credit_case(case).passed


def test_an_empty_comparison_proves_nothing():
    nothing = torch.zeros(2, dtype=torch.float64)
    for control in (False, True):
        assert not run_credit_case(CreditCase("", "", lambda: [(nothing, nothing)], control)).passed
    assert not run_credit_case(CreditCase("", "", lambda: [(nothing * torch.nan, nothing + 1)])).passed


def test_the_command_runs_credit_alone(monkeypatch, ran):
    kept = [named("stop or go", "to_go"), named("two turns", "z-score at the same turn")]
    monkeypatch.setattr(credit, "credit_cases", lambda: kept)
    out = ran(["check", "--credit", "-v"]).out
    assert "2 of 2 cases passed: step credit is unbiased here." in out
    assert "z-score at the same turn (must differ" in out
    assert "Loss and gradient" not in out
    report = json.loads(ran(["check", "--credit", "--json"]).out)
    assert [case["control"] for case in report["credit"]] == [False, True]
    assert "cases" not in report


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


def test_the_exact_gradient_is_that_of_the_mean_pass_rate():
    _, exact = next(chosen_prompts())
    assert exact.tolist() == pytest.approx([p * (1 - p) / 3 for p in (*NOW, *LATER)])


def test_a_prompt_that_is_retried_weighs_one_over_its_share_of_live_groups():
    gradient, exact = next(retried_until_mixed())  # of two completions
    assert (gradient / exact).tolist() == pytest.approx([1 / (2 * p * (1 - p)) for p in (*NOW, *LATER)])


@pytest.mark.parametrize("factor", [lambda s: s.drawn / (s.drawn - 1), lambda s: 1.0 + 0.2 * s.capped])
def test_bent_weights_are_seen(factor, monkeypatch):
    def bent(*args, **kwargs):
        selection = select_groups(*args, **kwargs)
        return dataclasses.replace(selection, weights=[w * factor(selection) for w in selection.weights])

    monkeypatch.setattr(enumerated_groups, "select_groups", bent)
    for gradient, exact in chosen_prompts(estimates=(0.9, 0.5, 0.02)):
        assert (gradient - exact).norm() > 1e-3 * exact.norm()
