"""The numbers on a report's first screen: values as logged, with the steps they come from; never smoothed."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trl_drgrpo.report.curves import Curve, ends_of, known_points, rounded
from trl_drgrpo.report.records import Run


@dataclass(frozen=True)
class _Number:
    """A number of the first screen. `metrics`: the first one that is there counts; `is_mean`: over the whole run,
    in seconds, instead of first and last value; `complement`: 1 minus the metric."""

    name: str
    metrics: tuple[str, ...]
    unit: str = ""
    share: bool = False
    is_mean: bool = False
    complement: bool = False


_SECONDS = ("time/generate_s", "time/score_s", "time/train_s")  # per step
_PASS_RATE = _Number("Pass rate", ("drgrpo/pass_rate",), share=True)
_REWARD = _Number("Reward", ("reward",))
_NUMBERS = (
    _Number("Mean length", ("completions/mean_length",), "tokens"),
    _Number("Live groups", ("drgrpo/zero_signal_frac", "frac_reward_zero_std"), share=True, complement=True),
    _Number("Speed", ("time/tokens_per_s",), "tokens/s", is_mean=True),
)


def headline(run: Run, curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """
    Pass rate (without one: reward), mean length, live groups, speed and warnings of a run.

    Args:
        run ([`Run`]): The run.
        curves (`dict[str, Curve]`): Of the run, not thinned.

    Returns:
        `list[dict]`: Per number `name`, `unit`, `share`, `steps` (first and last one that it is from), `first` and
        `last` (values logged at these steps; `first` is `None` for a mean over all of them) and `last_tenth` (mean of
        the last tenth of the values). `last` is `None` where nothing was logged or recorded.
    """
    first = _PASS_RATE if any(name in curves for name in _PASS_RATE.metrics) else _REWARD
    warned = None if run.kind == "trl" else len(run.warnings)
    warnings = {"name": "Warnings", "unit": "", "share": False, "steps": [], "first": None, "last": warned}
    return [*(_value(number, curves) for number in (first, *_NUMBERS)), {**warnings, "last_tenth": None}]


def _value(number: _Number, curves: dict[str, Curve]) -> dict[str, Any]:
    curve = next((curves[name] for name in number.metrics if name in curves), None)
    value: dict[str, Any] = {"name": number.name, "unit": number.unit, "share": number.share}
    if curve is None:
        return {**value, "steps": [], "first": None, "last": None, "last_tenth": None}
    points = known_points(curve)
    steps, values = [points[0][0], points[-1][0]], [value for _, value in points]
    if number.is_mean:
        return {**value, "steps": steps, "first": None, "last": rounded(_over_time(curve, curves)), "last_tenth": None}
    shown = (values[0], values[-1], ends_of(curve).last)
    first, last, tenth = (rounded(1 - each if number.complement else each) for each in shown)
    return {**value, "steps": steps, "first": first, "last": last, "last_tenth": tenth}


def _over_time(rates: Curve, curves: dict[str, Curve]) -> float | None:
    """What was done in all steps over the seconds that they took: a mean of rates would count short steps like long
    ones."""
    seconds: dict[int, float] = defaultdict(float)
    for name in _SECONDS:
        for step, value in known_points(curves[name]) if name in curves else []:
            seconds[step] += value
    # A logged value is of all steps since the one before.
    steps = zip(rates.values, pairwise([0, *rates.steps]), strict=True)
    spans = [(rate, seconds[step] * (step - before)) for rate, (before, step) in steps if rate is not None]
    total = sum(span for _, span in spans)
    return sum(rate * span for rate, span in spans) / total if total else None
