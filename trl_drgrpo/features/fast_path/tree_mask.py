"""Cut the tokens of a pack into blocks whose attention is computed block by block.

The first block is the stem, which all branches have in common: it attends causally and needs no mask. Each branch
attends to the stem and to itself. Short branches are cheaper together, so they stay in one block; forks within a
branch are left to its mask. Costs are in query-key pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

T = TypeVar("T")

# Cost of a block besides its pairs, forward and backward, as measured on a CPU (one thread, 8 heads of 64, blocks of
# 8 to 192 tokens, 2026-11-22): for each of its keys, which are gathered and whose gradients are added up; and once.
KEY_COST = 64
BLOCK_COST = 2048


def cut_into_blocks(ends: Sequence[int]) -> list[range]:
    """Cut a pack into its stem and branches, or into one block where that costs less.

    Args:
        ends (`Sequence[int]`): For each token, in depth-first order, the exclusive end of its descendants.

    Example:

    ```python
    >>> prompt = [1600] * 1000
    >>> cut_into_blocks(prompt + [1300] * 300 + [1600] * 300)
    [range(0, 1000), range(1000, 1300), range(1300, 1600)]
    >>> cut_into_blocks([4] * 2 + [3, 4])  # too short to be told apart
    [range(0, 4)]

    ```
    """
    pack = range(len(ends))
    # The stem ends before the first token that some of the later ones do not follow.
    stem = range(next((place for place in pack if ends[place] != len(ends)), len(ends)))
    branches: list[range] = []
    place = len(stem)
    while place < len(ends):
        branch = range(place, ends[place])
        place = branch.stop
        if branches:
            previous = branches[-1]
            together = range(previous.start, branch.stop)
            if _cost(together, stem) <= _cost(previous, stem) + _cost(branch, stem):
                branches[-1] = together
                continue
        branches.append(branch)
    # The stem gathers no keys, and causal attention leaves out half of its pairs.
    cost_of_blocks = len(stem) ** 2 // 2 + BLOCK_COST + sum(_cost(branch, stem) for branch in branches)
    if branches and _cost(pack, range(0)) <= cost_of_blocks:
        return [pack]
    return [stem, *branches]


def _cost(branch: range, stem: range) -> int:
    """Return the cost of a branch, in pairs."""
    return (len(branch) + KEY_COST) * (len(branch) + len(stem)) + BLOCK_COST


# Types of devices where blocks were measured to be faster than the plain mask (tests/benchmarks/README.md).
# Elsewhere each block is a few kernel launches more in every layer, and the mask stays plain.
MEASURED = frozenset({"cpu"})


def attends_apart(device: str) -> bool:
    """Tell whether branches attend apart on a type of device (`"cpu"`, `"cuda"`)."""
    return device in MEASURED


class TreeMask(torch.Tensor):
    """A boolean mask `(N, 1, W, W)` that knows the blocks of its packs. Made by [`TreeMask.of`]."""

    blocks: list[list[tuple[range, torch.Tensor | None]]]  # of each pack, with their masks; a chain has none

    @classmethod
    def of(
        cls,
        mask: torch.Tensor,
        ends: Sequence[Sequence[int]],
        is_windowed: bool = False,
    ) -> "TreeMask":
        """Make a mask that knows its blocks.

        Args:
            mask (`torch.Tensor` of shape `(N, 1, W, W)`, bool): True where a row sees a column.
            ends (`Sequence[Sequence[int]]`): Ends of each pack, as in [`cut_into_blocks`]; shorter than W: padding
                follows.
            is_windowed (`bool`): True if rows do not see all of their ancestors, so that no block is merely causal.
        """
        tree = mask.as_subclass(cls)
        tree.blocks = []
        for pack_mask, pack_ends in zip(mask, ends, strict=True):
            stem, *branches = cut_into_blocks(pack_ends)
            # Attention is causal in a stem with branches behind it, and in a pack of one block in which nothing forks.
            is_chain = bool(branches) or min(pack_ends) == len(pack_ends)
            stem_mask = None
            if is_windowed or not is_chain:
                stem_mask = pack_mask[None, :, : len(stem), : len(stem)]
            blocks = [(stem, stem_mask)]
            for branch in branches:
                places = slice(branch.start, branch.stop)
                to_stem = pack_mask[:, places, : len(stem)]
                to_itself = pack_mask[:, places, places]
                blocks.append((branch, torch.cat([to_stem, to_itself], dim=2)[None]))
            tree.blocks.append(blocks)
        return tree

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., T],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T | torch.Tensor:
        # The one call that models make with the mask is taken over here. Everything else must see a plain tensor, and
        # return one: a slice of the mask no longer belongs to the blocks.
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attention_by_blocks(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _attention_by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: TreeMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` block by block; in one call where queries or keys are not the packs'."""
    packs, _, width, _ = attn_mask.shape
    for states in (query, key, value):
        # Grouped keys that are not repeated, or keys of a cache: the blocks' places would mean something else.
        if states.shape[::2] != (packs, width) or states.size(1) != query.size(1):
            return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
    results = []
    for number, blocks in enumerate(attn_mask.blocks):
        sizes = [len(block) for block, _ in blocks]
        sizes.append(width - sum(sizes))  # padding
        # (1, H, W, D), as the kernel expects it, in pieces along W.
        queries = query[number : number + 1].split(sizes, dim=2)
        keys = key[number : number + 1].split(sizes, dim=2)
        values = value[number : number + 1].split(sizes, dim=2)
        outputs = []
        for place, (_, mask) in enumerate(blocks):
            seen_keys = keys[0]
            seen_values = values[0]
            if place:  # a branch sees the stem and itself
                seen_keys = torch.cat([keys[0], keys[place]], dim=2)
                seen_values = torch.cat([values[0], values[place]], dim=2)
            outputs.append(
                scaled_dot_product_attention(
                    queries[place], seen_keys, seen_values, mask, dropout_p, is_causal=mask is None, **named
                )
            )
        outputs.append(values[-1])  # padding sees itself alone, so its output is its value
        # Joined as (1, W, H, D), the layout of the kernel's own output: models reshape it without a copy.
        results.append(torch.cat([output.transpose(1, 2) for output in outputs], dim=1))
    return torch.cat(results).transpose(1, 2)
