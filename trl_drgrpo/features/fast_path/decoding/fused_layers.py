"""Decoding steps of fewer operations: norms, rotary embeddings and running states that torch computes at once.

The time of a step of one token per row grows with the number of its kernels. The RMS norm of most models is eight
operations, and torch has one for it. Rotary embeddings are ten, of which four remain. Running states of a hybrid are
updated in place (`state_updates.py`). No name tells what a layer computes, so a norm is replaced where
`torch.nn.functional.rms_norm` gives the same in float32, and a function where its first results come out the same. The
layers are as they were when the block is left.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.autocast import without_autocast
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.upstream.model_parts import ROTARY, layer_files, state_updates
from trl_drgrpo.upstream.private_state import swapped

# Largest difference from what transformers computes, as a share of the largest value.
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
AGREEMENT_BELOW = 0.1  # of numbers with fewer bits


class Gate(NamedTuple):
    """A second input of a norm, by whose activation its output is multiplied, or its input."""

    activation: Callable[[torch.Tensor], torch.Tensor]
    is_first: bool


# Of layers with running states. Mamba 2 multiplies first, the gated delta rule last.
GATES = [
    Gate(activation, is_first) for activation in (nn.functional.silu, torch.sigmoid) for is_first in (False, True)
]


class NormForm(NamedTuple):
    """A norm as `rms_norm(x, weight + offset, eps)`. Gemma's weights are distances from 1.

    `columns`: how many are normalized together, all or those of a group. `gate`: `None` for a norm of one input.
    """

    eps: float
    offset: float
    columns: int
    gate: Gate | None

    def apply(self, weight: torch.Tensor, states: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of states; `weight` has the offset already."""
        factor = None
        if self.gate is not None and gate is not None:
            factor = self.gate.activation(gate)
            if self.gate.is_first:
                states = states * factor
        if self.columns == len(weight):
            normed = nn.functional.rms_norm(states, weight.shape, weight, self.eps)
        else:
            by_group = states.unflatten(-1, (-1, self.columns))
            normed = nn.functional.rms_norm(by_group, (self.columns,), eps=self.eps).flatten(-2) * weight
        if factor is None or self.gate is None or self.gate.is_first:
            return normed
        return normed * factor


_norm_forms: MutableMapping[nn.Module, NormForm | None] = WeakKeyDictionary()


