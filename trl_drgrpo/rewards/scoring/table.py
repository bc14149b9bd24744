"""Reward functions over saved completions: values, failures, time, and disagreements.

Rewards are called as the trainer calls them, but on `batch_size` rows at a time: with one row per call, a failure and
a duration belong to one row. A reward that compares the completions of a group, or sends requests in parallel, wants
more; then the call's time is divided among its rows, and an exception fails all of them.
"""

import asyncio
import inspect
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_drgrpo.common.errors import InputError, speaks_for_itself, told
from trl_drgrpo.rewards.columns import row_problem
from trl_drgrpo.rewards.contract import validate_rewards
from trl_drgrpo.rewards.signatures import parameters

Row = dict[str, Any]
_OWN_COUNT = "counted as failed by the reward itself; see the log above"


@dataclass
class RewardScores:
    """Results of one reward function for `N` rows.

    Args:
        name (`str`): Of the reward.
        rewards (`list[float | None]`): `N` values.
        seconds (`list[float]`): `N` durations.
        failures (`dict[int, str]`): Reason by index of the row, where the call raised or returned nonsense.
        reported (`float`): Number of rows that the reward itself counted as failed (`rewards/<name>/failed_frac`)
            without raising, in calls of more than one row, where it is not known which they are.
        metrics (`dict[str, list[float]]`): Values logged by `log_metric`, per call.
        traceback (`str`): Of the first failure.
    """

    name: str
    rewards: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    reported: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)
    traceback: str = ""

    @property
    def num_failed(self) -> int:
        """Rows not scored because of a failure."""
        return len(self.failures) + round(self.reported)

    def summary(self) -> dict[str, Any]:
        """Numbers for the table: mean, standard deviation (population), extremes, shares, time."""
        scored = [reward for reward in self.rewards if reward is not None]
        return {
            "rows": len(self.rewards),
            "mean": statistics.fmean(scored) if scored else None,
            "std": statistics.pstdev(scored) if scored else None,
            "min": min(scored, default=None),
            "max": max(scored, default=None),
            "none_frac": 1 - len(scored) / len(self.rewards),
            "failed": self.num_failed,
            "seconds_mean": statistics.fmean(self.seconds),
            "seconds_max": max(self.seconds),
            "metrics": {name: statistics.fmean(values) for name, values in sorted(self.metrics.items())},
        }

    def slowest(self, count: int) -> list[int]:
        """Indices of the rows that took longest."""
        return sorted(range(len(self.seconds)), key=lambda row: -self.seconds[row])[:count]


@dataclass(frozen=True)
class Unscored:
    """
    A row to which a reward gave `None`.

    Args:
        row (`int`): Index of the row.
        columns (`dict[str, Any]`): Columns the reward reads: mostly the gold answer.
        reason (`str`, *optional*): What the reward itself says of these, see
            [`row_problem`].
    """

    row: int
    columns: Row
    reason: str | None = None


@dataclass(frozen=True)
class Disagreement:
    """Rows that two graders score differently; a row that one of them could not score counts too."""

    first: str
    second: str
    rows: list[int]


def score_rows(
    reward_func: Callable,
    rows: Sequence[Row],
    name: str,
    batch_size: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> RewardScores:
    """Call a reward function on saved completions.

    Args:
        reward_func (`Callable`): Synchronous or asynchronous.
        rows (`Sequence[dict]`): `N` rows with `prompt`, `completion` and columns; all with the same columns.
        name (`str`): Of the reward, for its failures.
        batch_size (`int`, *optional*, defaults to 1): Rows per call.
        on_progress (`Callable`, *optional*): Called with the number of rows that are done.

    Returns:
        [`RewardScores`]

    Raises:
        [`InputError`]: What a reward raises for bad configuration; it is no failure of a row.
    """
    scores = RewardScores(name)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        logged: dict[str, list[float]] = {}
        begun = time.perf_counter()
        try:
            output = reward_func(**_keywords(batch, logged))
            if inspect.isawaitable(output):
                output = asyncio.run(_result(output))
            rewards = validate_rewards(output, len(batch), name)
        except (Exception, SystemExit) as error:  # whatever a user's function raises is a row of the table
            if isinstance(error, InputError) and type(error) is InputError:
                raise
            rewards = [None] * len(batch)
            reason = told(error)
            scores.failures |= dict.fromkeys(range(start, start + len(batch)), reason)
            if not speaks_for_itself(error):
                scores.traceback = scores.traceback or traceback.format_exc()
        seconds = (time.perf_counter() - begun) / len(batch)
        scores.rewards += rewards
        scores.seconds += [seconds] * len(batch)
        # A composition reports its parts' failures too: they may be of the same rows.
        failed_fracs = [values[-1] for metric, values in logged.items() if metric.endswith("/failed_frac")]
        if start not in scores.failures and (failed_frac := max(failed_fracs, default=0.0)) > 0:
            if len(batch) == 1:
                scores.failures[start] = _OWN_COUNT
            else:
                scores.reported += failed_frac * len(batch)
        for metric, values in logged.items():
            scores.metrics.setdefault(metric, []).extend(values)
        if on_progress is not None:
            on_progress(start + len(batch))
    return scores


def unscored_rows(reward_func: Callable, rows: Sequence[Row], scores: RewardScores) -> list[Unscored]:
    """The rows that a reward could not score, with what it was given to score them by.

    Args:
        reward_func (`Callable`): The reward.
        rows (`Sequence[dict]`): `N` rows.
        scores ([`RewardScores`]): What [`score_rows`] made of them. Rows for which the call raised are not meant.

    Returns:
        `list[Unscored]`: In the order of the rows.
    """
    read = {parameter.name for parameter in parameters(reward_func) or ()} - {"completion_ids"}
    return [
        Unscored(index, {name: row[name] for name in row if name in read}, row_problem(reward_func, _columns(row)))
        for index, (row, reward) in enumerate(zip(rows, scores.rewards, strict=True))
        if reward is None and scores.failures.get(index, _OWN_COUNT) == _OWN_COUNT
    ]


def disagreements(graders: dict[str, Sequence[float | None]], tolerance: float) -> list[Disagreement]:
    """Disagreements of each pair of graders.

    Args:
        graders (`dict[str, Sequence]`): `N` rewards each.
        tolerance (`float`): Differences up to it are none.

    Returns:
        `list[Disagreement]`: One per pair, in order.
    """
    names = list(graders)
    return [
        Disagreement(
            one,
            two,
            [
                row
                for row, pair in enumerate(zip(graders[one], graders[two], strict=True))
                if _differ(*pair, tolerance)
            ],
        )
        for index, one in enumerate(names)
        for two in names[index + 1 :]
    ]


def _differ(one: float | None, two: float | None, tolerance: float) -> bool:
    if one is None or two is None:
        return one is not two
    return abs(one - two) > tolerance


def _keywords(batch: Sequence[Row], logged: dict[str, list[float]]) -> dict[str, Any]:
    """The keywords of TRL's call; `trainer_state` is `None`, there being no trainer."""
    keywords = {name: [row[name] for row in batch] for name in _columns(batch[0])}
    return {
        "completion_ids": [None] * len(batch),
        **keywords,
        "prompts": [row["prompt"] for row in batch],
        "completions": [row["completion"] for row in batch],
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda metric, value: logged.setdefault(metric, []).append(float(value)),
    }


def _columns(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("prompt", "completion")}


async def _result(awaitable: Any) -> Any:
    return await awaitable
