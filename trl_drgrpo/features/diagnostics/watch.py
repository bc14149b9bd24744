"""Base of the watches: a window of readings per cause, judged at every optimizer step and at the end of a run.

A reading is what an optimizer step brought, however seldom the run logs: the mean over ten steps has another spread
than a step, and a window of forty logs would outlast most runs.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

Metrics = Mapping[str, Any]
Thresholds = Mapping[str, float]


class Watch:
    """Base of the watches.

    Args:
        thresholds (`Mapping[str, float]`): One value for every entry of `defaults`.
        num_generations (`int`): G.

    Attributes:
        cause (`str`): Name of the cause, in `run_warnings` and in `warnings.jsonl`.
        defaults (`dict[str, float]`): The thresholds. `steps` is the number of optimizer steps that are looked at,
            those without the metrics (which generated nothing, for example) not counted.
        metrics (`tuple[str, ...]`): The metrics of a reading; a step without one of them is passed over.
        also_read (`tuple[str, ...]`): Metrics that may be missing from a reading (`None` then).
        fewest (`int`): Readings that suffice at the end of a run that was too short for a window.
        explains (`tuple[str, ...]`): Causes that would only repeat this one while it holds.
        from_logs (`bool`): Whether a reading is a log instead of an optimizer step: for metrics that exist there only.
        seen (`dict`): The readings so far, `[step, *values]` each. JSON-ready: it travels with checkpoints.
    """

    cause: ClassVar[str]
    defaults: ClassVar[dict[str, float]]
    metrics: ClassVar[tuple[str, ...]]
    also_read: ClassVar[tuple[str, ...]] = ()
    fewest: ClassVar[int] = 5
    explains: ClassVar[tuple[str, ...]] = ()
    from_logs: ClassVar[bool] = False

    def __init__(self, thresholds: Thresholds, num_generations: int):
        self.thresholds = thresholds
        self.num_generations = num_generations
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.seen: dict[str, Any] = {"readings": []}

    @property
    def window(self) -> int:
        """Readings that are judged together."""
        return int(self.thresholds["steps"])

    def observe(self, step: int, metrics: Metrics) -> str | None:
        """Take in an optimizer step; returns a warning with what to do about it, or `None`."""
        values = [finite(metrics.get(name)) for name in self.metrics]
        if None in values:
            return None
        readings = self.seen["readings"]
        readings.append([step, *values, *(finite(metrics.get(name)) for name in self.also_read)])
        del readings[: -self.window]
        return self.judge(self.series) if len(readings) >= self.window else None

    def conclude(self) -> str | None:
        """The run is over: the warning of one that was too short for a window."""
        return self.judge(self.series) if self.fewest <= len(self.seen["readings"]) < self.window else None

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        """The warning, from the readings as one series per metric."""
        raise NotImplementedError

    @property
    def series(self) -> list[tuple[Any, ...]]:
        """The readings as one series per metric, without the steps."""
        return list(zip(*self.seen["readings"], strict=True))[1:]

    @property
    def span(self) -> str:
        """The optimizer steps from the first reading to the last."""
        return span_of(self.seen["readings"])


def span_of(readings: Sequence[Sequence[Any]]) -> str:
    """The optimizer steps from the first reading to the last, in words."""
    steps = int(readings[-1][0] - readings[0][0]) + 1
    return "the last optimizer step" if steps == 1 else f"the last {steps} optimizer steps"


def finite(value: Any) -> float | None:
    """A number as it is, anything else as `None`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def mean_of(values: Sequence[float | None]) -> float:
    """Mean of a metric that may be missing; 0 where it always is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0
