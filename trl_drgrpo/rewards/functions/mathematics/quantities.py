"""Numbers of answers: exact values without sympy.

Most answers of GSM8K and MATH are an integer, a decimal or a fraction; `exact_number` reads them into a
`fractions.Fraction`, so that they are compared exactly and at once.
"""

import contextlib
import re
from fractions import Fraction
from typing import NamedTuple

_MAX_EXPONENT = 1000
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_GROUPED = re.compile(r"(-?)\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_PLAIN = re.compile(rf"-?{DECIMAL}")
_MIXED = re.compile(r"(-?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))")
_FRACTION = re.compile(rf"(-?)(?:\\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}|\(?({DECIMAL})\)?/\(?(-?{DECIMAL})\)?)")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"(?:(-?{DECIMAL}) ?(?:\\cdot|x) ?|(-?))10\^\{{?(-?\d+)\}}?|(-?{DECIMAL})[eE]([+-]?\d+)")

_WORDS_TEXT = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_WORDS = _WORDS_TEXT.split()
IN_WORDS = {word: place if place < 20 else 10 * (place - 18) for place, word in enumerate(_WORDS)}
IN_WORDS |= {f"{ten}-{one}": IN_WORDS[ten] + IN_WORDS[one] for ten in _WORDS[20:] for one in _WORDS[1:10]}


class Number(NamedTuple):
    """An exact value, and how it was written.

    Args:
        value (`Fraction`): The value.
        places (`int`): Digits after the point where it was written as a decimal with enough digits to stand for
            a value that has no end (six significant ones); else 0.
    """

    value: Fraction
    places: int = 0


def exact_number(text: str) -> Number | None:
    r"""
    The value of a tidied integer (in words too, below 100), decimal (repeating too), fraction, mixed number or power
    of ten, without a unit; `None` for anything else.

    Example:

    ```python
    >>> exact_number(r"1\frac{4}{5}").value, exact_number("16,800,000").value, exact_number(r"\sqrt{2}")
    (Fraction(9, 5), Fraction(16800000, 1), None)

    ```
    """
    if (in_words := IN_WORDS.get(text.lower())) is not None:
        return Number(Fraction(in_words))
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _PLAIN.fullmatch(text):
        digits, _, decimals = text.lstrip("-").partition(".")
        significant = len((digits + decimals).lstrip("0"))
        return Number(Fraction(text), len(decimals) if significant >= 6 else 0)
    with contextlib.suppress(ZeroDivisionError):
        for form, read in _FORMS:
            if (match := form.fullmatch(text)) and (number := read(match)):
                return number
    return None


def _mixed(match: re.Match[str]) -> Number | None:
    over, under = int(match[3] or match[5]), int(match[4] or match[6])
    if over >= under:
        return None  # 2\frac{5}{2} is a product, if anything
    return Number((int(match[2]) + Fraction(over, under)) * (-1 if match[1] else 1))


def _fraction(match: re.Match[str]) -> Number:
    value = Fraction(match[2] or match[4]) / Fraction(match[3] or match[5])
    return Number(-value if match[1] else value)


def _scientific(match: re.Match[str]) -> Number | None:
    mantissa = match[1] or match[4] or (match[2] or "") + "1"
    exponent = int(match[3] or match[5])
    return Number(Fraction(mantissa) * Fraction(10) ** exponent) if abs(exponent) <= _MAX_EXPONENT else None


def _repeating(match: re.Match[str]) -> Number:
    r"""`0.1\overline{6}`."""
    start, period = Fraction(f"{match[2] or 0}.{match[3] or 0}"), Fraction(int(match[4]), 10 ** len(match[4]) - 1)
    return Number((start + period / 10 ** len(match[3])) * (-1 if match[1] else 1))


_FORMS = ((_MIXED, _mixed), (_FRACTION, _fraction), (_SCIENTIFIC, _scientific), (_REPEATING, _repeating))


def numbers_equal(a: Number, b: Number) -> bool:
    """Exactly equal, or one is the other rounded to a decimal with six significant digits or more.

    Two decimals are never rounded: 0.0000672 is not 0.0000674.
    """
    if a.value == b.value:
        return True
    return is_rounded(a, b.value) if a.places and not _ends(b.value) else is_rounded(b, a.value) and not _ends(a.value)


def is_rounded(decimal: Number, value: Fraction) -> bool:
    """Whether `decimal` is `value` rounded to as many places as it shows."""
    return decimal.places > 0 and abs(decimal.value - value) * 2 * 10**decimal.places <= 1


def is_near(rounded: str, value: Fraction, precisely: bool = False) -> bool:
    """Whether `value` may be written as `rounded`, a tidied number: to within 5%, or half a unit of its last place.
    `precisely`: whether it may stand in its place: three digits, and less than one unit of the last away."""
    if not (number := exact_number(rounded)):
        return False
    whole, _, decimals = rounded.lstrip("-").partition(".")
    unit = Fraction(1, 10 ** len(decimals)) if _PLAIN.fullmatch(rounded) else Fraction(0)
    gap = abs(number.value - value)
    if precisely:
        return gap < unit and len((whole + decimals).lstrip("0")) >= 3
    return gap <= max(abs(value) / 20, unit / 2)


def _ends(value: Fraction) -> bool:
    """Whether the decimal expansion ends: no primes but 2 and 5 in the denominator."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def percent_equal(percent: Number, plain: Number) -> bool:
    """50% against 50 (the sign left out) and against 0.5 (the value); 0.5% only against 0.005."""
    if percent.value / 100 == plain.value:
        return True
    return abs(plain.value) >= 1 and percent.value == plain.value
