"""Limits of rows in transformers' own decoding loop."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class _RowLimits(StoppingCriteria):
    """Ends each row at its own limit, as `decode` does."""

    def __init__(self, limits: Sequence[int], width: int):
        self.limits = limits
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> Any:
        written = input_ids.size(1) - self.width
        return torch.tensor(self.limits, device=input_ids.device) <= written


def row_limits(limits: Sequence[int], width: int) -> StoppingCriteriaList:
    """Return what ends each row at its limit of tokens behind prompts of this width."""
    return StoppingCriteriaList([_RowLimits(limits, width)])
