"""The budget of a problem: which continuations it pays for, and exact counts of what was sampled.

The rule, in three sentences. Every token that the model samples is counted once, kept or not. The sum never
exceeds the limit: a continuation to the end is begun only if its longest possible outcome can be paid, and the steps
of one round share what is left in equal parts. As long as no completion is finished, the tokens of the longest one are
kept back, so that every problem ends with at least one. A step that its part cuts short is counted and thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Budget:
    """Tokens of one problem.

    Args:
        limit (`int`): Tokens that may be sampled.
        longest (`int`): Tokens of the longest completion, at most `limit`.
        sampled_tokens (`int`): Tokens sampled so far.
        kept_tokens (`int`): Those that are part of the tree. The rest was sampled twice (equal steps are merged),
            behind the end of a step, or cut short.
        prompt_tokens (`int`): Tokens of the prefixes that were continued, once per continuation.
        has_finished (`bool`): Whether a completion is finished, so that nothing is kept back.
    """

    limit: int
    longest: int
    sampled_tokens: int = 0
    kept_tokens: int = 0
    prompt_tokens: int = 0
    has_finished: bool = False

    @property
    def left(self) -> int:
        """Tokens that are not sampled yet."""
        return self.limit - self.sampled_tokens

    def whole(self, wanted: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, int]]:
        """Plans continuations to the end: their number in each place, and the limit of their length.

        Args:
            wanted (`Sequence[int]`): Continuations that are asked for, by place.
            rooms (`Sequence[int]`): Tokens that a completion has room for there.

        Returns:
            `list[tuple[int, int]]`: Number and limit, by place.

        Example:

        ```python
        >>> Budget(limit=25, longest=10).whole([2, 2], [10, 4])
        [(2, 10), (1, 4)]

        ```
        """
        left, paid = self.left, []
        for count, room in zip(wanted, rooms, strict=True):
            paid.append((min(count, left // room), room))
            left -= paid[-1][0] * room
        return paid

    def steps(self, wanted: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, int]]:
        """As [`whole`][Budget.whole], for continuations of one step, which share what is left in equal parts.

        Example:

        ```python
        >>> Budget(limit=25, longest=10).steps([2, 2], [10, 2])
        [(2, 3), (2, 2)]

        ```
        """
        free = self.left - (0 if self.has_finished else self.longest)
        part = max(free, 0) // max(sum(wanted), 1)
        return [(count if part else 0, min(part, room)) for count, room in zip(wanted, rooms, strict=True)]
