"""Fork rules; they read only the tokens before a cut.

A cut lies behind a step, and whether it does may depend on what was written up to there, never on what follows: a
branch that was chosen for how it ended would bias the gradient. So a step that makes the rule speak is in front of the
cut, not behind it.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, get_args

ForkAt = Literal["drawn", "entropy", "doubt"]
FORK_AT: tuple[str, ...] = get_args(ForkAt)


def boundaries(step_ends: Sequence[int], length: int) -> list[int]:
    """Tokens of a row before each place where it can be cut: behind a step, and not at the row's end.

    Args:
        step_ends (`Sequence[int]`): Inclusive last token of each step.
        length (`int`): Tokens of the row.

    Example:

    ```python
    >>> boundaries([3, 7, 9], 10)
    [4, 8]

    ```
    """
    return [end + 1 for end in step_ends if end + 1 < length]


def drawn_places(seed: str, depth: int, expected_length: float) -> list[float]:
    """Places to cut at, drawn before anything is written: `D` numbers of tokens, uniform up to a length, ascending.

    Args:
        seed (`str`): Of this draw.
        depth (`int`): D.
        expected_length (`float`): Mean length of earlier completions, in tokens.
    """
    generator = random.Random(seed)
    return sorted(generator.uniform(0, expected_length) for _ in range(depth))


def cut_behind(places: Sequence[int], at: float, after: int) -> int | None:
    """The first boundary at a number of tokens or later, and behind an earlier cut; `None`: there is none.

    Example:

    ```python
    >>> cut_behind([4, 8, 15], at=5.5, after=0), cut_behind([4, 8, 15], at=5.5, after=8), cut_behind([4], 5.5, 0)
    (8, 15, None)

    ```
    """
    places = places[bisect_left(places, max(at, after + 1)) :]
    return places[0] if places else None


def first_above(places: Sequence[int], measures: Sequence[float | None], threshold: float, after: int) -> int | None:
    """The first boundary, behind an earlier cut, whose step measures more than the threshold; `None`: there is none.

    Example:

    ```python
    >>> first_above([4, 8, 15], [0.9, 0.2, 0.7], threshold=0.5, after=4)
    15

    ```
    """
    for place, measure in zip(places, measures, strict=True):
        if place > after and measure is not None and measure > threshold:
            return place
    return None


def step_means(values: Sequence[float], step_ends: Sequence[int]) -> list[float]:
    """Mean of a row's token values over each of its steps, which `step_ends` (inclusive) cut."""
    starts = [0, *(end + 1 for end in step_ends)][: len(step_ends)]
    return [sum(values[start : end + 1]) / (end + 1 - start) for start, end in zip(starts, step_ends, strict=True)]
