"""The sliders of a group of answers under GRPO, DAPO and Dr. GRPO, as HTML for a notebook or a page of one's own.

Nothing is loaded: the styles and the script (`assets/group_widget.js`) stand in the snippet.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from trl_drgrpo.common.errors import InputError

# Those of the page that were not mounted yet: a notebook may hold several snippets, and some twice.
_MOUNT = """document.querySelectorAll("[data-group-widget]:not(.group-widget)").forEach((element) =>
  mountGroupWidget(element, JSON.parse(element.dataset.groupWidget)));"""


def group_widget_html(rewards: Sequence[float] | None = None, lengths: Sequence[int] | None = None) -> str:
    """
    One group of answers as an HTML snippet: sliders for rewards and lengths, bars for what each objective does.

    In a notebook: `IPython.display.HTML(group_widget_html())`.

    Args:
        rewards (`Sequence[float]`, *optional*): Of the answers, at least two; 0 and 1 read as incorrect and correct.
            Defaults to eight answers, two of them correct.
        lengths (`Sequence[int]`, *optional*): In tokens, as many, at least 1 each.

    Returns:
        `str`: A `<div>`, a `<style>` and a `<script>`; a page may hold several.

    Raises:
        [`InputError`]: Rewards without lengths or lengths without rewards, or not equally many.
    """
    group = {}
    if rewards is not None or lengths is not None:
        rewards, lengths = list(rewards or []), list(lengths or [])
        if len(rewards) != len(lengths) or len(rewards) < 2 or min(lengths) < 1:
            got = f"{len(rewards)} rewards and {len(lengths)} lengths"
            raise InputError(
                "rewards, lengths", got, "as many of each, two or more, lengths of at least 1", "Pass one group."
            )
        group = {"rewards": [float(reward) for reward in rewards], "lengths": [int(length) for length in lengths]}
    folder = files("trl_drgrpo.report") / "assets"
    style, script = ((folder / f"group_widget.{kind}").read_text("utf-8") for kind in ("css", "js"))
    hint = "Sliders for a group of answers: they need JavaScript."
    return (
        f'<div data-group-widget="{escape(json.dumps(group))}">{hint}</div>\n<style>{style}</style>\n'
        f"<script>(() => {{\n{script}\n{_MOUNT}\n}})();</script>\n"
    )
