"""Is my step credit unbiased? Expected gradients through the trainer's advantages, against the exact ones.

Each case enumerates small policies: all trajectories, all groups of two and of three rows. The advantages are those of
a real `DrGRPOTrainer`; weighted by the groups' probabilities they make the gradient that training follows on average.
It is the gradient of the expected reward to rounding, or the credit is biased.

Constructions from the literature are controls. They must differ from the exact gradient even after the best rescaling:
no learning rate makes up for the difference.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trl_drgrpo.labs.check.credit_cases import CreditCase, credit_cases

TOLERANCE = 1e-12  # relative, float64: four orders above the differences seen
CONTROL_FLOOR = 1e-2  # a control must be off by at least one percent


@dataclass(frozen=True)
class CreditResult:
    """Result of a case.

    Args:
        environment, credit (`str`), control (`bool`): Of the case.
        difference (`float`): `|g - exact| / |exact|`, the largest of all policies and group sizes. For a control the
            smallest, each after the best rescaling of g: 1 where no positive multiple comes closer than 0 does.
        passed (`bool`): Equal to tolerance; for a control, different.
    """

    environment: str
    credit: str
    control: bool
    difference: float
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def run_credit_check(on_result: Callable[[CreditResult], None] | None = None) -> list[CreditResult]:
    """Run all cases.

    Args:
        on_result (`Callable`, *optional*): Called with each result as it arrives.

    Returns:
        `list[CreditResult]`: In the order of [`credit_cases`].
    """
    results = []
    for case in credit_cases():
        results.append(run_credit_case(case))
        if on_result is not None:
            on_result(results[-1])
    return results


def run_credit_case(case: CreditCase) -> CreditResult:
    """Enumerate one case and compare."""
    if case.control:
        difference = min(_difference_at_best(*pair) for pair in case.gradients())
        passed = CONTROL_FLOOR < difference < math.inf
    else:
        difference = max(_difference(*pair) for pair in case.gradients())
        passed = difference <= TOLERANCE
    return CreditResult(case.environment, case.credit, case.control, difference, passed)


def _difference(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    """`|g - exact| / |exact|`; infinite without a gradient to compare, since that proves nothing."""
    scale = exact.norm().item()
    difference = (gradient - exact).norm().item() / scale if scale > 0 else math.inf
    return math.inf if math.isnan(difference) else difference


def _difference_at_best(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    """The same for the positive multiple of g that comes closest."""
    along, length = (gradient @ exact).item(), (gradient @ gradient).item()
    return _difference(gradient * (along / length if along > 0 else 0.0), exact)
