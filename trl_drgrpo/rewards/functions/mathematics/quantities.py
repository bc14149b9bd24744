r"""Numbers and units of answers: exact values without sympy, and which units contradict each other.

Most answers of GSM8K and MATH are an integer, a decimal or a fraction; `exact_number` reads them into a
`fractions.Fraction`, so that they are compared exactly and at once. Units are split off: one that is missing on either
side is forgiven, two different ones are two different answers (`12 m` is not `12 g`), and nothing is converted.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_MAX_EXPONENT = 1000
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_GROUPED = re.compile(r"(-?)\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_PLAIN = re.compile(rf"-?{_DECIMAL}")
_MIXED = re.compile(r"(-?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))")
_FRACTION = re.compile(
    rf"(-?)(?:\\frac\{{(-?{_DECIMAL})\}}\{{(-?{_DECIMAL})\}}|\(?({_DECIMAL})\)?/\(?(-?{_DECIMAL})\)?)"
)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"(?:(-?{_DECIMAL}) ?(?:\\cdot|x) ?|(-?))10\^\{{?(-?\d+)\}}?|(-?{_DECIMAL})[eE]([+-]?\d+)")


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
    r"""The value of an integer, decimal (repeating too), fraction, mixed number or power of ten.

    Args:
        text (`str`): A tidied answer without its unit.

    Returns:
        `Number` or `None`: `None` for anything else.

    Example:

    ```python
    >>> exact_number(r"1\frac{4}{5}").value, exact_number("16,800,000").value, exact_number(r"\sqrt{2}")
    (Fraction(9, 5), Fraction(16800000, 1), None)

    ```
    """
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _PLAIN.fullmatch(text):
        digits, _, decimals = text.lstrip("-").partition(".")
        significant = len((digits + decimals).lstrip("0"))
        return Number(Fraction(text), len(decimals) if significant >= 6 else 0)
    try:
        return _mixed(text) or _fraction(text) or _scientific(text) or _repeating(text)
    except ZeroDivisionError:
        return None


def _mixed(text: str) -> Number | None:
    if not (match := _MIXED.fullmatch(text)):
        return None
    over, under = int(match[3] or match[5]), int(match[4] or match[6])
    if over >= under:
        return None  # 2\frac{5}{2} is a product, if anything
    return Number((int(match[2]) + Fraction(over, under)) * (-1 if match[1] else 1))


def _fraction(text: str) -> Number | None:
    if not (match := _FRACTION.fullmatch(text)):
        return None
    value = Fraction(match[2] or match[4]) / Fraction(match[3] or match[5])
    return Number(-value if match[1] else value)


def _scientific(text: str) -> Number | None:
    if not (match := _SCIENTIFIC.fullmatch(text)):
        return None
    mantissa = match[1] or match[4] or (match[2] or "") + "1"
    exponent = int(match[3] or match[5])
    return Number(Fraction(mantissa) * Fraction(10) ** exponent) if abs(exponent) <= _MAX_EXPONENT else None


def _repeating(text: str) -> Number | None:
    r"""`0.1\overline{6}`."""
    if not (match := _REPEATING.fullmatch(text)):
        return None
    start, period = Fraction(f"{match[2] or 0}.{match[3] or 0}"), Fraction(int(match[4]), 10 ** len(match[4]) - 1)
    return Number((start + period / 10 ** len(match[3])) * (-1 if match[1] else 1))


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


# Units ---------------------------------------------------------------------------------------------------------------

PERCENT = "%"
_SYNONYMS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gm",
    "kg": "kg kilogram kilo",
    "t": "t ton tonne",
    "oz": "oz ounce",
    "lb": "lb lbs pound",
    "ms": "ms millisecond",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "d": "d day",
    "week": "wk week",
    "month": "mo month",
    "y": "yr year",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "degree": "degree deg",
    "radian": "rad radian",
    "dollar": "dollar usd buck",
    "cent": "cent penny pennie",
    "euro": "euro eur",
    "mi per h": "mph",
    "km per h": "kmh kph",
}
_MEASURES = {word: unit for unit, words in _SYNONYMS.items() for word in words.split()}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SYMBOLS = set("NJWVACF")  # one capital in \\text{} that is a unit; \\text{i} and \\text{x} are no units
# Words after a number that change it.
_NO_UNIT_TEXT = """
or and to than not no is maybe perhaps plus minus negative half halves third thirds fourth fourths fifth fifths
sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths factorial wrong zero one
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_NO_UNIT = frozenset(_NO_UNIT_TEXT.split())
_FILLERS = {"of", "the", "a", "an", "in", "each", "total", "about", "approximately"}
# `m` alone is a variable, `in` and `min` are other words too often.
_BARE_MEASURES = "|".join(sorted((w for w in _MEASURES if len(w) > 1 and w not in ("in", "min")), key=len)[::-1])

