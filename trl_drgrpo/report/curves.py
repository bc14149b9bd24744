"""Metrics of a run as curves: thinned to what a page can hold, with gaps where nothing is known, and final numbers.

A curve is its own list of steps and of values. A value that was logged as NaN is a gap (`None`), and so is a stretch
of steps that is many times longer than usual; a metric that is only logged now and then is joined. The numbers on the
first screen are values as logged, with the steps they come from; never smoothed.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY
from trl_drgrpo.report.run_folders import Logged, Run

# A gap is so many times longer than the usual distance of two logged steps.
_HOLE = 8
# Written once, at the end of a run, so they make no curves.
_ONCE = ("train_", "total_flos")


@dataclass
class Curve:
    """One metric over the steps.

    Args:
        steps (`list[int]`): Rising.
        values (`list[float or None]`): `None` = a gap.
        mean_of (`int`): Logged values that each point is the mean of.
    """

    steps: list[int]
    values: list[float | None]
    mean_of: int = 1

    def as_json(self) -> list[list[Any]]:
        """Return steps and values, rounded to the digits that can be seen."""
        return [self.steps, list(map(rounded, self.values))]


# By metric.
Curves = dict[str, Curve]


def curves_of(logged: Sequence[Logged], mode: str, points: int | None = None) -> Curves:
    """
    Return the curves of a run per metric, sorted, without metrics that have no value and those of a run's end.

    `logged` is in the order of the steps; of several entries of a step the last one counts. `mode`: `"train"` or
    `"eval"`, whose prefix `eval_` is taken off. Means of equally many neighbors leave at most `points` points; the
    last logged value is a point of its own, so that a curve ends where its run did.
    """
    values = defaultdict(dict)
    for entry in logged:
        if entry.mode != mode:
            continue
        for name, value in entry.metrics.items():
            if name.startswith(_ONCE):
                continue
            if mode == "eval":
                name = name.removeprefix("eval_")
            values[name][entry.step] = value
    curves = {}
    for name, value_at in sorted(values.items()):
        steps = sorted(value_at)
        logged_values = list(map(value_at.get, steps))
        if logged_values.count(None) < len(steps):
            curves[name] = _curve(steps, logged_values, points)
    return curves


def _curve(steps: list[int], values: list[float | None], points: int | None) -> Curve:
    """Thin a curve to at most `points` points, and put gaps where steps are missing."""
    size = 1
    last = len(steps) - 1
    if points is not None and last >= points:
        size = math.ceil(last / max(1, points - 1))
        thinned_steps = []
        thinned_values = []
        for start in range(0, last, size):
            end = min(start + size, last)
            thinned_steps.append(steps[end - 1])
            thinned_values.append(mean(values[start:end]))
        # The newest value stands alone, since it is the one that is read.
        steps = [*thinned_steps, steps[last]]
        values = [*thinned_values, values[last]]
    distances = [after - before for before, after in pairwise(steps)]
    longest = 2
    if distances:
        longest = max(_HOLE * statistics.median(distances), 2)
    # A longer stretch without entries is a gap, not a straight line. From the end on: an insertion moves what follows.
    for position in range(len(steps) - 1, 0, -1):
        if distances[position - 1] > longest:
            steps.insert(position, steps[position - 1] + 1)
            values.insert(position, None)
    return Curve(steps, values, size)


def axes_of(logged: Sequence[Logged], resumed_at: Sequence[int], points: int = 1000) -> dict[str, list[list[Any]]]:
    """
    Collect the axes that curves can be drawn over besides steps: for each, steps and values that never fall.

    Args:
        logged (`Sequence[Logged]`): In the order of the steps.
        resumed_at (`Sequence[int]`): Steps at which the run went on: the pause before does not count as time.
        points (`int`, *optional*): At most so many values per axis.

    Returns:
        `dict`: `tokens` (read and generated, as TRL counts them) and `time` (seconds since the first entry), those
        that were logged.
    """
    tokens = []
    clocks = []
    for entry in logged:
        if entry.mode == "train":
            num_tokens = entry.metrics.get("num_tokens")
            if num_tokens is not None:
                tokens.append((entry.step, num_tokens))
            if entry.time is not None:
                clocks.append((entry.step, entry.time))
    axes = {}
    readings_by_name = {"tokens": tokens, "time": _without_pauses(clocks, resumed_at)}
    for name, readings in readings_by_name.items():
        steps = []
        values = []
        highest = -math.inf
        for step, value in readings:
            # A reading that falls, as of a counter that started anew, stays where the axis was.
            highest = max(highest, value)
            steps.append(step)
            values.append(rounded(highest, 7))
        if len(readings) > 1 and highest > readings[0][1]:
            stride = math.ceil(len(values) / points)
            axes[name] = [[*numbers[:-1:stride], numbers[-1]] for numbers in (steps, values)]
    return axes


def _without_pauses(clocks: Sequence[tuple[int, float]], resumed_at: Sequence[int]) -> list[tuple[int, float]]:
    """Return step and seconds since the first entry, for entries of step and Unix time."""
    # Steps and seconds from one entry to the next; 0 seconds across a pause, or where the clock was put back.
    passed = []
    paces = []
    for (step, start), (next_step, end) in pairwise(clocks):
        steps = next_step - step
        seconds = max(0.0, end - start)
        if any(step <= resumed < next_step for resumed in resumed_at):
            seconds = 0.0
        passed.append((next_step, steps, seconds))
        if steps and seconds:
            paces.append(seconds / steps)
    # Steps across a pause were trained, too: they count with the usual pace.
    pace = statistics.median(paces or [0.0])
    total = 0.0
    times = [(step, total) for step, _ in clocks[:1]]
    for step, steps, seconds in passed:
        total += seconds or pace * steps
        times.append((step, total))
    return times


def known_points(curve: Curve) -> list[tuple[int, float]]:
    """Return the steps and values of a curve without its gaps."""
    points = zip(curve.steps, curve.values, strict=True)
    return [(step, value) for step, value in points if value is not None]


def ends_of(curve: Curve, window: int) -> tuple[float, float]:
    """
    Return the first and last level of a curve that has a value: means of the values that were logged in its first and
    in its last `window` steps (at least one value).

    Example:

    ```python
    >>> ends_of(Curve([1, 2, 3, 4], [0.0, None, 1.0, 2.0]), window=2)
    (0.0, 1.5)

    ```
    """
    points = known_points(curve)
    start = points[0][0] + window
    end = points[-1][0] - window
    first = [value for step, value in points if step < start]
    last = [value for step, value in points if step > end]
    return statistics.fmean(first), statistics.fmean(last)


def tenth_of(runs: Iterable[Iterable[Curve]]) -> int:
    """Return a tenth of the steps of the shortest run with a value, at least one step."""
    last_steps = []
    for curves in runs:
        steps = [curve.steps[-1] for curve in curves if known_points(curve)]
        # A run without a value shortens no other.
        if steps:
            last_steps.append(max(steps))
    return max(1, min(last_steps, default=1) // 10)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not `None`; `None` if there are none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return statistics.fmean(numbers)


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Round a number to so many significant digits."""
    if value is None:
        return None
    return float(f"{value:.{digits}g}")


