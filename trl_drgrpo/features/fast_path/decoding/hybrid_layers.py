"""Layers of hybrids in decoding steps of fewer operations: norms with a gate, and running states in place."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product, starmap
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.fused_function import FusedFunction
from trl_drgrpo.features.fast_path.decoding.state_updates import INSTEAD_OF
from trl_drgrpo.upstream.state_functions import state_updates


class GatedNormForm(NamedTuple):
    """An RMS norm with a second input, by whose activation its output is multiplied, or its first input.

    Args:
        eps (`float`): Of the norm.
        columns (`int`): Columns that are normalized together: all, or those of a group.
        activation (`Callable`): Of the gate.
        is_first (`bool`): Whether the gate comes first, as in Mamba 2, or last, as behind the gated delta rule.
    """

    eps: float
    columns: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    is_first: bool

    inputs = 2
    offset = 0.0

    def apply(self, weight: torch.Tensor, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of states."""
        # The gate comes before the norm, as in Mamba 2, or behind it.
        factor = self.activation(gate)
        if self.is_first:
            states = states * factor
        if self.columns == len(weight):
            normed = nn.functional.rms_norm(states, weight.shape, weight, self.eps)
        else:
            by_group = states.unflatten(-1, (-1, self.columns))
            normed = nn.functional.rms_norm(by_group, (self.columns,), eps=self.eps)
            normed = normed.flatten(-2) * weight
        if not self.is_first:
            normed = normed * factor
        return normed


def gated_forms(module: nn.Module) -> Iterator[GatedNormForm]:
    """Yield the forms that a norm with a gate may have."""
    # No name is asked for: every number that the module holds may be its eps, or the size of its groups.
    fields = vars(module).values()
    numbers = [value for value in fields if isinstance(value, float)]
    width = module.get_parameter("weight").numel()
    # A module holds the number of its groups, or their size.
    sizes = [value for value in fields if type(value) is int and value > 0 and width % value == 0]
    quotients = [width // size for size in sizes]
    columns = dict.fromkeys([width, *sizes, *quotients])
    activations = (nn.functional.silu, torch.sigmoid)
    gate_is_first = (False, True)
    yield from starmap(GatedNormForm, product(numbers, columns, activations, gate_is_first))


class StateUpdate(FusedFunction):
    """A model's update of a running state by one token, in place.

    Args:
        original (`Callable`): The model's function.
        fused (`Callable`): One of `state_updates.py`.
    """

    def __init__(self, original: Callable[..., Any], fused: Callable[..., Any]):
        super().__init__(original)
        self.fused = fused

    def compared(
        self, results: Iterable[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        if not isinstance(results, torch.Tensor):  # the output, and the state
            return list(results)
        # The state is one of the arguments, written in place; the others have not changed.
        arguments = (*args, *kwargs.values())
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        return [results, *tensors]


def updates_in(files: list[ModuleType]) -> Iterator[tuple[ModuleType, str, StateUpdate]]:
    """Yield what stands in for functions of models' files: file, name and function.

    A function with a parameter of another name is left alone: the first call may not show what it does.
    """
    for file, name, package in state_updates(files):
        original = getattr(file, name)
        fused = INSTEAD_OF[package]
        if _named_parameters(original) <= _named_parameters(fused):
            yield file, name, StateUpdate(original, fused)


def _named_parameters(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
