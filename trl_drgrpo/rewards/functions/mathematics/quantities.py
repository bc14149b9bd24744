r"""Numbers and units of answers: exact values without sympy, and which units contradict each other.

Most answers of GSM8K and MATH are an integer, a decimal or a fraction; `exact_number` reads them into a
`fractions.Fraction`, so that they are compared exactly and at once.

A unit is a product of powers, `m s^{-1}` or `\frac{\text{m}}{\text{s}}` or "meters per second", brought into one
spelling. One that is missing on either side is forgiven, two different ones are two different answers (`12 m` is not
`12 g`), and nothing is converted. A word that is no measure (`12 apples`) counts as the noun that it is.
"""

import contextlib
import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from trl_drgrpo.rewards.functions.mathematics.latex import respelled, rules

_MAX_EXPONENT = 1000  # an exact value has as many digits
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
# 1,234,567.8 and 1 234 567.8
_GROUPED = re.compile(r"(-?)\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_PLAIN = re.compile(rf"-?{DECIMAL}")
# 1\frac{4}{5}, and `1 4/5` with the space, without which it is 14/5
_MIXED = re.compile(r"(-?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))")
_FRACTION = re.compile(rf"(-?)(?:\\frac\{{(-?{DECIMAL})\}}\{{(-?{DECIMAL})\}}|\(?({DECIMAL})\)?/\(?(-?{DECIMAL})\)?)")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
# 6.72\cdot 10^{-5}, 10^{3}, 1e3
_SCIENTIFIC = re.compile(rf"(?:(-?{DECIMAL}) ?(?:\\cdot|x) ?|(-?))10\^\{{?(-?\d+)\}}?|(-?{DECIMAL})[eE]([+-]?\d+)")

_WORDS_TEXT = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_WORDS = _WORDS_TEXT.split()
IN_WORDS: dict[str, int] = dict(zip(_WORDS, [*range(20), *range(20, 100, 10)], strict=True))
for _ten in _WORDS[20:]:
    for _one in _WORDS[1:10]:
        IN_WORDS[f"{_ten}-{_one}"] = IN_WORDS[_ten] + IN_WORDS[_one]


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
    in_words = IN_WORDS.get(text.lower())
    if in_words is not None:
        return Number(Fraction(in_words))
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if _PLAIN.fullmatch(text):
        digits, _, decimals = text.lstrip("-").partition(".")
        significant = len((digits + decimals).lstrip("0"))
        # 0.333333 may be a third, 0.333 may not.
        return Number(Fraction(text), len(decimals) if significant >= 6 else 0)
    with contextlib.suppress(ZeroDivisionError):  # 1/0 is no number
        for form, read in _FORMS:
            match = form.fullmatch(text)
            number = match and read(match)
            if number:
                return number
    return None


def _mixed(match: re.Match[str]) -> Number | None:
    over = int(match[3] or match[5])
    under = int(match[4] or match[6])
    if over >= under:
        return None  # 2\frac{5}{2} is a product, if anything
    value = int(match[2]) + Fraction(over, under)
    return Number(-value if match[1] else value)


def _fraction(match: re.Match[str]) -> Number:
    value = Fraction(match[2] or match[4]) / Fraction(match[3] or match[5])
    return Number(-value if match[1] else value)


def _scientific(match: re.Match[str]) -> Number | None:
    mantissa = match[1] or match[4] or (match[2] or "") + "1"
    exponent = int(match[3] or match[5])
    if abs(exponent) > _MAX_EXPONENT:
        return None
    return Number(Fraction(mantissa) * Fraction(10) ** exponent)


def _repeating(match: re.Match[str]) -> Number:
    r"""Read `0.1\overline{6}`."""
    start = Fraction(f"{match[2] or 0}.{match[3] or 0}")
    period = Fraction(int(match[4]), 10 ** len(match[4]) - 1)  # 0.666... is 6/9
    value = start + period / 10 ** len(match[3])
    return Number(-value if match[1] else value)


_FORMS = ((_MIXED, _mixed), (_FRACTION, _fraction), (_SCIENTIFIC, _scientific), (_REPEATING, _repeating))


def numbers_equal(a: Number, b: Number) -> bool:
    """Tell whether two numbers are equal, or one is the other rounded to a decimal with six significant digits or
    more.

    Two decimals are never rounded: 0.0000672 is not 0.0000674.
    """
    if a.value == b.value:
        return True
    # Only a value whose decimals do not end has to be rounded: 0.999999 is not 1.
    if a.places and not _ends(b.value):
        return is_rounded(a, b.value)
    return is_rounded(b, a.value) and not _ends(a.value)


def is_rounded(decimal: Number, value: Fraction) -> bool:
    """Tell whether `decimal` is `value` rounded to as many places as it shows."""
    return decimal.places > 0 and abs(decimal.value - value) * 2 * 10**decimal.places <= 1


def is_near(rounded: str, value: Fraction, precisely: bool = False) -> bool:
    """Tell if `value` may be written as `rounded`, a tidied number: within 5%, or half a unit of its last place.
    `precisely`: within less than one unit of the last of at least three digits."""
    number = exact_number(rounded)
    if not number:
        return False
    integer, _, decimals = rounded.lstrip("-").partition(".")
    unit = Fraction(0)  # of the last place; a fraction has none
    if _PLAIN.fullmatch(rounded):
        unit = Fraction(1, 10 ** len(decimals))
    gap = abs(number.value - value)
    if precisely:
        return gap < unit and len((integer + decimals).lstrip("0")) >= 3
    return gap <= max(abs(value) / 20, unit / 2)


def _ends(value: Fraction) -> bool:
    """Tell whether the decimal expansion ends: no primes but 2 and 5 in the denominator."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def percent_equal(percent: Number, plain: Number) -> bool:
    """Compare 50% with 50 (the sign left out) and with 0.5 (the value); 0.5% only against 0.005."""
    if percent.value / 100 == plain.value:
        return True
    return abs(plain.value) >= 1 and percent.value == plain.value


# Units -----------------------------------------------------------------------------------------------------------

PERCENT = "%"
_PREFIXES = {"p": "pico", "n": "nano", "µ": "micro", "m": "milli", "c": "centi", "d": "deci", "": ""}
_PREFIXES |= {"k": "kilo", "M": "mega", "G": "giga", "T": "tera"}
# The symbol comes first; what follows are names and other spellings.
_WITH_PREFIX = """
m meter metre, g gram gramme, s second, l L liter litre, N newton, J joule, W watt, V volt, A ampere amp, K kelvin,
mol mole, Hz hertz, Pa pascal, C coulomb, F farad, Ω ohm, T tesla, H henry, eV electronvolt, cal calorie, bar, Wh
"""
_WITHOUT_PREFIX = """
in inch inche, ft foot feet, yd yard, mi mile, Å angstrom, ly lightyear, AU, t ton tonne, oz ounce, lb lbs pound,
u amu, gal gallon, s sec, min minute, h hr hour, d day, week wk, month mo, y yr year, atm atmosphere, kg kilo, g gm,
degree deg, rad radian, dollar usd buck, cent penny pennie, euro eur, mph, kph kmh,
unit
"""
_NO_MEASURES = {"pm", "TV"}  # no picometers and teravolts


def _measures() -> dict[str, str]:
    """Every spelling of a measure, with its symbol."""
    measures = {}
    for symbol, *names in map(str.split, _WITH_PREFIX.split(",")):
        for short, long in _PREFIXES.items():
            measures[short + symbol] = short + symbol
            for name in names:
                prefix = short if len(name) == 1 else long  # mL, milliliter
                measures[prefix + name] = short + symbol
    for symbol, *names in map(str.split, _WITHOUT_PREFIX.split(",")):
        measures |= dict.fromkeys((symbol, *names), symbol)
    for name in _NO_MEASURES:
        del measures[name]
    return measures


_MEASURES = _measures()
_SYMBOLS = {*_MEASURES.values(), PERCENT, "£", "¥"}
_POWERS_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_SPEEDS = {"mph": "mi", "kph": "km"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words after a number that change it: `5 or more`, `5 and a half`, `5 thirds`. A unit with one of them is none.
_NO_UNIT_TEXT = """
or and to than not no is maybe perhaps plus minus negative half halves third thirds fourth fourths fifth fifths
sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths factorial wrong
"""
_NO_UNIT = {*_NO_UNIT_TEXT.split(), *IN_WORDS}
_FILLERS = {"of", "the", "a", "an", "in", "each", "total", "about", "approximately"}
_MAX_WORDS = 6

_NUMBER = (
    rf"-?(?:{DECIMAL}[eE][+-]?\d+|(?:{DECIMAL} ?(?:\\cdot|x) ?)?10\^\{{-?\d+\}}|"
    rf"(?:{DECIMAL}|\\frac\{{\d+\}}\{{\d+\}})?(?:\\pi|\\sqrt\{{\d+\}})?|[\d,]+|\d+/\d+)"
)
_CURRENCY_BEFORE = re.compile(r"(-?)(?:(\\?\$)|(€|\\euro(?![a-z]))|(£|\\pounds(?![a-z]))|¥)\s*(?=[-\d.\\])")
_SIGN_AFTER = re.compile(r"(.*?[\d})])\s*(\\?%|\\degree ?(?:\\text\{([CF])\}|([CF]))?|\\?\$|€|£)$")
# The beginning of a unit that is set as text, also in a quotient: `/\text{s}`, `\mu\text{m}`, `\frac{\text{m}}`
_TEXT = re.compile(r"/?(?:\\mu ?)?(?:\\frac\{(?=\\(?:text|mu))|\\text\{)")
# 470 \Omega, 3 \mu m, 1.54 Å
_SYMBOL_AFTER = re.compile(r"(.*?) ?((?:[kMm] ?)?\\Omega|\\mu ?[a-zA-Z\\].*|Å)$")
_WORDS_AFTER = re.compile(rf"({_NUMBER})( ?)([A-Za-z](?:[A-Za-z .'/^{{}}()\d-]|\\cdot|\\mu)+)$")
# `m` alone is a variable, so are `mg` and `nm`; `in` and `min` are other words too often.
_UNSPACED = {name for name in _MEASURES if len(name) > 2 and name != "min"} | {
    *("mm", "cm", "km", "kg", "ml", "mL", "ft", "lb", "oz", "hr", "yd")
}
# A number, a space and one letter that is a unit. Without the space, `12m` is a product.
_LETTER_AFTER = re.compile(rf"({_NUMBER}) ([mgshlLNJWVK](?:\^\{{-?\d\}})?)$")
_CLOCK = re.compile(r"\d:\d\d")
ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_SIGNS = {"$": "dollar", "€": "euro", "£": "£", "%": PERCENT}
# \frac of two groups, with braces of one more level in them
_QUOTIENT = re.compile(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}")
_SPELLINGS = rules(
    (r"\\mu\s*", "µ"),
    (r"\\Omega", "Ω"),
    (r"(?<![A-Za-z])([kM]) (?=Ω)", r"\1"),
    (r"(?i)(?<![a-z])(light|electron)[ -](?=year|volt)", r"\1"),
)
_MARKS = {"/": "per", "(": "open", ")": "close"}
_IN_TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-zÅµΩ](?:[A-Za-zΩ'.-]*[A-Za-zΩ.])?|[\u3040-\u9fff]+)(?:(?P<digit>-?\d)(?![\d.]))?|\^\{?(?P<power>-?\d{1,2})\}?|"
    r"(?P<mark>[/()]|\\cdot)\s*)"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""
    A tidied answer without its unit, and the unit in one spelling: `"%"`, `"cm^2"`, `"m s^-1"`, `"dollar"`, `"apple"`;
    empty where there is none. A bare single letter is a variable: `12m` keeps it, `12 \text{ m}` does not.

    Example:

    ```python
    >>> split_unit(r"15\text{ square centimeters}"), split_unit(r"\$36"), split_unit("12m")
    (('15', 'cm^2'), ('36', 'dollar'), ('12m', ''))

    ```
    """
    # `8:30 am` is a time, and the degrees of `\sin 30\degree` are those of its argument.
    is_angle = ANGLE_FUNCTION.search(text) and text.rstrip().endswith("degree")
    if is_angle or _CLOCK.search(text):
        return text, ""
    # A currency in front, a sign behind, or words behind: the first of these that is there is the unit.
    before = _CURRENCY_BEFORE.match(text)
    if before:
        amount, after = split_unit(text[before.end() :])
        unit = "¥"
        for name, mark in (("dollar", before[2]), ("euro", before[3]), ("£", before[4])):
            if mark:
                unit = name
        if after not in ("", unit):  # $5 million
            unit = f"{unit} {after}"
        return before[1] + amount, unit
    sign = _SIGN_AFTER.fullmatch(text)
    if sign:
        mark = sign[2].lstrip("\\")
        scale = sign[3] or sign[4] or ""
        return sign[1].strip(), _SIGNS.get(mark, f"degree {scale}".rstrip())
    value, unit = _written_out(text)
    if unit is None:
        return text, ""
    return value, unit


def _written_out(text: str) -> tuple[str, str | None]:
    r"""The value and the unit of `5\text{ m}`, `5\Omega` and `5 meters`; no unit where it is part of the algebra."""
    # Set as text, behind something that can be a value and is not inside braces.
    for start in _TEXT.finditer(text):
        value = text[: start.start()].strip()
        if re.search(r"[\d})\]a-z]$", value) and value.count("{") == value.count("}"):
            return value, canonical_unit(text[start.start() :])
    # Behind a number only: `\sin\Omega` has a variable.
    symbol = _SYMBOL_AFTER.fullmatch(text)
    if symbol and exact_number(symbol[1]):
        return symbol[1], canonical_unit(symbol[2], is_text=False)
    words = _WORDS_AFTER.fullmatch(text)
    if not words or not words[1].strip("-"):
        return text, None
    if re.match(r"x(?![a-z])", words[3]):  # `2 x cm` multiplies
        return text, None
    # Without a space, `5cm` has a unit and `5ab` is a product.
    if words[2] or words[3].partition("^")[0].removesuffix("s") in _UNSPACED:
        return words[1], canonical_unit(words[3], is_text=False)
    return text, None


def letter_unit(text: str) -> tuple[str, str] | None:
    """The value and the unit of `12 m` or `20 m^2`, which are products in algebra; `None` for anything else."""
    match = _LETTER_AFTER.fullmatch(text)
    if not match:
        return None
    unit = canonical_unit(match[2])
    return (match[1], unit) if unit else None


def split_scale(unit: str) -> tuple[int, str]:
    """The factor in a unit of [`split_unit`] and the rest of it: `dollar million` is `(1000000, "dollar")`."""
    factor = 1
    words_left = []
    for word in unit.split():
        if word in _SCALES:
            factor *= _SCALES[word]
        else:
            words_left.append(word)
    return factor, " ".join(words_left)


def canonical_unit(text: str, is_text: bool = True) -> str | None:
    r"""
    A unit (`\text{ m}/\text{s}`, `square centimeters`, `red apples`) in one spelling, its measures before its nouns;
    `None` where it is no unit. Where it is not set as text (`is_text`), letters may be variables: `m` does not count,
    nor does `ab`.

    Example:

    ```python
    >>> canonical_unit(r"\text{m}\cdot\text{s}^{-1}"), canonical_unit("feet squared"), canonical_unit("ab", False)
    ('m s^-1', 'ft^2', None)

    ```
    """
    tokens = _tokens(text)
    if not tokens:
        return None
    # `square meters per hour`: powers {m: 2, h: -1}. `red apples`: nouns [red, apple].
    powers: Counter[str] = Counter()
    nouns: list[str] = []
    sign = 1  # -1 behind "per", up to the end of the bracket that it stands in
    signs = []  # in front of the open brackets
    to_raise = 1  # "square" raises the next word, "squared" the last
    last = None
    for kind, token in tokens:
        if kind == "per":
            sign = -1
        elif kind == "open":
            signs.append(sign)
        elif kind == "close":
            sign = signs.pop() if signs else sign
        elif kind == "raise":
            to_raise = _POWERS_BEFORE[token]
        elif kind == "power":
            if last is None:
                return None  # 5 squared, apples^2
            powers[last] *= int(token)
        else:
            last = _measure(token)
            if last or sign < 0:  # behind "per" a noun has a power, too: $3 per apple
                last = last or _singular(token)
                powers[last] += sign * to_raise
                to_raise = 1
            elif token.isascii() and len(token) < (2 if is_text else 3):
                return None  # a variable
            else:
                nouns.append(_singular(token))
    for speed in powers.keys() & _SPEEDS.keys():  # mph is mi h^-1
        power = powers.pop(speed)
        powers[_SPEEDS[speed]] += power
        powers["h"] -= power
    are_letters = all(re.fullmatch("[A-Za-z]", token) for kind, token in tokens if kind == "word")
    if are_letters and not is_text and powers["s"] >= 0:
        return None  # `5 N m` may be a product; `5 m/s` is none
    factors = []
    for name, power in sorted(powers.items()):
        if name != "unit":  # "square units" and "units" say nothing
            factors.append(name if power == 1 else f"{name}^{power}")
    return " ".join(factors + nouns)


def _tokens(text: str) -> list[tuple[str, str]] | None:
    """The words, powers and marks of a unit; `None` where there is anything else, or a word that is no unit."""
    # `\frac{\text{m}}{\text{s}}` becomes `( m )/( s )`, `\mu\text{m}` becomes `µ m`.
    text = _IN_TEXT.sub(r" \1 ", _QUOTIENT.sub(r"(\1)/(\2)", text)).strip().rstrip(".")
    text = respelled(text, _SPELLINGS)
    tokens = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if not token:
            return None
        position = token.end()
        word = (token["word"] or "").rstrip(".")
        lower = word.lower()
        if lower in _NO_UNIT:
            return None
        if token["mark"] or lower == "per":
            mark = token["mark"] or "/"
            if mark in _MARKS:  # \cdot is none: words that follow each other are factors anyway
                tokens.append((_MARKS[mark], mark))
        elif lower in _POWERS_BEFORE:
            tokens.append(("raise", lower))
        elif word or token["power"]:
            power = token["power"] or token["digit"] or str(_POWERS_AFTER.get(lower, ""))
            if word and lower not in _POWERS_AFTER:
                tokens.append(("word", word))
            if power:
                tokens.append(("power", power))
    words = [token for kind, token in tokens if kind == "word"]
    if not words or len(words) > _MAX_WORDS:  # a sentence is no unit
        return None
    if len(words) == 1 or tokens[0][0] != "word":  # "in" alone is an inch
        return tokens
    return [token for token in tokens if token[1].lower() not in _FILLERS]


def _measure(word: str) -> str | None:
    """The symbol of a measure, however it is written; `None` for another noun."""
    # As it is written first: `Mg` and `mg` are two measures. One letter counts only so: `G` is no gram.
    lower = word.lower()
    for form in (word, word.removesuffix("s"), lower, lower.removesuffix("s")):
        if form in _MEASURES and (len(form) > 1 or form == word):
            return _MEASURES[form]
    return None


def _singular(noun: str) -> str:
    return noun.lower().removesuffix("s") if len(noun) > 3 else noun.lower()  # `bus` and `gas` stay


def units_agree(a: str, b: str) -> bool:
    """Tell whether two units can be meant alike: equal, one missing, or with nouns of which one is more detailed.

    Measures (`cm`, `cm^2`, `dollar`, `%`) have to be equal; `apple` and `red apple` agree, `apple` and `pear` do not;
    `degree` agrees with `degree C`.
    """
    if not a or not b or a == b:
        return True
    if {"degree"} < {a, b} <= {"degree", "degree C", "degree F"}:
        return True
    # `red apple` is a more detailed `apple`. A measure is never a detail: `kg apple` is no `apple`.
    words_a = {*a.split()}
    words_b = {*b.split()}
    for word in words_a ^ words_b:
        if word in _SYMBOLS or "^" in word:  # a measure that only one of them has
            return False
    return words_a <= words_b or words_b <= words_a
