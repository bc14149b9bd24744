"""Markdown from texts that others chose: names, prompts and completions must not act in it; and rooms' templates.

jinja2 is imported when a template is asked for.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def plain(text: object) -> str:
    """Return a text for running Markdown: on one line, with no character that means something to it.

    Example:

    ```python
    >>> plain("a|b <script>`x`")
    'a\\\\|b &lt;script&gt;\\\\`x\\\\`'

    ```
    """
    one_line = " ".join(str(text).split())
    return html.escape(_SPECIAL.sub(r"\\\1", one_line), quote=False)


def code(text: object) -> str:
    """Return a text in a `<code>` element, in which neither Markdown nor HTML acts.

    Example:

    ```python
    >>> code("a|`b`")
    '<code>a&#124;&#96;b&#96;</code>'

    ```
    """
    escaped = html.escape(" ".join(str(text).split()), quote=False)
    # Markdown reads `*` and `_` inside of HTML elements, too, and `|` ends a cell even there.
    special = {ord(char): f"&#{ord(char)};" for char in r"\`*_|[]"}
    return f"<code>{escaped.translate(special)}</code>"


def fenced(text: str, language: str = "") -> str:
    """Return a block of code, with a fence longer than any in the text."""
    fence = "```"
    while fence in text:  # a fence in the text would end the block
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def row(cells: Sequence[Any], first: Callable[[Any], str] = plain) -> str:
    """Return a line of a table; `first` writes the first cell."""
    texts = [first(cells[0]), *map(plain, cells[1:])]
    return f"| {' | '.join(texts)} |"


def head(cells: Sequence[str]) -> str:
    """Return the head of a table and the line below it."""
    return f"{row(cells)}\n|{'---|' * len(cells)}"


def table(rows: Sequence[Sequence[Any]], header: Sequence[str] = ("", "")) -> str:
    """Return rows of texts as a table; under a header the first column is code."""
    first = code if header[0] else plain
    lines = [head(header)]
    for cells in rows:
        lines.append(row(cells, first))
    return "\n".join(lines)


def template(package: str, name: str, filters: Mapping[str, Callable[..., Any]], **options: Any) -> Any:
    """Return a template among the files of a package, with the filters of this module and others.

    A name without a value is an error. `options` are jinja2's.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder, _, file = name.rpartition("/")
    environment = Environment(loader=PackageLoader(package, folder), undefined=StrictUndefined, **options)
    environment.filters |= {"plain": plain, "fenced": fenced, "table": table, "row": row, "head": head, **filters}
    return environment.get_template(file)
