r"""Answers that are written with `=`, `<` or a letter in front: chains, named tuples, inequalities, choices.

All of it rewrites spelling, so that the comparison meets one form: `x = 2 + 3 = 5` is `x = 5` if its links agree,
`(x, y) = (1, 2)` is `(x=1, y=2)`, `-1 < x < 3` is `(-1,3)`, `x < -1 \text{ or } x > 1` is a union of intervals.
"""

import re
from typing import NamedTuple

from trl_drgrpo.rewards.functions.mathematics.brackets import bracketed, split_at
from trl_drgrpo.rewards.functions.mathematics.latex import ACCENTS, GREEK_NAMES, letters, tidy

_LETTER = rf"(?:[a-zA-Z]|\\(?:{GREEK_NAMES})(?![a-zA-Z]))"
_INDEX = r"(?:_\{(?:[^{}]|\{[^{}]*\})*\}|'+)?"
_VARIABLE = _LETTER + _INDEX
NAME = rf"(?:{_LETTER}|\\(?:{ACCENTS})\{{\w+\}}){_INDEX}(?:\([a-z]\))?"
CALL = rf"(?:{_LETTER}|\\mathbb\{{[a-zA-Z]\}}|\\text\{{\w+\}}){_INDEX}(?:\([^()]*\)|\[[^\[\]]*\])"
# \frac{dy}{dx}, also of higher order and partial
DERIVATIVE = (
    rf"\\frac\{{(?:d|\\partial ?)(?:\^\{{\d\}})? ?{_LETTER}(?:\([a-z]\))?\}}"
    rf"\{{(?:(?:d|\\partial) ?{_LETTER}(?:\^\{{\d\}})? ?)+\}}"
)
_NAMED = re.compile(rf"({_VARIABLE}) ?= ?([^=<>]+)")
_BOUND = r"(-?(?:\\infty|[^<>=|,a-zA-Z\\]*(?:\\(?:frac|sqrt|pi)[^<>=|,a-zA-Z\\]*)*))"
_SIDE = r" ?(<|>|\\le|\\ge) ?"
_INEQUALITY = re.compile(rf"(?:{_BOUND}{_SIDE})?({_LETTER})(?:{_SIDE}{_BOUND})?")
_MODULUS = re.compile(rf"\|({_LETTER})\|(<|>|\\le ?|\\ge ?)(\d+)")
_ALL_REALS = re.compile(r"(?:\\mathbb\{R\}|\\mathbb R|\\R|(?:\\text\{)?all ?real(?: ?number)?s\}?)")
_SET_BUILDER = re.compile(rf"\\\{{ ?({_LETTER})(?: ?\\in ?\\mathbb\{{R\}})? ?[:|] ?(.+)\\\}}")
_OR = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*,?\s*or\s*,?\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-zA-Z])")
_CHOICE = re.compile(r"\W*?(?:\(([A-J])\)|(?<!\w)([A-J])(?:\)|[.:](?=[\s$\\])))\s*(.*)", re.DOTALL)
_FONT = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf))\s*\{([^{}]*)\}")


class Chain(NamedTuple):
    """`x = 2 + 3 = 5` as `x=5`, and the links that have to agree with the last one for it to be true."""

    text: str
    links: tuple[str, ...]
    last: str


def chain(text: str) -> Chain | None:
    """The links of an equation with a numeric left side or more than one `=`; `None` for any other answer.

    Links with letters that the last one lacks, as in `A = \\pi r^2 = 9\\pi`, cannot be checked and are left out.
    """
    if "=" not in text or len(split_at(text, ",")) > 1:
        return None
    parts = [part.strip() for part in split_at(text, "=")]
    if len(parts) < 2 or not all(parts):
        return None
    own = [letters(part) for part in parts]
    head = parts[0] if own[0] else ""
    if (head and len(parts) == 2) or (not head and any(own)):
        return None
    last = parts[-1]
    links = tuple(part for part, used in zip(parts[:-1], own, strict=False) if part != head and used <= own[-1])
    return Chain(f"{head}={last}" if head else last, links, last)