def held_out(run: Run, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """
    Return accuracy, or reward, on held-out prompts before and after, as a number of the first screen.

    Args:
        run ([`Run`]): The run.
        evaluations (`Sequence[Mapping]`): Results of `trl-drgrpo eval`, the newest last. One with a baseline goes
            before the evaluations of the training: its two models saw the same prompts.

    Returns:
        `dict`: A number as in [`headline`], with the measurement in `origin`. `None` where nothing was measured, or
        where the training evaluated several splits, which TRL logs under one name.
    """
    number = _logged("Held-out accuracy", None, share=True)
    # The newest evaluation of both models.
    for content in reversed(evaluations):
        data = content["dataset"]
        rates = {}
        for model in content["models"]:
            rates[model["role"]] = model["pass_at"].get("1", {}).get("value")
        first = rates.get("baseline")
        last = rates.get("model")
        if data["split"] != "train" and None not in (first, last):
            origin = f"baseline and model on {data['name']}, split {data['split']}: {data['prompts']:,} prompts"
            return number | {"first": rounded(first), "last": rounded(last), "origin": origin}
    # TRL logs every evaluation's runtime, with the name of its split where there are several.
    names = set()
    for entry in run.logged:
        for name in entry.metrics:
            if re.fullmatch("eval_(.+_)?runtime", name):
                names.add(name)
    curves = curves_of(run.logged, "eval")
    curve = curves.get("drgrpo/pass_rate")
    if curve is None and PROCESS_ONLY not in curves:
        number |= {"name": "Held-out reward", "share": False}
        curve = curves.get("reward")
    if curve is None or len(names) > 1:
        return None
    (step, value), *later = known_points(curve)
    if not later:
        return number | {"steps": [step], "last": rounded(value), "origin": f"evaluation at step {step}"}
    last_step, last_value = later[-1]
    return number | {
        "steps": [step, last_step],
        "first": rounded(value),
        "last": rounded(last_value),
        "origin": f"evaluations at steps {step} and {last_step}",
    }


def headline(run: Run, curves: Curves, evaluations: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """
    List held-out accuracy where it was measured, pass rate (without one: reward), mean length, live groups, speed and
    warnings of a run.

    Args:
        run ([`Run`]): The run.
        curves (`dict[str, Curve]`): Of the run, not thinned.
        evaluations (`Sequence[Mapping]`, *optional*): See [`held_out`].

    Returns:
        `list[dict]`: Per number `name`, `unit`, `share`, `steps` (first and last one that it is from), `first` and
        `last` (values logged at these steps; `first` is `None` for a mean over all of them) and `last_tenth` (mean of
        the last tenth of the values). `last` is `None` where nothing was logged or recorded.
    """
    outcome = _logged("Reward", curves.get("reward"))
    if "drgrpo/pass_rate" in curves:
        outcome = _logged("Pass rate", curves["drgrpo/pass_rate"], share=True)
    elif PROCESS_ONLY in curves:
        outcome = _logged("Step reward", curves.get("process/reward_mean"))
    live = None
    dead = curves.get("drgrpo/dead_groups_frac", curves.get("frac_reward_zero_std"))
    if dead is not None:
        live = Curve(dead.steps, [None if value is None else 1 - value for value in dead.values])
    # The speed is one number for all steps.
    speed_curve = curves.get("time/tokens_per_s")
    speed = _logged("Speed", speed_curve, unit="tokens/s") | {"first": None, "last_tenth": None}
    if speed_curve is not None:
        speed["last"] = rounded(_over_time(speed_curve, curves))
    # Plain TRL gives none of our warnings.
    warnings = _logged("Warnings", None)
    if run.kind != "trl":
        warnings["last"] = len(run.warnings)
    numbers = [
        held_out(run, evaluations),
        outcome,
        _logged("Mean length", curves.get("completions/mean_length"), unit="tokens"),
        _logged("Live groups", live, share=True),
        speed,
        warnings,
    ]
    return list(filter(None, numbers))


def _logged(name: str, curve: Curve | None, unit: str = "", share: bool = False) -> dict[str, Any]:
    """Return a number of the first screen: the first and the last value of a curve, as logged."""
    number: dict[str, Any] = {
        "name": name,
        "unit": unit,
        "share": share,
        "steps": [],
        "first": None,
        "last": None,
        "last_tenth": None,
    }
    if curve is not None:
        points = known_points(curve)
        start, first = points[0]
        end, last = points[-1]
        last_tenth = ends_of(curve, tenth_of([[curve]]))[1]
        number["steps"] = [start, end]
        number["first"] = rounded(first)
        number["last"] = rounded(last)
        number["last_tenth"] = rounded(last_tenth)
    return number


def _over_time(rates: Curve, curves: Curves) -> float | None:
    """Divide the work of all steps by their seconds: a mean of rates would count short steps like long ones."""
    # Seconds of one step, by the step at which they were logged.
    seconds = defaultdict(float)
    for name in ("time/generate_s", "time/score_s", "time/train_s"):
        if name in curves:
            for step, value in known_points(curves[name]):
                seconds[step] += value
    # A logged value is the mean over all steps since the one before, unless some are missing in the log.
    counts = [step - before for before, step in pairwise([0, *rates.steps])]
    usual = statistics.median(counts)
    work = 0.0
    total = 0.0
    for rate, step, count in zip(rates.values, rates.steps, counts, strict=True):
        if count > _HOLE * usual:
            count = usual
        if rate is not None:
            span = seconds[step] * count
            total += span
            work += rate * span
    if not total:
        return mean(rates.values)
    return work / total
