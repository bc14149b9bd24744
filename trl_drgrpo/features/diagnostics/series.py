"""Whether a series of logged numbers has moved or left its usual range. Pure functions on short lists."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

MAD_TO_STD = 1.4826  # of a normal distribution


def moved(series: Sequence[float]) -> float:
    """By how many standard errors the second half of a series lies above the first.

    The noise is what is left of each half without its mean and without the slope that both have in common, so that a
    steady trend does not hide itself. Where that noise is correlated from step to step (lag one, estimated and
    corrected for its bias in short series), fewer values count as independent: the error grows by
    `sqrt((1 + rho) / (1 - rho))`.

    Args:
        series (`Sequence[float]`): Values over time.

    Returns:
        `float`: Difference of the halves' means over its standard error; infinite for a change without any noise; 0
        for fewer than 8 values, too short to tell.

    Example:

    ```python
    >>> round(moved([1, 2, 1, 2, 3, 4, 3, 4]), 6)
    5.0

    ```
    """
    half = len(series) // 2
    if half < 4:
        return 0.0
    halves = (series[:half], series[-half:])
    means = [statistics.fmean(values) for values in halves]
    difference = means[1] - means[0]
    times = [t - (half - 1) / 2 for t in range(half)]
    residues = [[value - mean for value in values] for values, mean in zip(halves, means, strict=True)]
    products = [t * e for values in residues for t, e in zip(times, values, strict=True)]
    slope = math.fsum(products) / (2 * math.fsum(t * t for t in times))
    residues = [[e - slope * t for t, e in zip(times, values, strict=True)] for values in residues]
    total = math.fsum(e * e for values in residues for e in values)
    if total <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    lagged = math.fsum(a * b for values in residues for a, b in pairwise(values)) / total
    rho = min(max(lagged + (1 + 4 * lagged) / half, 0.0), 0.9)
    error = math.sqrt(total / (2 * half - 3) * 2 / half * (1 + rho) / (1 - rho))
    return difference / error


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
