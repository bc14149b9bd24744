"""One look for every picture: open axes on a light grid, colors that color-blind readers can tell apart.

matplotlib (`trl-drgrpo[report]`) is imported when a figure is made; not pyplot: no backend is chosen, no figure kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00")  # Okabe and Ito's, yellow darkened
ROLES = {"correct": COLORS[0], "incorrect": COLORS[1]}


def new_figure(rows: int, columns: int, width: float, height: float, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """A figure of `rows * columns` panels, row by row. `width` and `height` are those of the whole figure, in inches;
    `shared` may hold `sharex` and `sharey`. `ImportError` without matplotlib."""
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
    axes: "Axes", x: Sequence[Any], values: Any, trend: Sequence[float], color: str, label: str | None, dash: str = "-"
) -> None:
    """Values as faint lines, one per column of `values`, and their trend over them as a strong one."""
    axes.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(x, trend, dash, color=color, linewidth=1.8, label=label)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Writes a figure as PNG, the folder with it, with a legend in each panel whose lines have labels."""
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png", metadata={"Software": None})
    return path
