r"""The structure of an answer, from its brackets and signs; and formulas, written for algebra.

Pairs, intervals, sets, lists, unions and matrices are taken apart into their entries; only brackets and commas are
looked at, entries stay text. Whether order counts is told by the brackets: `(1, 2)` is ordered, `\{1, 2\}` and `1, 2`
are not. `1 \pm 2` is a list of two.

The parser of formulas takes `A^T` for `A`, `\gamma` for a function and `f'` for `f`, and to sympy the derivative of
one letter by another is 0. They become letters with an index here. A formula that is too costly is compared by its
spelling.
"""

import functools
import re
from typing import NamedTuple

from trl_drgrpo.rewards.functions.mathematics.guards import is_cheap
from trl_drgrpo.rewards.functions.mathematics.latex import ACCENTS, GREEK_NAMES, letters, respelled, rules, tidy
from trl_drgrpo.rewards.functions.mathematics.quantities import ANGLE_FUNCTION

_RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv)(?![a-zA-Z])|[=<>]")
_AFTER_A_NAME = re.compile(r"_\{[^{}]*\}")  # of a sum
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BRACKETS = {"(": "()", "[": "[]", r"\{": "{}", r"\langle": "()"}
_CLOSINGS = {r"\}": "}", r"\rangle": ")", ")": ")", "]": "]"}


class Collection(NamedTuple):
    """Entries in brackets: `()` and `[]` and mixtures of them in order, `{}`, none (`""`) and unions without."""

    brackets: str
    items: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def collection(text: str) -> Collection | None:
    """Return the entries of a pair, interval, set, list or union, with `\\pm` as two; `None` for a single answer."""
    pieces = split_at(text, r"\cup")
    if len(pieces) > 1:
        return Collection("U", tuple(pieces))
    entries = bracketed(text)
    if entries is None and r"\pm" in text and not is_relation(text):
        entries = Collection("", (text,))
    if entries is None or entries.brackets not in ("", "{}"):
        return entries  # where order counts, a second entry would have no place
    items = []
    for item in entries.items:
        if r"\pm" not in item:
            items.append(item)
            continue
        # All signs of an entry go together: `1 \pm 2 \mp 3` is 1+2-3 and 1-2+3.
        plus = item.replace(r"\pm", "+").replace(r"\mp", "-").replace("=+", "=")
        minus = item.replace(r"\pm", "-").replace(r"\mp", "+")
        items += [tidy(re.sub(r"^\s*\+", "", plus)), tidy(minus)]
    return Collection(entries.brackets, tuple(items)) if len(items) > 1 else None


def bracketed(text: str) -> Collection | None:
    """Return the entries of `(a, b]`, `\\{a, b\\}` or `a, b`; `None` without a comma or a bracket around it all."""
    entries = split_at(text, ",")
    if len(entries) > 1:  # `1, 2, \dots, 5`: dots are no entry
        return Collection("", tuple(entry for entry in entries if entry not in ("", r"\dots", r"\ldots")))
    for opening, kind in _BRACKETS.items():
        if not text.startswith(opening):
            continue
        for closing, end in _CLOSINGS.items():
            if not text.endswith(closing):
                continue
            inner = text[len(opening) : len(text) - len(closing)]
            # Half-open intervals mix their brackets, sets do not; `(1)(2)` has no bracket around it all.
            if not inner.strip() or not _is_balanced(inner) or (kind == "{}") != (end == "}"):
                return None
            return Collection(kind[0] + end, tuple(split_at(inner, ",")))
        return None
    return None


_STEP = re.compile(r"\\begin\{|\\end\{|\\[a-zA-Z]+|\\.|.", re.DOTALL)
# `\begin{` opens two: the brace, which closes behind the name, and the matrix, whose end is the brace of `\end{`.
_DEPTH = {"{": 1, "(": 1, "[": 1, r"\{": 1, r"\langle": 1, r"\begin{": 2}
_DEPTH |= {"}": -1, ")": -1, "]": -1, r"\}": -1, r"\rangle": -1, r"\end{": 0}


