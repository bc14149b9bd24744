"""Cuts the tokens of a pack into blocks that attend apart, without tensors.

A pack is a tree of tokens, depth first. Its first block is what all branches have in common; each of the others
attends to the blocks on its path to the root, all of whose tokens it sees, and to itself. Branches that are short are
cheaper together, and stay so. Costs are in query-key pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
