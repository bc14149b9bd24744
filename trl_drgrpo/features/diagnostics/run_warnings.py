"""The warnings of a run: the causes as a table (metrics, thresholds, condition), one window class, each said once.

A cause is judged by a window of readings at every optimizer step, and at the end of a run. A reading is what an
optimizer step brought, however seldom the run logs: the mean over ten steps has another spread than a step, and a
window of forty logs would outlast most runs. What is said, and what to do, is in `advice.jinja`. In front of the
causes: whether a series has moved or left its usual range. Behind them: the setting and the watch.

`run_warnings` in the configuration is `True`, `False`, or a mapping from causes to thresholds (or to `False`). What
was said, and what the windows have seen, travels with checkpoints: a resumed run does not repeat itself.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Any

from trl_drgrpo.common import ranges
from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.markdown import template
from trl_drgrpo.features.diagnostics.statistics import QUARTERS

logger = logging.getLogger(__name__)

MAD_TO_STD = 1.4826  # of a normal distribution


def moved(series: Sequence[float]) -> float:
    """By how many standard errors the second half of a series lies above the first.

    The noise is what is left of each half without its mean and without the slope that both have in common, so that a
    steady trend does not hide itself. Where that noise is correlated from step to step (lag one, estimated and
    corrected for its bias in short series), fewer values count as independent: the error grows by
    `sqrt((1 + rho) / (1 - rho))`.

    Args:
        series (`Sequence[float]`): Values over time.

    Returns:
        `float`: Difference of the halves' means over its standard error; infinite for a change without any noise; 0
        for fewer than 8 values, too short to tell.

    Example:

    ```python
    >>> round(moved([1, 2, 1, 2, 3, 4, 3, 4]), 6)
    5.0

    ```
    """
    half = len(series) // 2
    if half < 4:
        return 0.0
    halves = (series[:half], series[-half:])
    means = [statistics.fmean(values) for values in halves]
    difference = means[1] - means[0]
    times = [t - (half - 1) / 2 for t in range(half)]
    residues = [[value - mean for value in values] for values, mean in zip(halves, means, strict=True)]
    products = [t * e for values in residues for t, e in zip(times, values, strict=True)]
    slope = math.fsum(products) / (2 * math.fsum(t * t for t in times))
    residues = [[e - slope * t for t, e in zip(times, values, strict=True)] for values in residues]
    total = math.fsum(e * e for values in residues for e in values)
    if total <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    lagged = math.fsum(a * b for values in residues for a, b in pairwise(values)) / total
    rho = min(max(lagged + (1 + 4 * lagged) / half, 0.0), 0.9)
    error = math.sqrt(total / (2 * half - 3) * 2 / half * (1 + rho) / (1 - rho))
    return difference / error


def change(series: Sequence[float]) -> float:
    """Mean of the second half minus mean of the first, in the series' units."""
    half = len(series) // 2
    return statistics.fmean(series[-half:]) - statistics.fmean(series[:half]) if half else 0.0


def distance_from_usual(value: float, usual: Sequence[float]) -> float:
    """Robust z-score: how far a value lies above the median, in standard deviations estimated from the MAD.

    Args:
        value (`float`): The value in question.
        usual (`Sequence[float]`): Earlier values, at least one.

    Returns:
        `float`: Deviations above (negative: below) the median. The spread counts as at least a tenth of the median's
        size, so that a series that hardly varies does not turn every wobble into an event.

    Example:

    ```python
    >>> round(distance_from_usual(11.0, [1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    5.4

    ```
    """
    median = statistics.median(usual)
    spread = MAD_TO_STD * statistics.median(abs(value - median) for value in usual)
    floor = max(abs(median) / 10, 1e-12)
    return (value - median) / max(spread, floor)


def finite(value: object) -> float | None:
    """A number as it is, anything else as `None`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def mean_of(values: Sequence[float | None]) -> float:
    """Mean of a metric that may be missing; 0 where it always is."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else 0.0


