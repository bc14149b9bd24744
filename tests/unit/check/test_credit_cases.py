"""`check --credit` is green here, and turns red when the trainer's credit is bent."""

import dataclasses
import json

import pytest
import torch

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.check import credit
from trl_drgrpo.check.credit import (
    CONTROL_FLOOR,
    TOLERANCE,
    CreditCase,
    adversarial_value,
    credit_cases,
    exact_value,
    run_credit_case,
)
from trl_drgrpo.check.groups import TrainerCredit
from trl_drgrpo.check.policies import Trajectory, compare, reasoning, shared_states, stop_or_go, total
from trl_drgrpo.cli import main as cli

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
    monkeypatch.setattr("trl_drgrpo.trainer.with_closings", lambda rewards, ends, *, apart: joined(rewards, ends))
    assert run_credit_case(named("stop or go", "to_go")).difference > 1e-2


def joined(rewards, ends):
    from trl_drgrpo.objective.step_advantages import with_closings

    return with_closings(rewards, ends, apart=False)


def test_keys_that_are_dropped_are_seen(monkeypatch):
    """Both baselines are unbiased, so it is the advantages that tell them apart."""
    policy, trainer = shared_states(), TrainerCredit(step_separator="turn")
    unkeyed = policy.map(lambda row: dataclasses.replace(row, state_keys=()))
    pair = [index for batch in policy.batches(2) for index in batch]
    with_keys = trainer([policy.rows[i] for i in pair], 2)
    assert not torch.allclose(with_keys, trainer([unkeyed.rows[i] for i in pair], 2))


def test_a_control_that_agrees_is_a_failure():
    policies = [stop_or_go(0.2)]
    exact = policies[0].gradient(total)
    for factor in (1.0, 3.0):  # a multiple is a learning rate
        case = CreditCase("stop or go", "no control", lambda factor=factor: [(factor * exact, exact)], control=True)
        assert not run_credit_case(case).passed


def test_nothing_to_compare_proves_nothing():
    nothing = torch.zeros(2, dtype=torch.float64)
    for control in (False, True):
        assert not run_credit_case(CreditCase("", "", lambda: [(nothing, nothing)], control)).passed
    assert not run_credit_case(CreditCase("", "", lambda: [(nothing * torch.nan, nothing + 1)])).passed


@pytest.fixture
def short_table(monkeypatch):
    kept = [named("stop or go", "to_go"), named("two turns", "z-score at the same turn")]
    monkeypatch.setattr(credit, "credit_cases", lambda: kept)


def test_the_command_runs_credit_alone(short_table, capsys):
    assert cli.main(["check", "--credit"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 cases as they should be: step credit is unbiased here." in out
    assert "z-score at the same turn (must differ)" in out
    assert "Loss and gradient" not in out


def test_the_command_speaks_json(short_table, capsys):
    assert cli.main(["check", "--credit", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert [case["control"] for case in report["credit"]] == [False, True]
    assert "cases" not in report


def test_the_command_exits_1_when_credit_is_bent(short_table, monkeypatch, capsys):
    bent(monkeypatch, without_the_decision_to_stop)
    assert cli.main(["check", "--credit"]) == 1
    assert "1 of 2 cases FAILED: do not trust runs in this environment" in capsys.readouterr().out


def test_full_and_credit_exclude_each_other(capsys):
    assert cli.main(["check", "--credit", "--full"]) == 2
    assert "not allowed with" in capsys.readouterr().err
