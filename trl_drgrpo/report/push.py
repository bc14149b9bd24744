"""The push of a run's updates on the decision to stop, from its recorded completions (`stop_push.py` defines it)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl_drgrpo.features.diagnostics.stop_push import Push, decision_scores, stop_push
from trl_drgrpo.report.records import Group, Row

_FEWEST = 8  # groups with a signal that an interval is worth


@dataclass(frozen=True)
class PushRow:
    """Input of a push from one row: its place, length, whether it ended by itself, correctness, advantage."""

    step: int
    length: int
    stopped: bool
    correct: bool
    advantage: float


def push_rows(group: Group) -> list[PushRow]:
    """The rows of a training group that all say whether they are correct and were cut off; none of another group."""
    if group.mode != "train" or not all(_is_known(row) for row in group.rows):
        return []
    return [
        PushRow(group.step, row.length or 0, not row.truncated, bool(row.right), row.advantage or 0.0)
        for row in group.rows
    ]


def push_note(groups: Sequence[Sequence[PushRow]]) -> str | None:
    """Push of correct and of incorrect completions, under the weights of the run and under a mean per row.

    Args:
        groups (`Sequence[Sequence[PushRow]]`): Of recorded groups (`push_rows`).

    Returns:
        `str` or `None`: One sentence with 95% intervals; `None` where too little is recorded.
    """
    rows = [(number, row) for number, group in enumerate(groups) for row in group]
    if not rows:
        return None
    number, step = np.array([number for number, _ in rows]), np.array([row.step for _, row in rows])
    lengths = np.array([row.length for _, row in rows])
    scores = decision_scores(lengths, np.array([row.stopped for _, row in rows]), number, step)
    correct = np.array([row.correct for _, row in rows])
    advantages = np.array([row.advantage for _, row in rows])
    pushes = {
        name: (stop_push(weights, scores, ~correct, number), stop_push(weights, scores, correct, number))
        for name, weights in (("this run's weights", advantages), ("a mean per row (GRPO)", advantages / lengths))
    }
    if min(push.groups for pair in pushes.values() for push in pair) < _FEWEST:
        return None
    said = [f"incorrect {_said(a)}, correct {_said(b)} under {name}" for name, (a, b) in pushes.items()]
    groups_seen = next(iter(pushes.values()))[0].groups
    return f"Push to go on instead of stopping, {groups_seen} recorded groups with a signal, ± 95%: {'; '.join(said)}."


def _is_known(row: Row) -> bool:
    """Whether a row has all that a push needs, and one advantage for all of its tokens: with credit per step or forks
    one number says too little."""
    is_judged = row.right is not None and row.truncated is not None and bool(row.length)
    return is_judged and row.advantage is not None and len({s.advantage for s in row.spans if not s.masked}) < 2


def _said(push: Push) -> str:
    return f"{push.value:+.3f} ± {1.96 * push.standard_error:.3f}"
