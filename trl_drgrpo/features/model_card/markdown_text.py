"""Names that others chose, in Markdown: a pipe, a backtick or a tag in them must not break the card or act in it."""

import html
import re
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
