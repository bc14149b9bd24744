"""Everything a report shows, as one dictionary: what `--format json` writes and the other formats draw.

Curves, samples and differences are computed here and nowhere else, so that the formats cannot disagree. A report is
made to be passed on: its texts name no folder of the machine that the run was on.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trl_drgrpo.common import __version__
from trl_drgrpo.evaluation.results import read_results
from trl_drgrpo.evaluation.table import notes, table, title
from trl_drgrpo.features.diagnostics.statistics import BUCKETS
from trl_drgrpo.report.curves import Curve, axes_of, curves_of, ends_of, headline, mean, rounded, tenth_of
from trl_drgrpo.report.groups import group_json, sample_groups
from trl_drgrpo.report.panels import BY_DIFFICULTY, Panel, difficulty_metric, other_metrics, panels_for
from trl_drgrpo.report.reading import LOG_FOLDER, Run
from trl_drgrpo.report.records import number

FORMAT = 3
COMPLETION_BYTES = 3_200_000  # of the page's five megabytes
CURVE_POINTS = 40_000  # of all curves of all runs

# Fields of a run that a report takes over.
_SHOWN_AS_READ = ("name", "kind", "status", "facts", "formula", "objective", "right", "notes", "resumed_at")
_HEAT_COLUMNS = 100
_GRADIENT_WEIGHT_KINDS = ("gradient_weight_frac", "gradient_weight_frac_grpo")

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


def evaluations_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a run, the oldest first.

    Args:
        run_dir (`str` or `Path`): Its output folder.

    Returns:
        `list[dict]`: `title`, `head`, `rows` (cells as text), `notes` and `date` of each; unreadable files
        are left out.
    """
    evaluations = []
    for content in _results_of(run_dir):
        try:
            head, rows = table(content)
            shown = {"title": title(content), "head": head, "rows": rows, "notes": notes(content)}
            evaluations.append({**shown, "date": content["date"]})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue  # somebody's edit: the others are shown
    return evaluations


def _results_of(run_dir: str | Path) -> list[dict[str, Any]]:
    return read_results(Path(run_dir) / LOG_FOLDER / "evaluations")


