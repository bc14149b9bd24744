"""`check --credit` is green here, and turns red when the trainer's credit is bent."""

import dataclasses
import json

import pytest
import torch

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.cli import main as cli
from trl_drgrpo.labs.check import credit_cases as table
from trl_drgrpo.labs.check.credit import CONTROL_FLOOR, TOLERANCE, run_credit_case
from trl_drgrpo.labs.check.enumeration import compare
from trl_drgrpo.labs.check.small_policies import reasoning, stop_or_go
from trl_drgrpo.labs.check.trainer_credit import TrainerCredit

CASES = table.credit_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.environment}: {case.credit}")
def test_the_expected_gradient_is_the_exact_one_or_must_differ(case):
    result = run_credit_case(case)
    if case.control:
        assert result.difference > CONTROL_FLOOR
    else:
        assert result.difference <= TOLERANCE
    assert result.passed
