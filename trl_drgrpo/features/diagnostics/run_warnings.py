"""The warnings of a run: how a cause is registered, the window of readings that it judges, and the watch.

A cause is judged by a window of readings at every optimizer step, and at the end of a run. A reading is the numbers of
one optimizer step, however seldom the run logs: the mean over ten steps has another spread than a step, and a window
of forty logs would outlast most runs. Each cause warns once per run. The causes of this package are in
`warning_causes.py`.

`run_warnings` in the configuration is `True`, `False`, or a mapping from causes to thresholds (or to `False`). The
warnings so far and the readings of the windows travel with checkpoints: a resumed run does not repeat itself.
"""

import fnmatch
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trl_drgrpo.common import ranges
from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.registry import Entry, Registry

logger = logging.getLogger(__name__)

Condition = Callable[..., str | None]


@dataclass(frozen=True)
class Cause(Entry):
    """A cause of warnings, see [`register_warning`].

    Args:
        condition (`Callable`): The function.
        metrics (`tuple[str, ...]`): Metrics of a reading. A step without one of them is passed over. A name with `*`
            stands for all metrics that match: each has readings of its own, which the function finds in
            `window.judged`.
        also (`tuple[str, ...]`): Metrics that may be missing from a reading (`None` then).
        steps (`int`, *optional*): Default of the threshold `steps`: optimizer steps that are judged together, those
            without the metrics (which generated nothing, for example) not counted. By default each reading is judged
            by itself.
        times (`int`): Windows of `steps` that are looked at.
        fewest (`int`): Readings that suffice at the end of a run that was too short for a window.
        explains (`tuple[str, ...]`): Causes that are silent while this one holds, as they would repeat it.
        from_logs (`bool`): Whether a reading is a log instead of an optimizer step: for metrics that exist there only.
            Then a window spans `steps` optimizer steps and holds at least three logs.
        reported_as (`str`): Another cause under whose name this one is configured and reported.
    """

    condition: Condition
    metrics: tuple[str, ...]
    also: tuple[str, ...] = ()
    steps: int | None = None
    times: int = 1
    fewest: int = 5
    explains: tuple[str, ...] = ()
    from_logs: bool = False
    reported_as: str = ""

    @property
    def setting(self) -> str:
        """Its name in `run_warnings` and in `warnings.jsonl`."""
        return self.reported_as or self.name

    @property
    def thresholds(self) -> dict[str, float]:
        """The defaults of its thresholds."""
        defaults = dict(getattr(self.condition, "__kwdefaults__", None) or {})
        if self.steps is not None:
            defaults["steps"] = self.steps
        return defaults


CAUSES: Registry[Cause] = Registry("warning")


def register_warning(*metrics: str, **options: Any) -> Callable[[Condition], Condition]:
    """Register a function as a cause of warnings, under its name.

    The function judges a full window: `f(window, *series, **thresholds)` gets a [`Window`], the series of each metric
    and the thresholds by keyword, which have defaults. It returns the warning, advice included, or `None`. The first
    paragraph of its docstring is its help.

    Args:
        *metrics (`str`): The metrics that it reads.
        **options: Further arguments of [`Cause`], `steps` for example.

    Raises:
        [`InputError`]: A name that is taken, no metrics, no docstring, or a function that does not take the window and
            its series.
    """

    if not all(isinstance(metric, str) for metric in metrics):
        remedy = "Pass the names of the metrics that the function reads: @register_warning('reward')."
        raise CAUSES.error("", f"the metrics {shortened(metrics)}", "texts", remedy)

    def register(condition: Condition) -> Condition:
        name = condition.__name__
        if not metrics:
            raise CAUSES.error(name, "no metrics", "at least one", "Pass the names of those that it reads.")
        help_text = (inspect.getdoc(condition) or "").partition("\n\n")[0]
        try:
            cause = Cause(name, help_text, condition, metrics, **options)
        except TypeError as error:
            expected = f"one of {', '.join(Cause.__dataclass_fields__)}"
            raise CAUSES.error(name, f"an option that does not exist ({error})", expected, "Remove it.") from None
        # Tried now: in the middle of a run, the cause would go off in silence.
        series = metrics[:1] if "*" in metrics[0] else (*metrics, *cause.also)
        try:
            inspect.signature(condition).bind("window", *series)
        except TypeError as error:
            got = f"a function that does not take a window and {len(series)} series ({error})"
            raise CAUSES.error(name, got, "one parameter for each", "Add them, in this order.") from None
        CAUSES.add(cause)
        return condition

    return register


