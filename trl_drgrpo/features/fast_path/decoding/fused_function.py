"""A function of a model's file that another one stands in for, once both have given the same."""

import copy
from collections.abc import Callable
from typing import Any

import torch

# Largest difference from what transformers computes, as a share of the largest value.
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
AGREEMENT_BELOW = 0.1  # of numbers with fewer bits


class FusedFunction:
    """A function of a model's file in fewer operations. Its first results are compared with the model's own.

    Args:
        own (`Callable`): The model's function.

    Attributes:
        fused (`Callable`): Returns what the model's function does; `None` where only that can tell.
        agrees (`bool`, *optional*): Whether the first results came out the same; `None` before that.
    """

    fused: Callable[..., Any]

    def __init__(self, own: Callable[..., Any]):
        self.own = own
        self.agrees: bool | None = None

    def compared(self, results: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that must be the same after a call."""
        return list(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.agrees is None:
            return self._first_call(args, kwargs)
        results = self.fused(*args, **kwargs) if self.agrees else None
        return self.own(*args, **kwargs) if results is None else results

    def _first_call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        copied_args, copied_kwargs = copy.deepcopy((args, kwargs))  # both functions may write to their tensors
        results = self.fused(*copied_args, **copied_kwargs)
        expected = self.own(*args, **kwargs)
        self.agrees = results is not None
        if self.agrees:
            ours = self.compared(results, copied_args, copied_kwargs)
            theirs = self.compared(expected, args, kwargs)
            # The first one is the output. A state in float32 is as precise as what it is computed from.
            tolerance = AGREEMENT.get(theirs[0].dtype, AGREEMENT_BELOW)
            self.agrees = all(_is_close(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
        return expected


def _is_close(values: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    apart = (values - expected).abs().max()
    return bool(apart <= tolerance * expected.abs().max())
