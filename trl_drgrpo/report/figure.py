"""Curves as one picture: a report's, for papers, model cards and places that show no pages; or trainers' histories."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.drawing import COLORS, ROLES, draw_trend, new_figure, save_figure
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.page import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_COLUMNS = 3
_DASHES = ("-", "--", ":")
_SPAN, _FEWEST = 0.03, 30  # of a curve's points; how many they must be


def has_matplotlib() -> bool:
    """Whether figures can be drawn here."""
    return find_spec("matplotlib") is not None


def draw_figure(contents: dict[str, Any], path: Path) -> Path:
    """Draws every panel of a report (`report_contents`) into a PNG file. Refuses to without matplotlib."""
    if not has_matplotlib():
        raise InputError(
            "format", "png without matplotlib", "matplotlib", 'Install it: pip install "trl-drgrpo[report]".'
        )
    panels, runs = contents["panels"], contents["runs"]
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    figure, drawn = new_figure(rows, _COLUMNS, 4.4 * _COLUMNS, 2.7 * rows + 0.4)
    for axes, panel in zip(drawn, panels, strict=False):
        _draw_panel(axes, panel, runs)
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(_plain(", ".join(run["name"] for run in runs)), fontsize=12)
    return save_figure(figure, path)


def _draw_panel(axes: "Axes", panel: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    axes.set_title(_plain(f"{panel['title']} ({panel['unit']})" if panel["unit"] else panel["title"]), fontsize=10)
    axes.tick_params(labelsize=8)
    for position, run in enumerate(runs):
        for number, line in enumerate(panel["lines"]):
            curve = next((run["curves"][name] for name in line["metrics"] if name in run["curves"]), None)
            if curve is None:
                continue
            several = len(runs) > 1
            color = COLORS[(position if several else number) % len(COLORS)]
            color = color if several else ROLES.get(line["role"], color)
            label = ", ".join(part for part in (run["name"] if several else "", line["label"]) if part)
            values = [math.nan if value is None else value for value in curve[1]]
            dash = _DASHES[number % len(_DASHES)] if several else "-"
            draw_trend(axes, curve[0], values, smoothed(curve[1]), color, _plain(label) or None, dash)
        for warning in run["warnings"]:
            axes.axvline(warning["step"], color="#b3261e", linewidth=0.8, linestyle=(0, (4, 3)))


def smoothed(values: list[float | None]) -> list[float]:
    """Exponential mean as the page draws it: without bias towards the first value, with a span of 3% of the points,
    and none below 30 of them. Gaps (`None`) become NaN."""
    known = sum(value is not None for value in values)
    decay = 1 - 2 / (max(1.0, known * _SPAN) + 1) if known >= _FEWEST else 0.0
    total = weight = 0.0
    result = []
    for value in values:
        if value is None:
            result.append(math.nan)
            continue
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return visible(text).replace("$", r"\$")


def draw_histories(histories: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> Any:
    """
    One panel per metric, one line per run that logged it: faint each step, strong smoothed as in the report.

    Args:
        histories (`Mapping[str, Sequence[Mapping[str, Any]]]`): Name of a run -> `trainer.state.log_history`.
        metrics (`Sequence[str]`): Keys of the entries, such as `"reward"`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, panels = new_figure(1, len(metrics), 4.5 * len(metrics), 3.2)
    for axes, metric in zip(panels, metrics, strict=True):
        for (name, history), color in zip(histories.items(), COLORS, strict=False):
            points = [(entry["step"], entry[metric]) for entry in history if metric in entry]
            if points:
                steps, values = zip(*points, strict=True)
                draw_trend(axes, steps, values, smoothed(list(values)), color, name)
        axes.set(title=metric, xlabel="optimizer step")
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    return figure
