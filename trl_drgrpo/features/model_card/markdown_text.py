"""Markdown of the card: its templates, and names that others chose, whose pipes, backticks and tags must not act."""

import html
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
_PATH = re.compile(r"^(~|/|[A-Za-z]:[\\/]|\.{1,2}[\\/])")


def plain(text: Any) -> str:
    """A text as running Markdown shows it: on one line, with no character that means something to it.

    Example:

    ```python
    >>> plain("a|b <script>`x`")
    'a\\\\|b &lt;script&gt;\\\\`x\\\\`'

    ```
    """
    one_line = " ".join(str(text).split())
    return html.escape(_SPECIAL.sub(r"\\\1", one_line), quote=False)


def code(text: Any) -> str:
    """A text in a `<code>` element, in which neither Markdown nor HTML acts.

    Example:

    ```python
    >>> code("a|`b`")
    '<code>a&#124;&#96;b&#96;</code>'

    ```
    """
    escaped = html.escape(" ".join(str(text).split()), quote=False)
    special = {ord(char): f"&#{ord(char)};" for char in r"\`*_|[]"}
    return f"<code>{escaped.translate(special)}</code>"


def fenced(text: str, language: str = "") -> str:
    """A block of code, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def is_local_path(value: Any) -> bool:
    """Whether a value is a path of somebody's machine, which says nothing to others."""
    return isinstance(value, str) and bool(_PATH.match(value))


def without_paths(values: Any) -> Any:
    """Nested mappings and lists with `"(local path)"` for every path of the machine."""
    if isinstance(values, dict):
        return {name: without_paths(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_paths(value) for value in values]
    return "(local path)" if is_local_path(values) else values


def table(rows: Sequence[Sequence[Any]], header: Sequence[str] = ("", "")) -> str:
    """Rows of texts as a table; under a header the first column is code."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name, *cells in rows:
        first = code(name) if header[0] else plain(name)
        lines.append(f"| {first} | {' | '.join(plain(cell) for cell in cells)} |")
    return "\n".join(lines)


@cache
def template(name: str) -> Any:
    """A template of this room; a name that it is not given is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True)
    environment.filters.update(plain=plain, fenced=fenced, table=table)
    return environment.from_string(files("trl_drgrpo.features.model_card").joinpath(name).read_text("utf-8"))


def lines_of(name: str, **values: Any) -> list[str]:
    """The lines of a rendered template, without empty ones."""
    return [line for line in template(name).render(values).splitlines() if line.strip()]
