"""Rank correlation of a few points, with its uncertainty."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_FIELLER = 1.06  # variance of Fisher's z of a rank correlation, times the points less three
_DRAWS = 20_000


class RankCorrelation(NamedTuple):
    """Spearman's rho, its 95% interval, and the share of permutations with one at least as high."""

    rho: float
    low: float
    high: float
    p_value: float
    points: int

    def __str__(self) -> str:
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> RankCorrelation:
    """Spearman's rank correlation: interval by Fisher's z with Fieller's variance, one-sided test by permutation.

    Args:
        x, y (`Sequence[float]`): At least four points; ties share their mean rank.

    Returns:
        [`RankCorrelation`]: The interval reaches from -1 to 1 where rho does.

    Example:

    ```python
    >>> print(rank_correlation([1, 2, 3, 4, 5], [2, 4, 5, 7, 9]))
    +1.00 [+1.00, +1.00]

    ```
    """
    ranks_x, ranks_y = _ranks(np.asarray(x, dtype=float)), _ranks(np.asarray(y, dtype=float))
    rho = float(np.corrcoef(ranks_x, ranks_y)[0, 1])
    rng, scale = np.random.default_rng(0), math.sqrt(_FIELLER / (len(ranks_x) - 3))
    shuffled = rng.permuted(np.tile(ranks_y, (_DRAWS, 1)), axis=1)
    products = (shuffled - ranks_y.mean()) @ (ranks_x - ranks_x.mean())
    reached = float((ranks_y - ranks_y.mean()) @ (ranks_x - ranks_x.mean()))
    p_value = (1 + int((products >= reached - 1e-9).sum())) / (1 + _DRAWS)
    if abs(rho) > 1 - 1e-9:
        return RankCorrelation(round(rho), round(rho), round(rho), p_value, len(ranks_x))
    middle = math.atanh(rho)
    return RankCorrelation(
        rho, math.tanh(middle - 1.96 * scale), math.tanh(middle + 1.96 * scale), p_value, len(ranks_x)
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
