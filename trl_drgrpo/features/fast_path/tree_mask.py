"""A tree mask whose branches attend apart, so that pairs it hides cost next to nothing.

`scaled_dot_product_attention` over a boolean mask computes every pair, hidden or not. Over a [`TreeMask`] it runs
block by block (`blocks.py`). The mask is a tensor of the plain mask's values, and everything else takes it for one. So
models need not know of it, gradient checkpoints find it among their inputs, and what alters it gets the plain mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from trl_drgrpo.features.fast_path.blocks import Block, cut_into_blocks

# Types of devices where blocks were measured to be faster than the plain mask (guides/benchmarks.md, 2026-11-22).
# Elsewhere each block is a few kernel launches more in every layer, and the mask stays plain.
MEASURED = frozenset({"cpu"})


def attends_apart(device: str) -> bool:
    """Whether branches attend apart on a type of device (`"cpu"`, `"cuda"`)."""
    return device in MEASURED


class TreeMask(torch.Tensor):
    """A boolean mask `(N, 1, W, W)` that knows the blocks of its packs. Made by [`TreeMask.of`]."""

    blocks: list[list[tuple[Block, torch.Tensor | None]]]  # of each pack, with their masks; `None`: plain causal

    @classmethod
    def of(cls, mask: torch.Tensor, ends: Sequence[Sequence[int]]) -> "TreeMask":
        """
        Args:
            mask (`torch.Tensor` of shape `(N, 1, W, W)`, bool): Which column each row sees.
            ends (`Sequence[Sequence[int]]`): Of each pack, as in [`cut_into_blocks`]; shorter than W: padding follows.
        """
        tree = mask.as_subclass(cls)
        tree.blocks = []
        for one, of_pack in zip(mask, ends, strict=True):
            blocks = cut_into_blocks(of_pack)
            masks = [_mask(one, block, blocks) for block in blocks]
            tree.blocks.append(list(zip(blocks, masks, strict=True)))
        return tree

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # inside, it is a plain tensor, and gives plain ones
            if func is scaled_dot_product_attention:
                return _attended(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _mask(mask: torch.Tensor, block: Block, blocks: Sequence[Block]) -> torch.Tensor | None:
    if block.chain and not block.path:
        return None
    columns = [*(blocks[number] for number in block.path), block]
    return torch.cat([mask[:, block.start : block.end, one.start : one.end] for one in columns], dim=2)[None]


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """As `scaled_dot_product_attention`, block by block; that itself where queries or keys are not the packs'."""
    packs, _, width, _ = attn_mask.shape
    if not all(each.shape[::2] == (packs, width) and each.size(1) == query.size(1) for each in (query, key, value)):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
    packs_attended = []
    for blocks, *pack in zip(attn_mask.blocks, query.split(1), key.split(1), value.split(1), strict=True):
        sizes = [block.size for block, _ in blocks]
        queries, keys, values = (each.split([*sizes, width - sum(sizes)], dim=2) for each in pack)
        attended = []
        for number, (block, mask) in enumerate(blocks):
            seen, content = (_gathered(each, (*block.path, number)) for each in (keys, values))
            causal = mask is None
            attended.append(
                scaled_dot_product_attention(queries[number], seen, content, mask, dropout_p, causal, **named)
            )
        attended.append(values[-1])  # padding sees itself
        packs_attended.append(torch.cat([each.transpose(1, 2) for each in attended], dim=1))  # as the kernel lays out
    return torch.cat(packs_attended).transpose(1, 2)


def _gathered(parts: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    return torch.cat([parts[number] for number in numbers], dim=2) if len(numbers) > 1 else parts[numbers[0]]
