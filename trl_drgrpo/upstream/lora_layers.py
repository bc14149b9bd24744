"""PEFT's LoRA layers: the names of theirs that decoding reads, and layers that may have none.

A plain layer adds `lora_B(lora_A(x)) * scaling` of each active adapter to what its base layer gives. Anything else
(DoRA, embeddings, layers of other kinds) computes something else, and keeps PEFT's forward.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from peft import PeftConfig
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraLayer
from torch import nn

# By name: the last two are there only where bitsandbytes is.
_PLAIN_FORWARDS = (
    "peft.tuners.lora.layer.Linear.forward",
    "peft.tuners.lora.bnb.Linear4bit.forward",
    "peft.tuners.lora.bnb.Linear8bitLt.forward",
)


class AdaptedLayer(Protocol):
    """The part of a [`LoraLayer`] that decoding reads; mappings are by the name of the adapter."""

    active_adapters: list[str]
    base_layer: nn.Module
    lora_A: Mapping[str, nn.Linear]  # (r, I)
    lora_B: Mapping[str, nn.Linear]  # (O, r)
    lora_dropout: Mapping[str, nn.Module]
    lora_embedding_A: Mapping[str, torch.Tensor]
    lora_variant: Mapping[str, object]  # DoRA and the like
    scaling: Mapping[str, float]

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def get_base_layer(self) -> nn.Module: ...  # behind all wrappers


def active_lora_layers(model: nn.Module) -> list[AdaptedLayer]:
    """Return the layers in which an adapter changes the output: it is active, switched on and not merged."""
    layers = []
    for module in model.modules():
        # PEFT's forward returns the base layer's output alone where adapters are merged into it or switched off.
        if isinstance(module, LoraLayer) and not module.merged and not module.disable_adapters:
            layer = cast(AdaptedLayer, module)
            if _adapters(layer):
                layers.append(layer)
    return layers


def _adapters(layer: AdaptedLayer) -> list[str]:
    """Return the names of a layer's active adapters, in PEFT's order."""
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def why_not_plain(layer: AdaptedLayer) -> str | None:
    """Return why the active adapters of a layer cannot be written as one low-rank product; `None` where they can."""
    forward = type(layer).forward
    is_plain = f"{forward.__module__}.{forward.__qualname__}" in _PLAIN_FORWARDS
    if not is_plain or "forward" in vars(layer):
        return f"{type(layer).__name__} of {type(layer.get_base_layer()).__name__} has a forward of its own"
    for name in _adapters(layer):
        down = layer.lora_A[name]
        up = layer.lora_B[name]
        dropout = layer.lora_dropout[name]
        if name in layer.lora_variant:
            return f"an adapter is a {type(layer.lora_variant[name]).__name__}"
        if type(down) is not nn.Linear or type(up) is not nn.Linear:
            return f"an adapter is made of {type(down).__name__} and {type(up).__name__}"
        if up.bias is not None:
            return "an adapter has a bias of its own"
        if dropout.training and not isinstance(dropout, nn.Identity):
            return "an adapter uses dropout in generation"
        # Hooks would not see calls that are left out, or would see an output that changes afterwards.
        for part in (down, up, dropout, layer.base_layer):
            if part._forward_hooks or part._forward_pre_hooks:
                return "a hook watches an adapter"
    return None


def adapter_dtype(layer: AdaptedLayer) -> torch.dtype:
    """Return the dtype of a plain layer's adapters."""
    return layer.lora_A[_adapters(layer)[0]].weight.dtype


def is_adding(layer: AdaptedLayer) -> bool:
    """Tell whether a plain layer's adapters change its output: B starts at 0."""
    return any(bool(layer.lora_B[name].weight.any()) for name in _adapters(layer))


def low_rank_factors(layers: Sequence[AdaptedLayer], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy the adapters of plain layers that read the same input.

    Args:
        layers (`Sequence[LoraLayer]`): Layers of `I` inputs.
        dtype (`torch.dtype`): Type of the copies.

    Returns:
        `(R, I)`, the rows of all A, layer by layer, and for each layer `(r, O)`: its B, transposed and scaled. Several
        active adapters of a layer are one of a larger rank.
    """
    downs: list[torch.Tensor] = []
    ups: list[torch.Tensor] = []
    for layer in layers:
        scaled = []
        for name in _adapters(layer):
            downs.append(layer.lora_A[name].weight)
            scaled.append(layer.lora_B[name].weight * layer.scaling[name])
        # Of two adapters: B1 A1 + B2 A2 = [B1 B2] [A1; A2].
        ups.append(torch.cat(scaled, dim=1).T.to(dtype))
    return torch.cat(downs).to(dtype), ups


def peft_refuses(config: PeftConfig, model: nn.Module, name: str) -> bool:
    """Tell whether PEFT raises an error for an adapter on layers of this name in this model."""
    # PEFT 0.21 has no public way to ask. Where the function is gone, PEFT itself says so when the adapter is made.
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return False
    try:
        check(config, model, name)
    except ValueError:
        return True
    return False
