"""Texts of a run without the folders of the machine it ran on: a report is made to be passed on."""

import re
from dataclasses import replace
from typing import Any

from trl_drgrpo.report.records import Run

# From `/`, `~/`, `C:\` or `file://` on, at least one folder, then the name that stays.
_FOLDERS = re.compile(
    r"(?<![\w.:/\\<~])(?:file://)?(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"`,;:()\[\]{}<>|]+)+[/\\](?=[\w.-]*\w)"
)
_A_PATH = re.compile(r"(?:file://)?(?:~|[A-Za-z]:)?[/\\]")


def without_folders(value: Any) -> Any:
    r"""
    A value with the absolute paths in its texts, also inside lists and dictionaries, cut to their last part.

    Example:

    ```python
    >>> without_folders({"model": "/home/me/runs/a-1", "of": ["Qwen/Qwen3-0.6B", "cannot write /data/x.json: full"]})
    {'model': 'a-1', 'of': ['Qwen/Qwen3-0.6B', 'cannot write x.json: full']}
    >>> without_folders("https://host/a/b and/or 1 / 2")
    'https://host/a/b and/or 1 / 2'

    ```
    """
    if isinstance(value, str):
        if _A_PATH.match(value) and "\n" not in value and ": " not in value:  # a path as a whole may hold spaces
            return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {name: without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_folders(part) for part in value]
    return value


def shareable(run: Run) -> Run:
    """The run with facts, objective, settings, warnings and notes that name no folder of a machine. Prompts and
    completions are what the model read and wrote: they stay."""
    warnings = [replace(warning, message=without_folders(warning.message)) for warning in run.warnings]
    names = ("facts", "formula", "objective", "settings", "right", "notes", "status")
    return replace(run, warnings=warnings, **{name: without_folders(getattr(run, name)) for name in names})
