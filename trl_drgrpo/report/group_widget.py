"""The sliders of a group of answers under GRPO, DAPO and Dr. GRPO, as HTML for a notebook or a page of one's own.

Nothing is loaded: the styles and the script (`assets/group_widget.js`) stand in the snippet.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.embedding import embedded


def group_widget_html(
    rewards: Sequence[float] | None = None, lengths: Sequence[int] | None = None, element_id: str = "group-widget"
) -> str:
    """
    One group of answers as an HTML snippet: sliders for rewards and lengths, bars for what each objective does.

    In a notebook: `IPython.display.HTML(group_widget_html())`.

    Args:
        rewards (`Sequence[float]`, *optional*): Of the answers, at least two; 0 and 1 read as incorrect and correct.
            Defaults to eight answers, two of them correct.
        lengths (`Sequence[int]`, *optional*): In tokens, as many, at least 1 each.
        element_id (`str`, *optional*): Id of the element, for pages with several groups.

    Returns:
        `str`: A `<div>`, a `<style>` and a `<script>`.

    Raises:
        [`InputError`]: Rewards without lengths or lengths without rewards, or not equally many.
    """
    group = {}
    if rewards is not None or lengths is not None:
        rewards, lengths = list(rewards or []), list(lengths or [])
        if len(rewards) != len(lengths) or len(rewards) < 2 or min(lengths) < 1:
            got = f"{len(rewards)} rewards and {len(lengths)} lengths"
            raise InputError(
                "rewards, lengths", got, "equally many, two or more, lengths from 1 on", "Pass one group."
            )
        group = {"rewards": [float(reward) for reward in rewards], "lengths": [int(length) for length in lengths]}
    style, script = (
        (files("trl_drgrpo.report") / "assets" / f"group_widget.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    name, hint = embedded(element_id), "Sliders for a group of answers: they need JavaScript."
    return (
        f'<div id="{escape(element_id)}">{hint}</div>\n<style>{style}</style>'
        f"\n<script>(() => {{\n{script}\nmountGroupWidget(document.getElementById({name}), {embedded(group)});\n}})();"
        "</script>\n"
    )
