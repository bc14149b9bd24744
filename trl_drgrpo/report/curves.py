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
from itertools import accumulate, pairwise
from typing import Any

from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY
from trl_drgrpo.report.run_folders import Logged, Run

_HOLE = 8  # a gap is so many times longer than the usual distance of two logged steps
_ONCE = ("train_", "total_flos")  # written once, at the end of a run, so they make no curves


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


def curves_of(logged: Sequence[Logged], mode: str, points: int | None = None) -> dict[str, Curve]:
    """
    Return the curves of a run per metric, sorted, without metrics that have no value and those of a run's end.

    `logged` is in the order of the steps; of several entries of a step the last one counts. `mode`: `"train"` or
    `"eval"`, whose prefix `eval_` is taken off. Means of equally many neighbors leave at most `points` points; the
    last logged value is a point of its own, so that a curve ends where its run did.
    """
    values: dict[str, dict[int, float | None]] = defaultdict(dict)
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
        logged_values = [value_at[step] for step in steps]
        if logged_values.count(None) < len(steps):
            curves[name] = _curve(steps, logged_values, points)
    return curves


def _curve(steps: list[int], values: list[float | None], points: int | None) -> Curve:
    """Thin a curve to at most `points` points, and put gaps where steps are missing."""
    size = 1
    last = len(steps) - 1
    if points is not None and last >= points:
        size = math.ceil(last / max(1, points - 1))
        starts = range(0, last, size)
        # The newest value stands alone, since it is the one that is read.
        values = [*(mean(values[start : min(start + size, last)]) for start in starts), values[last]]
        steps = [*(steps[min(start + size, last) - 1] for start in starts), steps[last]]
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
    tokens: list[tuple[int, float]] = []
    clocks: list[tuple[int, float]] = []
    for entry in logged:
        if entry.mode == "train":
            num_tokens = entry.metrics.get("num_tokens")
            if num_tokens is not None:
                tokens.append((entry.step, num_tokens))
            if entry.time is not None:
                clocks.append((entry.step, entry.time))
    # Steps and seconds from one entry to the next; 0 seconds across a pause, or where the clock was put back.
    passed = []
    for (step, start), (next_step, end) in pairwise(clocks):
        seconds = max(0.0, end - start)
        if any(step <= resumed < next_step for resumed in resumed_at):
            seconds = 0.0
        passed.append((next_step - step, seconds))
    paces = [seconds / steps for steps, seconds in passed if steps and seconds]
    pace = statistics.median(paces or [0.0])
    seconds_passed = accumulate((seconds or pace * steps for steps, seconds in passed), initial=0.0)
    times = [(step, total) for (step, _), total in zip(clocks, seconds_passed, strict=False)]  # none without a clock
    axes = {}
    for name, readings in (("tokens", tokens), ("time", times)):
        steps = [step for step, _ in readings]
        values = list(accumulate((value for _, value in readings), max))
        if len(values) > 1 and values[-1] > values[0]:
            stride = math.ceil(len(values) / points)
            thinned = [*values[:-1:stride], values[-1]]
            axes[name] = [[*steps[:-1:stride], steps[-1]], [rounded(value, 7) for value in thinned]]
    return axes


def known_points(curve: Curve) -> list[tuple[int, float]]:
    """Return the steps and values of a curve without its gaps."""
    return [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]


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
    for content in reversed(evaluations):
        data = content["dataset"]
        rates = {model["role"]: model["pass_at"].get("1", {}).get("value") for model in content["models"]}
        if data["split"] != "train" and None not in (rates.get("baseline"), rates.get("model")):
            number |= {"first": rounded(rates["baseline"]), "last": rounded(rates["model"])}
            number["origin"] = (
                f"baseline and model on {data['name']}, split {data['split']}: {data['prompts']:,} prompts"
            )
            return number
    # TRL logs every evaluation's runtime, with the name of its split where there are several.
    names = set()
    for entry in run.logged:
        names.update(name for name in entry.metrics if re.fullmatch("eval_(.+_)?runtime", name))
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


def headline(
    run: Run, curves: dict[str, Curve], evaluations: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
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
    speed_curve = curves.get("time/tokens_per_s")
    speed = _logged("Speed", speed_curve, unit="tokens/s") | {"first": None, "last_tenth": None}
    if speed_curve is not None:
        speed["last"] = rounded(_over_time(speed_curve, curves))
    warnings = _logged("Warnings", None)
    if run.kind != "trl":  # plain TRL gives none of our warnings
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
        start, first = known_points(curve)[0]
        end, last = known_points(curve)[-1]
        last_tenth = ends_of(curve, tenth_of([[curve]]))[1]
        number |= {"steps": [start, end], "first": rounded(first), "last": rounded(last)}
        number["last_tenth"] = rounded(last_tenth)
    return number


def _over_time(rates: Curve, curves: dict[str, Curve]) -> float | None:
    """Divide the work of all steps by their seconds: a mean of rates would count short steps like long ones."""
    seconds: dict[int, float] = defaultdict(float)  # of one step, by the step at which they were logged
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
