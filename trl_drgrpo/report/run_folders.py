"""A folder becomes a `Run`: the run log of `DrGRPOTrainer`, or the files of plain TRL.

The run log is `<output_dir>/_drgrpo/`: `run.json` and three files of JSON Lines, which grow while the run goes on.
A part that is missing, torn or damaged costs only itself, and a note in the report says so.

Plain TRL leaves the log history in `trainer_state.json`, and `completions/*.parquet` if it kept them. It writes
neither objective nor settings down where they can be read safely (`training_args.bin` is a pickle, which can execute
code), so the report has none for such a run. The metrics of `DrGRPOTrainer` are computed from the completions, under
its names and by its definitions. Only where every reward is 0 or 1: a continuous reward does not say which answers are
correct.
"""

import math
import time as clock
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_log import COMPLETIONS, FORMAT, METRICS, RUN, WARNINGS
from trl_drgrpo.features.diagnostics.run_log import FOLDER as LOG_FOLDER
from trl_drgrpo.features.diagnostics.statistics import BatchRows, batch_statistics
from trl_drgrpo.features.fast_path.speed import in_words
from trl_drgrpo.report import records
from trl_drgrpo.report.records import listed, mapping, number, read_object, text, whole

_FILES = (RUN, METRICS, COMPLETIONS, WARNINGS)
# By name; None was logged as NaN.
Metrics = dict[str, float | None]


@dataclass
class Warned:
    """A warning that the run gave: its step, the name of its cause, and the message with its remedy."""

    step: int
    cause: str
    message: str


@dataclass
class Logged:
    """One call of `Trainer.log`: the step, `"train"` or `"eval"`, and the metrics (`None` = logged as NaN)."""

    step: int
    mode: str
    metrics: Metrics
    time: float | None = None


