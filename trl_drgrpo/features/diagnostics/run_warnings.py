"""The warnings of a run: which causes are watched, with which thresholds, each said once.

`run_warnings` in the configuration is `True`, `False`, or a mapping from causes to thresholds (or to `False`). What
was said, and what the watches have seen, travels with checkpoints: a resumed run does not repeat itself.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import positive, share, whole
from trl_drgrpo.features.diagnostics.warning_causes import WATCHES, Metrics, Watch

logger = logging.getLogger(__name__)

ALL_DEAD = "all_dead"  # judged at the end of a run, from what was counted
DEFAULTS: dict[str, dict[str, float]] = {
    **{watch.cause: watch.defaults for watch in WATCHES},
    ALL_DEAD: {"steps": 5},
}
_RANGES = {
    **dict.fromkeys(("share", "rise", "distinct"), share()),
    **dict.fromkeys(("steps", "consecutive"), whole(1)),
}


def warning_thresholds(setting: Any) -> dict[str, dict[str, float]]:
    """
    All thresholds of each watched cause, from `run_warnings` as configured (a text is JSON); empty: silence. Refuses a
    cause or threshold that does not exist, and a value out of its range.

    Example:

    ```python
    >>> warning_thresholds({"kl": False, "dead_groups": {"share": 0.5}})["dead_groups"]
    {'share': 0.5, 'steps': 20}
    >>> warning_thresholds({"kl": {"deviation": 5}})
    Traceback (most recent call last):
    trl_drgrpo.common.errors.InputError: run_warnings: got 'deviation' under kl; expected one of ... Did you mean ...

    ```
    """
    setting = _parsed(setting)
    if setting is False:
        return {}
    chosen: dict[str, Any] = {} if setting is True else setting
    thresholds = {}
    for cause in chosen:
        _refuse_unknown(cause, DEFAULTS, "")
    for cause, defaults in DEFAULTS.items():
        given = chosen.get(cause, True)
        if given is False:
            continue
        if given is not True and not isinstance(given, Mapping):
            remedy = f"Write for example {{{cause!r}: {dict(defaults)}}}."
            raise InputError("run_warnings", f"{given!r} for {cause}", "a mapping of thresholds, or false", remedy)
        overrides = {} if given is True else dict(given)
        for name, value in overrides.items():
            _refuse_unknown(name, defaults, f" under {cause}")
            _check_value(cause, name, value)
        thresholds[cause] = {**defaults, **overrides}
    return thresholds


def _parsed(setting: Any) -> Any:
    if isinstance(setting, str):
        try:
            setting = json.loads(setting)
        except json.JSONDecodeError as error:
            remedy = f"It is not valid JSON: {error}."
            raise InputError("run_warnings", repr(setting), "true, false or a JSON mapping", remedy) from None
    if not isinstance(setting, bool | Mapping):
        remedy = "Write for example {'dead_groups': {'share': 0.9}, 'kl': False}."
        raise InputError("run_warnings", repr(setting), "True, False or a mapping from causes to thresholds", remedy)
    return setting


def _refuse_unknown(name: Any, known: Iterable[str], where: str) -> None:
    if name in known:
        return
    remedy = did_you_mean(name, known, "Remove it.", form="{!r}")
    raise InputError("run_warnings", f"{name!r}{where}", f"one of {', '.join(known)}", remedy)


def _check_value(cause: str, name: str, value: Any) -> None:
    allowed = _RANGES.get(name, positive())
    if not allowed.allows(value):
        raise InputError("run_warnings", f"{value!r} for {cause}: {name}", str(allowed), allowed.remedy)


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
        tell: Callable[[int, str, str], None] | None = None,
    ):
        self.thresholds = thresholds
        self.tell = tell
        self.said: dict[str, int] = {}  # cause -> step
        self.step = 0  # the last one that was observed
        self.signal_steps = self.dead_steps = 0  # those that say something about signal, those without any
        self._newest: dict[str, Any] = {}  # newest value of each metric
        self._watches = [
            watch(thresholds[watch.cause], num_generations) for watch in WATCHES if watch.cause in thresholds
        ]

    def observe(self, step: int, metrics: Metrics) -> None:
        """Take in the metrics of an optimizer step, logged or not. A step that is not above the last one starts
        another run."""
        if step <= self.step:
            self.signal_steps = self.dead_steps = 0
            for watch in self._watches:
                watch.forget()
        self.step = step
        self._newest.update(metrics)
        dead = metrics.get("drgrpo/zero_signal_frac")
        if dead is not None:
            self.signal_steps += 1
            self.dead_steps += dead >= 1
        self._judge((watch, watch.observe(step, metrics)) for watch in self._watches if not watch.from_logs)

    def observe_log(self, step: int, logs: Metrics) -> None:
        """Take in what was logged at an optimizer step; evaluations (`eval_...`) say nothing here."""
        logs = {**logs, **self._newest}  # of the step, not a mean since the last log
        self._judge((watch, watch.observe(step, logs)) for watch in self._watches if watch.from_logs)

    def finish(self) -> None:
        """The run is over: judge what was too short for a window, and a run in which no group had a signal."""
        explained: tuple[str, ...] = ()
        enough = ALL_DEAD in self.thresholds and self.signal_steps >= self.thresholds[ALL_DEAD]["steps"]
        if enough and self.dead_steps == self.signal_steps:
            explained = ("all_incorrect", "dead_groups")
            self._say(
                ALL_DEAD,
                "No group of the whole run had a signal: every group's rewards were equal, so nothing was learned "
                "from them. Check the reward on a few completions (`trl-drgrpo score`), the difficulty of the "
                "prompts, and that sampling is on.",
            )
        self._judge(((watch, watch.conclude()) for watch in self._watches), explained)

    def _judge(self, judged: Iterable[tuple[Watch, str | None]], explained: tuple[str, ...] = ()) -> None:
        """Say what is not said yet, and is not explained by a cause that was said and still holds."""
        for watch, message in judged:
            if message is None or watch.cause in explained:
                continue
            self._say(watch.cause, message)
            explained += watch.explains

    def _say(self, cause: str, message: str) -> None:
        if cause in self.said:
            return
        self.said[cause] = self.step
        logger.warning("%s (%s; run_warnings={%r: False} silences this)", message, cause, cause)
        if self.tell is not None:
            self.tell(self.step, cause, message)

    def state_dict(self) -> dict[str, Any]:
        """Warnings and readings so far, JSON-ready."""
        return {
            "said": self.said,
            "step": self.step,
            "signal_steps": self.signal_steps,
            "dead_steps": self.dead_steps,
            "seen": {watch.cause: watch.seen for watch in self._watches},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; causes that are watched anew start from nothing."""
        self.said = state["said"]
        self.step = state["step"]
        self.signal_steps = state["signal_steps"]
        self.dead_steps = state["dead_steps"]
        seen = state["seen"]
        for watch in self._watches:
            if seen.get(watch.cause, {}).keys() == watch.seen.keys():
                watch.seen = seen[watch.cause]
