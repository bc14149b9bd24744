"""A run of plain TRL as a `Run`: the log history in `trainer_state.json`, and `completions/*.parquet` if it kept them.

TRL writes neither objective nor settings down where they can be read safely (`training_args.bin` is a pickle, which
executes what it holds), so the report has none for such a run. With `log_completions=True` there are completions; what
`DrGRPOTrainer` would have logged follows from them, under its names and by its definitions. Only where every reward is
0 or 1: what counts as correct is never guessed from a continuous reward.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.features.diagnostics.statistics import BUCKETS, bucket_index
from trl_drgrpo.report.completions import SavedCompletions
from trl_drgrpo.report.records import Group, Logged, Run, mapping, number, read_object, whole


def derived_metrics(completions: SavedCompletions) -> tuple[dict[int, dict[str, float | None]], list[str]]:
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
    """Shares of the gradient weight by bucket: Dr. GRPO's is `|r - mean|` for each token of a row, GRPO's is `|z|` for
    each, divided by their number."""
    rules: dict[str, Callable[[Any, float], float]] = {
        "gradient_weight_frac": lambda row, mean: abs(row.reward - mean) * row.length,
        "gradient_weight_frac_grpo": lambda row, mean: abs(row.zscore or 0.0) * (row.length > 0),
    }
    weights: dict[str, float | None] = {}
    for name, weigh in rules.items():
        by_bucket: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        for rate, group in rates:
            known = [row for row in group.rows if row.reward is not None and row.length is not None]
            by_bucket[bucket_of(rate)] += sum(weigh(row, rate) for row in known)
        if total := sum(by_bucket.values()):
            weights |= {f"difficulty/{name}/{bucket}": weight / total for bucket, weight in by_bucket.items()}
    return weights


STATE_FILE = "trainer_state.json"
_NOT_METRICS = ("step", "epoch")


def read_plain_run(folder: Path) -> Run | None:
    """Reads a run that has no run log, from its output folder or a checkpoint: no objective, no settings; `None` where
    there is none. The trainer state that got furthest counts, in the folder or in one of its checkpoints."""
    paths = [path for path in (folder / STATE_FILE, *folder.glob(f"checkpoint-*/{STATE_FILE}")) if path.is_file()]
    if not paths and not any((folder / "completions").glob("completions_*.parquet")):
        return None
    states = [(_state(path), path) for path in paths]
    state, path = max(states, key=lambda each: _step(each[0]), default=({}, folder))
    run = Run(name=folder.resolve().name, path=str(folder), kind="trl")
    run.notes.append("A run of plain TRL: it records no objective, settings, warnings or token advantages.")
    torn = [str(other.relative_to(folder)) for content, other in states if _step(content) < 0]
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
    if state:
        run.facts = {"max_steps": str(state.get("max_steps")), "read from": str(path.relative_to(folder))}
        step, last = whole(state.get("global_step")), whole(state.get("max_steps"))
        run.status = f"finished at step {step}" if step == last else f"saved at step {step} of {last}"
    else:
        run.status = "no trainer state saved yet"
    return run


def _state(path: Path) -> dict[str, Any]:
    try:
        return read_object(path) or {}
    except OSError:
        return {}


def _step(state: dict[str, Any]) -> int:
    """Of a trainer state; -1 where it cannot be read."""
    step = whole(state.get("global_step"))
    return -1 if step is None else step


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
