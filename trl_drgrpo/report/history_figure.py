"""Metrics of several runs from their trainers' log histories, as one figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl_drgrpo.common.drawing import COLORS, draw_trend, new_figure
from trl_drgrpo.report.figure import smoothed


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
