"""The curves of a run as one picture beside its card: reward and length over optimizer steps.

Drawn from what the run logged, only when matplotlib is installed (`trl-drgrpo[report]`) and at least two points exist.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import new_figure, save_figure

Panels = Sequence[tuple[str, Sequence[str]]]  # title, and the metrics in it

PANELS = (
    ("mean reward", ("reward", "eval_reward")),
    ("mean completion length (tokens)", ("completions/mean_length", "eval_completions/mean_length")),
)


def curves(history: list[dict[str, Any]], wanted: Panels = PANELS) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points `(step, value)` of each metric of each panel, without panels that have fewer than two points."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    logged = dict.fromkeys(name for entry in history for name in entry)
    for title, stems in wanted:
        names = [name for name in logged if name.partition(" (")[0] in stems]
        lines = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in names}
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        if lines:
            panels[title] = lines
    return panels


def draw_curves(history: list[dict[str, Any]], target: Path, wanted: Panels = PANELS) -> bool:
    """Write the picture; returns whether there is one: not without matplotlib, nor without two points."""
    panels = curves(history, wanted)
    if not panels:
        return False
    try:
        figure, drawn = new_figure(1, len(panels), 5.5 * len(panels), 3.5)
    except ImportError:
        return False
    for axes, (title, lines) in zip(drawn, panels.items(), strict=True):
        for name, points in lines.items():
            label = name if len(lines) > 1 else None
            axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 50 else None)
        axes.set(xlabel="optimizer step", title=title)
    save_figure(figure, target)
    return True
