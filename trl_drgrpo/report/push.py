"""The push of a run's updates on the decision to stop, from its recorded completions (`stop_push.py` defines it)."""

import numpy as np

from trl_drgrpo.features.diagnostics.stop_push import Push, decision_scores, stop_push
from trl_drgrpo.report.records import Row, Run

_FEWEST = 8  # groups with a signal that an interval is worth


def push_note(run: Run) -> str | None:
    """What correct and incorrect completions push towards, under the weights of the run and under a mean per row.

    Args:
        run ([`Run`]): With recorded training groups whose rows say whether they are correct and were cut off.

    Returns:
        `str` or `None`: One sentence with 95% intervals; `None` where too little is recorded.
    """
    groups = [group for _, group in run.completions.looked_at() if group.mode == "train"] if run.completions else []
    whole = [group for group in groups if all(_is_known(row) for row in group.rows)]
    rows = [(number, group.step, row) for number, group in enumerate(whole) for row in group.rows]
    if not rows:
        return None
    number, step = np.array([each[0] for each in rows]), np.array([each[1] for each in rows])
    lengths = np.array([row.length for _, _, row in rows])
    scores = decision_scores(lengths, np.array([not row.truncated for _, _, row in rows]), number, step)
    correct = np.array([row.right for _, _, row in rows])
    advantages = np.array([row.advantage for _, _, row in rows], dtype=float)
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
    """What is needed, and one advantage for all of its tokens: with credit per step or forks one number says too
    little."""
    is_judged = row.right is not None and row.truncated is not None and bool(row.length)
    return is_judged and row.advantage is not None and len({s.advantage for s in row.spans if not s.masked}) < 2


def _said(push: Push) -> str:
    return f"{push.value:+.3f} ± {1.96 * push.standard_error:.3f}"
