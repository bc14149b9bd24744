"""Cuts the tokens of a pack into blocks that attend apart: its stem, which all branches have in common, causally and
without a mask, then each branch to the stem and itself.

Branches that are short are cheaper together, and stay so; forks within a branch are left to its mask. Costs are in
query-key pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

T = TypeVar("T")

# What a block costs besides its pairs, forward and backward, as measured on a CPU (one thread, 8 heads of 64, blocks
# of 8 to 192 tokens, 2026-11-22): keys and values gathered, gradients added up, and its calls.
KEY_COST, BLOCK_COST = 64, 2048


def cut_into_blocks(ends: Sequence[int]) -> list[range]:
    """The stem of a pack and its branches; one block where that costs less.

    Args:
        ends (`Sequence[int]`): For each place, where the tokens that follow it, on any branch, end.

    Example:

    ```python
    >>> prompt, long = [1600] * 1000, [1300] * 300 + [1600] * 300
    >>> cut_into_blocks(prompt + long)
    [range(0, 1000), range(1000, 1300), range(1300, 1600)]
    >>> cut_into_blocks([4] * 2 + [3, 4])  # too short to be told apart
    [range(0, 4)]

    ```
    """
    whole = range(len(ends))
    stem = range(next((place for place in whole if ends[place] != len(ends)), len(ends)))
    branches: list[range] = []
    place = len(stem)
    while place < len(ends):
        branch = range(place, ends[place])
        place = branch.stop
        before = branches[-1] if branches else range(0)
        together = range(before.start, branch.stop)
        if before and _cost(together, stem) <= _cost(before, stem) + _cost(branch, stem):
            branches[-1] = together
        else:
            branches.append(branch)
    # The stem gathers nothing, and half of its pairs are left out.
    apart = len(stem) ** 2 // 2 + BLOCK_COST + sum(_cost(branch, stem) for branch in branches)
    return [whole] if branches and _cost(whole, range(0)) <= apart else [stem, *branches]


def _cost(branch: range, stem: range) -> int:
    """Cost of a branch, in pairs."""
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
    def of(cls, mask: torch.Tensor, ends: Sequence[Sequence[int]], is_windowed: bool = False) -> "TreeMask":
        """
        Args:
            mask (`torch.Tensor` of shape `(N, 1, W, W)`, bool): Which column each row sees.
            ends (`Sequence[Sequence[int]]`): Of each pack, as in [`cut_into_blocks`]; shorter than W: padding follows.
            is_windowed (`bool`): Whether rows do not see all of their ancestors, so that no block is merely causal.
        """
        tree = mask.as_subclass(cls)
        tree.blocks = []
        for one, of_pack in zip(mask, ends, strict=True):
            stem, *branches = cut_into_blocks(of_pack)
            is_chain = not is_windowed and (bool(branches) or min(of_pack) == len(of_pack))
            blocks = [(stem, None if is_chain else one[None, :, : len(stem), : len(stem)])]
            for branch in branches:
                own = slice(branch.start, branch.stop)
                blocks.append((branch, torch.cat([one[:, own, : len(stem)], one[:, own, own]], dim=2)[None]))
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
        with torch._C.DisableTorchFunctionSubclass():  # inside, it is a plain tensor, and gives plain ones
            if func is scaled_dot_product_attention:
                return _attended(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: TreeMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Attend block by block; in one piece where queries or keys are not the packs'."""
    packs, _, width, _ = attn_mask.shape
    if not all(
        states.shape[::2] == (packs, width) and states.size(1) == query.size(1) for states in (query, key, value)
    ):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
    packs_attended = []
    for blocks, *pack in zip(attn_mask.blocks, query.split(1), key.split(1), value.split(1), strict=True):
        sizes = [len(block) for block, _ in blocks]
        queries, keys, values = (each.split([*sizes, width - sum(sizes)], dim=2) for each in pack)
        attended = []
        for number, (_, mask) in enumerate(blocks):
            seen, content = (
                torch.cat([each[0], each[number]], dim=2) if number else each[0] for each in (keys, values)
            )
            causal = mask is None
            attended.append(
                scaled_dot_product_attention(queries[number], seen, content, mask, dropout_p, causal, **named)
            )
        attended.append(values[-1])  # padding sees itself
        packs_attended.append(torch.cat([each.transpose(1, 2) for each in attended], dim=1))  # as the kernel lays out
    return torch.cat(packs_attended).transpose(1, 2)
