"""Decoding steps of fewer operations: norms, rotary embeddings and running states that torch computes at once.

The time of a step of one token per row grows with the number of its kernels. The RMS norm of most models is eight
operations, and torch has one for it. Rotary embeddings are ten, of which four remain. What hybrids have
besides is in `hybrid_layers.py`. No name tells what a layer computes, so a norm is replaced where
`torch.nn.functional.rms_norm` gives the same in float32, and a function where its first results come out the same. The
layers are as they were when the block is left.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, product, starmap
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.autocast import without_autocast
from trl_drgrpo.features.fast_path.decoding.fused_function import FusedFunction
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.upstream.model_parts import ROTARY, layer_files
from trl_drgrpo.upstream.private_state import swapped

if TYPE_CHECKING:
    from trl_drgrpo.features.fast_path.decoding.hybrid_layers import GatedNormForm

Form: TypeAlias = "NormForm | GatedNormForm"


class NormForm(NamedTuple):
    """A norm as `rms_norm(x, weight + offset, eps)`. Gemma's weights are distances from 1."""

    eps: float
    offset: float

    inputs = 1

    def apply(self, weight: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the norm of states; `weight` has the offset already."""
        return nn.functional.rms_norm(states, weight.shape, weight, self.eps)


_norm_forms: MutableMapping[nn.Module, "Form | None"] = WeakKeyDictionary()


def _norm_form(module: nn.Module, kinds: list[Callable[[nn.Module], Iterator[Form]]]) -> "Form | None":
    """Return the form of a norm, the first of these kinds that gives the same; `None`: it is none, or one that torch
    does not have."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return None
    # On a CPU and in float32, where results can be compared closely, whatever the model runs in.
    alone = copy.deepcopy(module).to("cpu", torch.float32)
    weight = alone.get_parameter("weight")
    random = torch.Generator().manual_seed(0)  # the run's own generator stays where it is
    states = torch.randn(2, 2, 3, len(weight), generator=random)
    states[0, 0] *= 1e-3  # small enough for eps to show
    for form in chain.from_iterable(kind(module) for kind in kinds):
        inputs = states[: form.inputs]
        try:
            expected = type(alone).forward(alone, *inputs)  # past hooks, for which this is no forward of the model
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # takes something else
            continue
        if not isinstance(expected, torch.Tensor) or expected.shape != states[0].shape:
            continue
        normed = form.apply(weight + form.offset, *inputs)
        if torch.allclose(normed, expected, 1e-4):
            return form
    return None


def _plain_forms(module: nn.Module) -> Iterator[NormForm]:
    """Yield the forms that a norm of one input may have: with a number that it holds."""
    # One of them may be its eps, whatever its name.
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    return starmap(NormForm, product(numbers, (0.0, 1.0)))


def _fused_norm(module: nn.Module, form: Form) -> Callable[..., torch.Tensor]:
    """Return the forward of a norm in few operations, with the weights of this generation."""
    # Once per generation, and not in every step: the weights do not change meanwhile.
    weight: Any = module.weight
    if form.offset:
        weight = weight + form.offset

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        inputs = [*args, *kwargs.values()]
        # Torch's kernel takes one dtype.
        if len(inputs) != form.inputs or inputs[0].dtype != weight.dtype:
            return type(module).forward(module, *args, **kwargs)
        with without_autocast(weight.device.type):
            return form.apply(weight, *inputs)

    return forward


class Rotation(FusedFunction):
    """A model's rotary embedding of queries and keys of one token per row, in four operations.

    The rotation of halves, `x * cos + cat(-x2, x1) * sin`, is `x * cos + roll(x) * cat(-sin1, sin2)`. The signs of the
    sine are set once for all layers, and queries and keys are rotated as heads of one tensor: their first columns, or
    all. A rotation of another kind, such as that of neighboring pairs, is left to the model.
    """

    _cos: torch.Tensor | None = None  # of the last call, whose sines have their signs
    _signed_sin: Any = None

    def fused(self, *args: Any, **kwargs: Any) -> Any:
        # Gemma 4 rotates one tensor per call, others pass the dimension of the heads: these calls are the model's.
        if len(args) != 4 or kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
            return None
        query, key, cos, sin = args
        columns = cos.size(-1)
        # One token per row: (n, heads, 1, D), and (n, 1, columns) of `cos` and `sin`.
        fits = query.shape[2:] == key.shape[2:] and query.size(2) == 1 and cos.shape[1:] == (1, columns)
        if not fits or columns > query.size(3):
            return None
        if not query.dtype == key.dtype == cos.dtype:
            return None
        half = columns // 2
        if cos is not self._cos:  # all layers of a step get the same tensor
            self._cos = cos
            self._signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=2).unsqueeze(1)
        heads = torch.cat([query, key], dim=1)  # (n, heads + H, 1, D)
        turned = heads[..., :columns]
        rotated = torch.addcmul(turned * cos.unsqueeze(1), turned.roll(half, 3), self._signed_sin)
        # The columns behind those that turn stay as they are: the result takes its place before them.
        if columns < heads.size(3):
            turned.copy_(rotated)
            rotated = heads
        return rotated.split([query.size(1), key.size(1)], dim=1)


class FusedLayers:
    """Layers of a model while it decodes, in fewer operations.

    Args:
        model ([`~torch.nn.Module`]): Decoder, with or without adapters.
        speed ([`Speed`]): Is told what is used, and why not.
        is_hybrid (`bool`): Whether some layers may hold running states.
    """

    def __init__(self, model: nn.Module, speed: Speed, is_hybrid: bool):
        self._speed = speed
        self._norms: dict[nn.Module, Form] = {}
        # Functions of models' files by file and name.
        self._functions: list[tuple[ModuleType, str, FusedFunction]] = []
        kinds: list[Callable[[nn.Module], Iterator[Form]]] = [_plain_forms]
        files = layer_files(model)
        if is_hybrid:
            from trl_drgrpo.features.fast_path.decoding.hybrid_layers import gated_forms, updates_in

            # A norm that has a gate may be called without it, too, but its layer never does so.
            kinds.insert(0, gated_forms)
            self._functions += updates_in(files)
        for module in model.modules():
            if module not in _norm_forms:
                _norm_forms[module] = _norm_form(module, kinds)
            form = _norm_forms[module]
            # A forward of its own may do more, such as fetch offloaded weights first.
            if form is not None and "forward" not in vars(module):
                self._norms[module] = form
        for file in files:
            rotation = getattr(file, ROTARY, None)
            if callable(rotation):
                self._functions.append((file, ROTARY, Rotation(rotation)))
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
                    forward = partial(self._adapters.forward, layer)
                    stack.enter_context(swapped(layer, forward=forward))
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
