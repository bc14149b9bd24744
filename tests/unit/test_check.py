"""`trl-drgrpo check` is green here, and turns red when the objective is broken on purpose."""

import json

import pytest

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.check.credit import credit_cases
from trl_drgrpo.check.parity import CONTROL_FLOOR, TOLERANCE, Case, cases, run_case

# Settings that another case has too, together with more.
CONTAINED = (
    *("one batch", "accumulation", "two steps per generation", "two of both", "KL", "KL, off-policy", "LoRA"),
    *("L set on its own", "clip-higher", "shared prompts"),
)
CASES = [
    pytest.param(case, id=f"{case.name} [{i}]", marks=[pytest.mark.slow] * (case.name in CONTAINED))
    for i, case in enumerate(cases())
]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_agree_with_the_specification(case):
    result = run_case(case)
    assert result.steps >= 3
    if case.control:
        assert result.gradient_difference > result.residual > CONTROL_FLOOR
    else:
        assert result.gradient_difference <= case.tolerance
        assert result.loss_difference <= case.tolerance
    assert result.passed


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(full=True)[:48])
def test_every_combination(case):
    assert run_case(case).gradient_difference <= TOLERANCE


class WrongWeight(DrGRPOTrainer):
    """L off by one token."""

    def loss_constants(self, inputs):
        constants = super().loss_constants(inputs)
        return {**constants, "max_completion_length": constants["max_completion_length"] + 1}


class StdLeftOn(DrGRPOTrainer):
    """The other half of the trap: the right loss on advantages divided by a standard deviation."""

    def on_rollouts(self, rollouts):
        rollouts = super().on_rollouts(rollouts)
        rollouts["advantages"] = rollouts["advantages"] / rollouts["advantages"].std()
        return rollouts


class WidthAsNormalizer(DrGRPOTrainer):
    """The commonest wrong denominator: the padded width of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.width = inputs["completion_ids"].size(1)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def loss_constants(self, inputs):
        return {**super().loss_constants(inputs), "max_completion_length": self.width}


class ForgottenAccumulation(DrGRPOTrainer):
    """Micro-batch losses summed instead of averaged."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * self.current_gradient_accumulation_steps


class NaNInTheEnd(DrGRPOTrainer):
    """Right, but for the last optimizer step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * float("nan") if self.state.global_step == self.args.max_steps - 1 else loss


BROKEN = Case("broken", 4, 2, 4, settings=(("max_completion_length", 40),))


def test_the_case_that_is_broken_below_passes():
    assert run_case(BROKEN).passed


@pytest.mark.parametrize("broken", [WrongWeight, StdLeftOn, WidthAsNormalizer, ForgottenAccumulation, NaNInTheEnd])
def test_a_broken_objective_turns_the_check_red(broken):
    result = run_case(BROKEN, trainer_class=broken)
    assert not result.passed
    assert result.gradient_difference > 1e-3


def test_a_run_without_gradient_proves_nothing(monkeypatch):
    monkeypatch.setattr(
        "trl_drgrpo.check.parity.completion_reward", lambda completion_ids: [1.0] * len(completion_ids)
    )
    assert not run_case(Case("constant reward")).passed


@pytest.fixture
def short_matrix(monkeypatch):
    short = [cases()[0], cases()[-1]]
    monkeypatch.setattr("trl_drgrpo.check.parity.cases", lambda full=False: short)
    credit = [case for case in credit_cases() if case.environment == "shared states"][:2]
    monkeypatch.setattr("trl_drgrpo.check.credit.credit_cases", lambda: credit)


def test_the_command_prints_a_table_and_exits_0(short_matrix, ran):
    out = ran(["check", "-v"]).out
    assert "4 of 4 cases passed: the trainer computes Dr. GRPO here." in out
    assert "own row counted (must differ" in out
    assert "_compute_loss" in out
    summary = ran(["check"]).out
    assert "own row counted" not in summary
    assert "_compute_loss" not in summary
    assert summary.count("1 of 1 agree, largest difference") == summary.count("1 of 1 controls differ") == 2
    assert len(summary.splitlines()) < 15


def test_the_command_speaks_json(short_matrix, ran):
    report = json.loads(ran(["check", "--json"]).out)
    assert report["passed"] is True
    assert report["seams"]["_compute_loss"] == "ok"
    for part in ("cases", "credit"):
        assert [case["passed"] for case in report[part]] == [True, True]


def test_the_command_exits_1_when_the_loss_weight_is_broken(short_matrix, monkeypatch, ran):
    right = DrGRPOTrainer.loss_constants
    wrong = {"max_completion_length": 13}
    monkeypatch.setattr(DrGRPOTrainer, "loss_constants", lambda self, inputs: {**right(self, inputs), **wrong})
    out = ran(["check"], 1).out
    assert "1 of 4 cases FAILED: do not trust runs in this environment" in out
    assert out.count("\n  FAIL ") == 1


def test_the_command_exits_1_when_a_seam_moved(monkeypatch, ran):
    from trl_drgrpo.upstream import seams

    monkeypatch.setattr(seams, "SEAMS", {"__init__": ("model, another",)})
    assert "nothing further was run" in ran(["check"], 1).out