@dataclass
class Run:
    """Everything that a report knows of one run.

    Args:
        name (`str`): Short and different for every run of a report.
        path (`str`): The folder, as it was given.
        kind (`str`): `"trl-drgrpo"` (it has a run log) or `"trl"`.
        status (`str`): How it ended, in words.
        facts (`dict[str, str]`): Model, dataset, device, versions, ...
        formula (`list[str]`): The objective in lines of plain text; empty where nobody wrote it down.
        objective, settings (`dict`): Of the run; empty where nobody wrote them down.
        right (`dict` or `None`): Definition of correct: `{"reward": name, "threshold": x}`.
        logged (`list[Logged]`): In the order of the steps.
        warnings (`list[Warned]`): In the order of the steps.
        resumed_at (`list[int]`): Steps at which it was resumed.
        completions (`Completions` or `None`): `None` if none were recorded.
        notes (`list[str]`): Messages about parts that could not be read or were left out: shown in the report.
    """

    name: str
    path: str
    kind: str
    status: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    formula: list[str] = field(default_factory=list)
    objective: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] | None = None
    logged: list[Logged] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    completions: records.Completions | None = None
    notes: list[str] = field(default_factory=list)


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read the runs of some output folders, in order, and give them different names.

    Raises:
        [`InputError`]: A folder is not there, is no run, or is of an unknown format.
    """
    if not folders:
        raise InputError("run_dirs", "no folder", "at least one", "Name the output_dir of a run.")
    runs = list(map(read_run, folders))
    # `a/output` and `b/output` are told apart by the folder above, one run that was named twice by its place.
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = "/".join(Path(run.path).resolve().parts[-2:])
    names = set()
    for position, run in enumerate(runs):
        if run.name in names:
            run.name += f" ({position + 1})"
        names.add(run.name)
    return runs


def read_run(folder: str | Path) -> Run:
    """Read one run from its `output_dir`, its `_drgrpo` folder, or one of its checkpoints. Errors: see `read_runs`."""
    folder = Path(folder)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise InputError(str(folder), got, "the output folder of a run", "Give the run's output_dir.")
    log = folder
    if folder.name != LOG_FOLDER:
        log /= LOG_FOLDER
    if any((log / name).is_file() for name in _FILES):
        return read_run_log(log)
    run = read_plain_run(folder)
    if run is not None:
        return run
    # Neither: show what is there, with a slash behind folders.
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    got = "an empty folder"
    if entries:
        got = f"a folder with {', '.join(entries[:6])}"
    if len(entries) > 6:
        got += f" and {len(entries) - 6} more"
    expected = f"a run: {LOG_FOLDER}/ (DrGRPOTrainer), or {STATE_FILE} in it or in a checkpoint, or completions/ (TRL)"
    remedy = "Give the run's output_dir; a plain TRL run needs a saved checkpoint or log_completions=True."
    raise InputError(str(folder), got, expected, remedy)


def read_run_log(log: Path) -> Run:
    """Read the folder `<output_dir>/_drgrpo` that `DrGRPOTrainer` writes. Refuses a `run.json` of another format."""
    notes = []
    about = _about(log / RUN, notes)
    # What a later start did again does not count.
    start_entries = [entry for entry in listed(about.get("starts")) if isinstance(entry, dict)]
    times_and_steps = []
    for entry in start_entries:
        time = number(entry.get("time")) or 0.0
        step = whole(entry.get("step")) or 0
        times_and_steps.append((time, step))
    starts = records.Starts(times_and_steps)
    run = Run(
        name=log.resolve().parent.name,
        path=str(log.parent),
        kind="trl-drgrpo",
        facts=_facts(about, start_entries, starts.began),
        formula=[line for line in listed(about.get("formula")) if isinstance(line, str)],
        objective=dict(mapping(about.get("objective"))),
        settings=dict(mapping(about.get("settings"))),
        right=dict(mapping(about.get("right"))) or None,
        resumed_at=starts.resumed_at,
        notes=notes,
    )
    logged, superseded = _entries(log / METRICS, starts, notes)
    for step, line in logged:
        logs = mapping(line.get("logs"))
        metrics = {str(name): number(value) for name, value in logs.items()}
        mode = text(line.get("mode", "train"))
        run.logged.append(Logged(step, mode, metrics, number(line.get("time"))))
    if superseded:
        notes.append(f"{superseded} logged entries were done again after a crash, or are an earlier run's: left out.")
    warnings, _ = _entries(log / WARNINGS, starts, notes)
    for step, line in warnings:
        cause = text(line.get("cause", ""))
        run.warnings.append(Warned(step, cause, text(line.get("message", ""))))
    completions = records.RecordedCompletions(log / COMPLETIONS, starts)
    _note_unreadable(completions.unreadable, COMPLETIONS, notes)
    if completions.groups:
        run.completions = completions
    run.status = _status(about, run.logged)
    return run


def _about(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read `run.json`. Without it, return nothing and add a note."""
    about = read_object(path)
    if about is None:
        problem = "is missing"
        if path.is_file():
            problem = "cannot be read (cut off?)"
        notes.append(f"run.json {problem}: objective and settings are not known.")
        return {}
    if about.get("format", FORMAT) != FORMAT:
        remedy = "Another version of trl-drgrpo wrote this run: install that one, or a newer one, to read it."
        raise InputError(str(path), f"format {about['format']!r}", f"format {FORMAT}", remedy)
    return about


def _facts(about: dict[str, Any], starts: list[dict[str, Any]], began: float | None) -> dict[str, str]:
    """Return the facts for the head of the report, in its order."""
    # Device and versions are those of the last start.
    latest: dict[str, Any] = starts[-1] if starts else {}
    speed = {text(part): text(reason) for part, reason in mapping(about.get("speed")).items()}
    versions = [f"{name} {version}" for name, version in mapping(latest.get("versions")).items()]
    # In the order of the report; what is unknown is left out.
    facts = {
        "model": about.get("model"),
        "adapter": about.get("adapter"),
        "dataset": about.get("dataset"),
        "rewards": _weighted(mapping(about.get("rewards"))),
        "step rewards": _weighted(mapping(about.get("step_rewards"))),
        "correct": _correctness(mapping(about.get("right"))),
        "max_steps": about.get("max_steps"),
        "device": latest.get("device"),
        "processes": latest.get("processes"),
        "fast path": in_words(speed),
        "started": _moment(began),
        "versions": ", ".join(versions),
    }
    known_facts = {}
    for name, value in facts.items():
        if value not in (None, "", {}, []):
            known_facts[name] = text(value)
    return known_facts


