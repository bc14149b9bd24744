"""Mean and 95% confidence interval over a handful of seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, 97.5% quantile, by degrees of freedom; above the last one the normal's 1.96 is near enough.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL_975 = 1.960


class Interval(NamedTuple):
    """A mean and half the width of its 95% interval, in the unit of the values."""

    mean: float
    half_width: float

    def text(self, decimals: int = 1, signed: bool = False) -> str:
        """Both, rounded; `signed` for differences."""
        return f"{self.mean:{'+' if signed else ''}.{decimals}f} ± {self.half_width:.{decimals}f}"

    def __str__(self) -> str:
        return self.text()


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95% interval by Student's t, the values being independent.

    Args:
        values (`Sequence[float]`): One per seed, at least one.

    Returns:
        [`Interval`]: With one value the half width is infinite.

    Example:

    ```python
    >>> str(interval([1.0, 2.0, 3.0]))
    '2.0 ± 2.5'

    ```
    """
    if len(values) < 2:
        return Interval(statistics.fmean(values), math.inf)
    freedom = len(values) - 1
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else _NORMAL_975
    return Interval(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values)))
