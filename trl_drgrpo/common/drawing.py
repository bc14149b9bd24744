"""One look for every picture: open axes on a light grid, colors that color-blind readers can tell apart.

matplotlib (`trl-drgrpo[report]`) is imported when a figure is made; not pyplot: no backend is chosen, no figure kept.
"""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.disk import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00")  # Okabe and Ito's, yellow darkened
ROLES = {"correct": COLORS[0], "incorrect": COLORS[1]}


def new_figure(rows: int, columns: int, width: float, height: float, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """Make a figure of `rows * columns` panels, row by row.

    `width` and `height` are those of the whole figure, in inches; `shared` may hold `sharex` and `sharey`. Raises
    `ImportError` without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels:
        axes.set_prop_cycle(color=COLORS)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, panels


def draw_trend(
    axes: "Axes",
    x: Sequence[float],
    values: "ArrayLike",
    trend: Sequence[float],
    color: str,
    label: str | None,
    dash: str = "-",
) -> None:
    """Draw values as faint lines, one per column of `values`, and their trend over them as a strong one."""
    axes.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(x, trend, dash, color=color, linewidth=1.8, label=label)


_SPAN = 0.03  # of a curve's points
_FEWEST = 30  # points that are smoothed


def smoothed(values: Sequence[float | None]) -> list[float]:
    """Return the exponential mean as the report's page draws it; gaps (`None`) become NaN.

    It has no bias towards the first value, and a span of 3% of the points; fewer than 30 are not smoothed.
    """
    points = sum(value is not None for value in values)
    decay = 0.0
    if points >= _FEWEST:
        decay = 1 - 2 / (max(1.0, points * _SPAN) + 1)
    # The mean of all values so far, each with a weight that decays: `total / weight`. Without the division, a curve
    # would begin near 0.
    total = 0.0
    weight = 0.0
    result = []
    for value in values:
        if value is None:
            result.append(math.nan)
            continue
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], width: float, height: float
) -> "Figure":
    """Draw one panel per title, each `width` by `height` inches, with a curve for each name in it.

    The values of the points `(step, value)` are faint, smoothed ones strong. A name has one color in all panels that
    name the same ones. A curve without points is not drawn.
    """
    figure, drawn = new_figure(1, len(panels), width * len(panels), height)
    for axes, (title, lines) in zip(drawn, panels.items(), strict=True):
        # A color is used up by a name without points, too: others keep theirs from panel to panel.
        for (name, points), color in zip(lines.items(), cycle(COLORS), strict=False):
            if points:
                steps, values = zip(*points, strict=True)
                draw_trend(axes, steps, values, smoothed(values), color, name)
        axes.set(title=title, xlabel="optimizer step")
        _add_legend(axes)
    return figure


def draw_histories(histories: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> Any:
    """
    Draw one panel per metric, one line per run that logged it: faint each step, strong smoothed as in the report.

    Args:
        histories (`Mapping[str, Sequence[Mapping[str, Any]]]`): Name of a run -> `trainer.state.log_history`.
        metrics (`Sequence[str]`): Keys of the entries, such as `"reward"`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    panels = {}
    for metric in metrics:
        panels[metric] = {}
        for name, history in histories.items():
            # Not every entry has every metric: evaluations and the summary at the end are entries, too.
            panels[metric][name] = [(entry["step"], entry[metric]) for entry in history if metric in entry]
    return draw_panels(panels, 4.5, 3.2)


def _add_legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG, and its folder, with a legend in each panel whose lines have labels."""
    for axes in figure.axes:
        _add_legend(axes)
    # Into memory first, so that a file is written whole. Without the name of matplotlib's release, equal figures are
    # equal files.
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format="png", metadata={"Software": None})
    write_whole(path, picture.getvalue())
    return path