def _weighted(functions: Mapping[str, Any]) -> str:
    names = listed(functions.get("names"))
    weights = listed(functions.get("weights"))
    if len(weights) != len(names):
        weights = [1] * len(names)
    terms = []
    for name, weight in zip(names, weights, strict=True):
        terms.append(text(name) if weight in (1, None) else f"{weight} {text(name)}")
    return " + ".join(terms)


def _correctness(rule: Mapping[str, Any]) -> str:
    if "reward" not in rule:
        return ""
    reward = text(rule["reward"])
    threshold = rule.get("threshold")
    if threshold is None:
        return f"{reward} is 1 (of 0 and 1)"
    return f"{reward} at least {text(threshold)}"


def _moment(time: float | None) -> str | None:
    # A time beyond the calendar, which anybody may have written, is none.
    with suppress(OverflowError, OSError, ValueError):
        if time is not None:
            return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    return None


def _status(about: dict[str, Any], logged: list[Logged]) -> str:
    """Return the end of the run. Without one it may be running or killed: then tell when it last wrote."""
    ended = mapping(about.get("ended"))
    if ended:
        status = text(ended.get("how", "ended"))
        if whole(ended.get("step")) is not None:
            status += f" at step {ended['step']}"
        return status
    times = [entry.time for entry in logged if entry.time is not None]
    if not times:
        return "no end recorded"
    # The clock of another machine may go ahead of this one's.
    age = max(0.0, clock.time() - times[-1])
    since = f"{age / 3600:.0f} h"
    if age < 120:
        since = f"{age:.0f} s"
    elif age < 7200:
        since = f"{age / 60:.0f} min"
    return f"running or killed: no end recorded, last entry at step {logged[-1].step}, {since} before this report"


def _entries(path: Path, starts: records.Starts, notes: list[str]) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Return step and content of the lines that still count, in the order of the steps, and the number of others."""
    lines = records.JsonLines(path)
    entries = []
    superseded = 0
    for line in lines:
        step = whole(line.get("step"))
        # An object without a step is no entry.
        if step is None:
            lines.unreadable += 1
        elif starts.superseded(step, number(line.get("time"))):
            superseded += 1
        else:
            entries.append((step, line))
    _note_unreadable(lines.unreadable, path.name, notes)
    return sorted(entries, key=lambda entry: entry[0]), superseded


def _note_unreadable(count: int, name: str, notes: list[str]) -> None:
    if count:
        lines = "lines" if count > 1 else "line"
        notes.append(f"{name}: {count} unreadable {lines} (cut off or damaged), left out.")


STATE_FILE = "trainer_state.json"
_NOT_METRICS = ("step", "epoch")


def read_plain_run(folder: Path) -> Run | None:
    """Read a run without a run log, from its output folder or a checkpoint; `None` where there is no run.

    The trainer state that got furthest counts, in the folder or in one of its checkpoints. Such a run has no objective
    and no settings.
    """
    paths = [folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")]
    paths = list(filter(Path.is_file, paths))
    if not paths and not any((folder / "completions").glob("completions_*.parquet")):
        return None
    run = Run(name=folder.resolve().name, path=str(folder), kind="trl")
    run.notes.append("A run of plain TRL: it records no objective, settings, warnings or token advantages.")
    states = {}
    torn = []
    for path in paths:
        name = str(path.relative_to(folder))
        state = read_object(path) or {}
        if whole(state.get("global_step")) is None:
            torn.append(name)
        else:
            states[name] = state
    if torn:
        run.notes.append(f"{', '.join(torn)} cannot be read (cut off?) and was passed over.")
    # A resumed run has several checkpoints; the state with the most steps holds the whole history.
    name = max(states, key=lambda candidate: states[candidate]["global_step"], default="")
    state = states.get(name, {})
    run.logged = list(filter(None, map(_logged, state.get("log_history") or [])))
    # Metrics of ours, computed from completions. They exist only where rewards say which answers are correct.
    completions = records.SavedCompletions(folder)
    if completions.groups:
        run.completions = completions
        derived, notes = derived_metrics(completions)
        run.logged = _merged(run.logged, derived)
        completions.one_is_correct = bool(derived)
        run.notes += notes
    run.notes += completions.notes
    if state:
        run.facts = {"max_steps": str(state.get("max_steps")), "read from": name}
        step = whole(state.get("global_step"))
        last = whole(state.get("max_steps"))
        run.status = f"saved at step {step} of {last}"
        if step == last:
            run.status = f"finished at step {step}"
    else:
        run.status = "no trainer state saved yet"
    return run


def _logged(line: object) -> Logged | None:
    """Read an entry of `log_history`."""
    entry = mapping(line)
    step = whole(entry.get("step"))
    if step is None:
        return None
    metrics = {}
    mode = "train"
    for name, value in entry.items():
        if name in _NOT_METRICS:
            continue
        metrics[str(name)] = number(value)
        # Plain TRL does not write the mode down; metrics of an evaluation have a prefix.
        if str(name).startswith("eval_"):
            mode = "eval"
    return Logged(step, mode, metrics)


def _merged(logged: list[Logged], derived: dict[int, Metrics]) -> list[Logged]:
    """Put derived metrics into the log: into their step's first entry, or into a new one. Logged values win."""
    first_entries = {}
    for entry in logged:
        if entry.mode == "train":
            first_entries.setdefault(entry.step, entry)
    for step, metrics in derived.items():
        entry = first_entries.get(step)
        if entry is None:
            logged.append(Logged(step, "train", metrics))
        else:
            entry.metrics = metrics | entry.metrics
    return sorted(logged, key=lambda entry: entry.step)


