r"""Formulas on their way to algebra: which are handed over, and how what its parser drops is written for it.

The parser takes `A^T` for `A`, `\gamma` for a function and `f'` for `f`, and to sympy the derivative of one letter by
another is 0. They become letters with an index here. A formula that is too costly is compared by its spelling.
"""

import re

from trl_drgrpo.rewards.functions.mathematics.algebra import algebraically_equal
from trl_drgrpo.rewards.functions.mathematics.guards import is_cheap
from trl_drgrpo.rewards.functions.mathematics.relations import DERIVATIVE
from trl_drgrpo.rewards.functions.mathematics.units import ANGLE_FUNCTION

# What the parser computes away: 5', gcd(a, b).
_DROPPED = re.compile(r"'|\\(?:gcd|lcm)(?![a-zA-Z])[^)]*[a-zA-Z]|(?:gcd|lcm)\}? ?\([^)]*[a-zA-Z]")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[a-zA-Z]) ?\\degree ?")
_PRIMED = re.compile(r"([a-zA-Z])('+)")
_DERIVATIVE = re.compile(DERIVATIVE)
# With an index of their own; no answer has such.
_SPELLINGS = (
    (re.compile(r"\\([gG])amma(?![a-zA-Z])(?:_\{(\w+)\})?"), r" \1_{8\2}"),
    (re.compile(r"\^\{(?:T|\\top|\\intercal)\}"), r"^{t_{8}}"),
    (re.compile(r"_\{\\(max|min)\}"), r"_{\1}"),
    (re.compile(r"(\d+|[a-zA-Z])!(?=\^)"), r"(\1!)"),
)
_LOOSE = re.compile(r"(?:(?<!\d)\\cdot|\\cdot(?! ?\d)|(?<!\d) | (?!\d))+")


def same_formula(gold: str, answer: str, deep: bool) -> bool | None:
    """Whether two tidied formulas are the same: by algebra where it is allowed (`deep`) and they are cheap, else by
    spelling. `None` where algebra is needed and not allowed."""
    if not (is_cheap(gold) and is_cheap(answer)):
        return _LOOSE.sub("", gold) == _LOOSE.sub("", answer)
    gold, answer = for_algebra(gold), for_algebra(answer)
    if _DROPPED.search(gold) or _DROPPED.search(answer):
        return False
    return algebraically_equal(gold, answer) if deep else None


def for_algebra(text: str) -> str:
    """`text` without what the parser drops or misreads; degrees in the argument of a function become radians."""
    if r"\degree" in text and ANGLE_FUNCTION.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _DERIVATIVE.sub(_derivative_letter, text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return _PRIMED.sub(lambda match: f"{match[1]}_{{9{len(match[2])}}}", text)


def _derivative_letter(derivative: re.Match[str]) -> str:
    r"""`D_{7dydx}` for `\frac{dy}{dx}`: one letter, whose index tells of what it is and by what."""
    return f"D_{{7{re.sub(r'[^0-9a-zA-Z]|frac', '', derivative[0])}}}"