def span_of(steps: Sequence[float]) -> str:
    """Return the optimizer steps from the first to the last, in words."""
    count = int(steps[-1] - steps[0]) + 1
    return "the last optimizer step" if count == 1 else f"the last {count} optimizer steps"


def _finite(value: object) -> float | None:
    """Return a finite number as it is, anything else as `None`."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


class Window:
    """The newest readings for a cause.

    Args:
        cause ([`Cause`]): The cause.
        thresholds (`Mapping[str, float]`): All thresholds under its name.
        num_generations (`int`): G.

    Attributes:
        readings (`dict[str, list]`): The readings so far, `[step, *values]` each, by the metric that a `*` stands for,
            else under `""`.
        memory (`dict`): Values that the function keeps from one judgement to the next. Both are JSON-ready and travel
            with checkpoints.
        judged (`dict[str, list]`): The readings that are judged.
        steps (`tuple[int, ...]`): The step of each of them, if there is no `*`.
        span (`str`): These steps in words, for the text of a warning.
    """

    def __init__(self, cause: Cause, thresholds: Mapping[str, float], num_generations: int):
        self.cause = cause
        self.num_generations = num_generations
        self.size = 1 if cause.steps is None else int(thresholds["steps"]) * cause.times
        self._thresholds = {name: thresholds[name] for name in cause.thresholds if name != "steps"}
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.readings: dict[str, list[Any]] = {}
        self.memory: dict[str, Any] = {}

    def take(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Take in the metrics of a step. Return the warning, if the window is full and its cause holds."""
        # Each metric that a pattern matches has a window of its own.
        values_by_metric = self._reading(metrics)
        for name, values in values_by_metric.items():
            readings = self.readings.setdefault(name, [])
            readings.append([step, *values])
            while self._is_full(readings[1:]):  # the oldest is not needed any more
                del readings[0]
        if not values_by_metric:  # the same readings would be judged again
            return None
        return self._judge(self._is_full)

    def conclude(self) -> str | None:
        """Judge a window that is not full: the run is over. Return the warning, if its cause holds."""
        return self._judge(lambda readings: len(readings) >= self.cause.fewest and not self._is_full(readings))

    def _reading(self, metrics: Mapping[str, Any]) -> dict[str, list[float | None]]:
        patterns = self.cause.metrics
        if "*" in patterns[0]:
            names: set[str] = set()
            for pattern in patterns:
                names.update(fnmatch.filter(metrics, pattern))
            # In the order of the metrics: that of a set is another one in every process.
            return {name: [_finite(metrics[name]) or 0.0] for name in metrics if name in names}
        values = [_finite(metrics.get(name)) for name in (*patterns, *self.cause.also)]
        if None in values[: len(patterns)]:
            return {}
        return {"": values}

    def _is_full(self, readings: list[Any]) -> bool:
        if not self.cause.from_logs:
            return len(readings) >= self.size
        # Three at least: one log with an odd value is no trend, however many steps lie behind it.
        if len(readings) < min(self.size, 3):
            return False
        first_step = readings[0][0]
        last_step = readings[-1][0]
        return last_step - first_step + 1 >= self.size

    def _judge(self, are_enough: Callable[[list[Any]], bool]) -> str | None:
        self.judged = {}
        for name, readings in self.readings.items():
            if are_enough(readings):
                self.judged[name] = readings
        if not self.judged:
            return None
        # The columns of the readings: steps, then one series per metric.
        first_readings = next(iter(self.judged.values()))  # the only ones, unless a `*` stands for several metrics
        self.steps, *series = zip(*first_readings, strict=True)
        self.span = span_of(self.steps)
        return self.cause.condition(self, *series, **self._thresholds)


_RANGES = {
    **dict.fromkeys(("share", "rise", "distinct"), ranges.share()),
    **dict.fromkeys(("steps", "consecutive"), ranges.whole(1)),
}


