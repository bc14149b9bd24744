"""States of the files in a folder: whether they have changed, without reading them."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path


def file_states(folder: Path, patterns: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return name below a folder, size and time of the files that match, sorted: equal while none of them changes."""
    states = []
    for path in chain(*map(folder.glob, patterns)):
        with suppress(OSError):  # deleted just now
            state = path.stat()
            states.append((path.relative_to(folder).as_posix(), state.st_size, state.st_mtime_ns))
    return sorted(states)