_CURRENCY_BEFORE = re.compile(r"(-?)(?:(\\?\$)|(€|\\euro(?![a-z]))|(£|\\pounds(?![a-z])))\s*(?=[-\d.\\])")
_SIGN_AFTER = re.compile(r"(.*?[\d})])\s*(\\?%|\\degree ?(?:\\text\{([CF])\}|([CF]))?|\\?\$|€|£)$")
_TEXT_AFTER = re.compile(r"(.*?\S)\s*\\text\{([^{}]*)\}(?:\^\{(\d)\})?$")
_WORDS_AFTER = re.compile(
    rf"(-?(?:{_DECIMAL}|[\d,]+|\d+/\d+|\\frac\{{\d+\}}\{{\d+\}}))"
    rf"(?: ((?!x\b|and\b|or\b)[A-Za-z][A-Za-z .'/-]+)| ?((?:{_BARE_MEASURES})s?))(?:\^\{{(\d)\}})?$"
)
_CLOCK = re.compile(r"\d:\d\d")
ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_SIGNS = {"$": "dollar", "€": "euro", "£": "pound sterling", "%": PERCENT}


def split_unit(text: str) -> tuple[str, str]:
    r"""An answer and its unit.

    Args:
        text (`str`): A tidied answer.

    Returns:
        `tuple[str, str]`: The answer without it, and the unit in one spelling: `"%"`, `"cm^2"`, `"dollar"`, `"apple"`;
        empty where there is none. A bare single letter is a variable: `12m` keeps it, `12 \text{ m}` does not.

    Example:

    ```python
    >>> split_unit(r"15\text{ square centimeters}"), split_unit(r"\$36"), split_unit("12m")
    (('15', 'cm^2'), ('36', 'dollar'), ('12m', ''))

    ```
    """
    if _CLOCK.search(text) or (ANGLE_FUNCTION.search(text) and text.rstrip().endswith("degree")):
        return text, ""
    if before := _CURRENCY_BEFORE.match(text):
        rest, after = split_unit(text[before.end() :])
        unit = "dollar" if before[2] else "euro" if before[3] else "pound sterling"
        return before[1] + rest, unit if after in ("", unit) else f"{unit} {after}"
    if sign := _SIGN_AFTER.fullmatch(text):
        mark = sign[2].lstrip("\\")
        scale = sign[3] or sign[4]
        return sign[1].strip(), _SIGNS.get(mark, f"degree {scale}" if scale else "degree")
    if (worded := _TEXT_AFTER.fullmatch(text)) and re.search(r"[\d})\]a-z]$", worded[1]):
        unit = canonical_unit(worded[2], worded[3])
        return (worded[1].strip(), unit) if unit is not None else (text, "")
    if worded := _WORDS_AFTER.fullmatch(text):
        unit = canonical_unit(worded[2] or worded[3], worded[4])
        return (worded[1], unit) if unit is not None else (text, "")
    return text, ""


def split_scale(unit: str) -> tuple[int, str]:
    """The factor in a unit and the rest of it: `million dollar` is `(1000000, "dollar")`.

    Args:
        unit (`str`): A unit in the spelling of [`split_unit`].

    Returns:
        `tuple[int, str]`: The factor, 1 where there is none, and the unit without it.
    """
    factor, rest = 1, []
    for word in unit.split():
        if word in _SCALES:
            factor *= _SCALES[word]
        else:
            rest.append(word)
    return factor, " ".join(rest)


def canonical_unit(words: str, power: str | None = None) -> str | None:
    r"""`square centimeters`, `sq cm` and `cm` with power 2 in one spelling, `cm^2`; `None` where it is no unit."""
    words = words.strip().strip(".").strip()
    if power is None and (raised := re.search(r"\^\{?(\d)\}?$", words)):
        power, words = raised[1], words[: raised.start()]
    words = re.sub(r"\s*/\s*|\bper\b", " per ", words)
    tokens = [token.strip(".,") for token in words.split()]
    if any(re.search(r"[^A-Za-z'.-]", token) for token in tokens) or len(tokens) > 6:
        return None
    if (
        "," in words
        or _NO_UNIT & {token.lower() for token in tokens}
        or (len(words) == 1 and words not in {*_MEASURES, *_SYMBOLS})
    ):
        return None
    names = []
    for token in tokens:
        if token.lower() in _POWERS:
            power = _POWERS[token.lower()]
        elif token.lower().removesuffix("s") != "unit" and (len(tokens) == 1 or token.lower() not in _FILLERS):
            names.append(_singular(token))
    if not names:
        return None if power and tokens and tokens[-1].lower() in _POWERS else ""  # 5 squared
    return " ".join(names) + (f"^{power}" if power and power != "1" else "")


def _singular(word: str) -> str:
    if word in _MEASURES:
        return _MEASURES[word]
    word = word.lower()
    for form in (word, word.removesuffix("s")):
        if form in _MEASURES and len(form) > 1:
            return _MEASURES[form]
    return word.removesuffix("s") if len(word) > 3 else word


_KNOWN = set(_SYNONYMS) | {"%", "pound sterling", "degree C", "degree F"}


def units_agree(a: str, b: str) -> bool:
    """Whether two units can be meant alike: equal, one missing, or two nouns of which one is more detailed.

    Measures (`cm`, `cm^2`, `dollar`, `%`) have to be equal; `apple` and `red apple` agree, `apple` and `pear` do not.
    """
    if not a or not b or a == b:
        return True
    if _is_measure(a) or _is_measure(b):
        return False
    words_a, words_b = set(a.split()), set(b.split())
    return words_a <= words_b or words_b <= words_a


def _is_measure(unit: str) -> bool:
    return unit in _KNOWN or "^" in unit or any(word in _KNOWN for word in unit.split())