def derived_metrics(completions: records.SavedCompletions) -> tuple[dict[int, Metrics], list[str]]:
    """Compute metrics per logged step of a run of plain TRL, with notes on their origin.

    Where a reward is neither 0 nor 1, return no metrics, and the reason as a note.
    """
    batches = defaultdict(list)
    several_rewards = False
    has_lengths = False
    for _, group in completions.looked_at():
        for row in group.rows:
            if row.reward not in (0, 1, None):
                note = "Some rewards are neither 0 nor 1, so correct and incorrect completions are not told apart."
                return {}, [note]
            several_rewards |= len(row.rewards) > 1
            has_lengths |= row.length is not None
        batches[group.step].append(group)
    notes = [
        "Correct = reward 1. Pass rates, dead groups, lengths and difficulty are computed from saved completions."
    ]
    if several_rewards:
        notes.append("The weights of its reward functions are not recorded: rewards are summed with weight 1.")
    if has_lengths:
        notes.append("Lengths are tokens counted with the saved tokenizer; special tokens are not in the saved text.")
    return {step: batch_metrics(groups) for step, groups in sorted(batches.items())}, notes


# Beginnings of the names of a batch's metrics that need no advantages.
_DERIVED = ("drgrpo/pass_rate", "drgrpo/all_", "difficulty/")
_DERIVED_FROM_LENGTHS = ("completions/length_correct", "completions/length_incorrect")


def batch_metrics(groups: Sequence[records.Group]) -> Metrics:
    """Return metrics of one batch whose rewards are 0 or 1 (`batch_statistics`), as far as they can be computed."""
    sizes = []
    rewards = []
    lengths = []
    gradient_weights = []
    correct = []
    for group in groups:
        # A group that nobody could judge says nothing.
        if all(row.reward is None for row in group.rows):
            continue
        sizes.append(len(group.rows))
        for row in group.rows:
            length = row.length or 0
            lengths.append(length)
            if row.reward is None:
                rewards.append(math.nan)
                gradient_weights.append(0.0)
                correct.append(None)
            else:
                rewards.append(row.reward)
                # Dr. GRPO would weigh each token of a row with |r - mean|.
                advantage = row.reward - (group.baseline or 0.0)
                gradient_weights.append(abs(advantage) * length)
                correct.append(row.reward == 1)
    if not sizes:
        return {}
    # Of truncation and equal texts nothing is known; metrics of them are left out below.
    batch = BatchRows(
        num_generations=max(sizes),
        sizes=sizes,
        rewards=rewards,
        lengths=lengths,
        trained=lengths,
        gradient_weights=gradient_weights,
        truncated=[False] * len(rewards),
        texts=range(len(rewards)),
        correct=correct,
    )
    prefixes = _DERIVED
    if any(lengths):
        prefixes += _DERIVED_FROM_LENGTHS
    return {name: value for name, value in batch_statistics(batch).items() if name.startswith(prefixes)}
