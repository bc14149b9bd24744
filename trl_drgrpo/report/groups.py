"""Selection of the completions that a report shows, and their form in the page.

A report must stay small. Three queues are served in turn until the space is used up: the newest groups (what does it
do now), groups spread evenly over the run (how did it get there: at any length the prefix of this queue is evenly
spread), and extremes (the longest completion, the largest advantages, rewards that failed). Groups are taken whole:
their statistics need every row. Texts that are longer than a limit lose their middle; the limit is the largest at
which enough groups fit.

Rows of a forked group repeat the tokens that they share: `fork_tree` has each stretch of them once.
`group_widget_html` shows a group under GRPO, DAPO and Dr. GRPO in a notebook or a page of one's own; nothing is
loaded, styles and script (`assets/group_widget.js`) stand in the snippet.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import chain, zip_longest
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.page import embedded
from trl_drgrpo.report.records import Completions, Group, Row, Span

# Characters of a completion, tried in this order.
TEXT_LIMITS = (40_000, 16_000, 6_000, 2_000, 600)
ENOUGH_GROUPS = 60
# Groups per kind of extreme.
_EXTREMES = 24


def sample_groups(
    completions: Completions | None, budget: int, max_groups: int | None = None
) -> tuple[list[Group], int]:
    """Choose at most `max_groups` groups that fit into `budget` bytes as JSON, in the order of the steps.

    Also return the number of characters above which a completion lost its middle.
    """
    if completions is None:
        return [], TEXT_LIMITS[0]
    order = _order(completions)[:max_groups]
    chosen = {}
    limit = 0
    for limit in TEXT_LIMITS:
        chosen = _fill(order, completions, budget, limit)
        if len(chosen) >= min(len(order), ENOUGH_GROUPS):
            break
    # By step, and by number within a step, as sorting keeps the order of equals.
    groups = [chosen[number] for number in sorted(chosen)]
    return sorted(groups, key=lambda group: group.step), limit


def _order(completions: Completions) -> list[int]:
    """Return the numbers of the groups that can be shown, in the order in which they are tried."""
    # The newest first.
    extremes = {number: _extremes(group) for number, group in completions.looked_at()}
    numbers = list(extremes)
    tops = []
    for kind in range(4):
        # Of equal ones the newer, which has the larger number.
        ranked = sorted(numbers, key=lambda number: (extremes[number][kind], number), reverse=True)
        tops.append(ranked[:_EXTREMES])
    # The first of every kind, then the second of every kind, and so on.
    extreme_numbers = chain(*zip(*tops, strict=True))
    turns = zip_longest(numbers, spread(numbers), extreme_numbers)
    # A dictionary keeps the first place of a group that is in several queues; shorter queues are filled with `None`.
    order = dict.fromkeys(chain(*turns))
    order.pop(None, None)
    return list(order)


def spread(items: Sequence[int]) -> list[int]:
    """
    Order items such that every prefix is spread evenly over them.

    Example:

    ```python
    >>> spread(range(8))
    [0, 4, 2, 6, 1, 5, 3, 7]

    ```
    """
    # Positions in the order of their reversed bits: 0, 1/2, 1/4, 3/4, 1/8 and so on of the way.
    bits = max(1, (len(items) - 1).bit_length())

    def reversed_bits(position: int) -> str:
        return f"{position:0{bits}b}"[::-1]

    return [items[position] for position in sorted(range(len(items)), key=reversed_bits)]


def _fill(order: Sequence[int], completions: Completions, budget: int, limit: int) -> dict[int, Group]:
    """Take groups in this order while they fit. Those that do not are passed over, until ten in a row do not fit."""
    chosen = {}
    failed = 0
    for number in order:
        group = completions.load(number)
        if group is None:
            continue
        group = shortened(group, limit)
        # As it will stand in the page.
        size = len(embedded(group_json(group)).encode())
        if size <= budget:
            budget -= size
            chosen[number] = group
            failed = 0
            continue
        failed += 1
        if failed == 10:
            break
    return chosen


def shortened(group: Group, limit: int) -> Group:
    """Return the group with the middle of long texts left out.

    A prompt or completion keeps `limit` characters: three quarters from its start, the rest from its end.
    """
    prompt = _shortened_row(Row([Span(group.prompt)]), limit)
    rows = [_shortened_row(row, limit) for row in group.rows]
    return replace(group, prompt=prompt.text, prompt_cut=prompt.cut, rows=rows)


def _shortened_row(row: Row, limit: int) -> Row:
    length = len(row.text)
    if length <= limit:
        return row
    head = limit * 3 // 4
    spans = list(_between(row.spans, 0, head))
    spans.append(Span(" [...] ", None, masked=True, level=spans[-1].level))
    spans += _between(row.spans, length - (limit - head), length)
    return replace(row, spans=spans, cut=length - limit)


def _between(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """Yield the parts of spans from one character to another."""
    at = 0
    for span in spans:
        first = max(start - at, 0)
        last = min(end - at, len(span.text))
        if first < last:
            yield replace(span, text=span.text[first:last])
        at += len(span.text)


def _extremes(group: Group) -> tuple[float, float, float, float]:
    """Return the longest completion of a group, its largest advantage, failed rewards, and minus the lowest reward."""
    length = 0
    advantage = 0.0
    failed = 0
    rewards = []
    for row in group.rows:
        length = max(length, row.length or len(row.text))
        for span in row.spans:
            advantage = max(advantage, abs(span.advantage or 0.0))
        failed += [row.reward, *row.rewards.values()].count(None)
        if row.reward is not None:
            rewards.append(row.reward)
    # The largest of each kind is the extreme one.
    return length, advantage, failed, -min(rewards, default=0.0)


def group_json(group: Group) -> dict[str, Any]:
    """Return plain JSON of a group. There are many spans, so they leave out defaults; `tree` where the group forks."""
    rows = []
    for row in group.rows:
        spans = list(map(_short, row.spans))
        rows.append(vars(row) | {"spans": spans})
    value = vars(group) | {"rows": rows}
    if group.forks:
        value["tree"] = fork_tree(group)
    return value


def fork_tree(group: Group) -> list[dict[str, Any]]:
    """
    Return the parents of a forked group, each with its branches.

    A node: `level` (forks in front of it), `rows` (first, and one behind the last; consecutive), `shown` (the row
    whose spans of that level are its text), `reward` (mean of its rows' rewards, `None` = unscorable), `advantages`
    (lowest and highest of its tokens, empty if none is trained on) and `branches`, in order. A node without branches
    but with several rows could not be cut: they are the same completion.
    """
    return _siblings(group.rows, group.forks, 0, range(len(group.rows)))


def _siblings(rows: Sequence[Row], forks: Sequence[int], level: int, within: range) -> list[dict[str, Any]]:
    """Return the nodes of a level that go on from one place; `forks`: branches at the levels that are left."""
    # With forks [2, 2] a node of the first level has 4 rows, and one of the second has 2.
    leaves = math.prod(forks)
    nodes = []
    for first in within[::leaves]:
        nodes.append(_node(rows, forks, level, range(first, first + leaves)))
    return nodes


def _node(rows: Sequence[Row], forks: Sequence[int], level: int, leaves: range) -> dict[str, Any]:
    """Return the node whose completions are the rows `leaves`."""
    spans = {}
    rewards = []
    is_cut = False
    for leaf in leaves:
        row = rows[leaf]
        spans[leaf] = []
        for span in row.spans:
            span_level = span.level or 0
            if span_level == level:
                spans[leaf].append(span)
            is_cut |= span_level > level
        if row.reward is not None:
            rewards.append(row.reward)

    def rank(leaf: int) -> tuple[bool, bool]:
        # A shared stretch is trained in one of its rows, whose spans carry the advantages; masked rows come next.
        return any(not span.masked for span in spans[leaf]), bool(spans[leaf])

    shown = max(leaves, key=rank)
    advantages = []
    for span in spans[shown]:
        if span.advantage is not None and not span.masked:
            advantages.append(span.advantage)
    node: dict[str, Any] = {
        "level": level,
        "rows": [leaves.start, leaves.stop],
        "shown": shown,
        "reward": None,
        "advantages": [],
        "branches": [],
    }
    if rewards:
        node["reward"] = statistics.fmean(rewards)
    if advantages:
        node["advantages"] = [min(advantages), max(advantages)]
    if is_cut and forks:
        node["branches"] = _siblings(rows, forks[1:], level + 1, leaves)
    return node


def _short(span: Span) -> dict[str, Any]:
    """Return the fields of a span that are not at their default."""
    short = {}
    for name, value in vars(span).items():
        if name == "advantage" and value is not None:
            value = float(f"{value:.6g}")
        # By identity: a step 0 equals False, and is not left out.
        if value is not None and value is not False:
            short[name] = value
    return short


# Only elements that were not mounted yet: a notebook may hold several snippets, and some twice.
_MOUNT = """document.querySelectorAll("[data-group-widget]:not(.group-widget)").forEach((element) =>
  mountGroupWidget(element, JSON.parse(element.dataset.groupWidget)));"""


def group_widget_html(rewards: Sequence[float] | None = None, lengths: Sequence[int] | None = None) -> str:
    """
    Return an HTML snippet of one group of answers: sliders for rewards and lengths, bars for each objective's effect.

    In a notebook: `IPython.display.HTML(group_widget_html())`.

    Args:
        rewards (`Sequence[float]`, *optional*): One per answer, at least two; 0 and 1 read as incorrect and correct.
            Defaults to eight answers, two of them correct.
        lengths (`Sequence[int]`, *optional*): Tokens per answer, at least 1.

    Returns:
        `str`: A `<div>`, a `<style>` and a `<script>`; a page may hold several.

    Raises:
        [`InputError`]: Rewards without lengths or lengths without rewards, or not equally many.
    """
    group = {}
    if rewards is not None or lengths is not None:
        rewards = list(rewards or [])
        lengths = list(lengths or [])
        if len(rewards) != len(lengths) or len(rewards) < 2 or min(lengths) < 1:
            got = f"{len(rewards)} rewards and {len(lengths)} lengths"
            expected = "as many of each, two or more, lengths of at least 1"
            raise InputError("rewards, lengths", got, expected, "Pass one group.")
        group = {"rewards": list(map(float, rewards)), "lengths": list(map(int, lengths))}
    folder = files("trl_drgrpo.report") / "assets"
    style = (folder / "group_widget.css").read_text("utf-8")
    script = (folder / "group_widget.js").read_text("utf-8")
    hint = "Sliders for a group of answers: they need JavaScript."
    return (
        f'<div data-group-widget="{escape(json.dumps(group))}">{hint}</div>\n<style>{style}</style>\n'
        f"<script>(() => {{\n{script}\n{_MOUNT}\n}})();</script>\n"
    )
