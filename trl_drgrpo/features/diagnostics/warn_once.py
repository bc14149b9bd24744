"""The warnings of a run: which causes are watched, with which thresholds, each said once.

`run_warnings` in the configuration is `True`, `False`, or a mapping from causes to thresholds (or to `False`). What
was said, and what the watches have seen, travels with checkpoints: a resumed run does not repeat itself.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import positive, share, whole
from trl_drgrpo.features.diagnostics.warning_causes import CAUSES, Window

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, dict[str, float]] = {}
for _row in CAUSES:
    DEFAULTS.setdefault(_row.name, {}).update(_row.thresholds)
_RANGES = {
    **dict.fromkeys(("share", "rise", "distinct"), share()),
    **dict.fromkeys(("steps", "consecutive"), whole(1)),
}


def warning_thresholds(setting: Any) -> dict[str, dict[str, float]]:
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
            allowed = _RANGES.get(name, positive())
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

    def _say(self, judged: Iterable[tuple[Window, str | None]]) -> None:
        """Say what is not said yet, and is not explained by a cause that was said and still holds."""
        explained: set[str] = set()
        for window, message in judged:
            cause = window.cause
            if message is None or cause.name in explained:
                continue
            explained.update(cause.explains)
            if cause.name in self.said:
                continue
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
