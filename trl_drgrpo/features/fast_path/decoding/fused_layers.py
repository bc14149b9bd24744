"""Decoding steps of fewer operations: norms and rotary embeddings that torch computes at once.

The time of a step of one token per row grows with the number of its kernels. The RMS norm of most models is eight
operations, and torch has one for it. Rotary embeddings are ten, of which four remain. No name tells what a layer
computes, so a norm is replaced where `torch.nn.functional.rms_norm` gives the same in float32, and the rotation where
the first queries and keys come out the same. The layers are as they were when the block is left.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.autocast import without_autocast
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.upstream.model_parts import ROTARY, rotary_files
from trl_drgrpo.upstream.private_state import swapped

# Largest difference from what transformers computes, as a share of the largest value.
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
AGREEMENT_BELOW = 0.1  # of numbers with fewer bits


class NormForm(NamedTuple):
    """A norm as `rms_norm(x, weight + offset, eps)`. Gemma's weights are distances from 1."""

    eps: float
    offset: float


_norm_forms: MutableMapping[nn.Module, NormForm | None] = WeakKeyDictionary()


def _norm_form(module: Any) -> NormForm | None:
    """Return the form of a norm, found by comparison; `None`: it is none, or one that torch does not have."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or module.weight.dim() != 1:
        return None
    alone = copy.deepcopy(module).to("cpu", torch.float32)
    width = (len(alone.weight),)
    states = torch.randn(2, 3, *width, generator=torch.Generator().manual_seed(0))
    states[0] *= 1e-3  # small enough for eps to show
    try:
        expected = type(alone).forward(alone, states)  # past hooks, for which this is no forward of the model
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # takes something else
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != states.shape:
        return None
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    for form in [NormForm(eps, offset) for eps in numbers for offset in (0.0, 1.0)]:
        if torch.allclose(nn.functional.rms_norm(states, width, alone.weight + form.offset, form.eps), expected, 1e-4):
            return form
    return None


def _fused_norm(module: nn.Module, form: NormForm) -> Callable[..., torch.Tensor]:
    """Return the forward of a norm in one operation, with the weights of this generation."""
    weight: Any = module.weight
    if form.offset:
        weight = weight + form.offset

    def forward(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or states.dtype != weight.dtype:  # torch's kernel takes one dtype
            return type(module).forward(module, states, *args, **kwargs)
        with without_autocast(states.device.type):
            return nn.functional.rms_norm(states, weight.shape, weight, form.eps)

    return forward


class Rotation:
    """A model's rotary embedding of queries and keys of one token per row, in four operations.

    The rotation of halves, `x * cos + cat(-x2, x1) * sin`, is `x * cos + roll(x) * cat(-sin1, sin2)`. The signs of the
    sine are set once for all layers, and queries and keys are rotated as heads of one tensor. A rotation of another
    kind, such as that of neighboring pairs, is left to the model.

    Args:
        own (`Callable`): The model's function, from `(q, k, cos, sin)` to `(q, k)`.

    Attributes:
        agrees (`bool`, *optional*): Whether the first queries and keys came out the same; `None` before that.
    """

    def __init__(self, own: Callable[..., Any]):
        self._own = own
        self.agrees: bool | None = None
        self._cos: torch.Tensor | None = None  # whose sines have their signs
        self._signed_sin: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Gemma 4 rotates one tensor per call, others pass the dimension of the heads: these calls are the model's.
        takes_both = len(args) == 4 and not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        if not takes_both or self.agrees is False:
            return self._own(*args, **kwargs)
        query, key, cos, sin = args
        # (1, D) of one token per row; `cos` and `sin` are (n, 1, D)
        fits = query.shape[2:] == key.shape[2:] == cos.shape[1:] == (1, cos.size(-1))
        if not fits or not query.dtype == key.dtype == cos.dtype:
            return self._own(query, key, cos, sin)
        half = cos.size(2) // 2
        if cos is not self._cos:
            self._cos = cos
            self._signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=2).unsqueeze(1)
        heads = torch.cat([query, key], dim=1)  # (n, heads + H, 1, D)
        heads = torch.addcmul(heads * cos.unsqueeze(1), heads.roll(half, 3), self._signed_sin)
        rotated = heads.split([query.size(1), key.size(1)], dim=1)
        if self.agrees is None:
            expected = self._own(query, key, cos, sin)
            self.agrees = all(map(_is_close, rotated, expected))
            return expected
        return rotated


def _is_close(values: torch.Tensor, expected: torch.Tensor) -> bool:
    apart = (values - expected).abs().max()
    tolerance = AGREEMENT.get(expected.dtype, AGREEMENT_BELOW)
    return bool(apart <= tolerance * expected.abs().max())


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
        self._rotations = {file: Rotation(getattr(file, ROTARY)) for file in rotary_files(model)}
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
            for file, rotation in self._rotations.items():
                stack.enter_context(swapped(file, **{ROTARY: rotation}))
            if self._adapters is not None:
                for layer in self._adapters.layers:
                    stack.enter_context(swapped(layer, forward=partial(self._adapters.forward, layer)))
            yield

    def after_first_step(self) -> None:
        """Join what the first step has shown to read the same input, and tell what is used."""
        if self._adapters is not None:
            self._adapters.join()
            self._speed.uses[SpeedPart.JOINED_ADAPTERS] += len(self._adapters.layers)
        if self._norms or any(rotation.agrees for rotation in self._rotations.values()):
            self._speed.on(SpeedPart.FUSED_LAYERS)
            self._speed.uses[SpeedPart.FUSED_LAYERS] += 1
        else:
            self._speed.off("torch has none of its norms and rotations", SpeedPart.FUSED_LAYERS, expected=True)

    def proves_adapters(self) -> bool:
        """Tell whether a comparison of logits says something about adapters: new ones add nothing to any layer."""
        return self._adapters is None or not self._adapters.add_nothing()


def has_adapters(model: nn.Module) -> bool:
    """Tell whether some layers may have LoRA adapters."""
    return any(hasattr(module, "lora_A") for module in model.modules())
