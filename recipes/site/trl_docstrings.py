"""Docstrings in the style of TRL, as griffe's Google parser reads them.

`name (`str`, *optional*, defaults to `"a"`):` becomes `name (str):`, the default being shown from the signature, and
references such as [`~datasets.Dataset`] become code.
"""

import re
from typing import Any

from griffe import Extension

SECTION = re.compile(r"^(\s*)(Args|Parameters|Attributes|Returns|Yields|Raises):\s*$")
TYPED = re.compile(r"^(\s+)([\w*]+(?:, [\w*]+)*) \(([^\n]*?)\):(?=\s|$)")
REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?([\w.]+)`\](?!\()")


def google_style(text: str) -> str:
    """A docstring in TRL's style as one in Google's."""
    lines = []
    section = None
    for line in REFERENCE.sub(r"`\1`", text).splitlines():
        if found := SECTION.match(line):
            section = found[2]
            line = line.replace("Parameters:", "Args:")
        elif section in ("Args", "Parameters", "Attributes"):
            line = TYPED.sub(_typed, line)
        elif section in ("Returns", "Yields", "Raises"):
            line = re.sub(r"^(\s+)`([^`]+)`(?: \([^)]*\))?:", r"\1\2:", line)
        lines.append(line)
    return "\n".join(lines)


def _typed(line: re.Match) -> str:
    words = re.sub(r"[`*]", "", re.sub(r"(, \*optional\*)?(, defaults? to .*)?$", "", line[3]))
    return f"{line[1]}{line[2]} ({words}):"


class TrlDocstrings(Extension):
    """Rewrites each docstring when it has been loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every object that griffe has read."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)
