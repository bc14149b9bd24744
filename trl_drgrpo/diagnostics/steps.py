"""Statistics of step rewards, and the sign that a process reward is being exploited.

A learned process reward can be raised without solving anything: by more steps, or by mistakes it cannot see. Then the
process reward rises while the outcome reward falls. `looks_hacked` says so from the logged numbers, and
`ProcessRewardWatch` warns once, and whether the steps per completion grew too.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

_POSITIONS = 4  # quarters of a completion


def step_statistics(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> dict[str, float]:
    """What one generation batch says about its steps.

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
    """Which quarter of a completion the middle of a step falls into."""
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


def looks_hacked(process: Sequence[float], outcome: Sequence[float]) -> bool:
    """Whether the process reward rose while the outcome reward fell.

    Each series is cut in half; it rose (fell) when the mean of the second half is above (below) that of the first by
    more than three standard errors of their difference.

    Args:
        process, outcome (`Sequence[float]`): Process and outcome reward over time, equally long.

    Returns:
        `bool`: `False` for fewer than 8 points.
    """
    return _moved(process) > 3 and _moved(outcome) < -3


def _moved(series: Sequence[float]) -> float:
    """Difference of the halves' means in standard errors; 0 when too short to tell."""
    half = len(series) // 2
    if half < 4:
        return 0.0
    before, after = series[:half], series[-half:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / half)
    difference = statistics.fmean(after) - statistics.fmean(before)
    return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0


class ProcessRewardWatch(TrainerCallback):
    """Warns once when the process reward looks exploited over the last logged intervals.

    Args:
        window (`int`, *optional*, defaults to `20`): Logged intervals that are compared, first half with second.
    """

    def __init__(self, window: int = 20):
        self.history: deque[tuple[float, float, float]] = deque(maxlen=window)
        self.has_warned = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        keys = ("process/steps_mean", "process/reward_mean", "reward")
        values = [(logs or {}).get(key) for key in keys]
        if self.has_warned or any(value is None for value in values):
            return
        self.history.append((float(values[0] or 0), float(values[1] or 0), float(values[2] or 0)))
        if len(self.history) < (self.history.maxlen or 0):
            return
        steps, process, outcome = zip(*self.history, strict=True)
        if looks_hacked(process, outcome):
            self.has_warned = True
            grew = "steps per completion and process reward" if _moved(steps) > 3 else "the process reward"
            logger.warning(
                "Over the last %d logged intervals %s rose while the outcome reward fell: the process reward is "
                "probably being exploited. Look at the completions; give the outcome more weight (outcome_weight, "
                "process_weight); against growing steps, step_credit='min_to_go' cannot be raised by more of them.",
                len(self.history),
                grew,
            )
