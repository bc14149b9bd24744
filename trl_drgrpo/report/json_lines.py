"""JSON Lines that may be growing, torn by a crash, or damaged: lines that cannot be read are counted, not fatal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """The JSON objects of a file, one per line.

    Args:
        path (`Path`): The file; one that is missing has no lines.

    Attributes:
        unreadable (`int`): Lines that were no JSON object, so far.
    """

    def __init__(self, path: Path):
        self.path = path
        self.unreadable = 0

    def raw(self) -> Iterator[tuple[int, bytes]]:
        """Offset in the file and bytes of every line that is not empty."""
        if not self.path.is_file():
            return
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield offset, line
                offset += len(line)

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object of a line; `None`, and counted, if it is none."""
        try:
            value = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        self.unreadable += 1
        return None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, line in self.raw():
            if (value := self.parse(line)) is not None:
                yield value
