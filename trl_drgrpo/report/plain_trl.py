"""Metrics of `DrGRPOTrainer` for a run of plain TRL, computed from its saved completions.

Only where every reward is 0 or 1: what counts as correct is never guessed from a continuous reward. The metrics have
the names, and the definitions, of `DrGRPOTrainer`'s.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.features.diagnostics.statistics import BUCKETS, bucket_index
from trl_drgrpo.report.completions import SavedCompletions
from trl_drgrpo.report.records import Completions, Group, Logged, Row, Run, mapping, number, whole


def derived_metrics(completions: Completions) -> tuple[dict[int, dict[str, float | None]], list[str]]:
    """Metrics per logged step of a run of plain TRL, and notes on their origin. Where a reward is neither 0 nor 1: no
    metrics, and the reason."""
    batches: dict[int, list[Group]] = defaultdict(list)
    several = False
    for _, group in completions.looked_at():
        several |= any(len(row.rewards) > 1 for row in group.rows)
        if any(row.reward not in (0, 1, None) for row in group.rows):
            return {}, ["Some rewards are neither 0 nor 1, so correct and incorrect completions are not told apart."]
        batches[group.step].append(group)
    notes = [
        "Correct = reward 1. Pass rates, dead groups, lengths and difficulty are computed from saved completions."
    ]
    if several:
        notes.append("The weights of its reward functions are not recorded: rewards are summed with weight 1.")
    lengths = [row.length for groups in batches.values() for group in groups for row in group.rows]
    if any(length is not None for length in lengths):
        notes.append("Lengths are tokens counted with the saved tokenizer; special tokens are not in the saved text.")
    return {step: batch_metrics(groups) for step, groups in sorted(batches.items())}, notes


def batch_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """Metrics of one batch whose rewards are 0 or 1, without those that have nothing to be computed from."""
    rates = []
    for group in groups:
        rewards = [row.reward for row in group.rows if row.reward is not None]
        if rewards:
            rates.append((statistics.fmean(rewards), group))
    if not rates:
        return {}
    rows = [row for _, group in rates for row in group.rows if row.reward is not None]
    metrics: dict[str, float | None] = {
        "drgrpo/pass_rate": statistics.fmean(row.reward or 0.0 for row in rows),
        "drgrpo/all_correct_frac": sum(rate == 1 for rate, _ in rates) / len(rates),
        "drgrpo/all_incorrect_frac": sum(rate == 0 for rate, _ in rates) / len(rates),
    }
    for name, value in (("correct", 1), ("incorrect", 0)):
        if lengths := [row.length for row in rows if row.reward == value and row.length is not None]:
            metrics[f"completions/length_{name}_mean"] = statistics.fmean(lengths)
    buckets = [bucket_of(rate) for rate, _ in rates]
    for bucket in BUCKETS:
        metrics[f"difficulty/groups_frac/{bucket}"] = buckets.count(bucket) / len(buckets)
    return {**metrics, **_gradient_weights(rates)}


def bucket_of(rate: float) -> str:
    """
    The difficulty bucket of a pass rate, 0 to 1.

    Example:

    ```python
    >>> [bucket_of(rate) for rate in (0.0, 0.25, 0.5, 0.875, 1.0)]
    ['0', '0-25', '25-50', '75-100', '100']

    ```
    """
    return BUCKETS[bucket_index(rate)]


def _gradient_weights(rates: Sequence[tuple[float, Group]]) -> dict[str, float | None]:
    """Shares of the gradient weight by bucket, with Dr. GRPO's weights and with GRPO's."""
    weights: dict[str, float | None] = {}
    for name, weigh in (
        ("gradient_weight_frac", _dr_grpo_gradient_weight),
        ("gradient_weight_frac_grpo", _grpo_gradient_weight),
    ):
        by_bucket: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        for rate, group in rates:
            by_bucket[bucket_of(rate)] += sum(weigh(row, rate) for row in group.rows)
        if total := sum(by_bucket.values()):
            weights |= {f"difficulty/{name}/{bucket}": weight / total for bucket, weight in by_bucket.items()}
    return weights


def _dr_grpo_gradient_weight(row: Row, mean: float) -> float:
    """`|r - mean|` for each of its tokens."""
    return 0.0 if row.reward is None or row.length is None else abs(row.reward - mean) * row.length


def _grpo_gradient_weight(row: Row, mean: float) -> float:
    """`|z|` for each of its tokens, divided by their number."""
    return 0.0 if row.zscore is None or row.length is None else abs(row.zscore) * (row.length > 0)


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
