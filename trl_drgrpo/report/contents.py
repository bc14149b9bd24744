"""The contents of a report as one dictionary: `--format json` writes it, the other formats draw it.

Curves, samples and differences are computed here and nowhere else, so that the formats cannot disagree. A report is
made to be passed on: its texts name no folder of the machine that the run was on.
"""

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from trl_drgrpo.common import __version__
from trl_drgrpo.evaluation.results import read_results
from trl_drgrpo.evaluation.table import notes, table, title
from trl_drgrpo.features.diagnostics.statistics import BUCKETS
from trl_drgrpo.report.curves import Curves, axes_of, curves_of, ends_of, headline, mean, rounded, tenth_of
from trl_drgrpo.report.groups import group_json, sample_groups
from trl_drgrpo.report.panels import BY_DIFFICULTY, Panel, difficulty_metric, other_metrics, panels_for
from trl_drgrpo.report.records import number
from trl_drgrpo.report.run_folders import LOG_FOLDER, Run

FORMAT = 3
# Bytes of all completions, of the page's five megabytes.
COMPLETION_BYTES = 3_200_000
# Points of all curves of all runs.
CURVE_POINTS = 40_000

# Fields of a run that a report takes over.
_SHOWN_AS_READ = ("name", "kind", "status", "facts", "formula", "objective", "right", "notes", "resumed_at")
# Columns of the heat map at most, each a mean over several steps of a long run.
_HEAT_COLUMNS = 100
_GRADIENT_WEIGHT_KINDS = ("gradient_weight_frac", "gradient_weight_frac_grpo")