def span_of(readings: Sequence[Sequence[Any]]) -> str:
    """The optimizer steps from the first reading to the last, in words."""
    steps = int(readings[-1][0] - readings[0][0]) + 1
    return "the last optimizer step" if steps == 1 else f"the last {steps} optimizer steps"


Found = dict[str, Any] | None  # by a condition that holds
Series = Sequence[float]
SomeKnown = Sequence[float | None]  # of a metric that may be missing


@dataclass(frozen=True)
class Cause:
    """One row of the table. The function that it is made from is the condition, judged over a full window: it returns
    what it found, for the cause's macro in `advice.jinja`, or `None`.

    Args:
        name (`str`): In `run_warnings` and in `warnings.jsonl`.
        judge (`Callable`): The function: of the window, the series of each metric, and by keyword the thresholds, with
            their defaults.
        metrics (`tuple[str, ...]`): Of a reading; a step without one of them is passed over. A name with `*` stands
            for all that fit: each has readings of its own, and the function finds them in `window.judged`.
        also (`tuple[str, ...]`): Metrics that may be missing from a reading (`None` then).
        steps (`int`, *optional*): Default of the threshold `steps`: optimizer steps that are judged together, those
            without the metrics (which generated nothing, for example) not counted; `None`: each reading by itself.
        times (`int`): Windows of `steps` that are looked at.
        fewest (`int`): Readings that suffice at the end of a run that was too short for a window.
        explains (`tuple[str, ...]`): Causes that would only repeat this one while it holds.
        from_logs (`bool`): Whether a reading is a log instead of an optimizer step: for metrics that exist there
            only. A window spans `steps` optimizer steps then, and holds at least three logs.
    """

    name: str
    judge: Callable[..., Found]
    metrics: tuple[str, ...]
    also: tuple[str, ...] = ()
    steps: int | None = None
    times: int = 1
    fewest: int = 5
    explains: tuple[str, ...] = ()
    from_logs: bool = False

    @property
    def thresholds(self) -> dict[str, float]:
        """The defaults."""
        steps = {} if self.steps is None else {"steps": self.steps}
        return {**(self.judge.__kwdefaults__ or {}), **steps}

    def advice(self, found: dict[str, Any]) -> str:
        """The warning: what was found, and what to do about it."""
        return " ".join(getattr(_advice(), self.judge.__name__)(**found).split())


@cache
def _advice() -> Any:
    filters = {"percent": "{:.0%}".format, "short": "{:.3g}".format}
    return template("trl_drgrpo.features.diagnostics", "advice.jinja", filters).module


CAUSES: list[Cause] = []  # those that explain others before these


def _cause(*metrics: str, name: str = "", **row: Any) -> Callable[[Any], Any]:
    """Puts a function into the table, under its own name unless another one is given."""

    def add(judge: Any) -> Any:
        CAUSES.append(Cause(name or judge.__name__, judge, metrics, **row))
        return judge

    return add


