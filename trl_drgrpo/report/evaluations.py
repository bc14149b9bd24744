"""Evaluations of a run, as `trl-drgrpo eval` leaves them in its log folder: tables for the report."""

from pathlib import Path
from typing import Any

from trl_drgrpo.evaluation.results import FOLDER, read_results
from trl_drgrpo.evaluation.table import notes, table, title
from trl_drgrpo.report.reading import LOG_FOLDER


def evaluations_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a run, the oldest first.

    Args:
        run_dir (`str` or `Path`): Its output folder.

    Returns:
        `list[dict]`: `title`, `head`, `rows` (cells as text), `notes` and `date` of each; unreadable files
        are left out.
    """
    found = []
    for content in read_results(Path(run_dir) / LOG_FOLDER / FOLDER):
        try:
            head, rows = table(content)
            shown = {"title": title(content), "head": head, "rows": rows, "notes": notes(content)}
            found.append({**shown, "date": content["date"]})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue  # somebody's edit: the others are shown
    return found
