"""Attention of one new token per row over a [`GroupCache`]: rows that share a prompt are one product with its keys.

Registered with transformers under [`NAME`]. A name without a mask function gets no mask: windows and padding are the
cache's. Whatever it does not know it refuses, and decoding goes on without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from trl_drgrpo.features.fast_path.decoding.group_cache import LAYER, GroupLayer

NAME = "trl_drgrpo_groups"


class Refused(Exception):
    """A model whose attention a group cache cannot serve. The message says why."""


# What a model may raise over a cache that is not made for it. Too little memory is none of these.
NOT_SERVED = (Refused, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


@contextmanager
def group_attention_in(model: Any) -> Iterator[None]:
    """Inside the block the model attends to a [`GroupCache`]. Its own attention is back afterwards in any case."""
    parts = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = {part._attn_implementation for part in parts.values()}
    if len(before) != 1:
        raise Refused("its parts use different attention")
    try:
        try:
            model.set_attn_implementation(NAME)
        except (ValueError, KeyError) as error:
            raise Refused(f"its attention cannot be replaced ({error})") from error
        if any(part._attn_implementation != NAME for part in parts.values()):  # some models only warn
            raise Refused("its attention cannot be replaced")
        yield
    finally:
        [own] = before
        for part in parts.values():
            part._attn_implementation = own


def group_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it.

    Args:
        module: The layer that attends.
        query (`(n, heads, 1, D)`), key, value (`(n, H, 1, D)`): Of the new tokens; keys and values are in the cache.
        scaling (`float`, *optional*): Of scores; `D ** -0.5` by default.
        softcap (`float`, *optional*): Scores are `softcap * tanh(score / softcap)`.
        s_aux (`(heads,)`, *optional*): Sinks, one more score per head without a value.
        attention_mask, dropout, position_bias: Refused, unless they change nothing.
        sliding_window (`int`, *optional*): Refused, unless it is the cache's.

    Returns:
        `(n, 1, heads, D)`, and no weights.
    """
    layer = getattr(key, LAYER, None)
    if layer is None or getattr(value, LAYER, None) is not layer:
        raise Refused("it changes keys or values after the cache")
    if attention_mask is not None or position_bias is not None:
        raise Refused("it adds a mask or bias to attention scores")
    if dropout:
        raise Refused("its attention uses dropout")
    if sliding_window is not None and sliding_window != layer.window:
        raise Refused(f"it attends to a window of {sliding_window}, its cache holds {layer.window or 'everything'}")
    scaled = query * (query.size(-1) ** -0.5 if scaling is None else scaling)
    return _attended(layer, scaled, softcap, s_aux), None


def _attended(layer: GroupLayer, query: torch.Tensor, softcap: float | None, sinks: Any) -> torch.Tensor:
    """One softmax, in float32, over the prompt's scores and a row's own."""
    grid, seen = layer.grid, layer.visible()
    prompts, width = grid.shape
    repeated = query.size(1) // layer.heads  # query heads of a key-value head
    query = query[:, :, 0].to(seen.own_keys.dtype)
    # (P, H, W, repeated, D): a view both as rows of a prompt and as rows of a completion
    query = grid.spread(query).unflatten(2, (layer.heads, repeated)).transpose(1, 2).contiguous()
    shared = torch.bmm(query.view(prompts * layer.heads, width * repeated, -1), seen.prompt_keys)
    own = torch.bmm(query.view(-1, repeated, query.size(-1)), seen.own_keys.transpose(1, 2))
    columns, layer.computes_in = shared.size(2), shared.dtype
    scores = torch.cat([shared.view(len(own), repeated, columns), own], dim=2).float()  # (P * H * W, repeated, l + t)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if seen.bias is not None:
        scores.view(prompts, -1, scores.size(2))[..., :columns] += seen.bias
    if sinks is not None:
        sinks = sinks.float().view(1, layer.heads, 1, repeated, 1).expand(prompts, -1, width, -1, -1)
        scores = torch.cat([scores, sinks.reshape(len(own), repeated, 1)], dim=2)
    weights = scores.softmax(dim=2).to(seen.own_values.dtype)
    over_prompt = weights[..., :columns].view(prompts * layer.heads, width * repeated, columns)
    over_own = weights[..., columns : columns + own.size(2)]
    attended = torch.bmm(over_prompt, seen.prompt_values).view(len(own), repeated, -1)
    attended = attended + torch.bmm(over_own, seen.own_values)
    attended = attended.view(prompts, layer.heads, width, repeated, -1).transpose(1, 2).flatten(2, 3)
    return grid.gather(attended)[:, None]


AttentionInterface.register(NAME, group_attention)  # there is no way back; the name is ours alone
