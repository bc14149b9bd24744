"""Token advantages of one group, drawn on the tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl_drgrpo.common.drawing import new_figure


def draw_token_credit(tokens: Sequence[Sequence[str]], advantages: Mapping[str, Any]) -> Any:
    """One panel per kind of credit, one row per completion: blue tokens become likelier, orange ones less likely.

    Args:
        tokens (`Sequence[Sequence[str]]`): Decoded tokens of each completion, B rows.
        advantages (`Mapping[str, Any]`): Title -> tensor or array of shape `(B, T)`, 0 behind a completion's end.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("credit", ["#d55e00", "#ffffff", "#0072b2"])
    longest = max(len(row) for row in tokens)
    height = 0.6 + len(advantages) * (0.6 + 0.35 * len(tokens))
    figure, panels = new_figure(len(advantages), 1, 1 + 0.4 * longest, height, sharex=True)
    for axes, (title, values) in zip(panels, advantages.items(), strict=True):
        bound = float(abs(values).max()) or 1.0
        axes.imshow(values, cmap=colors, vmin=-bound, vmax=bound, aspect="auto", alpha=0.6)
        for row, texts in enumerate(tokens):
            for column, text in enumerate(texts):
                axes.text(column, row, _visible(text), ha="center", va="center", fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(yticks=range(len(tokens)), yticklabels=range(1, len(tokens) + 1), ylabel="completion", xticks=[])
        axes.grid(visible=False)
    return figure


def _visible(token: str) -> str:
    shown = "■" if token.startswith("<|") else token.replace("\n", "↵")
    return shown.replace("$", r"\$")
