"""Golden cases that stand in tables, `tests/data/*.tsv`: one case per line, tabs between its cells."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
_MARKS = {"⏎": "\n", "⇥": "\t"}


def cases(table, *sections):
    """The cells of every case, its section first. With `sections` of those only; lines that begin with `# ` say what
    follows, those with `## ` name a section. ∅ is `None`, ⏎ a line break and ⇥ a tab."""
    section = ""
    for line in (DATA / table).read_text("utf-8").split("\n"):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line and not line.startswith("# ") and section in (sections or [section]):
            yield [section, *map(_cell, line.split("\t"))]


def _cell(text):
    for mark, stands_for in _MARKS.items():
        text = text.replace(mark, stands_for)
    return None if text == "∅" else text