def spread(text: str) -> str:
    """`(x,y)=(1,2)` as `(x=1,y=2)`; anything else as it is."""
    left, equals, right = text.partition("=")
    names, values = bracketed(left.strip()), bracketed(right.strip())
    if not equals or not names or not values or names.brackets != "()" or values.brackets != "()":
        return text
    if len(names.items) != len(values.items) or not all(re.fullmatch(_VARIABLE, name) for name in names.items):
        return text
    return f"({','.join(f'{name}={value}' for name, value in zip(names.items, values.items, strict=True))})"


def by_name(items: tuple[str, ...]) -> tuple[str, ...] | None:
    """The values of `y=4, x=3` in the order of their names; `None` unless all have names, and different ones.

    The roots `x_1 = 3, x_2 = 4` are a list without order.
    """
    named = [_NAMED.fullmatch(item) for item in items]
    values = {match[1]: match[2].strip() for match in named if match}
    bases = {name.partition("_")[0] for name in values}
    if len(values) < len(items) or len(bases) == 1:
        return None
    return tuple(value for _, value in sorted(values.items()))


def condition(text: str) -> str:
    r"""`x > 1` of `\{x \mid x > 1\}`, where that is an interval; anything else as it is."""
    match = _SET_BUILDER.fullmatch(text)
    return match[2] if match and (inside := interval(match[2])) and inside[0] == match[1] else text


class Approximation(NamedTuple):
    """`\\frac{22}{7} \\approx 3.14`: what is meant, and how it was rounded."""

    exact: str
    rounded: str


def approximation(text: str) -> Approximation | None:
    """The two sides of `\\approx`, also where `x \\approx 3.14` names only one; `None` for any other answer."""
    if r"\approx" not in text or len(split_at(text, ",")) > 1:
        return None
    first, *others = split_at(text, r"\approx")
    if not others or not all(others):
        return None
    if not first or (first != "e" and re.fullmatch(rf"{NAME}|{CALL}", first)):
        exact = f"{first}={others[0]}" if first else others[0]
        return Approximation(exact, others[-1])
    return Approximation(first, others[-1])


def interval(text: str) -> tuple[str, str] | None:
    """Variable and interval of `-1 < x < 3`, `|x| < 3` or "all real numbers"; `None` for anything else."""
    if _ALL_REALS.fullmatch(text):
        return "", r"(-\infty,\infty)"
    if modulus := _MODULUS.fullmatch(text):
        name, sign, bound = modulus[1], modulus[2].strip(), modulus[3]
        if sign in ("<", r"\le"):
            return name, f"(-{bound},{bound})" if sign == "<" else f"[-{bound},{bound}]"
        inner, outer = ("(", ")") if sign == ">" else ("[", "]")
        return name, rf"(-\infty,-{bound}{outer}\cup{inner}{bound},\infty)"
    match = _INEQUALITY.fullmatch(text)
    if not match or not (match[2] or match[4]) or match[1] == "" or match[5] == "":
        return None
    first, second = match[2], match[4]
    if first and second and (first in ("<", r"\le")) != (second in ("<", r"\le")):
        return None
    rises = (first or second) in ("<", r"\le")
    low, low_sign, high, high_sign = (
        (match[1], first, match[5], second) if rises else (match[5], second, match[1], first)
    )
    opening = "(" if low_sign in ("<", ">", None) else "["
    closing = ")" if high_sign in ("<", ">", None) else "]"
    return match[3], opening + (low or r"-\infty") + "," + (high or r"\infty") + closing


def union(text: str) -> str:
    r"""An answer as written, `x < -1 \text{ or } x > 1` as a union of intervals; anything else as it is."""
    parts = [interval(tidy(part)) for part in _OR.split(text)]
    if len(parts) < 2 or not all(parts) or len({part[0] for part in parts if part}) > 1:
        return text
    return r"\cup ".join(part[1] for part in parts if part)


def choice(answer: str) -> str | None:
    r"""The letter of a choice that is given with what stands behind it: `C) 15`, `\textbf{(C)}\ 15`, `A. 5`. `None`
    without such a letter, and where a second one is named."""
    plain = _FONT.sub(r"\1 ", answer.replace("\\ ", " ").replace("~", " "))
    match = _CHOICE.fullmatch(plain.strip())
    if not match or re.match(r"[+*/^_=,<>]|- ", match[3]) or re.search(r"(?<!\w)\(?[A-J][).:]|\bor\b", match[3]):
        return None
    return match[1] or match[2]
