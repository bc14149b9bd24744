"""The report's curves as one picture, for papers, model cards and places that show no pages."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.visible_text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00")  # Okabe and Ito's, yellow darkened
_ROLES = {"correct": "#0072b2", "incorrect": "#d55e00"}
_DASHES = ("-", "--", ":")
_SMOOTHING = 0.8


def has_matplotlib() -> bool:
    """Whether figures can be drawn here."""
    return find_spec("matplotlib") is not None


def draw_figure(contents: dict[str, Any], path: Path) -> Path:
    """
    Draws every panel of a report.

    Args:
        contents (`dict`): As `report_contents` gives them.
        path (`Path`): PNG file to write.

    Returns:
        `Path`: `path`.

    Raises:
        [`InputError`]: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise InputError(
            "format", "png without matplotlib", "matplotlib", 'Install it: pip install "trl-drgrpo[report]".'
        )
    from matplotlib.figure import Figure

    panels, runs = contents["panels"], contents["runs"]
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    figure = Figure(figsize=(4.4 * _COLUMNS, 2.7 * rows + 0.4), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, _COLUMNS, squeeze=False).flat, panels, strict=False):
        _draw_panel(axes, panel, runs)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(_plain(", ".join(run["name"] for run in runs)), fontsize=12)
    figure.savefig(path, dpi=110, format="png")
    return path


def _draw_panel(axes: "Axes", panel: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    axes.set_title(_plain(f"{panel['title']} ({panel['unit']})" if panel["unit"] else panel["title"]), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    for position, run in enumerate(runs):
        for number, line in enumerate(panel["lines"]):
            curve = next((run["curves"][name] for name in line["metrics"] if name in run["curves"]), None)
            if curve is None:
                continue
            several = len(runs) > 1
            color = _COLORS[(position if several else number) % len(_COLORS)]
            color = color if several else _ROLES.get(line["role"], color)
            label = ", ".join(part for part in (run["name"] if several else "", line["label"]) if part)
            values = [math.nan if value is None else value for value in curve[1]]
            axes.plot(curve[0], values, color=color, alpha=0.25, linewidth=0.8)
            dash = _DASHES[number % len(_DASHES)] if several else "-"
            axes.plot(curve[0], smoothed(curve[1]), dash, color=color, linewidth=1.6, label=_plain(label) or None)
        for warning in run["warnings"]:
            axes.axvline(warning["step"], color="#b3261e", linewidth=0.8, linestyle=(0, (4, 3)))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def smoothed(values: list[float | None]) -> list[float]:
    """
    Exponential mean as the page draws it: without bias towards the first value, gaps stay gaps.

    Args:
        values (`list[float or None]`): `None` = a gap.

    Returns:
        `list[float]`: NaN in the gaps.
    """
    total = weight = 0.0
    result = []
    for value in values:
        if value is None:
            result.append(math.nan)
            continue
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(total / weight)
    return result


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return visible(text).replace("$", r"\$")