def _headline(run: Run, curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """The numbers of the first screen; without the evaluations, where somebody's edit has broken one."""
    try:
        return without_folders(headline(run, curves, _results_of(run.path)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return headline(run, curves)


def report_contents(runs: Sequence[Run], max_groups: int | None = None, thin: bool = True) -> dict[str, Any]:
    """
    Collect the contents of a report over some runs.

    Args:
        runs (`Sequence[Run]`): At least one.
        max_groups (`int`, *optional*): At most so many groups of completions per run.
        thin (`bool`, *optional*): Whether curves are thinned to what a page holds.

    Returns:
        `dict`: Plain JSON that names no folder of the machine. `runs`: per run status, headline numbers, facts,
        curves, the axes they can be drawn over, difficulty, evaluations, warnings and sampled groups; `panels`,
        `other_metrics`: how the curves are drawn; `settings_table`, `final_table`: rows with one value per run,
        the latter over `window` steps.
    """
    runs = [shareable(run) for run in runs]
    trained = [curves_of(run.logged, "train") for run in runs]
    names = {name for curves in trained for name in curves}
    panels = panels_for(names)
    amount = sum(len(curves) for curves in trained)
    points = max(60, min(1000, CURVE_POINTS // max(1, amount))) if thin else None
    budget = COMPLETION_BYTES // len(runs)
    return {
        "format": FORMAT,
        "made_by": f"trl-drgrpo {__version__}",
        "made_at": int(time.time()),
        "buckets": list(BUCKETS),
        "panels": [asdict(panel) for panel in panels],
        "other_metrics": other_metrics(names, panels),
        "settings_table": settings_table(runs),
        "window": tenth_of(curves.values() for curves in trained),
        "final_table": final_table(panels, trained),
        "runs": [_run(run, curves, points, budget, max_groups) for run, curves in zip(runs, trained, strict=True)],
    }


def _run(
    run: Run, curves: dict[str, Curve], points: int | None, budget: int, max_groups: int | None
) -> dict[str, Any]:
    groups, text_limit = sample_groups(run.completions, budget, max_groups)
    thinned = curves if points is None else curves_of(run.logged, "train", points)
    evals = curves_of(run.logged, "eval", points)
    return {
        **{field: getattr(run, field) for field in _SHOWN_AS_READ},
        "last_step": max((entry.step for entry in run.logged), default=0),
        "headline": _headline(run, curves),
        "curves": {name: curve.as_json() for name, curve in thinned.items() if not name.startswith(BY_DIFFICULTY)},
        "axes": axes_of(run.logged, run.resumed_at),
        "mean_of": max((curve.mean_of for curve in thinned.values()), default=1),
        "eval_curves": {name: curve.as_json() for name, curve in evals.items()},
        "difficulty": difficulty(curves),
        "evaluations": without_folders(evaluations_of(run.path)),
        "warnings": [vars(warning) for warning in run.warnings],
        "groups_total": run.completions.groups if run.completions else 0,
        "text_limit": text_limit,
        "groups": [group_json(group) for group in groups],
    }


def difficulty(curves: dict[str, Curve]) -> dict[str, Any] | None:
    """
    The heat map of difficulty over time, and the gradient weight by difficulty; `None` if there is nothing.

    `steps`: last step of each column; `groups`: per bucket the shares of groups per column; `gradient_weight`: per
    weighting the share per bucket, mean over the run, absent if not logged; `keep_probability`: the curriculum's per
    bucket of estimated pass rates, mean over the run, `None` where no prompt was, empty without one. `curves` are not
    thinned.
    """

    def by_bucket(kind: str) -> dict[str, Curve | None]:
        return {bucket: curves.get(difficulty_metric(kind, bucket)) for bucket in BUCKETS}

    shares = by_bucket("groups_frac")
    longest = max((curve for curve in shares.values() if curve), key=lambda curve: len(curve.steps), default=None)
    if longest is None:
        return None
    size = -(-len(longest.steps) // _HEAT_COLUMNS)
    columns = [longest.steps[start : start + size] for start in range(0, len(longest.steps), size)]
    groups = {}
    for bucket, curve in shares.items():
        at = dict(zip(curve.steps, curve.values, strict=True)) if curve else {}
        groups[bucket] = [rounded(mean([at.get(step) for step in column]), 3) for column in columns]

    def means(kind: str, missing: float | None) -> dict[str, float | None]:
        curves_of_buckets = by_bucket(kind)
        means_of_buckets = {
            bucket: rounded(mean(curve.values), 4) if curve else missing for bucket, curve in curves_of_buckets.items()
        }
        return means_of_buckets if any(curves_of_buckets.values()) else {}

    return {
        "steps": [column[-1] for column in columns],
        "groups": groups,
        "gradient_weight": {kind: weights for kind in _GRADIENT_WEIGHT_KINDS if (weights := means(kind, 0.0))},
        "keep_probability": means("keep_probability", None),
    }


def settings_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Objective and settings, one row per field; `None` where a run does not have it. `differs`: whether runs that
    have the field have different values of it."""
    rows = []
    for part in ("facts", "objective", "settings"):
        names = dict.fromkeys(name for run in runs for name in getattr(run, part))
        for name in names:
            values = [getattr(run, part).get(name) for run in runs]
            set_values = [value for value in values if value is not None]
            differs = any(value != set_values[0] for value in set_values)
            rows.append({"name": name, "part": part, "values": values, "differs": differs})
    return rows


def final_table(panels: Sequence[Panel], trained: Sequence[dict[str, Curve]]) -> list[dict[str, Any]]:
    """First and last level of every curve of the panels, means over as many steps in all runs (`tenth_of`); its `end`,
    the last logged value; and `change`, the last level minus that of the first run. One per run, `None` where a run
    did not log it. `trained`: curves per run, not thinned."""
    rows = []
    window = tenth_of(curves.values() for curves in trained)
    for panel in panels:
        for line in panel.lines:
            final_curves = [
                next((curves[name] for name in line.metrics if name in curves), None) for curves in trained
            ]
            ends = [ends_of(curve, window) if curve else None for curve in final_curves]
            base, *other_ends = [end and number(end[1]) for end in ends]
            changes = [None if base is None or end_of_run is None else end_of_run - base for end_of_run in other_ends]
            rows.append(
                {
                    "name": f"{panel.title}, {line.label}" if line.label else panel.title,
                    "unit": panel.unit,
                    "role": line.role,
                    "share": panel.share,
                    "first": [rounded(number(end[0]), 4) if end else None for end in ends],
                    "last": [rounded(number(end[1]), 4) if end else None for end in ends],
                    "change": [None, *(rounded(change, 3) for change in changes)],
                    "end": [rounded(ends_of(curve, 1)[1], 4) if curve else None for curve in final_curves],
                }
            )
    return rows