class Window:
    """The newest readings for a cause.

    Args:
        cause ([`Cause`]): The row of the table.
        thresholds (`Mapping[str, float]`): All of the cause's name.
        num_generations (`int`): G.

    Attributes:
        readings (`dict[str, list]`): The readings so far, `[step, *values]` each, by the metric that a `*` stands for,
            else under `""`.
        kept (`dict`): What the function keeps from one judgement to the next. Both are JSON-ready and travel with
            checkpoints.
        judged (`dict[str, list]`): Of the readings, those that are judged.
        steps (`tuple[int, ...]`): The step of each of them, where there is no `*`.
    """

    def __init__(self, cause: Cause, thresholds: Mapping[str, float], num_generations: int):
        self.cause, self.num_generations = cause, num_generations
        self.size = 1 if cause.steps is None else int(thresholds["steps"]) * cause.times
        self._thresholds = {name: thresholds[name] for name in cause.thresholds if name != "steps"}
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.readings: dict[str, list[Any]] = {}
        self.kept: dict[str, Any] = {}

    def take(self, step: int, metrics: Mapping[str, Any]) -> Found:
        """Take in the metrics of a step; returns what is found in a full window, if there is anything."""
        taken = self._reading(metrics)
        for name, values in taken.items():
            readings = self.readings.setdefault(name, [])
            readings.append([step, *values])
            while self._is_full(readings[1:]):
                del readings[0]
        return self._judge(self._is_full) if taken else None

    def conclude(self) -> Found:
        """The run is over: what is found in one that was too short for a window."""
        return self._judge(lambda readings: len(readings) >= self.cause.fewest and not self._is_full(readings))

    def _reading(self, metrics: Mapping[str, Any]) -> dict[str, list[float | None]]:
        wanted = self.cause.metrics
        if "*" in wanted[0]:
            names = [name for name in metrics if any(fnmatchcase(name, each) for each in wanted)]
            return {name: [finite(metrics[name]) or 0.0] for name in names}
        values = [finite(metrics.get(name)) for name in wanted]
        return {} if None in values else {"": [*values, *(finite(metrics.get(name)) for name in self.cause.also)]}

    def _is_full(self, readings: list[Any]) -> bool:
        if not self.cause.from_logs:
            return len(readings) >= self.size
        return len(readings) >= min(self.size, 3) and readings[-1][0] - readings[0][0] + 1 >= self.size

    def _judge(self, are_enough: Callable[[list[Any]], bool]) -> Found:
        self.judged = {name: each for name, each in self.readings.items() if are_enough(each)}
        if not self.judged:
            return None
        readings = next(iter(self.judged.values()))
        self.steps, *series = zip(*readings, strict=True)
        found = self.cause.judge(self, *series, **self._thresholds)
        return found and {"span": span_of(readings), **found}


def _mostly(cut_off: SomeKnown) -> float:
    """The share of completions that are cut off where that is most of them, else 0."""
    return share if (share := mean_of(cut_off)) >= 0.5 else 0.0


def only_value(rewards: SomeKnown, lowest: SomeKnown) -> float | None:
    """The reward of every completion of a window, where all have the same one: their means are the lowest reward."""
    known = [value for value in (*rewards, *lowest) if value is not None]
    if len(known) < len(rewards) + len(lowest):
        return None
    return known[-1] if max(known) - min(known) <= 1e-6 * max(abs(min(known)), 1.0) else None


@_cause(
    *("completions/clipped_ratio", "drgrpo/dead_groups_frac", "reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate",),
    steps=5,
    fewest=2,
    explains=("truncation", "all_incorrect", "dead_groups"),
)
def all_truncated(window: Window, *series: Any, share: float = 0.95) -> Found:
    """Nearly all completions are cut off, and every reward is the same: seen in the first steps."""
    cut_off, dead, rewards, lowest, right = series
    truncated = statistics.fmean(cut_off)
    only = only_value(rewards, lowest)
    if only is None or truncated < share or min(dead) < 1 or mean_of(right) > 0:
        return None
    return {"truncated": truncated, "reward": only}


@_cause(
    "drgrpo/pass_rate",
    also=("completions/clipped_ratio", "reward", "drgrpo/reward_min"),
    steps=20,
    fewest=10,
    explains=("dead_groups",),
)
def all_incorrect(window: Window, rates: Series, cut_off: SomeKnown, rewards: SomeKnown, lowest: SomeKnown) -> Found:
    """Every completion is incorrect."""
    if correct := [step for step, rate in zip(window.steps, rates, strict=True) if rate > 0]:
        window.kept["last_correct"] = correct[-1]
        return None
    last_correct = window.kept.get("last_correct")
    return {"cut_off": _mostly(cut_off), "last_correct": last_correct, "only": only_value(rewards, lowest)}


