"""Whether a series of logged numbers has moved or left its usual range. Pure functions on short lists."""

import math
import statistics
from collections.abc import Sequence

MAD_TO_STD = 1.4826  # of a normal distribution


def moved(series: Sequence[float]) -> float:
    """By how many standard errors the second half of a series lies above the first.

    Args:
        series (`Sequence[float]`): Values over time.

    Returns:
        `float`: Difference of the halves' means over its standard error (the values taken as independent); infinite
        for a change without any spread; 0 for fewer than 8 values, too short to tell.

    Example:

    ```python
    >>> moved([1, 2, 1, 2, 3, 4, 3, 4])
    4.898979485566356

    ```
    """
    half = len(series) // 2
    if half < 4:
        return 0.0
    before, after = series[:half], series[-half:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / half)
    difference = statistics.fmean(after) - statistics.fmean(before)
    return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0


def change(series: Sequence[float]) -> float:
    """Mean of the second half minus mean of the first, in the series' units."""
    half = len(series) // 2
    return statistics.fmean(series[-half:]) - statistics.fmean(series[:half]) if half else 0.0


def distance_from_usual(value: float, usual: Sequence[float]) -> float:
    """Robust z-score: how far a value lies above the median, in standard deviations estimated from the MAD.

    Args:
        value (`float`): The value in question.
        usual (`Sequence[float]`): Earlier values, at least one.

    Returns:
        `float`: Deviations above (negative: below) the median. The spread counts as at least a tenth of the median's
        size, so that a series that hardly varies does not turn every wobble into an event.

    Example:

    ```python
    >>> round(distance_from_usual(11.0, [1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    5.4

    ```
    """
    median = statistics.median(usual)
    spread = MAD_TO_STD * statistics.median(abs(each - median) for each in usual)
    floor = max(abs(median) / 10, 1e-12)
    return (value - median) / max(spread, floor)
