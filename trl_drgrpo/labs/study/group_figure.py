"""Example groups drawn, and one with sliders."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_drgrpo.common.drawing import ROLES, new_figure
from trl_drgrpo.labs.study.group import ExampleGroup
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.report.group_widget import group_widget_html

COMPARED = ("grpo", "dapo", "dr_grpo")  # drawn by default
_RIGHT, _WRONG, _NEUTRAL = ROLES["correct"], ROLES["incorrect"], "#555555"
_MARKERS = ("o", "s", "D", "^", "v")


def draw_groups(groups: Sequence[ExampleGroup], objectives: Sequence[str] = COMPARED) -> Any:
    """One column per group: the lengths of its answers, the weight of a token of each, the pull of each.

    Args:
        groups (`Sequence[ExampleGroup]`): At least one.
        objectives (`Sequence[str]`, *optional*): Keys of `OBJECTIVES`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    count = len(groups)
    figure, panels = new_figure(3, count, 1.2 + 3.8 * count, 7.2, sharey="row", sharex="col")
    for column, group in enumerate(groups):
        lengths, weights, pulls = panels[column::count]
        _draw_lengths(lengths, group)
        _draw_values(weights, group, {name: group.token_weights(name) for name in objectives})
        _draw_values(pulls, group, {name: group.pulls(name) for name in objectives})
        pulls.set_xlabel("answer of the group")
    labels = ("length (tokens)", "weight of a token\n(even group = 1)", "pull of the answer\n(even group = 1)")
    for axes, label in zip(panels[::count], labels, strict=True):
        axes.set_ylabel(label)
    _legend(figure, objectives)
    return figure


def _draw_lengths(axes: Any, group: ExampleGroup) -> None:
    colors = [_RIGHT if right else _WRONG for right in group.is_right]
    axes.bar(np.arange(group.num_generations) + 1, group.lengths, color=colors, width=0.7)
    axes.set_title(f"{group.right} of {group.num_generations} correct", fontsize=11)


def _draw_values(axes: Any, group: ExampleGroup, values: dict[str, np.ndarray]) -> None:
    colors = [_RIGHT if right else _WRONG for right in group.is_right]
    offsets = np.linspace(-0.26, 0.26, len(values)) if len(values) > 1 else [0.0]
    for name, offset in zip(values, offsets, strict=True):
        at, filled = np.arange(group.num_generations) + 1 + offset, name == "dr_grpo"
        axes.vlines(at, 0, values[name], color=colors, linewidth=1.2, alpha=0.6)
        axes.scatter(
            at,
            values[name],
            marker=_marker(name),
            s=34,
            zorder=3,
            c=colors if filled else "white",
            edgecolors=colors,
        )
    axes.axhline(0, color=_NEUTRAL, linewidth=0.8)
    for level in (-1, 1):
        axes.axhline(level, color=_NEUTRAL, linewidth=0.8, linestyle=":")
    axes.set_xticks(np.arange(group.num_generations) + 1)


def _legend(figure: Any, objectives: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_RIGHT, label="correct answer"), Patch(color=_WRONG, label="incorrect answer")]
    for name in objectives:
        fill = _NEUTRAL if name == "dr_grpo" else "white"
        style: dict[str, Any] = {
            "marker": _marker(name),
            "markerfacecolor": fill,
            "markeredgecolor": _NEUTRAL,
            "linestyle": "",
        }
        handles.append(Line2D([], [], label=OBJECTIVES[name].label, **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _marker(objective: str) -> str:
    return _MARKERS[list(OBJECTIVES).index(objective)]


def show_group_widget(rewards: Sequence[float] | None = None, lengths: Sequence[int] | None = None) -> None:
    """Show one group with sliders below a notebook's cell: `group_widget_html` of the report, which needs no kernel.

    Args:
        rewards (`Sequence[float]`, *optional*): Of the answers. Defaults to eight answers, two of them correct.
        lengths (`Sequence[int]`, *optional*): In tokens, as many.
    """
    from IPython.display import HTML, display

    display(HTML(group_widget_html(rewards, lengths)))
