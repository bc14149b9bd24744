"""A group as the page and `--format json` have it; with forks also as a tree.

Rows of a forked group repeat what they share. The tree has each stretch of tokens once; its text is that of a row.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from trl_drgrpo.report.records import Group, Row, Span


def group_json(group: Group) -> dict[str, Any]:
    """Plain JSON of a group: spans without what is at its default, since there are many; `tree` where it forks."""
    rows = [{**vars(row), "spans": [_short(span) for span in row.spans]} for row in group.rows]
    value = {**vars(group), "rows": rows}
    return {**value, "tree": fork_tree(group)} if group.forks else value


def fork_tree(group: Group) -> list[dict[str, Any]]:
    """
    The parents of a forked group, each with its branches.

    A node: `level` (forks in front of it), `rows` (first, and one behind the last; consecutive), `shown` (the row
    whose spans of that level are its text), `reward` (mean of its rows' rewards, `None` = unscorable), `advantages`
    (lowest and highest of its tokens, empty if none is trained on) and `branches`, in order. A node without branches
    but with several rows could not be cut: they are the same completion.
    """
    return _siblings(group.rows, group.forks, 0, range(len(group.rows)))


def _siblings(rows: Sequence[Row], forks: Sequence[int], level: int, within: range) -> list[dict[str, Any]]:
    """The nodes of a level that go on from one place; `forks`: branches at the levels that are left."""
    leaves = math.prod(forks)
    return [_node(rows, forks, level, range(first, first + leaves)) for first in within[::leaves]]


def _node(rows: Sequence[Row], forks: Sequence[int], level: int, of: range) -> dict[str, Any]:
    spans = {row: [span for span in rows[row].spans if (span.level or 0) == level] for row in of}
    shown = max(of, key=lambda row: (any(not span.masked for span in spans[row]), bool(spans[row])))  # else the first
    is_cut = any((span.level or 0) > level for row in of for span in rows[row].spans)
    rewards = [reward for row in of if (reward := rows[row].reward) is not None]
    advantages = [span.advantage for span in spans[shown] if span.advantage is not None and not span.masked]
    return {
        "level": level,
        "rows": [of.start, of.stop],
        "shown": shown,
        "reward": statistics.fmean(rewards) if rewards else None,
        "advantages": [min(advantages), max(advantages)] if advantages else [],
        "branches": _siblings(rows, forks[1:], level + 1, of) if is_cut and forks else [],
    }


def _short(span: Span) -> dict[str, Any]:
    short = {name: value for name, value in vars(span).items() if value is not None and value is not False}
    if span.advantage is not None:
        short["advantage"] = float(f"{span.advantage:.6g}")
    return short
