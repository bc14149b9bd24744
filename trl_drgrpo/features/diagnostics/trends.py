"""Changes and outliers of a series of numbers: whether it has moved, and whether it has left its usual range."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise, starmap
from operator import mul, sub

MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


def moved(series: Sequence[float]) -> float:
    """Return how many standard errors the second half of a series lies above the first.

    The noise is the rest of each half after its mean and the slope that both have in common are subtracted, so that a
    steady trend does not hide itself. If the noise is correlated from step to step (lag one, estimated and corrected
    for its bias in short series), fewer values count as independent: the error grows by `sqrt((1 + rho) / (1 - rho))`.

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
    difference = change(series)
    times = _centered(range(half))
    first = _centered(series[:half])
    second = _centered(series[-half:])
    # Least squares with one slope for both halves, which have their own means.
    slope = _product(times * 2, first + second) / (2 * _product(times, times))
    trend = [slope * t for t in times]
    first = list(map(sub, first, trend))
    second = list(map(sub, second, trend))
    noise = first + second
    total = _product(noise, noise)
    if total <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    # No pair reaches over the middle: between the halves the mean jumps.
    lagged = math.fsum(starmap(mul, [*pairwise(first), *pairwise(second)])) / total
    # + (1 + 4 rho) / n: the bias of a short series. rho ends at 0.9, as the estimate of a short series may come to 1,
    # which would make the error infinite and every change disappear.
    rho = min(max(lagged + (1 + 4 * lagged) / half, 0.0), 0.9)
    variance = total / (2 * half - 3)  # less two means and one slope
    error = math.sqrt(variance * 2 / half * (1 + rho) / (1 - rho))
    return difference / error


def _centered(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(mul, a, b))


def change(series: Sequence[float]) -> float:
    """Return the mean of the second half minus the mean of the first; 0 for fewer than two values."""
    half = len(series) // 2
    if half == 0:
        return 0.0
    return statistics.fmean(series[-half:]) - statistics.fmean(series[:half])


def distance_from_usual(value: float, usual: Sequence[float]) -> float:
    """Return a robust z-score: the distance of a value from the median, in standard deviations estimated by the MAD.

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
    spread = MAD_TO_STD * statistics.median(abs(earlier - median) for earlier in usual)
    floor = max(abs(median) / 10, 1e-12)  # 1e-12: zeros alone have no spread to divide by
    return (value - median) / max(spread, floor)


def mean_of(values: Sequence[float | None]) -> float:
    """Return the mean of a metric that may be missing; 0 if it always is."""
    present = [value for value in values if value is not None]
    if not present:
        return 0.0
    return statistics.fmean(present)
