"""A run of plain TRL as a `Run`: the log history in `trainer_state.json`, and `completions/*.parquet` if it kept them.

TRL writes neither objective nor settings down where they can be read safely (`training_args.bin` is a pickle, which
executes what it holds), so the report has none for such a run. With `log_completions=True` there are completions; if
the reward is 0 or 1 throughout, what `DrGRPOTrainer` would have logged follows from them (`derived.py`).
"""

import json
from pathlib import Path
from typing import Any

from trl_drgrpo.report.derived import derived_metrics
from trl_drgrpo.report.records import Logged, Run, mapping, number, whole
from trl_drgrpo.report.saved_completions import SavedCompletions

STATE_FILE = "trainer_state.json"
_NOT_METRICS = ("step", "epoch")


def find_trainer_state(folder: Path) -> Path | None:
    """The trainer state that got furthest, in the folder or in one of its checkpoints. Passes over files that cannot
    be read, unless there is no other."""
    found = _states(folder)
    readable = [(step, path) for step, path in found if step is not None]
    if readable:
        return max(readable)[1]
    return found[0][1] if found else None


def _states(folder: Path) -> list[tuple[int | None, Path]]:
    """Per trainer state: its step (`None` = unreadable) and its path."""
    paths = [folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")]
    return [(whole(_state(path).get("global_step")), path) for path in paths if path.is_file()]


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def read_plain_run(folder: Path) -> Run:
    """Reads a run that has no run log, from its output folder or a checkpoint: no objective, no settings."""
    path = find_trainer_state(folder)
    state = _state(path) if path is not None else {}
    run = Run(name=folder.resolve().name, path=str(folder), kind="trl")
    run.notes.append("A run of plain TRL: it records no objective, settings, warnings or token advantages.")
    torn = [str(other.relative_to(folder)) for step, other in _states(folder) if step is None]
    if torn:
        run.notes.append(f"{', '.join(torn)} cannot be read (cut off?) and was passed over.")
    run.logged = [entry for line in state.get("log_history") or [] if (entry := _logged(line)) is not None]
    completions = SavedCompletions(folder)
    if completions.groups:
        run.completions = completions
        derived, notes = derived_metrics(completions)
        run.logged = _merged(run.logged, derived)
        completions.one_is_correct = bool(derived)
        run.notes += notes
    run.notes += completions.notes
    if path is not None and state:
        run.facts = {"max_steps": str(state.get("max_steps")), "read from": str(path.relative_to(folder))}
        step, last = whole(state.get("global_step")), whole(state.get("max_steps"))
        run.status = f"finished at step {step}" if step == last else f"saved at step {step} of {last}"
    else:
        run.status = "no trainer state saved yet"
    return run


def _logged(line: Any) -> Logged | None:
    """An entry of `log_history`."""
    step = whole(mapping(line).get("step"))
    if step is None:
        return None
    metrics = {str(name): number(value) for name, value in line.items() if name not in _NOT_METRICS}
    return Logged(step, "eval" if any(name.startswith("eval_") for name in metrics) else "train", metrics)


def _merged(logged: list[Logged], derived: dict[int, dict[str, float | None]]) -> list[Logged]:
    """The log with what was derived for a step put into that step's entry, or into one of its own."""
    at = {entry.step: entry for entry in reversed(logged) if entry.mode == "train"}
    for step, metrics in derived.items():
        if step in at:
            at[step].metrics = {**metrics, **at[step].metrics}
        else:
            logged.append(Logged(step, "train", metrics))
    return sorted(logged, key=lambda entry: entry.step)