def split_at(text: str, separator: str) -> list[str]:
    """Cut `text` at each separator that stands in no bracket."""
    parts = []
    depth = 0
    start = 0
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
    """Return the rows of a matrix or column vector, whichever brackets it has; `None` for anything else."""
    if re.match(r"[(\[]\\begin\{(?:matrix|array)\}", text) and text[-1] in ")]":
        text = text[1:-1].strip()
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    rows = []
    for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]):  # `\\[2pt]` sets a distance
        if row.strip():  # none behind a last `\\`
            rows.append([tidy(entry) for entry in row.split("&")])
    return rows


def is_relation(text: str) -> bool:
    """Tell whether it is an equation, an inequality or a membership."""
    return bool(_RELATION.search(_AFTER_A_NAME.sub("", text)))  # not by the `=` in `\sum_{i=1}`


# What can be the left side of an equation: a letter with an index or primes, accented or applied to a letter (`NAME`),
# a function of something (`CALL`).
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
# A number, perhaps with a fraction, a root or \pi in it, or \infty; no letter, which could be the variable.
_BOUND = r"(-?(?:\\infty|[^<>=|,a-zA-Z\\]*(?:\\(?:frac|sqrt|pi)[^<>=|,a-zA-Z\\]*)*))"
_SIDE = r" ?(<|>|\\le|\\ge) ?"
_RISING = ("<", r"\le")
# `-1 < x \le 3`, or one side of it
_INEQUALITY = re.compile(rf"(?:{_BOUND}{_SIDE})?({_LETTER})(?:{_SIDE}{_BOUND})?")
_MODULUS = re.compile(rf"\|({_LETTER})\|(<|>|\\le ?|\\ge ?)(\d+)")
# All real numbers, as a sign or in words
_ALL_REALS = re.compile(r"(?:\\mathbb\{R\}|\\mathbb R|\\R|(?:\\text\{)?all ?real(?: ?number)?s\}?)")
# \{x \in \mathbb{R} : x > 1\}
_SET_BUILDER = re.compile(rf"\\\{{ ?({_LETTER})(?: ?\\in ?\\mathbb\{{R\}})? ?[:|] ?(.+)\\\}}")
_OR = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*,?\s*or\s*,?\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-zA-Z])")
# `(C) 15`, `C) 15`, `A. 5`: the letter in one of the first two groups, what follows it in the third
_CHOICE = re.compile(r"\W*?(?:\(([A-J])\)|(?<!\w)([A-J])(?:\)|[.:](?=[\s$\\])))\s*(.*)", re.DOTALL)
_OPTION = re.compile(r"^\s*(?i:option|choice|answer)\s*:?\s+")
_FONT = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf))\s*\{([^{}]*)\}")


class Chain(NamedTuple):
    """`x = 2 + 3 = 5` as `x=5`, and the links that have to agree with the last one for it to be true."""

    text: str
    links: tuple[str, ...]
    last: str


def chain(text: str) -> Chain | None:
    """Return the links of an equation with a numeric left side or more than one `=`; `None` for any other answer.

    Links with letters that the last one lacks, as in `A = \\pi r^2 = 9\\pi`, cannot be checked and are left out.
    """
    if "=" not in text or len(split_at(text, ",")) > 1:
        return None
    parts = split_at(text, "=")
    if len(parts) < 2 or not all(parts):
        return None
    letters_of_parts = list(map(letters, parts))
    head = parts[0] if letters_of_parts[0] else ""  # the name in `x = 2 + 3 = 5`
    if head and len(parts) == 2:  # `x = 5`
        return None
    if not head and any(letters_of_parts):  # `4 = x^2 + y^2`
        return None
    last = parts[-1]
    links = []  # what has to be equal for the chain to be true
    for part, used in zip(parts[:-1], letters_of_parts, strict=False):
        if part != head and used <= letters_of_parts[-1]:
            links.append(part)
    return Chain(f"{head}={last}" if head else last, tuple(links), last)


