"""Statistics of step rewards.

A learned process reward can be raised without solving anything: by more steps, or by mistakes it cannot see. Then the
process reward rises while the outcome reward falls: the cause `process_hacked` in `watches.py` warns of it from these
numbers.
"""

import math
import statistics
from collections.abc import Sequence

_POSITIONS = 4  # quarters of a completion


def step_statistics(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> dict[str, float]:
    """Statistics of a generation batch's steps.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step; `None` = unscorable.
        outcome_rewards (`B` floats): Outcome reward of each row; `None` or NaN = unscorable.

    Returns:
        `dict[str, float]`: Metrics under `process/`; one that has nothing to be computed from is left out.

        - `process/steps_mean`: steps per completion, over completions that have any;
        - `process/reward_mean`: mean over scorable steps, in the units of the reward;
        - `process/reward_quarter_1` to `_4`: the same for the steps in each quarter of a completion;
        - `process/unscorable_frac`: share of steps without a reward, 0 to 1;
        - `process/outcome_correlation`: Pearson's, of a row's mean step reward with its outcome reward, -1 to 1.

    Example:

    ```python
    >>> step_statistics([[1.0, 0.0], [1.0, None]], [0.0, 1.0])["process/reward_mean"]
    0.6666666666666666

    ```
    """
    rows = [row for row in step_rewards if len(row)]
    if not rows:
        return {}
    scored = [s for row in rows for s in row if s is not None]
    total = sum(len(row) for row in rows)
    result = {"process/steps_mean": total / len(rows), "process/unscorable_frac": 1 - len(scored) / total}
    if scored:
        result["process/reward_mean"] = statistics.fmean(scored)
    for quarter in range(_POSITIONS):
        values = [s for row in rows for k, s in enumerate(row) if s is not None and _quarter(k, len(row)) == quarter]
        if values:
            result[f"process/reward_quarter_{quarter + 1}"] = statistics.fmean(values)
    correlation = _correlation(step_rewards, outcome_rewards)
    return result if correlation is None else {**result, "process/outcome_correlation": correlation}


def _quarter(step: int, steps: int) -> int:
    """Quarter of a completion that the middle of a step falls into."""
    return int(_POSITIONS * (step + 0.5) / steps)


def _correlation(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> float | None:
    pairs = []
    for row, outcome in zip(step_rewards, outcome_rewards, strict=True):
        scored = [s for s in row if s is not None]
        if scored and outcome is not None and not math.isnan(outcome):
            pairs.append((statistics.fmean(scored), outcome))
    process, outcomes = [p for p, _ in pairs], [o for _, o in pairs]
    if len(set(process)) < 2 or len(set(outcomes)) < 2:
        return None
    return statistics.correlation(process, outcomes)
