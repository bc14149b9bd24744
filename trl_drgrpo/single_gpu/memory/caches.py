"""Keys and values of a generation on the meta device, as the fast path or transformers holds them."""

from typing import Any

import torch

from trl_drgrpo.features.fast_path.decoding.group_attention import NOT_SERVED, group_attention_in
from trl_drgrpo.features.fast_path.decoding.group_cache import BLOCK, GroupCache
from trl_drgrpo.single_gpu.memory.setup import Setup
from trl_drgrpo.single_gpu.memory.skeleton import Skeleton


def plain_cache(skeleton: Skeleton, setup: Setup, rows: int, length: int) -> Any:
    """A cache of transformers that holds the keys and values of `length` tokens of so many rows."""
    from transformers import DynamicCache

    config = skeleton.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = skeleton.precision.dtype or getattr(torch, setup.dtype)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.empty(rows, heads, length, size, dtype=dtype, device="meta") for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def group_cache(prefilled: Any, setup: Setup, written: int = 0) -> GroupCache:
    """A cache that holds each prompt of `prefilled` once, and so many tokens of each completion."""
    rows, prompts = setup.generated_rows, prefilled.layers[0].keys.size(0)
    cache: Any = GroupCache(prefilled, [row * prompts // rows for row in range(rows)], None, most=setup.completion)
    for layer in cache.layers if written else ():
        window = written + 1 if layer.window is None else layer.window + max(BLOCK, layer.window // 2)
        held = min(written + 1, window)  # with room for the next one
        shape = layer.grid.shape[0], layer.heads, layer.grid.shape[1], held, layer.prompt_values.size(2)
        layer.keys, layer.values = layer.prompt_values.new_empty(shape), layer.prompt_values.new_empty(shape)
        layer.tokens, layer.dropped = written, written + 1 - held
    return cache


@torch.no_grad()
def has_group_cache(skeleton: Skeleton, setup: Setup) -> bool:
    """Whether the model takes a cache in which a prompt is held once: one step over it is tried."""
    config = skeleton.config
    if not (setup.exact and setup.fast_generation) or getattr(config, "attention_chunk_size", None):
        return False
    ids = torch.empty(1, 1, dtype=torch.long, device="meta")
    try:
        cache = GroupCache(plain_cache(skeleton, setup, 1, 1), [0], None, most=1)
        with skeleton.precision, group_attention_in(skeleton.model):
            skeleton.model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
    except NOT_SERVED:
        return False
    finally:
        skeleton.precision.forget()
    return True