def spread(text: str) -> str:
    """Write `(x,y)=(1,2)` as `(x=1,y=2)`; anything else as it is."""
    # The names go into the entries, where `by_name` finds them: `(y,x)=(1,2)` is not `(1,2)`.
    names_text, _, right = text.partition("=")
    names = bracketed(names_text.strip())
    values = bracketed(right.strip())
    if not names or not values or names.brackets != "()" or values.brackets != "()":
        return text
    if len(names.items) != len(values.items):
        return text
    if not all(re.fullmatch(_VARIABLE, name) for name in names.items):
        return text
    return f"({','.join(map('{}={}'.format, names.items, values.items))})"


def by_name(items: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the values of `y=4, x=3` in the order of their names; `None` unless all have names, different ones."""
    values = {}  # by name
    for item in items:
        match = _NAMED.fullmatch(item)
        if not match:
            return None
        values[match[1]] = match[2].strip()
    # The roots `x_1 = 3, x_2 = 4` are a list without order.
    letters_of_names = {name.partition("_")[0] for name in values}
    if len(values) < len(items) or len(letters_of_names) == 1:
        return None
    return tuple(values[name] for name in sorted(values))


def condition(text: str) -> str:
    r"""Return `x > 1` of `\{x \mid x > 1\}`, where that is an interval; anything else as it is."""
    match = _SET_BUILDER.fullmatch(text)
    inside = match and interval(match[2])
    if not match or not inside or inside[0] != match[1]:
        return text
    return match[2]


class Approximation(NamedTuple):
    """`\\frac{22}{7} \\approx 3.14`: what is meant, and how it was rounded."""

    exact: str
    rounded: str


def approximation(text: str) -> Approximation | None:
    """Return the two sides of `\\approx`, also where `x \\approx 3.14` names only one; `None` for any other answer."""
    if r"\approx" not in text or len(split_at(text, ",")) > 1:
        return None
    first, *approximations = split_at(text, r"\approx")
    if not approximations or not all(approximations):  # it stands in brackets, or breaks off
        return None
    exact = first or approximations[0]
    if first and first != "e" and re.fullmatch(rf"{NAME}|{CALL}", first):  # a name has no value, the number e has one
        exact = f"{first}={approximations[0]}"
    return Approximation(exact, approximations[-1])


def interval(text: str) -> tuple[str, str] | None:
    """Return variable and interval of `-1 < x < 3`, `|x| < 3` or "all real numbers"; `None` for anything else."""
    if _ALL_REALS.fullmatch(text):
        return "", r"(-\infty,\infty)"
    modulus = _MODULUS.fullmatch(text)
    if modulus:
        name = modulus[1]
        sign = modulus[2].strip()
        bound = modulus[3]
        opening, closing = "()" if sign in "<>" else "[]"
        if sign in ("<", r"\le"):
            return name, f"{opening}-{bound},{bound}{closing}"
        return name, rf"(-\infty,-{bound}{closing}\cup{opening}{bound},\infty)"
    match = _INEQUALITY.fullmatch(text)
    if not match:
        return None
    low, low_sign, name, high_sign, high = match.groups()
    if not (low_sign or high_sign) or "" in (low, high):  # no sign, or one without a bound
        return None
    if low_sign and high_sign and (low_sign in _RISING) != (high_sign in _RISING):
        return None  # 1 < x > 3
    if (low_sign or high_sign) not in _RISING:  # 3 > x > 1
        low, low_sign, high_sign, high = high, high_sign, low_sign, low
    # A side that is not there is open, at infinity.
    opening = "(" if low_sign in ("<", ">", None) else "["
    closing = ")" if high_sign in ("<", ">", None) else "]"
    return name, opening + (low or r"-\infty") + "," + (high or r"\infty") + closing


def union(text: str) -> str:
    r"""Write `x < -1 \text{ or } x > 1`, not tidied, as a union of intervals; anything else as it is."""
    # Before `tidy`, to which "or" is a comma: `x < -1, x > 1` would be a list of two.
    names = set()
    intervals = []
    for part in _OR.split(text):
        name_and_interval = interval(tidy(part))
        if name_and_interval is None:
            return text
        names.add(name_and_interval[0])
        intervals.append(name_and_interval[1])
    if len(intervals) < 2 or len(names) > 1:
        return text
    return r"\cup ".join(intervals)


def choice(answer: str, expected: str) -> str | None:
    r"""Return the letter of a choice given with its content: `C) 15`, `\textbf{(C)}\ 15`, `A. 5`; a bare `c`, too,
    where C is expected. `None` without such a letter, and where a second one is named."""
    plain = _FONT.sub(r"\1 ", answer.replace("\\ ", " ").replace("~", " "))
    plain = _OPTION.sub("", plain)
    bare = plain.strip("$().* ")
    if bare == expected or (bare == expected.lower() and expected <= "E"):  # `f` may be a function
        return expected
    match = _CHOICE.fullmatch(plain.strip())
    if not match:
        return None
    content = match[3]
    if re.match(r"[+*/^_=,<>]|- ", content):  # `C + 1` is a formula
        return None
    if re.search(r"(?<!\w)\(?[A-J][).:]|\bor\b", content):  # `C) 15 or D) 16`
        return None
    return match[1] or match[2]


# What the parser computes away: 5', gcd(a, b). Of numbers, `gcd(4, 6)` is computed as it should be.
_DROPPED = re.compile(r"'|\\(?:gcd|lcm)(?![a-zA-Z])[^)]*[a-zA-Z]|(?:gcd|lcm)\}? ?\([^)]*[a-zA-Z]")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z]) ?\\degree ?")
_PRIMED = re.compile(r"([a-zA-Z])('+)")
_DERIVATIVE = re.compile(DERIVATIVE)
# What the parser misreads becomes a letter with an index that begins with 7, 8 or 9; no answer has such.
_SPELLINGS = rules(
    (r"\\([gG])amma(?![a-zA-Z])(?:_\{(\w+)\})?", r" \1_{8\2}"),  # a function to the parser
    (r"\^\{(?:T|\\top|\\intercal)\}", r"^{t_{8}}"),  # a transpose, which it drops
    (r"_\{\\(max|min)\}", r"_{\1}"),
    (r"(\d+|[a-zA-Z])!(?=\^)", r"(\1!)"),
)
# Spaces and multiplication signs that say nothing. Between digits they do: `1 \cdot 2` is not 12.
_LOOSE = re.compile(r"(?:(?<!\d)\\cdot|\\cdot(?! ?\d)|(?<!\d) | (?!\d))+")


def same_formula(gold: str, answer: str, deep: bool) -> bool | None:
    """Compare two tidied formulas: by algebra where it is allowed (`deep`) and they are cheap, else by
    spelling. `None` where algebra is needed and not allowed."""
    if not (is_cheap(gold) and is_cheap(answer)):
        return _LOOSE.sub("", gold) == _LOOSE.sub("", answer)
    gold = for_algebra(gold)
    answer = for_algebra(answer)
    if _DROPPED.search(gold) or _DROPPED.search(answer):  # without its prime, 5' would be 5
        return False
    if not deep:
        return None
    # Imported here: sympy takes seconds to load, and most samples never come to this line.
    from trl_drgrpo.rewards.functions.mathematics.algebra import algebraically_equal

    return algebraically_equal(gold, answer)


def for_algebra(text: str) -> str:
    """Return `text` without what the parser drops or misreads; degrees in the argument of a function become
    radians."""
    if r"\degree" in text and ANGLE_FUNCTION.search(text):  # to the parser, `\sin 30` is of radians
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _DERIVATIVE.sub(_derivative_letter, text)
    text = respelled(text, _SPELLINGS)
    return _PRIMED.sub(lambda match: f"{match[1]}_{{9{len(match[2])}}}", text)


def _derivative_letter(derivative: re.Match[str]) -> str:
    r"""Write `\frac{dy}{dx}` as `D_{7dydx}`: one letter, whose index tells of what it is and by what."""
    return f"D_{{7{re.sub(r'[^0-9a-zA-Z]|frac', '', derivative[0])}}}"
