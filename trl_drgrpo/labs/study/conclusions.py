"""Conclusions of a study: sentences made from its numbers, so that they cannot say more than the numbers do.

Everywhere the same rule: two things differ if the 95% interval of their difference, taken seed by seed, leaves out 0.
"""

from collections.abc import Mapping, Sequence

from trl_drgrpo.labs.study.intervals import Interval, interval
from trl_drgrpo.labs.study.objectives import OBJECTIVES

_MANY = 8  # comparisons; from so many on, the sentence mentions chance


def compared(title: str, found: Mapping[str, Interval], even: float = 0.0, decimals: int = 1) -> str:
    """Sentence on the intervals that lie above a value, below it, and around it.

    Args:
        title (`str`): Name of the compared quantity.
        found (`Mapping[str, Interval]`): By label.
        even (`float`, *optional*, defaults to `0.0`): The value of no difference.
        decimals (`int`, *optional*, defaults to `1`): Of the numbers.

    Example:

    ```python
    >>> compared("Points", {"a": Interval(3, 1), "b": Interval(-1, 2)})
    'Points: above 0 with a (+3.0 ± 1.0); not told apart from 0 with b (-1.0 ± 2.0).'

    ```
    """
    sides: dict[str, list[str]] = {f"above {even:g}": [], f"below {even:g}": [], f"not told apart from {even:g}": []}
    above, below, neither = sides.values()
    for label, each in found.items():
        side = (
            above if each.mean - each.half_width > even else below if each.mean + each.half_width < even else neither
        )
        side.append(f"{label} ({each.text(decimals, signed=even == 0)})")
    parts = "; ".join(f"{side} with {', '.join(labels)}" for side, labels in sides.items() if labels)
    chance = f" Of {len(found)} comparisons one in twenty would say so by chance." if len(found) >= _MANY else ""
    return f"{title}: {parts}.{chance}"


def paired(own: Sequence[float], reference: Sequence[float]) -> Interval:
    """Mean and 95% interval of differences, seed by seed.

    Args:
        own, reference (`Sequence[float]`): One value per seed, in one order.
    """
    return interval([a - b for a, b in zip(own, reference, strict=True)])


def length_bias(differences: Mapping[str, Interval]) -> str:
    """Sentence on the objectives under which the length bias shows.

    Args:
        differences (`Mapping[str, Interval]`): By key of `OBJECTIVES`, incorrect answers minus correct ones, minus the
            same under Dr. GRPO.
    """
    labels = {OBJECTIVES[name].label: found for name, found in differences.items()}
    shown = [label for label, found in labels.items() if found.mean > found.half_width]
    text = compared("Incorrect minus correct answers at the end, minus the same under Dr. GRPO, in tokens", labels)
    shows = f"shows under {', '.join(shown)}" if shown else "does not show"
    return f"{text} The length bias {shows}."
