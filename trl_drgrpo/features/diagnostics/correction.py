"""The correction for vLLM's probabilities, seen from the side of a row: how much do its tokens weigh?

Each token's loss is multiplied by a ratio of the policy's probability to the engine's, bounded in one of four ways. A
row's weight is the mean ratio over its trained tokens. Where the ratio is the product over a row, noise that is the
same for every token masks or clips long rows more often: a length bias that no other metric shows.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

QUARTERS = tuple(f"sampling/weight_q{q}_mean" for q in (1, 2, 3, 4))  # from the shortest rows to the longest


def weight_statistics(
    weights: Sequence[float], lengths: Sequence[int], correct: Sequence[bool | None] | None = None
) -> dict[str, float]:
    """Mean weights of short and long rows, and of correct and incorrect ones.

    Args:
        weights (`B` floats): NaN for rows without trained tokens, which are left out.
        lengths (`B` ints): In tokens.
        correct (`B` bools or `None`, *optional*): As in [`BatchRows`].

    Returns:
        `dict[str, float]`: `sampling/weight_q1_mean` (the shortest quarter of the rows) to `sampling/weight_q4_mean`,
        `sampling/weight_correct_mean`, `sampling/weight_incorrect_mean`. Rows of one length are in one quarter, that
        of their mean rank, so a quarter may be empty; what is empty is left out.

    Example:

    ```python
    >>> weight_statistics([1.0, 0.9, 0.8, 0.0], [10, 20, 30, 40])["sampling/weight_q4_mean"]
    0.0
    >>> list(weight_statistics([1.0, 1.0], [7, 7]))
    ['sampling/weight_q3_mean']

    ```
    """
    known = [i for i, weight in enumerate(weights) if not math.isnan(weight)]
    ordered = sorted(lengths[i] for i in known)
    chosen: dict[str, list[int]] = {}
    for i in known:
        rank = statistics.fmean((bisect_left(ordered, lengths[i]), bisect_right(ordered, lengths[i])))
        chosen.setdefault(QUARTERS[int(4 * rank / len(ordered))], []).append(i)
    for name, wanted in (("correct", True), ("incorrect", False)):
        chosen[f"sampling/weight_{name}_mean"] = [i for i in known if correct is not None and correct[i] is wanted]
    return {name: statistics.fmean(weights[i] for i in rows) for name, rows in sorted(chosen.items()) if rows}