def warning_thresholds(setting: object) -> dict[str, dict[str, float]]:
    """Return all thresholds of each watched cause, from `run_warnings` as configured; empty: silence.

    Raises:
        [`InputError`]: A cause or threshold that does not exist, or a value out of its range.

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
    thresholds: dict[str, dict[str, float]] = {}
    for cause in CAUSES.values():  # several causes may share a setting
        thresholds.setdefault(cause.setting, {}).update(cause.thresholds)
    if setting is True:
        return thresholds
    # Names before values: a misspelled cause is the first error.
    for name in setting:
        _refuse_unknown(name, thresholds, "")
    # In the order of the registry, whatever that of the settings: the first error is the same for the same mistakes.
    for name, defaults in list(thresholds.items()):
        overrides = setting.get(name, True)
        if overrides is False:
            del thresholds[name]
        elif isinstance(overrides, Mapping):
            for threshold, value in overrides.items():
                _refuse_unknown(threshold, defaults, f" under {name}")
                allowed = _RANGES.get(threshold, ranges.positive())
                if not allowed.allows(value):
                    got = f"{value!r} for {name}: {threshold}"
                    raise InputError("run_warnings", got, str(allowed), allowed.remedy)
            thresholds[name] = {**defaults, **overrides}
        elif overrides is not True:
            remedy = f"Write for example {{{name!r}: {defaults}}}."
            raise InputError("run_warnings", f"{overrides!r} for {name}", "a mapping of thresholds, or false", remedy)
    return thresholds


def _refuse_unknown(name: object, allowed: Mapping[str, object], where: str) -> None:
    if name in allowed:
        return
    remedy = did_you_mean(name, allowed, "Remove it.", form="{!r}")
    raise InputError("run_warnings", f"{name!r}{where}", f"one of {', '.join(allowed)}", remedy)


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
        tell: Callable[[int, str, str], None] = lambda *warning: None,
    ):
        self.thresholds = thresholds
        self.tell = tell
        self.warned: dict[str, int] = {}  # cause -> step
        self.step = 0  # the last one that was observed
        self._newest: dict[str, Any] = {}  # newest value of each metric
        self._windows: list[Window] = []
        for cause in CAUSES.values():
            if cause.setting in thresholds:
                self._windows.append(Window(cause, thresholds[cause.setting], num_generations))

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of an optimizer step, logged or not.

        A step that is not above the last one starts another run.
        """
        if step <= self.step:
            for window in self._windows:
                window.forget()
        self.step = step
        self._newest.update(metrics)
        self._warn(lambda window: window.take(step, metrics), from_logs=False)

    def observe_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take in the log of an optimizer step; evaluations (`eval_...`) have no effect here."""
        logs = {**logs, **self._newest}  # of the step, not a mean since the last log
        self._warn(lambda window: window.take(step, logs), from_logs=True)

    def finish(self) -> None:
        """Judge the windows that are not full: the run is over."""
        self._warn(Window.conclude)

    def _warn(self, judge: Callable[[Window], str | None], from_logs: bool | None = None) -> None:
        """Give the warnings that are new and that no other cause explains. A cause that fails is no longer watched.

        `from_logs`: of the causes that read logs, or of those that read steps, alone.
        """
        messages: dict[Cause, str] = {}
        for window in list(self._windows):
            if from_logs not in (None, window.cause.from_logs):
                continue
            try:
                message = judge(window)
            except Exception:  # a cause may be anybody's: it costs neither the run nor the other causes
                self._windows.remove(window)
                logger.exception("The warning %r failed, and is no longer watched.", window.cause.name)
                continue
            if message is not None:
                messages[window.cause] = " ".join(message.split())
        # All causes are judged first: one that explains another may be registered behind it.
        explained = set(chain.from_iterable(cause.explains for cause in messages))
        for cause, message in messages.items():
            name = cause.setting
            if name not in explained and name not in self.warned:
                self.warned[name] = self.step
                logger.warning("%s (%s; run_warnings={%r: False} silences this)", message, name, name)
                self.tell(self.step, name, message)

    def state_dict(self) -> dict[str, Any]:
        """Return the warnings and readings so far, JSON-ready."""
        windows = {}
        for window in self._windows:
            windows[window.cause.name] = {"readings": window.readings, "kept": window.memory}
        return {"said": self.warned, "step": self.step, "seen": windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; causes that were not watched then start from nothing."""
        self.warned = state["said"]
        self.step = state["step"]
        for window in self._windows:
            window_state = state["seen"].get(window.cause.name)
            # A cause that was not watched before starts from nothing.
            if window_state is not None:
                window.readings = window_state["readings"]
                window.memory = window_state["kept"]
