"""pass@k and its interval over prompts. Pure: NumPy alone.

The estimator is that of Chen et al. (arXiv 2107.03374, equation 1): with `n` samples of a prompt, `c` of them
correct, `1 - C(n - c, k) / C(n, k)` is the unbiased estimate of the chance that one of `k` samples is correct; for
`k = 1` it is `c / n`. The mean runs over prompts. The interval is the percentile bootstrap over prompts: prompts are
drawn anew, and the samples of a prompt stay together, so it covers both the choice of prompts and the sampling. Two
models are compared prompt by prompt: the interval of the difference is that of the paired differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl_drgrpo.common.errors import InputError

RESAMPLES = 10_000
INTERVAL = f"95%, percentile bootstrap over prompts ({RESAMPLES:,} resamples)"
_VALUES_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Args:
        value (`float`, *optional*): The mean; `None` over no prompts.
        low, high (`float`, *optional*): Ends of the 95% interval. `None` where all prompts have the same value: their
            bootstrap has no width, whatever the uncertainty.
        prompts (`int`): Prompts in the mean.
    """

    value: float | None
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of `k` completions of a prompt is correct, estimated from more of them.

    Args:
        samples (`int`): Completions of the prompt, at least `k`.
        correct (`int`): Those that are correct.
        k (`int`): At least 1.

    Returns:
        `float`: 0 to 1.

    Raises:
        `InputError`: Fewer completions than `k`, or more correct ones than there are.

    Example:

    ```python
    >>> pass_at_k(8, 2, 1), round(pass_at_k(8, 2, 4), 4), pass_at_k(8, 2, 8)
    (0.25, 0.7857, 1.0)

    ```
    """
    if not 1 <= k <= samples:
        remedy = "Sample at least k completions of each prompt."
        raise InputError("k", f"{k} of {samples} samples", "a whole number from 1 to the number of samples", remedy)
    if not 0 <= correct <= samples:
        raise InputError(
            "correct", f"{correct} of {samples}", "a number from 0 to the number of samples", "Check the counts."
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_over_prompts(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean and 95% interval.

    Args:
        values (`Sequence[float]`): One per prompt.
        seed (`int`, *optional*, defaults to `0`): Of the bootstrap.

    Returns:
        [`Estimate`]

    Example:

    ```python
    >>> mean_over_prompts([1.0, 1.0])
    Estimate(value=1.0, low=None, high=None, prompts=2)

    ```
    """
    if not len(values):
        return Estimate(None, None, None, 0)
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if array.min() == array.max():
        return Estimate(mean, None, None, len(array))
    generator = np.random.default_rng(seed)
    at_once = max(1, _VALUES_AT_ONCE // len(array))
    means: list[np.ndarray] = []
    for start in range(0, RESAMPLES, at_once):
        drawn = generator.integers(len(array), size=(min(at_once, RESAMPLES - start), len(array)))
        means.append(array[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Estimate(mean, float(low), float(high), len(array))
