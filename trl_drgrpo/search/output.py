"""The file of a search or of an evaluation: written problem by problem, taken up where it ends.

Beside `found.jsonl` lies `found.search.json` with everything that the rows depend on. The same command, started again,
goes on behind the last whole group of problems (see `collecting`): lines behind it, a torn one among them, are cut
off, so that the file ends up the same, byte by byte. Another command does not touch it.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.search.dataset import Row


class SearchFile:
    """Rows of a search, or of an evaluation, on disk.

    Args:
        path (`str` or `Path`): JSON Lines file.
        facts (`Mapping[str, Any]`): What the rows depend on: settings, model, data; values that JSON knows.
        group (`int`): Problems of a group.
        kind (`str`, *optional*, defaults to `"search"`): Key of a row under which its `problem`, its number (`row`)
            and the number of the problem's rows (`rows`) are, and of the file beside it.

    Raises:
        `InputError`: The file is one of another command, or no file can be written there.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any], group: int, kind: str = "search"):
        self.path, self.group, self.kind = Path(path), group, kind
        if self.path.is_dir():
            raise InputError("output", f"{self.path}, a folder", "a JSON Lines file to write", "Name a file in it.")
        self.facts = json.loads(json.dumps(facts))
        self.facts_path = self.path.with_suffix(f".{kind}.json")
        self.rows: list[Row] = []
        self._check()

    @property
    def done(self) -> int:
        """Problems whose rows are in the file."""
        return self.rows[-1][self.kind]["problem"] + 1 if self.rows else 0

    @property
    def _expected(self) -> str:
        return f"a new file, or one of the same {self.kind}"

    def _check(self) -> None:
        if not self.path.exists():
            return
        try:
            before = json.loads(self.facts_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            got = f"{self.path}, which exists and was not written by this command"
            raise InputError("output", got, self._expected, "Name another file.") from None
        for name in {**before, **self.facts}:
            if before.get(name) != self.facts.get(name):
                old, new = shortened(before.get(name)), shortened(self.facts.get(name))
                got = f"{self.path}, written with {name} {old}, not {new}"
                remedy = "Run the same command to continue, name another file, or delete this one."
                raise InputError("output", got, self._expected, remedy)

    def open(self, total: int) -> None:
        """Read what is there, cut off what is no whole group, and note the facts.

        Args:
            total (`int`): Problems of the whole search.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        pending: list[Row] = []
        kept = position = 0
        for line in content.splitlines(keepends=True):
            position += len(line)
            row = _read(line)
            if row is None:
                break
            pending.append(row)
            counts = row[self.kind]
            is_last_row, number = counts["row"] + 1 == counts["rows"], counts["problem"] + 1
            if is_last_row and (number % self.group == 0 or number == total):
                self.rows += pending
                pending, kept = [], position
        if kept < len(content):
            os.truncate(self.path, kept)
        partial = self.facts_path.with_suffix(".partial")
        partial.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.facts_path)
        self.path.touch()

    def append(self, rows: Iterable[Row]) -> None:
        """Write the rows of a problem."""
        rows = list(rows)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(to_lines(rows))
        self.rows += rows


def to_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _read(line: bytes) -> Row | None:
    """A line of the file; None for one that was torn off."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
