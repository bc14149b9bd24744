r"""The cheap checks that keep a hostile answer away from algebra.

A text that is too long, too deeply nested or unbalanced is no answer (`is_well_formed`), and one like `9^{9^{9}}` or
`9999999!` is never handed to sympy, which would compute it (`is_cheap`).
"""

import math
import re

from trl_drgrpo.rewards.functions.mathematics.latex import group_end, letters

MAX_CHARS = 1000  # no answer of MATH or GSM8K has more than a tenth of it
MAX_DEPTH = 20
_MAX_DIGITS = 300
_MAX_POWER = 10_000  # product of the numeric exponents: 10^{10000} takes a millisecond, 9^{9^9} takes all day
_MAX_POWER_OF_SUM = 100  # (a+b+c)^{100} has 5151 terms
_MAX_FACTORIAL = 1000

# Escaped braces first, so that the brace of `\{` is not taken for one of LaTeX's own groups.
_BRACKET = re.compile(r"\\[{}]|\\\\|\\.|[{}()\[\]]", re.DOTALL)
_OPENING = ("{", "(", "[", r"\{")
_CLOSING = ("}", ")", "]", r"\}")
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS},}}")
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|lim|bigcup|bigcap)(?![a-zA-Z])")
# \sum_{k=1}^{99}, \sum_{k=0}^{n-1}
_SHORT_SUM = re.compile(r"\\(?:sum|prod)_\{[a-z]=-?\d\}\^\{(?:\d{1,2}|\d?[a-z](?:[+-]\d)?)\}")
_EXPONENT = re.compile(r"(.)\s*\^\s*")
# A power of a power without brackets: 9^{9}^{9}, x^y^z
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|\w+)\s*\^")
_INTEGER = re.compile(r"\d+")
_DIGITS = re.compile(r"^\d*")
_POWER_IN_POWER = re.compile(r"\^\{[^{}]*\^")
_OF_GROUP = re.compile(r"[)}\]]\s*!")
# \binom{2020}{3} has at most 99 factors.
_CHEAP_BINOMIAL = re.compile(r"\\binom\{\d{1,6}\}\{\d{1,2}\}")


def is_well_formed(text: str) -> bool:
    """Tell whether `text` is short, not deeply nested, and closes every brace it opens (intervals may mix theirs)."""
    if not text.strip() or len(text) > MAX_CHARS:
        return False
    # All kinds count as one, since half-open intervals close `(` by `]`. Braces are counted once more by themselves.
    depth = braces = 0
    for token in _BRACKET.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        braces += (token == "{") - (token == "}")
        if depth > MAX_DEPTH or depth < 0 or braces < 0:
            return False
    return depth == 0 and braces == 0


def is_cheap(text: str) -> bool:
    r"""
    Tell if sympy can be trusted with a tidied answer: no towers of powers, huge factorials, long sums or integrals.
    Other answers are compared by spelling alone; the limits err on the side of refusing.

    Example:

    ```python
    >>> is_cheap("2^{100}"), is_cheap("9^{9^{9}}"), is_cheap("9999999!")
    (True, False, False)

    ```
    """
    # One sum of at most 99 terms, or up to `n`, counts as a letter. Two could be one in the other.
    text = _SHORT_SUM.sub("s", text, count=1)
    if _LONG_NUMBER.search(text) or _UNBOUNDED.search(text) or _TOWER.search(text):
        return False
    return _powers_are_cheap(text) and _counts_are_cheap(text)


def _powers_are_cheap(text: str) -> bool:
    # Products, since exponents of nested powers multiply: ((2^{100})^{100})^{100}.
    of_numbers = 1
    of_sums = 1
    for power in _EXPONENT.finditer(text):
        base = power[1]
        exponent = _exponent(text, power.end())
        sizes = [*map(int, _INTEGER.findall(exponent))]
        is_of_e = base == "e" and not re.search(r"\\[a-zA-Z]*$", text[: power.start()])
        # e^{x^2} stays a symbol, 9^{9^9} is computed.
        if "^" in exponent and sizes and (not is_of_e or _POWER_IN_POWER.search(exponent)):
            return False
        if "!" in exponent or "binom" in exponent:
            return False
        for size in sizes:
            if base.isdigit():
                of_numbers *= max(size, 1)
            elif base in ")}]|!":  # of a group, which may be a sum that is multiplied out
                of_sums *= max(size, 1)
            elif size > _MAX_POWER:  # of a letter
                return False
    return of_numbers <= _MAX_POWER and of_sums <= _MAX_POWER_OF_SUM


def _exponent(text: str, start: int) -> str:
    """Return the exponent behind a `^`: up to the end of its brackets, or of the number."""
    if text.startswith("{", start):
        end = group_end(text, start)
        if end > 0:
            return text[start:end]
    if text.startswith("(", start):
        end = text.find(")", start)
        # Where another bracket opens, all that follows counts: too much rather than too little.
        if end < 0 or "(" in text[start + 1 : end]:
            return text[start:]
        return text[start:end]
    return text[start : start + 1] + _DIGITS.findall(text[start + 1 :])[0]


def _counts_are_cheap(text: str) -> bool:
    """Factorials and binomials of small numbers only, and no factorial of a factorial."""
    text = _CHEAP_BINOMIAL.sub(str(_MAX_FACTORIAL + 1), text)  # the number, so that no factorial of it passes
    if "!" not in text and "binom" not in text:
        return True
    if "!!" in text:  # 9!! may be read as (9!)!
        return False
    for factorial in _OF_GROUP.finditer(text):
        if not _small(text, factorial.start()):
            return False
    # All numbers, not only those in front of a sign: `(2 \cdot 5000)!` has its size inside.
    return max(map(int, _INTEGER.findall(text)), default=0) <= _MAX_FACTORIAL


def _small(text: str, end: int) -> bool:
    """Tell whether the group that ends at `end` is small enough for a factorial of it: `(2n-k)!`."""
    start = end
    depth = 0
    while start >= 0:  # back to the bracket that opens the group
        depth += (text[start] in ")}]") - (text[start] in "({[")
        if depth == 0:
            break
        start -= 1
    group = text[max(start, 0) : end]
    # A factorial or a power inside grows beyond what its numbers say, and `999/0.001` is larger than both of them.
    if re.search(r"[!^.|]|binom", group) or text[max(start - 1, 0)] == "^":
        return False
    if len(letters(group)) > 3 or len(re.findall("[a-z]", group)) > 3:
        return False
    # The group may multiply its numbers: `(999 \cdot 999)!`.
    return math.prod(max(int(number), 1) for number in _INTEGER.findall(group)) <= _MAX_FACTORIAL
