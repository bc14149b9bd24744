"""The completions of a run log: an index of the file first, the text of few of them later.

100,000 completions are easily a gigabyte. So the file is read once line by line without being parsed: the head of a
line says its step and group. Then as many lines as can be parsed in seconds, spread over the run, are looked at; and
what is chosen from them is loaded on its own.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_drgrpo.report.json_lines import JsonLines
from trl_drgrpo.report.records import Group, Row, Span, finish_group, flag, mapping, number, text, whole
from trl_drgrpo.report.starts import Starts

PARSED_BYTES = 120_000_000  # two to three seconds of parsing
NEWEST = 100  # groups that are looked at whatever their size

_HEAD = re.compile(rb'\s*\{"step":\s*(\d+),\s*"time":\s*(\d[\d.eE+-]*|null),\s*"mode":\s*"(\w+)",\s*"group":\s*(\d+)')


class RecordedCompletions:
    """The groups in a run log's `completions.jsonl`. Implements [`Completions`].

    Args:
        path (`Path`): The file.
        starts ([`Starts`]): Of the run: groups that a resumed run did again are left out.
        parsed_bytes (`int`, *optional*): How much of the file to parse when groups are looked at.
    """

    def __init__(self, path: Path, starts: Starts, parsed_bytes: int = PARSED_BYTES):
        self._lines = JsonLines(path)
        self._parsed_bytes = parsed_bytes
        found: dict[tuple[str, int, int], tuple[int, int]] = {}
        for offset, line in self._lines.raw():
            head = self._head(line)
            if head is None:
                continue
            step, time, mode, group = head
            if not starts.superseded(step, time):
                found.pop((mode, step, group), None)  # what was written last counts, in its place
                found[mode, step, group] = (offset, len(line))
        self._entries = list(found.values())
        self._damaged: set[int] = set()
        self._rows_seen = self._groups_seen = 0

    @property
    def groups(self) -> int:
        """Groups that are recorded."""
        return len(self._entries) - len(self._damaged)

    @property
    def rows(self) -> int:
        """Completions that are recorded; scaled up from the groups that were looked at unless that was all."""
        if not self._groups_seen:
            return 0
        return self._rows_seen if self.rows_are_exact else round(self._rows_seen / self._groups_seen * self.groups)

    @property
    def rows_are_exact(self) -> bool:
        """Whether every group was looked at."""
        return self._groups_seen == self.groups

    @property
    def unreadable(self) -> int:
        """Lines that were no group."""
        return self._lines.unreadable

    def looked_at(self) -> Iterator[tuple[int, Group]]:
        """Number and content of the newest groups, then of others spread evenly, as `parsed_bytes` allows."""
        total = sum(size for _, size in self._entries)
        stride = max(1, -(-total // self._parsed_bytes))
        self._rows_seen = self._groups_seen = 0
        last = len(self._entries) - 1
        for chosen in (*range(last, max(-1, last - NEWEST), -1), *range(last - NEWEST, -1, -stride)):
            group = self.load(chosen)
            if group is None:
                self._damaged.add(chosen)
                continue
            self._groups_seen += 1
            self._rows_seen += len(group.rows)
            yield chosen, group

    def load(self, number: int) -> Group | None:
        """The group of that number; `None` if its line is damaged."""
        offset, size = self._entries[number]
        with self._lines.path.open("rb") as file:
            file.seek(offset)
            value = self._lines.parse(file.read(size))
        return None if value is None else group_of(value)

    def _head(self, line: bytes) -> tuple[int, float | None, str, int] | None:
        """Step, time, mode and group of a line."""
        if match := _HEAD.match(line):
            if not line.rstrip().endswith(b"}"):  # torn by a crash, or just being written
                self._lines.unreadable += 1
                return None
            step, time, mode, group = match.groups()
            return int(step), None if time == b"null" else float(time), mode.decode(), int(group)
        value = self._lines.parse(line)
        if value is None:
            return None
        step = whole(value.get("step"))
        if step is None:
            self._lines.unreadable += 1
            return None
        return step, number(value.get("time")), text(value.get("mode", "train")), whole(value.get("group")) or 0


def group_of(value: dict[str, Any]) -> Group:
    """A group from a line of `completions.jsonl`, without what is missing or of another type."""
    rows = value.get("rows")
    rows = rows if isinstance(rows, list) else []
    return finish_group(
        Group(
            step=whole(value.get("step")) or 0,
            mode=text(value.get("mode", "train")),
            index=whole(value.get("group")) or 0,
            prompt=text(value.get("prompt", "")),
            rows=[_row(mapping(row)) for row in rows],
            baseline=number(value.get("baseline")),
            std=number(value.get("std")),
            columns={str(name): text(entry)[:500] for name, entry in mapping(value.get("columns")).items()},
            forks=_forks(value.get("forks"), len(rows)),
        )
    )


def _forks(value: Any, rows: int) -> list[int]:
    """Branches at each level, if complete trees of them are as many rows."""
    if not isinstance(value, list) or any((whole(branches) or 0) < 2 for branches in value):
        return []
    return value if rows and rows % math.prod(value) == 0 else []


def _row(value: Any) -> Row:
    spans = value.get("spans")
    return Row(
        spans=[_span(mapping(span)) for span in spans] if isinstance(spans, list) else [],
        rewards={str(name): number(reward) for name, reward in mapping(value.get("rewards")).items()},
        reward=number(value.get("reward")),
        advantage=number(value.get("advantage")),
        length=whole(value.get("length")),
        truncated=flag(value.get("truncated")),
        right=flag(value.get("right")),
    )


def _span(value: Any) -> Span:
    return Span(
        text=text(value.get("text", "")),
        advantage=number(value.get("advantage")),
        step=whole(value.get("step")),
        step_reward=number(value.get("step_reward")),
        masked=value.get("masked") is True,
        level=whole(value.get("level")),
    )
