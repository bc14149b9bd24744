"""LoRA while decoding: layers that read the same input share one low-rank product.

PEFT computes `base(x) + lora_B(lora_A(x)) * scaling` in four operations per layer besides the base, and casts around
them. With one token per row, each is a kernel that waits for the one before it, and the adapters take longer than the
model. Here:

- Adapters are copied once per generation, in the dtype in which training uses them under autocast.
- A of all layers that read the same tensor (q, k and v; gate and up) is one matrix.
- B holds the scale, and `addmm_` adds its product to the base's output without another operation.

The parameters are only read, and the copies go with the generation. Merging adapters into bfloat16 weights would be
cheaper still, but early updates are smaller than the spacing of these weights and would vanish.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.autocast import autocast_dtype
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.upstream.lora_layers import (
    AdaptedLayer,
    active_lora_layers,
    adapter_dtype,
    is_adding,
    low_rank_factors,
    why_not_plain,
)


class SharedProduct:
    """Low-rank products of layers that read the same input.

    Args:
        layers (`Sequence[LoraLayer]`): Plain layers, in the order of their calls.
        dtype (`torch.dtype`): What the products are computed in.
    """

    def __init__(self, layers: Sequence[AdaptedLayer], dtype: torch.dtype):
        self.dtype = dtype
        down, self._ups = low_rank_factors(layers, dtype)
        self._down = down.T  # (I, R)
        self._input: torch.Tensor | None = None
        self._low: Sequence[torch.Tensor] = ()

    def add(self, place: int, output: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Add to the output of a base layer, in place, what the adapters of the layer at this place add."""
        # The first layer always computes: a tensor may come again with other values.
        if place == 0 or states is not self._input:
            inputs = states.reshape(-1, states.size(-1)).to(self._down.dtype)
            ranks = [len(up) for up in self._ups]
            self._low = (inputs @ self._down).split(ranks, dim=1)
            self._input = states
        low = self._low[place]  # (n, r)
        up = self._ups[place]  # (r, O), scaled
        if place == len(self._ups) - 1:
            # Nobody reads them any more: a recording can use their memory again.
            self._input = None
            self._low = ()
        outputs = output.view(-1, output.size(-1))
        if output.dtype == low.dtype:
            outputs.addmm_(low, up)
        else:  # `addmm_` takes one dtype
            outputs.add_(low @ up)
        return output


class JoinedAdapters:
    """LoRA layers of a model for one generation.

    In the first step each layer computes its product alone, and it is noted which layers get the same tensor: no name
    tells that for every model. [`JoinedAdapters.join`] ends this step.

    Args:
        model ([`~torch.nn.Module`]): Model with adapters.
        speed ([`Speed`]): Is told which layers keep PEFT's forward, and why.

    Attributes:
        layers (`list[LoraLayer]`): Layers that take part: [`JoinedAdapters.forward`] computes what theirs does.
    """

    def __init__(self, model: nn.Module, speed: Speed):
        self.layers: list[AdaptedLayer] = []
        refusals = []
        for layer in active_lora_layers(model):
            reason = why_not_plain(layer)
            if reason is None:
                self.layers.append(layer)
            else:
                refusals.append(reason)
        # Inputs are held: their identity is compared, and a new tensor may take the address of a freed one.
        self._first_calls: list[tuple[torch.Tensor, AdaptedLayer]] | None = []
        self._products: dict[AdaptedLayer, tuple[SharedProduct, int]] = {}
        if refusals:
            count = len(self.layers) + len(refusals)
            speed.off(f"{refusals[0]} ({len(refusals)} of {count} layers)", SpeedPart.JOINED_ADAPTERS)
        elif self.layers:
            speed.on(SpeedPart.JOINED_ADAPTERS)

    def forward(
        self,
        layer: AdaptedLayer,
        states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute what `layer.forward(states)` does."""
        if args or kwargs:  # such as another adapter for each row
            return type(layer).forward(layer, states, *args, **kwargs)
        output = layer.base_layer(states)
        # A layer that was not called in the first step has a product of its own from its first call on.
        if layer not in self._products:
            product = SharedProduct([layer], _product_dtype(layer, output))
            self._products[layer] = (product, 0)
            if self._first_calls is not None:
                self._first_calls.append((states, layer))
        product, place = self._products[layer]
        return product.add(place, output, states)

    def join(self) -> None:
        """Share a product among the layers that have read the same tensor in the first step."""
        # By the identity of the input, and by dtype: layers of another one have a product of their own.
        readers: dict[tuple[int, torch.dtype], list[AdaptedLayer]] = {}
        for states, layer in self._first_calls or ():
            product, _ = self._products[layer]
            readers.setdefault((id(states), product.dtype), []).append(layer)
        for (_, dtype), layers in readers.items():
            product = SharedProduct(layers, dtype)
            for place, layer in enumerate(layers):
                self._products[layer] = (product, place)
        self._first_calls = None

    def add_nothing(self) -> bool:
        """Tell whether none of these adapters changes an output yet: B is zero before the first optimizer step."""
        return bool(self.layers) and not any(map(is_adding, self.layers))


def _product_dtype(layer: AdaptedLayer, output: torch.Tensor) -> torch.dtype:
    """Return the dtype of a layer's low-rank products: that of autocast, where training computes them, too; otherwise
    that of the adapters or of the base, whichever has fewer bits."""
    dtype = adapter_dtype(layer)
    lowered = autocast_dtype(output.device.type)
    if lowered is not None and dtype != torch.float64:  # autocast leaves double precision alone
        return lowered
    return min(output.dtype, dtype, key=lambda kind: kind.itemsize)
