"""Example groups drawn, and the same with sliders.

The widget shows a picture that it draws anew on each change, so it needs no particular backend of matplotlib. A
notebook that is run without a reader (nbclient, papermill) has nobody to move sliders, and a stored widget without its
kernel shows as a placeholder: `show_group_widget` then shows nothing.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_drgrpo.common.drawing import ROLES, new_figure
from trl_drgrpo.labs.study.group import ExampleGroup
from trl_drgrpo.labs.study.objectives import OBJECTIVES

COMPARED = ("grpo", "dapo", "dr_grpo")  # what is drawn unless told otherwise
_RIGHT, _WRONG, _NEUTRAL = ROLES["correct"], ROLES["incorrect"], "#555555"
_MARKERS = ("o", "s", "D", "^", "v")


def draw_groups(groups: Sequence[ExampleGroup], objectives: Sequence[str] = COMPARED) -> Any:
    """One column per group: the lengths of its answers, what a token of each weighs, what each pulls.

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


def group_widget() -> Any:
    """Sliders for how many of 8 answers are correct, for the lengths and the cut, a choice of objectives, the drawing.

    Returns:
        `ipywidgets.VBox`: Its last child is the drawing, an `ipywidgets.Image`.

    Raises:
        `ImportError`: ipywidgets or matplotlib is not installed.
    """
    import ipywidgets

    style = {"description_width": "150px"}
    sliders = {
        name: ipywidgets.IntSlider(value, low, high, description=text, style=style, continuous_update=False)
        for name, text, value, low, high in (
            ("right", "correct answers", 4, 0, 8),
            ("length_right", "correct, tokens", 50, 1, 500),
            ("length_wrong", "incorrect, tokens", 200, 1, 500),
            ("max_length", "cut at, tokens (L)", 500, 1, 500),
        )
    }
    chosen = ipywidgets.SelectMultiple(
        options=[(objective.label, name) for name, objective in OBJECTIVES.items()],
        value=COMPARED,
        rows=len(OBJECTIVES),
        description="objectives",
        style=style,
    )
    image = ipywidgets.Image(format="png", layout={"max_width": "640px"})

    def redraw(change: Any = None) -> None:
        group = ExampleGroup(**{name: slider.value for name, slider in sliders.items()})
        picture = io.BytesIO()
        draw_groups([group], chosen.value or COMPARED).savefig(picture, format="png", dpi=110)
        image.value = picture.getvalue()

    for control in (*sliders.values(), chosen):
        control.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([ipywidgets.HBox([ipywidgets.VBox(list(sliders.values())), chosen]), image])


def has_reader() -> bool:
    """Whether somebody sits in front of this notebook: the front end takes input, which nbclient does not."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    get_parent = getattr(get_ipython(), "get_parent", None)
    request = get_parent() if get_parent else None
    return bool(request) and request.get("content", {}).get("allow_stdin", False)


def show_group_widget() -> None:
    """Show `group_widget` below the cell, if there is a reader and ipywidgets is installed; else nothing."""
    if not has_reader():
        return
    try:
        widget = group_widget()
    except ImportError:
        return
    from IPython.display import display

    display(widget)
