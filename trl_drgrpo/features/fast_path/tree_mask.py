"""Cuts the tokens of a pack into blocks that attend apart, without tensors.

A pack is a tree of tokens, depth first. Its first block is what all branches have in common; each of the others
attends to the blocks on its path to the root, all of whose tokens it sees, and to itself. Branches that are short are
cheaper together, and stay so. Costs are in query-key pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

# What a block costs besides its pairs, forward and backward, as measured on a CPU (one thread, 8 heads of 64, blocks
# of 8 to 192 tokens, 2026-11-22): keys and values gathered, gradients added up, and its calls.
KEY_COST, BLOCK_COST = 64, 2048


@dataclass(frozen=True)
class Block:
    """Neighboring tokens of a pack that attend together.

    Args:
        start (`int`), end (`int`): Their places.
        path (`tuple[int, ...]`): The blocks, by number, that all of them see all of.
        chain (`bool`): Whether each follows the one before it.
    """

    start: int
    end: int
    path: tuple[int, ...]
    chain: bool

    @property
    def size(self) -> int:
        """Queries."""
        return self.end - self.start


def cut_into_blocks(ends: Sequence[int]) -> list[Block]:
    """The blocks of a pack at the least cost.

    Args:
        ends (`Sequence[int]`): For each place, where the tokens that follow it, on any branch, end.

    Example:

    ```python
    >>> prompt, long = [1600] * 1000, [1300] * 300 + [1600] * 300
    >>> [(block.start, block.end, block.path) for block in cut_into_blocks(prompt + long)]
    [(0, 1000, ()), (1000, 1300, (0,)), (1300, 1600, (0,))]
    >>> len(cut_into_blocks([4] * 2 + [3, 4]))  # too short to be told apart
    1

    ```
    """
    return _subtree(ends, 0, (), 0, 0)[1]


def _subtree(
    ends: Sequence[int], start: int, path: tuple[int, ...], seen: int, number: int
) -> tuple[int, list[Block]]:
    """Cost and blocks of a token and all that follow it. `path`: blocks above it, of `seen` tokens; `number`: of the
    first block."""
    end = ends[start]
    middle = next((place for place in range(start, end) if ends[place] != end), end)
    whole = Block(start, end, path, chain=middle == end)
    cost = _cost(whole.size, seen) if path or not whole.chain else _causal_cost(whole.size)
    if whole.chain:
        return cost, [whole]
    stem = Block(start, middle, path, chain=True)
    apart, blocks = _cost(stem.size, seen) if path else _causal_cost(stem.size), [stem]
    path, seen = (*path, number), seen + stem.size
    place, before = middle, 0  # before: cost of the block before, where it may grow
    while place < end:
        branch_cost, branch = _subtree(ends, place, path, seen, number + len(blocks))
        place = ends[place]
        together = _cost(place - blocks[-1].start, seen)
        if before and len(branch) == 1 and together <= before + branch_cost:
            apart, before = apart - before + together, together
            blocks[-1] = Block(blocks[-1].start, place, path, chain=False)
        else:
            apart, before = apart + branch_cost, branch_cost if len(branch) == 1 else 0
            blocks += branch
    return (cost, [whole]) if cost <= apart else (apart, blocks)


def _cost(queries: int, seen: int) -> int:
    """Cost of a block, in pairs."""
    return (queries + KEY_COST) * (queries + seen) + BLOCK_COST


def _causal_cost(queries: int) -> int:
    """Cost of the chain at the root: it gathers nothing, and half of its pairs are left out."""
    return queries**2 // 2 + BLOCK_COST


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
