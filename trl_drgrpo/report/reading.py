"""A folder becomes a `Run`: the run log of `DrGRPOTrainer`, or what plain TRL leaves behind.

The run log is `<output_dir>/_drgrpo/`: `run.json` and three files of JSON Lines, which grow while the run goes on.
What is missing, torn or damaged costs only itself, and a note in the report says so.
"""

import time as clock
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.completions import RecordedCompletions
from trl_drgrpo.report.records import (
    JsonLines,
    Logged,
    Run,
    Starts,
    Warned,
    listed,
    mapping,
    number,
    read_object,
    text,
    whole,
)

LOG_FOLDER, FORMAT = "_drgrpo", 1

_FILES = ("run.json", "metrics.jsonl", "completions.jsonl", "warnings.jsonl")


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Reads the runs of some output folders, in order, and gives them different names. Refuses a folder that is not
    there, is no run, or is of an unknown format."""
    if not folders:
        raise InputError("run_dirs", "no folder", "at least one", "Name the output_dir of a run.")
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = "/".join(Path(run.path).resolve().parts[-2:])
    for position, run in enumerate(runs):
        if any(run.name == other.name for other in runs[:position]):
            run.name = f"{run.name} ({position + 1})"
    return runs


def read_run(folder: str | Path) -> Run:
    """Reads one run from its `output_dir`, its `_drgrpo` folder, or one of its checkpoints. Errors are those of
    `read_runs`."""
    from trl_drgrpo.report.plain_trl import read_plain_run

    folder = Path(folder)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise InputError(str(folder), got, "the output folder of a run", "Give the run's output_dir.")
    log = folder if folder.name == LOG_FOLDER else folder / LOG_FOLDER
    if any((log / name).is_file() for name in _FILES):
        return read_run_log(log)
    if (run := read_plain_run(folder)) is not None:
        return run
    held = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    shown = ", ".join(held[:6]) + (f" and {len(held) - 6} more" if len(held) > 6 else "")
    raise InputError(
        str(folder),
        f"a folder with {shown}" if held else "an empty folder",
        f"a run: {LOG_FOLDER}/ (DrGRPOTrainer), or trainer_state.json in it or in a checkpoint, or completions/ (TRL)",
        "Give the run's output_dir; a plain TRL run needs a saved checkpoint or log_completions=True.",
    )


def read_run_log(log: Path) -> Run:
    """Reads the folder `<output_dir>/_drgrpo` that `DrGRPOTrainer` writes. Refuses a `run.json` of another format."""
    notes: list[str] = []
    about = _about(log / "run.json", notes)
    entries = [mapping(start) for start in listed(about.get("starts")) if isinstance(start, dict)]
    starts = Starts([(number(entry.get("time")) or 0.0, whole(entry.get("step")) or 0) for entry in entries])
    output_dir = log.resolve().parent
    run = Run(
        name=output_dir.name,
        path=str(log.parent),
        kind="trl-drgrpo",
        facts=_facts(about, entries, starts.began),
        formula=[text(line) for line in listed(about.get("formula")) if isinstance(line, str)],
        objective=dict(mapping(about.get("objective"))),
        settings=dict(mapping(about.get("settings"))),
        right=dict(mapping(about.get("right"))) or None,
        resumed_at=starts.resumed_at,
        notes=notes,
    )
    logged, superseded = _entries(log / "metrics.jsonl", starts, notes)
    for step, line in logged:
        metrics = {str(name): number(value) for name, value in mapping(line.get("logs")).items()}
        run.logged.append(Logged(step, text(line.get("mode", "train")), metrics, number(line.get("time"))))
    if superseded:
        notes.append(f"{superseded} logged entries were done again after a crash, or are an earlier run's: left out.")
    for step, line in _entries(log / "warnings.jsonl", starts, notes)[0]:
        run.warnings.append(Warned(step, text(line.get("cause", "")), text(line.get("message", ""))))
    completions = RecordedCompletions(log / "completions.jsonl", starts)
    _note_unreadable(completions.unreadable, "completions.jsonl", notes)
    run.completions = completions if completions.groups else None
    run.status = _status(about, run.logged)
    return run


def _about(path: Path, notes: list[str]) -> dict[str, Any]:
    """`run.json`, or nothing and a note."""
    try:
        about = read_object(path)
    except OSError:
        notes.append("run.json is missing: objective and settings are not known.")
        return {}
    if about is None:
        notes.append("run.json cannot be read (cut off?): objective and settings are not known.")
        return {}
    if about.get("format", FORMAT) != FORMAT:
        raise InputError(
            str(path),
            f"format {about['format']!r}",
            f"format {FORMAT}",
            "Another version of trl-drgrpo wrote this run: install that one, or a newer one, to read it.",
        )
    return about


def _facts(about: dict[str, Any], starts: list[Any], began: float | None) -> dict[str, str]:
    """Facts for the head of the report, in its order."""
    latest = starts[-1] if starts else {}
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
        "started": _moment(began),
        "versions": ", ".join(f"{name} {version}" for name, version in mapping(latest.get("versions")).items()),
    }
    return {name: text(value) for name, value in facts.items() if value not in (None, "", {}, [])}


def _weighted(functions: Mapping[str, Any]) -> str:
    names, weights = listed(functions.get("names")), listed(functions.get("weights"))
    weights = weights if len(weights) == len(names) else [1] * len(names)
    return " + ".join(
        text(name) if weight in (1, None) else f"{weight} {text(name)}"
        for name, weight in zip(names, weights, strict=True)
    )


def _correctness(rule: Any) -> str:
    if "reward" not in rule:
        return ""
    threshold = rule.get("threshold")
    return f"{text(rule['reward'])} {'is 1 (of 0 and 1)' if threshold is None else f'at least {text(threshold)}'}"


def _moment(time: float | None) -> str | None:
    try:
        return None if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return None


def _status(about: dict[str, Any], logged: list[Logged]) -> str:
    """The end of the run. Without one it may be running or killed: the page says when it last wrote."""
    ended = mapping(about.get("ended"))
    if ended:
        how = text(ended.get("how", "ended"))
        return f"{how} at step {ended['step']}" if whole(ended.get("step")) is not None else how
    times = [entry.time for entry in logged if entry.time is not None]
    if not times:
        return "no end recorded"
    age = max(0.0, clock.time() - times[-1])
    since = f"{age:.0f} s" if age < 120 else f"{age / 60:.0f} min" if age < 7200 else f"{age / 3600:.0f} h"
    return f"running or killed: no end recorded, last entry at step {logged[-1].step}, {since} before this report"


def _entries(path: Path, starts: Starts, notes: list[str]) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Step and line of what still counts, in the order of the steps; and how many lines no longer do."""
    lines = JsonLines(path)
    entries, superseded = [], 0
    for line in lines:
        step = whole(line.get("step"))
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
        notes.append(f"{name}: {count} unreadable line{'s' if count > 1 else ''} (cut off or damaged), left out.")
