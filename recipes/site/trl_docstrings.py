"""Docstrings in the style of TRL, as griffe's Google parser reads them.

`name (`str`, *optional*, defaults to `"a"`):` becomes `name (str):`, the default being shown from the signature, and
references such as [`~datasets.Dataset`] become code. Lists get their empty line in front.
"""

import re
from textwrap import dedent
from typing import Any

from griffe import Extension

SECTION = re.compile(r"^(\s*)(Args|Parameters|Attributes|Returns|Yields|Raises):\s*$")
TYPED = re.compile(r"^(\s+)([\w*]+(?:, [\w*]+)*) \(([^\n]*?)\):(?=\s|$)")
INDENTED_LIST = re.compile(r"^(\S.*:)\n((?: +.*\n?)+)", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?([\w.]+)`\](?!\()")


def google_style(text: str) -> str:
    """A docstring in TRL's style as one in Google's."""
    lines: list[str] = []
    section = None
    item = -1  # indentation of the list that is open
    text = INDENTED_LIST.sub(_outdent, REFERENCE.sub(r"`\1`", text))
    for line in text.splitlines():
        if found := SECTION.match(line):
            section = found[2]
            line = line.replace("Parameters:", "Args:")
        elif section in ("Args", "Parameters", "Attributes"):
            line = TYPED.sub(_typed, line)
        elif section in ("Returns", "Yields", "Raises"):
            line = re.sub(r"^(\s+)`([^`]+)`(?: \([^)]*\))?:", r"\1\2:", line)
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("- "):
            if item < 0 and lines and lines[-1].strip():
                lines.append("")  # Markdown wants one before a list
            item = indent
        elif indent <= item:
            item = -1
        lines.append(line)
    return "\n".join(lines)


def _outdent(block: re.Match) -> str:
    """A list below a title that is no section, as a list."""
    is_list = block[2].lstrip().startswith("- ") and not SECTION.match(block[1])
    return f"{block[1]}\n\n{dedent(block[2])}" if is_list else block[0]


def _typed(line: re.Match) -> str:
    words = re.sub(r"[`*]", "", re.sub(r"(, \*optional\*)?(, defaults? to .*)?$", "", line[3]))
    return f"{line[1]}{line[2]} ({words}):"


class TrlDocstrings(Extension):
    """Rewrites each docstring when it has been loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every object that griffe has read."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)
