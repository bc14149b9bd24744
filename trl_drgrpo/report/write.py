"""`write_report`: from folders of runs to one file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.reading import LOG_FOLDER, read_runs

ReportFormat = Literal["html", "md", "json", "png"]
FORMATS: tuple[str, ...] = get_args(ReportFormat)


def write_report(
    run_dirs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    format: ReportFormat = "html",
    max_groups: int | None = None,
) -> Path:
    """
    Writes what one or several runs logged as one file.

    Args:
        run_dirs (`str`, `Path` or a sequence of them):
            Output folders of runs of `DrGRPOTrainer` or of TRL's `GRPOTrainer`, also unfinished ones.
        output (`str` or `Path`, *optional*): The file. Defaults to `default_output(run_dirs, format)`.
        format (`str`, *optional*, defaults to `"html"`):
            `"html"` (one page that needs no network), `"md"` (tables, and the plots in a `.png` beside it), `"json"`
            (everything computed) or `"png"` (the plots). `md` and `png` need matplotlib (the extra `report`).
        max_groups (`int`, *optional*): Show at most so many groups of completions per run.

    Returns:
        `Path`: The file.

    Raises:
        [`InputError`]: A folder is no run, the format is unknown, or the file cannot be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, (str, Path)) else list(run_dirs)
    if format not in FORMATS:
        raise InputError("format", repr(format), f"one of {', '.join(FORMATS)}", "html is the default.")
    if max_groups is not None and max_groups < 0:
        raise InputError("max_groups", str(max_groups), "0 or larger", "Leave it out to show what fits.")
    path = default_output(folders, format) if output is None else Path(output)
    if path.is_dir():
        raise InputError("output", f"'{path}', a folder", "a file", f"Try {path / f'report.{format}'}.")
    contents = report_contents(read_runs(folders), max_groups, thin=format != "json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(contents, path, format)
    except OSError as error:
        raise InputError(
            "output", f"'{path}' ({error.strerror})", "a file that can be written", "Choose another place."
        ) from error
    return path


def default_output(run_dirs: Sequence[str | Path], format: str) -> Path:
    """Default path of a report: of one run in its `_drgrpo` folder, or in the run's folder if it has none; of several
    in the current folder. `format`: the ending."""
    if len(run_dirs) != 1:
        return Path(f"report.{format}")
    folder = Path(run_dirs[0])
    return (folder / LOG_FOLDER if (folder / LOG_FOLDER).is_dir() else folder) / f"report.{format}"


def _write(contents: dict[str, Any], path: Path, format: str) -> None:
    if format == "png":
        from trl_drgrpo.report.figure import draw_figure

        draw_figure(contents, path)
        return
    if format == "json":
        written = json.dumps(contents, ensure_ascii=True, allow_nan=False, indent=1) + "\n"
    elif format == "md":
        from trl_drgrpo.report.figure import draw_figure, has_matplotlib
        from trl_drgrpo.report.markdown import markdown_page

        plot = draw_figure(contents, path.with_suffix(".png")) if has_matplotlib() else None
        written = markdown_page(contents, plot)
    else:
        from trl_drgrpo.report.page import html_page

        written = html_page(contents)
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # a page that is open is replaced whole
    partial.write_bytes(written.encode("utf-8", errors="backslashreplace"))
    partial.replace(path)
