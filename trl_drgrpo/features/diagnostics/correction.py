"""The correction for vLLM's probabilities, seen from the side of a row: how much do its tokens weigh?

Each token's loss is multiplied by a ratio of the policy's probability to the engine's, bounded in one of four ways. A
row's weight is the mean ratio over its trained tokens. Where the ratio is the product over a row, noise that is the
same for every token masks or clips long rows more often: a length bias that no other metric shows.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar

from trl_drgrpo.features.diagnostics.watch import Watch

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


class UnequalWeights(Watch):
    """The correction for vLLM's probabilities weighs long rows otherwise than short ones."""

    cause = "unequal_weights"
    defaults: ClassVar = {"share": 0.1, "deviations": 6.0, "steps": 40}
    metrics = (QUARTERS[0], QUARTERS[-1])
    fewest = 10

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        short, long = map(statistics.fmean, series)
        gaps = [a - b for a, b in zip(*series, strict=True)]
        error = statistics.pstdev(gaps) / math.sqrt(max(len(gaps) - 1, 1))
        if abs(short - long) < max(self.thresholds["share"] * max(short, long), self.thresholds["deviations"] * error):
            return None
        return (
            f"The correction for vLLM's probabilities weighs the longest quarter of the completions {long:.2f} and "
            f"the shortest {short:.2f} (means over {self.span}): a length bias. Set "
            "vllm_importance_sampling_mode='token_truncate'. If it is set, vLLM and the trainer disagree too much "
            "(sampling/sampling_logp_difference): set the same dtype, vllm serve --logprobs-mode processed_logprobs."
        )