# From `/`, `~/`, `C:\` or `file://` on, at least one folder, then the name that stays.
_FOLDERS = re.compile(
    r"(?<![\w.:/\\<~])(?:file://)?(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"`,;:()\[\]{}<>|]+)+[/\\](?=[\w.-]*\w)"
)
_A_PATH = re.compile(r"(?:file://)?(?:~|[A-Za-z]:)?[/\\]")


def without_folders(value: object) -> Any:
    r"""
    Cut absolute paths in the texts of a value, also inside lists and dictionaries, to their last part.

    Example:

    ```python
    >>> without_folders({"model": "/home/me/runs/a-1", "of": ["Qwen/Qwen3-0.6B", "cannot write /data/x.json: full"]})
    {'model': 'a-1', 'of': ['Qwen/Qwen3-0.6B', 'cannot write x.json: full']}
    >>> without_folders("https://host/a/b and/or 1 / 2")
    'https://host/a/b and/or 1 / 2'

    ```
    """
    if isinstance(value, str):
        # A text that is a path as a whole may hold spaces, at which a path inside of a text would end.
        if _A_PATH.match(value) and "\n" not in value and ": " not in value:
            return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {name: without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_folders(part) for part in value]
    return value


def shareable(run: Run) -> Run:
    """Return the run with facts, objective, settings, warnings and notes that name no folder of a machine.

    Prompts and completions stay as the model read and wrote them.
    """
    fields: dict[str, Any] = {}
    for name in ("facts", "formula", "objective", "settings", "right", "notes", "status"):
        fields[name] = without_folders(getattr(run, name))
    fields["warnings"] = []
    for warning in run.warnings:
        message = without_folders(warning.message)
        fields["warnings"].append(replace(warning, message=message))
    return replace(run, **fields)


def shown_evaluations(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `title`, `head`, `rows` (cells as text), `notes` and `date` of results of `trl-drgrpo eval`."""
    evaluations = []
    for content in results:
        # A file that somebody edited is left out; the others are shown.
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
            head, rows = table(content)
            evaluation = {
                "title": title(content),
                "head": head,
                "rows": rows,
                "notes": notes(content),
                "date": content["date"],
            }
            evaluations.append(evaluation)
    return evaluations


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
    runs = list(map(shareable, runs))
    trained = [curves_of(run.logged, "train") for run in runs]
    names = set(chain(*trained))
    panels = panels_for(names)
    points = None
    if thin:
        num_curves = sum(map(len, trained))
        # A chart shows no more than 1,000 points; fewer than 60 would hide the course of a run.
        points = max(60, min(1000, CURVE_POINTS // max(1, num_curves)))
    # Each run gets an equal part, however long it is.
    budget = COMPLETION_BYTES // len(runs)
    run_entries = []
    for run, curves in zip(runs, trained, strict=True):
        run_entries.append(_run(run, curves, points, budget, max_groups))
    return {
        "format": FORMAT,
        "made_by": f"trl-drgrpo {__version__}",
        "made_at": int(time.time()),
        "buckets": list(BUCKETS),
        "panels": list(map(asdict, panels)),
        "other_metrics": other_metrics(names, panels),
        "settings_table": settings_table(runs),
        "window": tenth_of(map(dict.values, trained)),
        "final_table": final_table(panels, trained),
        "runs": run_entries,
    }


def _run(run: Run, curves: Curves, points: int | None, budget: int, max_groups: int | None) -> dict[str, Any]:
    # Groups are counted after the sampling, which finds damaged ones.
    groups, text_limit = sample_groups(run.completions, budget, max_groups)
    groups_total = 0
    if run.completions:
        groups_total = run.completions.groups
    # Somebody may have edited an evaluation: the numbers of the log are shown without it.
    results = read_results(Path(run.path) / LOG_FOLDER / "evaluations")
    try:
        numbers = without_folders(headline(run, curves, results))
    except (KeyError, TypeError, ValueError, AttributeError):
        numbers = headline(run, curves)
    # By difficulty there is a chart of its own, made of curves that are not thinned.
    thinned = curves
    if points is not None:
        thinned = curves_of(run.logged, "train", points)
    drawn = {}
    for name, curve in thinned.items():
        if not name.startswith(BY_DIFFICULTY):
            drawn[name] = curve.as_json()
    evals = curves_of(run.logged, "eval", points)
    return {
        **{field: getattr(run, field) for field in _SHOWN_AS_READ},
        "last_step": max((entry.step for entry in run.logged), default=0),
        "headline": numbers,
        "curves": drawn,
        "axes": axes_of(run.logged, run.resumed_at),
        "mean_of": max((curve.mean_of for curve in thinned.values()), default=1),
        "eval_curves": {name: curve.as_json() for name, curve in evals.items()},
        "difficulty": difficulty(curves),
        "evaluations": without_folders(shown_evaluations(results)),
        "warnings": list(map(vars, run.warnings)),
        "groups_total": groups_total,
        "text_limit": text_limit,
        "groups": list(map(group_json, groups)),
    }


def difficulty(curves: Curves) -> dict[str, Any] | None:
    """
    Compute the heat map of difficulty over time, and the gradient weight by difficulty; `None` if nothing was logged.

    `steps`: last step of each column; `groups`: per bucket the shares of groups per column; `gradient_weight`: per
    weighting the share per bucket, mean over the run, absent if not logged; `keep_probability`: the curriculum's per
    bucket of estimated pass rates, mean over the run, `None` where no prompt was, empty without one. `curves` are not
    thinned.
    """

    def by_bucket(kind: str) -> Curves:
        curves_of_buckets = {}
        for bucket in BUCKETS:
            name = difficulty_metric(kind, bucket)
            if name in curves:
                curves_of_buckets[bucket] = curves[name]
        return curves_of_buckets

    def means(kind: str, missing: float | None) -> dict[str, float | None]:
        logged = {}
        for bucket, curve in by_bucket(kind).items():
            logged[bucket] = rounded(mean(curve.values), 4)
        if not logged:
            return {}
        return dict.fromkeys(BUCKETS, missing) | logged

    shares = by_bucket("groups_frac")
    if not shares:
        return None
    # The columns follow the bucket that was logged most often.
    steps = max((curve.steps for curve in shares.values()), key=len)
    size = math.ceil(len(steps) / _HEAT_COLUMNS)
    columns = [steps[start : start + size] for start in range(0, len(steps), size)]
    groups: dict[str, list[float | None]] = {bucket: [None] * len(columns) for bucket in BUCKETS}
    for bucket, curve in shares.items():
        share_at = dict(zip(curve.steps, curve.values, strict=True))
        for position, column in enumerate(columns):
            share = mean([share_at.get(step) for step in column])
            groups[bucket][position] = rounded(share, 3)
    gradient_weights = {}
    for kind in _GRADIENT_WEIGHT_KINDS:
        weights = means(kind, 0.0)
        if weights:
            gradient_weights[kind] = weights
    return {
        "steps": [column[-1] for column in columns],
        "groups": groups,
        "gradient_weight": gradient_weights,
        "keep_probability": means("keep_probability", None),
    }


def settings_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """List objective and settings, one row per field; `None` where a run does not have it.

    `differs`: whether runs that have the field have different values of it.
    """
    rows = []
    for part in ("facts", "objective", "settings"):
        fields_of_runs = [getattr(run, part) for run in runs]
        # Every name once, in the order of the runs.
        for name in dict.fromkeys(chain(*fields_of_runs)):
            values = [fields.get(name) for fields in fields_of_runs]
            # Values may be lists, which no set can hold.
            set_values = [value for value in values if value is not None]
            differs = any(value != set_values[0] for value in set_values)
            rows.append({"name": name, "part": part, "values": values, "differs": differs})
    return rows


def final_table(panels: Sequence[Panel], trained: Sequence[Curves]) -> list[dict[str, Any]]:
    """List the first and last level of every curve of the panels: means over as many steps in all runs (`tenth_of`).

    Also its `end`, the last logged value; and `change`, the last level minus that of the first run. One per run;
    `None` where a run did not log it. `trained`: curves per run, not thinned.
    """
    rows = []
    window = tenth_of(map(dict.values, trained))
    for panel in panels:
        for line in panel.lines:
            name = panel.title
            if line.label:
                name += f", {line.label}"
            firsts = []
            lasts = []
            ends = []
            for curves in trained:
                first = last = end = None
                # The first name under which the run has logged it counts.
                metrics = [metric for metric in line.metrics if metric in curves]
                if metrics:
                    curve = curves[metrics[0]]
                    first, last = map(number, ends_of(curve, window))
                    end = ends_of(curve, 1)[1]
                firsts.append(rounded(first, 4))
                lasts.append(last)
                ends.append(rounded(end, 4))
            # Changes come before rounding: a difference of two rounded numbers would have no digits left.
            changes: list[float | None] = [None] * len(lasts)
            for i, last in enumerate(lasts[1:], 1):
                if last is not None and lasts[0] is not None:
                    changes[i] = rounded(last - lasts[0], 3)
            rows.append(
                {
                    "name": name,
                    "unit": panel.unit,
                    "role": line.role,
                    "share": panel.share,
                    "first": firsts,
                    "last": [rounded(last, 4) for last in lasts],
                    "change": changes,
                    "end": ends,
                }
            )
    return rows