@_cause(
    *("reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate", "completions/clipped_ratio"),
    steps=30,
    times=2,
    fewest=16,
)
def reward_collapse(window: Window, *series: Any, share: float = 0.5, deviations: float = 5.0) -> Found:
    """The pass rate, or the reward, has fallen far below its best.

    The mean of the last `steps` readings is compared with the best mean of as many earlier ones. Rewards count from
    the lowest one that any completion has had, so that a shift of all rewards changes nothing.
    """
    rewards, lowest, rates, cut_off = series
    floor = window.kept["lowest"] = min(*lowest, window.kept.get("lowest", math.inf))
    half = len(rewards) // 2
    found = None  # of both, the pass rate
    for name, values, origin, form in (("mean reward", rewards, floor, "{:.3g}"), ("pass rate", rates, 0.0, "{:.0%}")):
        if None in values:
            continue
        before, recent = values[:half], values[-half:]
        best = window.kept.get(name)
        if best is None or len(best["values"]) != half or statistics.fmean(before) > statistics.fmean(best["values"]):
            best = window.kept[name] = {"values": list(before), "step": window.steps[half - 1]}
        former, now = statistics.fmean(best["values"]), statistics.fmean(recent)
        if now - origin < share * (former - origin) and moved([*best["values"], *recent]) <= -deviations:
            found = {"name": name, "now": form.format(now), "was": form.format(former), "step": best["step"]}
    span = span_of(window.judged[""][-half:])
    return found and {**found, "span": span, "cut_off": _mostly(cut_off[-half:])}


@_cause("completions/unique_frac", steps=10, explains=("dead_groups",))
def sampling_collapse(window: Window, unique: Series, *, distinct: float = 0.1) -> Found:
    """The completions of a group are the same text."""
    # One completion per group is distinct anyway; of the others none (0) to all (1).
    further = (statistics.fmean(unique) * window.num_generations - 1) / (window.num_generations - 1)
    return {"further": further} if further <= distinct else None


@_cause(
    "drgrpo/dead_groups_frac",
    also=("drgrpo/all_correct_frac", "drgrpo/all_incorrect_frac", "reward", "drgrpo/reward_min"),
    steps=20,
)
def dead_groups(window: Window, dead: Series, *series: Any, share: float = 0.8) -> Found:
    """Most groups are dead."""
    correct, incorrect, rewards, lowest = series
    found = {"dead": mean_of(dead), "correct": mean_of(correct), "incorrect": mean_of(incorrect)}
    return {**found, "only": only_value(rewards, lowest)} if found["dead"] >= share else None


