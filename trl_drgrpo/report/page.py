"""The report as one HTML page that needs and admits nothing else, as Markdown, and as one picture for papers.

Page and Markdown are templates (`assets/page.html.j2`, `assets/report.md.j2`). Styles, scripts and data are part of
the page. Its content security policy allows exactly the style and the script that stand in it, by their hashes, and no
connection to anywhere. Texts of a run reach the page as escaped text (`visible`: characters that cannot be seen, or
that turn the text around them, are shown by their codes) or as JSON that cannot end the script element it stands in
(`embedded`), whatever a completion holds.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_drgrpo.common import markdown
from trl_drgrpo.common.drawing import COLORS, ROLES, draw_trend, new_figure, save_figure, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# `<` opens tags and comments; direction marks would turn the source around; surrogates have no UTF-8; and so on.
_ESCAPED = re.compile("[<>&\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]")


def embedded(value: object) -> str:
    r"""
    Return a value as JSON, encodable as UTF-8, that may stand in a `<script type="application/json">` element.

    Example:

    ```python
    >>> print(embedded({"text": "</script>"}))
    {"text":"\u003c/script\u003e"}

    ```
    """
    plain = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", plain)


# Control characters but tab and line break, direction marks, line separators, byte order mark, surrogates, ...
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""
    Replace every character that cannot be seen by its code.

    Example:

    ```python
    >>> visible("a\x1b[31mb\u202e")
    'a⟨U+001B⟩[31mb⟨U+202E⟩'

    ```
    """
    return _UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", str(text))


# Characters of a completion in Markdown.
_BEGINNING = 300

_STYLES = ("uplot/uPlot.min.css", "page.css", "completions.css", "group_widget.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "dom.js",
    "charts.js",
    "tools.js",
    "difficulty.js",
    "detail.js",
    "completions.js",
    "group_widget.js",
    "page.js",
)
_PAGE_DATA = ("buckets", "panels", "other_metrics")
# Parts of a run that the template writes and no script reads.
_WRITTEN = ("status", "headline", "facts", "formula", "objective", "right", "notes", "mean_of", "evaluations")


def html_page(contents: dict[str, Any], version: str | None = None) -> str:
    """Render `contents` (see `report_contents`) as one page, encodable as UTF-8.

    With a `version`, which names these contents, the page asks its server for newer ones.
    """
    from markupsafe import Markup

    # Hashed as they stand in their elements: the policy of the page admits these two texts and nothing else.
    style = _joined(_STYLES)
    # The license must go with copies of its code.
    uplot_license = _joined(("uplot/LICENSE",))
    script = f'"use strict";\n/*\nuPlot: {uplot_license}*/\n{_joined(_SCRIPTS)}'
    data = {name: contents[name] for name in _PAGE_DATA}
    data["runs"] = []
    for run in contents["runs"]:
        data["runs"].append({name: run[name] for name in run if name not in _WRITTEN})
    return _template("page.html.j2", autoescape=True).render(
        **contents,
        version=version,
        made=f"{datetime.fromtimestamp(contents['made_at'], UTC):%Y-%m-%d %H:%M} UTC",
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=Markup(embedded(data)),
    )


def markdown_page(contents: dict[str, Any], plot: Path | None) -> str:
    """Render `contents` (see `report_contents`) as Markdown.

    `plot`: the picture in the same folder, `None` without matplotlib.
    """
    name = plot.name if plot else ""
    return _template("report.md.j2", keep_trailing_newline=True).render(**contents, plot=name)


def _template(name: str, **options: Any) -> Any:
    filters = {
        "value": shown,
        "amount": amount,
        "change": change,
        "headline": headline_text,
        "visible": visible,
        "cell": cell,
        "beginning": _beginning,
        "row": lambda cells: markdown.row(list(map(shown, cells))),
    }
    options |= {"trim_blocks": True, "lstrip_blocks": True}
    return markdown.template("trl_drgrpo.report", f"assets/{name}", filters, **options)


def cell(value: str) -> str:
    """Escape text, so that it is neither Markdown, nor markup, nor the end of a table's cell."""
    return markdown.plain(visible(value))


def _beginning(spans: Sequence[dict[str, Any]], level: int | None = None, cut: int = 0) -> str:
    """Return the start of a completion, or of its stretch behind `level` forks.

    `cut`: characters that are left out already.
    """
    # Spans leave out defaults: without a level they stand in front of every fork.
    text = ""
    for span in spans:
        if level in (None, span.get("level", 0)):
            text += span["text"]
    if len(text) + cut <= _BEGINNING:
        return text
    return f"{text[:_BEGINNING]} [...]"


def shown(value: object) -> str:
    """Write a value of a table as text. `None` is a dash; numbers have at most six significant digits."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(value)


def amount(value: float | None, share: bool) -> str:
    """Write a metric as text. `None` is a dash; a share, 0 to 1, is in percent."""
    if share and value is not None:
        return f"{value:.1%}"
    return shown(value)


def change(value: float | None, share: bool) -> str:
    """Write a difference of two metrics as text, with its sign; a share's in percentage points. `None` is empty."""
    if value is None:
        return ""
    if share:
        return f"{100 * value:+.1f} points"
    return f"{value:+.3g}"


def headline_text(value: float | None, share: bool) -> str:
    """Write a number of the first screen as text, with three significant digits or as a whole number."""
    if share or value is None:
        return amount(value, share)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _joined(names: tuple[str, ...]) -> str:
    folder = files("trl_drgrpo.report") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


_COLUMNS = 3
_DASHES = ("-", "--", ":")


def draw_figure(contents: dict[str, Any], path: Path) -> Path | None:
    """Draw every panel of a report (`report_contents`) into a PNG file; `None` without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    panels = contents["panels"]
    runs = contents["runs"]
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    figure, drawn = new_figure(rows, _COLUMNS, 4.4 * _COLUMNS, 2.7 * rows + 0.4)
    for axes, panel in zip(drawn, panels, strict=False):
        _draw_panel(axes, panel, runs)
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(_plain(", ".join(run["name"] for run in runs)), fontsize=12)
    return save_figure(figure, path)


def _draw_panel(axes: "Axes", panel: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    title = panel["title"]
    if panel["unit"]:
        title += f" ({panel['unit']})"
    axes.set_title(_plain(title), fontsize=10)
    axes.tick_params(labelsize=8)
    for position, run in enumerate(runs):
        for number, line in enumerate(panel["lines"]):
            # The first name under which the run has logged it.
            names = [name for name in line["metrics"] if name in run["curves"]]
            if not names:
                continue
            steps, values = run["curves"][names[0]]
            # Several runs have a color per run and a dash per line. Of one run, correct and incorrect have the same
            # color in every panel.
            if len(runs) > 1:
                color = COLORS[position % len(COLORS)]
                dash = _DASHES[number % len(_DASHES)]
                label = ", ".join(filter(None, (run["name"], line["label"])))
            else:
                color = ROLES.get(line["role"], COLORS[number % len(COLORS)])
                dash = "-"
                label = line["label"]
            # NumPy makes NaN of None, where matplotlib leaves a gap.
            with_gaps = np.array(values, dtype=np.float64)
            draw_trend(axes, steps, with_gaps, smoothed(values), color, _plain(label) or None, dash)
        for warning in run["warnings"]:
            axes.axvline(warning["step"], color="#b3261e", linewidth=0.8, linestyle=(0, (4, 3)))


def _plain(text: str) -> str:
    """Escape text, so that matplotlib sees no formula in it."""
    return visible(text).replace("$", r"\$")