def _norm_form(module: Any) -> NormForm | None:
    """Return the form of a norm, found by comparison; `None`: it is none, or one that torch does not have."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or module.weight.dim() != 1:
        return None
    alone = copy.deepcopy(module).to("cpu", torch.float32)
    width = len(alone.weight)
    random = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, width, generator=random)
    states[0] *= 1e-3  # small enough for eps to show
    gate = torch.randn(2, 3, width, generator=random)
    fields = vars(module).values()
    numbers = [value for value in fields if isinstance(value, float)]
    # A module holds the number of its groups, or their size.
    sizes = [value for value in fields if type(value) is int and value > 0 and width % value == 0]
    columns = dict.fromkeys([width, *sizes, *(width // size for size in sizes)])
    # A norm that has a gate may be called without one, too, but its layer calls it with one.
    for gates, inputs in ((GATES, (states, gate)), ([None], (states,))):
        try:
            expected = type(alone).forward(alone, *inputs)  # past hooks, for which this is no forward of the model
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # takes something else
            continue
        if not isinstance(expected, torch.Tensor) or expected.shape != states.shape:
            continue
        for form in map(NormForm._make, product(numbers, (0.0, 1.0), columns, gates)):
            if torch.allclose(form.apply(alone.weight + form.offset, states, gate), expected, 1e-4):
                return form
    return None


def _fused_norm(module: nn.Module, form: NormForm) -> Callable[..., torch.Tensor]:
    """Return the forward of a norm in few operations, with the weights of this generation."""
    weight: Any = module.weight
    if form.offset:
        weight = weight + form.offset
    gates = 0 if form.gate is None else 1

    def forward(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        others = [*args, *kwargs.values()]
        if len(others) != gates or states.dtype != weight.dtype:  # torch's kernel takes one dtype
            return type(module).forward(module, states, *args, **kwargs)
        with without_autocast(states.device.type):
            return form.apply(weight, states, *(others or [None]))

    return forward


class FusedFunction:
    """A function of a model's file in fewer operations. Its first results are compared with the model's own.

    Args:
        own (`Callable`): The model's function.

    Attributes:
        agrees (`bool`, *optional*): Whether the first results came out the same; `None` before that.
    """

    def __init__(self, own: Callable[..., Any]):
        self.own = own
        self.agrees: bool | None = None

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's function does; `None` where only that can tell."""
        raise NotImplementedError

    def compared(self, results: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that must be the same after a call."""
        return list(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.agrees is None:
            return self._first_call(args, kwargs)
        if self.agrees:
            results = self.fused(*args, **kwargs)
            if results is not None:
                return results
        return self.own(*args, **kwargs)

    def _first_call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        # Each of the two functions gets tensors of its own: both may write to them.
        copied_args = [_copied(arg) for arg in args]
        copied_kwargs = {name: _copied(arg) for name, arg in kwargs.items()}
        results = self.fused(*copied_args, **copied_kwargs)
        expected = self.own(*args, **kwargs)
        self.agrees = results is not None
        if self.agrees:
            ours = self.compared(results, copied_args, copied_kwargs)
            theirs = self.compared(expected, args, kwargs)
            # A state in float32 is as precise as what it has been computed from.
            dtypes = {tensor.dtype for tensor in (*theirs, *args) if isinstance(tensor, torch.Tensor)}
            tolerance = max(AGREEMENT.get(dtype, AGREEMENT_BELOW) for dtype in dtypes if dtype.is_floating_point)
            self.agrees = all(_is_close(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
        return expected


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_close(values: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    apart = (values - expected).abs().max()
    return bool(apart <= tolerance * expected.abs().max())


class Rotation(FusedFunction):
    """A model's rotary embedding of queries and keys of one token per row, in four operations.

    The rotation of halves, `x * cos + cat(-x2, x1) * sin`, is `x * cos + roll(x) * cat(-sin1, sin2)`. The signs of the
    sine are set once for all layers, and queries and keys are rotated as heads of one tensor: their first columns, or
    all. A rotation of another kind, such as that of neighboring pairs, is left to the model.
    """

    def __init__(self, own: Callable[..., Any]):
        super().__init__(own)
        self._cos: torch.Tensor | None = None  # whose sines have their signs
        self._signed_sin: Any = None

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        # Gemma 4 rotates one tensor per call, others pass the dimension of the heads: these calls are the model's.
        if len(args) != 4 or kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
            return None
        query, key, cos, sin = args
        columns = cos.size(-1)
        # One token per row: (n, heads, 1, D), and (n, 1, columns) of `cos` and `sin`.
        fits = query.shape[2:] == key.shape[2:] and query.size(2) == 1 and cos.shape[1:] == (1, columns)
        if not fits or columns > query.size(3) or not query.dtype == key.dtype == cos.dtype:
            return None
        half = columns // 2
        if cos is not self._cos:
            self._cos = cos
            self._signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=2).unsqueeze(1)
        heads = torch.cat([query, key], dim=1)  # (n, heads + H, 1, D)
        turned = heads[..., :columns]
        rotated = torch.addcmul(turned * cos.unsqueeze(1), turned.roll(half, 3), self._signed_sin)
        if columns < heads.size(3):
            turned.copy_(rotated)
            rotated = heads
        return rotated.split([query.size(1), key.size(1)], dim=1)


class StateUpdate(FusedFunction):
    """A model's update of a running state by one token, in place.

    Args:
        own (`Callable`): The model's function.
        fused (`Callable`): One of `state_updates.py`.
    """

    def __init__(self, own: Callable[..., Any], fused: Callable[..., Any]):
        super().__init__(own)
        self.fused = fused

    def compared(self, results: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if isinstance(results, tuple):  # the output, and the state
            return list(results)
        # The state is one of the arguments, written in place; the others have not changed.
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        return [results, *tensors]


class FusedLayers:
    """Layers of a model while it decodes, in fewer operations.

    Args:
        model ([`~torch.nn.Module`]): Decoder, with or without adapters.
        speed ([`Speed`]): Is told what is used, and why not.
    """

    def __init__(self, model: nn.Module, speed: Speed):
        self._speed = speed
        self._norms: dict[nn.Module, NormForm] = {}
        for module in model.modules():
            if module not in _norm_forms:
                _norm_forms[module] = _norm_form(module)
            form = _norm_forms[module]
            if form is not None and "forward" not in vars(module):  # such as one that fetches weights first
                self._norms[module] = form
        files = layer_files(model)
        self._functions: list[tuple[ModuleType, str, FusedFunction]] = []
        for file in files:
            rotation = getattr(file, ROTARY, None)
            if callable(rotation):
                self._functions.append((file, ROTARY, Rotation(rotation)))
        for file, name, package in state_updates(files):
            from trl_drgrpo.features.fast_path.decoding.state_updates import INSTEAD_OF

            update = StateUpdate(getattr(file, name), INSTEAD_OF[package])
            self._functions.append((file, name, update))
        self._adapters = None
        if has_adapters(model):
            from trl_drgrpo.features.fast_path.decoding.joined_adapters import JoinedAdapters

            self._adapters = JoinedAdapters(model, speed)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model runs with these layers."""
        with ExitStack() as stack:
            for module, form in self._norms.items():
                stack.enter_context(swapped(module, forward=_fused_norm(module, form)))
            for file, name, function in self._functions:
                stack.enter_context(swapped(file, **{name: function}))
            if self._adapters is not None:
                for layer in self._adapters.layers:
                    stack.enter_context(swapped(layer, forward=partial(self._adapters.forward, layer)))
            yield

    def after_first_step(self) -> None:
        """Join what the first step has shown to read the same input, and tell what is used."""
        if self._adapters is not None:
            self._adapters.join()
            self._speed.uses[SpeedPart.JOINED_ADAPTERS] += len(self._adapters.layers)
        if self._norms or any(function.agrees for _, _, function in self._functions):
            self._speed.on(SpeedPart.FUSED_LAYERS)
            self._speed.uses[SpeedPart.FUSED_LAYERS] += 1
        else:
            self._speed.off("torch has none of its norms, rotations and states", SpeedPart.FUSED_LAYERS, expected=True)

    def proves_adapters(self) -> bool:
        """Tell whether a comparison of logits says something about adapters: new ones add nothing to any layer."""
        return self._adapters is None or not self._adapters.add_nothing()


def has_adapters(model: nn.Module) -> bool:
    """Tell whether some layers may have LoRA adapters."""
    return any(hasattr(module, "lora_A") for module in model.modules())