@_cause("completions/length_incorrect_mean", "completions/length_correct_mean", steps=40, fewest=20)
def incorrect_grow(
    window: Window, incorrect: Series, correct: Series, *, deviations: float = 6.0, growth: float = 0.15
) -> Found:
    """Incorrect answers get longer while correct ones do not."""
    grew = change(incorrect)
    is_much = grew > growth * statistics.fmean(incorrect[: len(incorrect) // 2]) and moved(incorrect) >= deviations
    return {"grew": grew} if is_much and moved(correct) <= 2 else None


@_cause("completions/clipped_ratio", steps=40, fewest=8)
def truncation(
    window: Window, truncated: Series, *, share: float = 0.5, rise: float = 0.15, deviations: float = 6.0
) -> Found:
    """Many completions are cut off, or more and more."""
    mean = statistics.fmean(truncated)
    rises = change(truncated) >= rise and moved(truncated) >= deviations
    points = change(truncated) * 100 if rises else None
    return {"truncated": mean, "points": points} if mean >= share or rises else None


@_cause("kl", steps=50, fewest=25)
def kl(window: Window, divergences: Series, *, deviations: float = 10.0, consecutive: float = 3) -> Found:
    """The KL divergence from the reference leaves its usual range."""
    newest = int(consecutive)
    usual, last = divergences[:-newest], divergences[-newest:]
    if not usual or min(distance_from_usual(value, usual) for value in last) < deviations:
        return None
    return {"now": last[-1], "usual": statistics.median(usual), "consecutive": newest}


@_cause("rewards/*/failed_frac", "process_rewards/*/failed_frac", steps=10, fewest=3)
def reward_failing(window: Window, *_: Series, share: float = 0.1) -> Found:
    """A reward function, or a step reward function, fails often."""
    failing = [
        f"{name.split('/')[1]} ({mean:.0%} over {span_of(readings)})"
        for name, readings in window.judged.items()
        if (mean := mean_of([value for _, value in readings])) >= share
    ]
    return {"failing": failing} if failing else None


@_cause("process/steps_mean", "process/reward_mean", "reward", steps=40, fewest=20)
def process_hacked(
    window: Window, steps: Series, process: Series, outcome: Series, *, deviations: float = 4.0
) -> Found:
    """The process reward rises while the outcome reward falls."""
    if moved(process) <= deviations or moved(outcome) >= -deviations:
        return None
    return {"with_steps": moved(steps) > deviations}


@_cause("sampling/sampling_logp_difference/mean", steps=2, fewest=2, explains=("unequal_weights",))
def lost_sync(window: Window, gaps: Series, *, nats: float = 0.1) -> Found:
    """vLLM samples from other weights than those that are trained."""
    return {"gap": statistics.fmean(gaps)} if min(gaps) >= nats else None


@_cause(QUARTERS[0], QUARTERS[-1], steps=40, fewest=10)
def unequal_weights(
    window: Window, shortest: Series, longest: Series, *, share: float = 0.1, deviations: float = 6.0
) -> Found:
    """The correction for vLLM's probabilities weighs long rows otherwise than short ones."""
    short, long = statistics.fmean(shortest), statistics.fmean(longest)
    gaps = [a - b for a, b in zip(shortest, longest, strict=True)]
    error = statistics.pstdev(gaps) / math.sqrt(max(len(gaps) - 1, 1))
    is_far = abs(short - long) >= max(share * max(short, long), deviations * error)
    return {"longest": long, "shortest": short} if is_far else None


@_cause("drgrpo/moved_frac", name="nothing_moves", from_logs=True)
def rounded_away(window: Window, shares: Series, *, share: float = 0.5) -> Found:
    """Many trained weights have not changed in the first optimizer steps.

    The threshold lies in a gap that was measured (share of LoRA-A that changed in 20 steps, base of width 256, see
    `tests/benchmarks/adapter_dtype.py`): in bfloat16 0.4% at learning rate 1e-6, 4.4% at 1e-5, 50% at 1e-4; in float32
    more than 99.9% at each. Wider layers start smaller, so in bfloat16 somewhat more of them moves.
    """
    return {"moved": f"{shares[-1]:.2%}"} if shares[-1] < share else None


@_cause("grad_norm", "drgrpo/dead_groups_frac", "learning_rate", steps=10, fewest=2, from_logs=True)
def nothing_moves(window: Window, norms: Series, dead: Series, rates: Series) -> Found:
    """Groups are live, and the gradient, or the learning rate, is 0 all the same. The norm is that of the step that
    logs."""
    has_no_gradient = max(norms) <= 0 and max(dead) < 1
    return {"rate": max(rates)} if max(rates) <= 0 or has_no_gradient else None


DEFAULTS: dict[str, dict[str, float]] = {}
for _row in CAUSES:
    DEFAULTS.setdefault(_row.name, {}).update(_row.thresholds)
_RANGES = {
    **dict.fromkeys(("share", "rise", "distinct"), ranges.share()),
    **dict.fromkeys(("steps", "consecutive"), ranges.whole(1)),
}


def warning_thresholds(setting: object) -> dict[str, dict[str, float]]:
    """
    All thresholds of each watched cause, from `run_warnings` as configured; empty: silence. Refuses a cause or
    threshold that does not exist, and a value out of its range.

    Example:

    ```python
    >>> warning_thresholds({"kl": False, "dead_groups": {"share": 0.5}})["dead_groups"]
    {'share': 0.5, 'steps': 20}
    >>> warning_thresholds({"kl": {"deviation": 5}})
    Traceback (most recent call last):
    trl_drgrpo.common.errors.InputError: run_warnings: got 'deviation' under kl; expected one of ... Did you mean ...

    ```
    """
    if not isinstance(setting, bool | Mapping):
        remedy = "Write for example {'dead_groups': {'share': 0.9}, 'kl': False}."
        raise InputError("run_warnings", repr(setting), "True, False or a mapping from causes to thresholds", remedy)
    if setting is False:
        return {}
    chosen = {} if setting is True else setting
    for cause in chosen:
        _refuse_unknown(cause, DEFAULTS, "")
    thresholds = {}
    for cause, defaults in DEFAULTS.items():
        given = chosen.get(cause, True)
        if not isinstance(given, bool | Mapping):
            remedy = f"Write for example {{{cause!r}: {dict(defaults)}}}."
            raise InputError("run_warnings", f"{given!r} for {cause}", "a mapping of thresholds, or false", remedy)
        overrides = given if isinstance(given, Mapping) else {}
        for name, value in overrides.items():
            _refuse_unknown(name, defaults, f" under {cause}")
            allowed = _RANGES.get(name, ranges.positive())
            if not allowed.allows(value):
                raise InputError("run_warnings", f"{value!r} for {cause}: {name}", str(allowed), allowed.remedy)
        if given is not False:
            thresholds[cause] = {**defaults, **overrides}
    return thresholds


def _refuse_unknown(name: Any, known: Iterable[str], where: str) -> None:
    if name in known:
        return
    remedy = did_you_mean(name, known, "Remove it.", form="{!r}")
    raise InputError("run_warnings", f"{name!r}{where}", f"one of {', '.join(known)}", remedy)


class RunWarnings:
    """Watches the metrics of a run, optimizer step by optimizer step, and warns, once per cause.

    Args:
        thresholds (`dict[str, dict[str, float]]`): From [`warning_thresholds`].
        num_generations (`int`): G.
        tell (`Callable[[int, str, str], None]`, *optional*): Told step, cause and message of every warning, beside the
            log.
    """

    def __init__(
        self,
        thresholds: dict[str, dict[str, float]],
        num_generations: int,
        tell: Callable[[int, str, str], None] = lambda *what: None,
    ):
        self.thresholds, self.tell = thresholds, tell
        self.said: dict[str, int] = {}  # cause -> step
        self.step = 0  # the last one that was observed
        self._newest: dict[str, Any] = {}  # newest value of each metric
        self._windows = [
            Window(cause, thresholds[cause.name], num_generations) for cause in CAUSES if cause.name in thresholds
        ]

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of an optimizer step, logged or not. A step that is not above the last one starts
        another run."""
        if step <= self.step:
            for window in self._windows:
                window.forget()
        self.step = step
        self._newest.update(metrics)
        self._say((w, w.take(step, metrics)) for w in self._windows if not w.cause.from_logs)

    def observe_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take in what was logged at an optimizer step; evaluations (`eval_...`) say nothing here."""
        logs = {**logs, **self._newest}  # of the step, not a mean since the last log
        self._say((w, w.take(step, logs)) for w in self._windows if w.cause.from_logs)

    def finish(self) -> None:
        """The run is over: judge what was too short for a window."""
        self._say((w, w.conclude()) for w in self._windows)

    def _say(self, judged: Iterable[tuple[Window, Found]]) -> None:
        """Say what is not said yet, and is not explained by a cause that was said and still holds."""
        explained: set[str] = set()
        for window, found in judged:
            cause = window.cause
            if found is None or cause.name in explained:
                continue
            explained.update(cause.explains)
            if cause.name not in self.said:
                message = cause.advice(found)
                self.said[cause.name] = self.step
                logger.warning("%s (%s; run_warnings={%r: False} silences this)", message, cause.name, cause.name)
                self.tell(self.step, cause.name, message)

    def state_dict(self) -> dict[str, Any]:
        """Warnings and readings so far, JSON-ready."""
        seen = {w.cause.judge.__name__: {"readings": w.readings, "kept": w.kept} for w in self._windows}
        return {"said": self.said, "step": self.step, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; causes that are watched anew start from nothing."""
        self.said, self.step = state["said"], state["step"]
        for window in self._windows:
            if (seen := state["seen"].get(window.cause.judge.__name__)) is not None:
                window.readings, window.kept = seen["readings"], seen["kept"]
