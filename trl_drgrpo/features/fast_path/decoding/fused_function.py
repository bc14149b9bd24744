"""A function of a model's file that another one stands in for, once both have given the same."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Largest difference from what transformers computes, as a share of the largest value.
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
AGREEMENT_BELOW = 0.1  # of numbers with fewer bits


class FusedFunction:
    """A function of a model's file in fewer operations. Its first results are compared with the model's own.

    Args:
        original (`Callable`): The model's function.

    Attributes:
        fused (`Callable`): Returns what the model's function does; `None` where only that can tell.
        agrees (`bool`, *optional*): Whether the first results came out the same; `None` before that.
    """

    fused: Callable[..., Any]

    def __init__(self, original: Callable[..., Any]):
        self.original = original
        self.agrees: bool | None = None

    def compared(
        self, results: Iterable[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors that must be the same after a call."""
        return list(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.agrees is None:
            return self._first_call(args, kwargs)
        if self.agrees:
            results = self.fused(*args, **kwargs)
            if results is not None:
                return results
        return self.original(*args, **kwargs)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Both functions may write to their tensors. What the model goes on with is written by its own.
        copied_args, copied_kwargs = copy.deepcopy((args, kwargs))
        results = self.fused(*copied_args, **copied_kwargs)
        expected = self.original(*args, **kwargs)
        self.agrees = results is not None
        if self.agrees:
            fused_tensors = self.compared(results, copied_args, copied_kwargs)
            expected_tensors = self.compared(expected, args, kwargs)
            # The first tensor is the output. A state in float32 is as precise as what it is computed from.
            tolerance = AGREEMENT.get(expected_tensors[0].dtype, AGREEMENT_BELOW)
            for values, expected_values in zip(fused_tensors, expected_tensors, strict=True):
                self.agrees = self.agrees and _is_close(values, expected_values, tolerance)
        return expected


def _is_close(values: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (values - expected).abs().max()
    return bool(difference <= tolerance * expected.abs().max())
