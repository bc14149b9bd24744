"""Curves as one picture: a report's, for papers, model cards and places that show no pages; or trainers' histories."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.drawing import COLORS, ROLES, draw_panels, draw_trend, new_figure, save_figure, smoothed
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.page import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_COLUMNS = 3
_DASHES = ("-", "--", ":")


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
    panels = {
        metric: {
            name: [(entry["step"], entry[metric]) for entry in history if metric in entry]
            for name, history in histories.items()
        }
        for metric in metrics
    }
    return draw_panels(panels, 4.5, 3.2)
