"""Progress of a command: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_drgrpo.cli import console


@contextmanager
def progress_over(total: int, done: int, doing: str, noun: str) -> Iterator[Any]:
    """Inside the block a call `show(status)` says that one more is done.

    Args:
        total (`int`): Problems.
        done (`int`): Those that were done before.
        doing (`str`): For the bar: `"searching"`.
        noun (`str`): For the lines: `"problems"`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stderr = Console(file=sys.stderr)
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=stderr, disable=not stderr.is_terminal)
    task = bar.add_task(doing, total=total, completed=done, status="")
    printed = time.monotonic()

    def show(status: str) -> None:
        nonlocal done, printed
        done += 1
        bar.update(task, advance=1, status=status)
        if not stderr.is_terminal and time.monotonic() - printed > 10:
            printed = time.monotonic()
            console.log(f"{done} of {total} {noun}, {status}")

    with bar:
        yield show
