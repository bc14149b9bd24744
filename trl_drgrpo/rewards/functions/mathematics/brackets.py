"""The structure of an answer: pairs, intervals, sets, lists, unions and matrices taken apart into their entries.

Only brackets and commas are looked at; entries stay text. Whether order counts is told by the brackets: `(1, 2)` is
ordered, `\\{1, 2\\}` and `1, 2` are not. `1 \\pm 2` is a list of two.
"""

import functools
import re
from typing import NamedTuple

from trl_drgrpo.rewards.functions.mathematics.latex import tidy

_RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv)(?![a-zA-Z])|[=<>]")
_INDEX = re.compile(r"_\{[^{}]*\}")  # of a sum
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BRACKETS = {"(": "()", "[": "[]", r"\{": "{}", r"\langle": "()"}


class Collection(NamedTuple):
    """Entries in brackets: `()` and `[]` and mixtures of them in order, `{}`, none (`""`) and unions without."""

    brackets: str
    items: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def collection(text: str) -> Collection | None:
    """The entries of a pair, interval, set, list or union, with `\\pm` as two of them; `None` for a single answer."""
    pieces = split_at(text, r"\cup")
    if len(pieces) > 1:
        return Collection("U", tuple(pieces))
    found = bracketed(text)
    if found is None and r"\pm" in text and not is_relation(text):
        found = Collection("", (text,))
    if found is None or found.brackets not in ("", "{}"):
        return found
    items = [half for item in found.items for half in _both_signs(item)]
    return Collection(found.brackets, tuple(items)) if len(items) > 1 else None


def _both_signs(item: str) -> list[str]:
    if r"\pm" not in item:
        return [item]
    plus = re.sub(r"^\s*\+", "", item.replace(r"\pm", "+").replace(r"\mp", "-").replace("=+", "="))
    return [tidy(plus), tidy(item.replace(r"\pm", "-").replace(r"\mp", "+"))]


def bracketed(text: str) -> Collection | None:
    """The entries of `(a, b]`, `\\{a, b\\}` or `a, b`; `None` where there is no comma and no bracket around it all."""
    entries = split_at(text, ",")
    if len(entries) > 1:
        return Collection("", tuple(entry for entry in entries if entry not in ("", r"\dots", r"\ldots")))
    for opening, kind in _BRACKETS.items():
        if not text.startswith(opening):
            continue
        closing = next((c for c in (r"\}", r"\rangle", ")", "]") if text.endswith(c)), None)
        inner = text[len(opening) : len(text) - len(closing)] if closing else ""
        if closing is None or not inner.strip() or not _is_balanced(inner):
            return None
        if (kind == "{}") != (closing == r"\}"):
            return None
        end = {")": ")", "]": "]", r"\}": "}", r"\rangle": ")"}[closing]
        return Collection(kind[0] + end, tuple(split_at(inner, ",")))
    return None


_STEP = re.compile(r"\\begin\{|\\end\{|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_DEPTH = {"{": 1, "(": 1, "[": 1, r"\{": 1, r"\langle": 1, r"\begin{": 2}
_DEPTH |= {"}": -1, ")": -1, "]": -1, r"\}": -1, r"\rangle": -1, r"\end{": 0}


def split_at(text: str, separator: str) -> list[str]:
    """`text` cut at each separator that stands in no bracket."""
    parts, depth, start = [], 0, 0
    for step in _STEP.finditer(text):
        depth += _DEPTH.get(step[0], 0)
        if depth == 0 and step[0] == separator:
            parts.append(text[start : step.start()].strip())
            start = step.end()
    return [*parts, text[start:].strip()]


def _is_balanced(inner: str) -> bool:
    depth = 0
    for step in _STEP.finditer(inner):
        depth += _DEPTH.get(step[0], 0)
        if depth < 0:
            return False
    return depth == 0


def matrix(text: str) -> list[list[str]] | None:
    """The rows of a matrix or column vector, whichever brackets it has; `None` for anything else."""
    if not (match := _MATRIX.fullmatch(_without_array_brackets(text))):
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    return [[tidy(entry) for entry in row.split("&")] for row in rows]


def _without_array_brackets(text: str) -> str:
    if re.match(r"[(\[]\\begin\{(?:matrix|array)\}", text) and text[-1] in ")]":
        return text[1:-1].strip()
    return text


def is_relation(text: str) -> bool:
    """Whether it is an equation, an inequality or a membership."""
    return bool(_RELATION.search(_INDEX.sub("", text)))
