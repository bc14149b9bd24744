r"""The last step of comparing two answers: algebra, with Math-Verify's parser and sympy.

Formulas are compared by their values at a few points: rational values exactly, others to 30 digits and, where these
agree, to 200 behind the point. It refutes incorrect answers at once, where `simplify` searches, tells `2^{2019}-1`
from `2^{2019}-2`, and shows `\frac{\sqrt{3}}{3}` to be `\frac{1}{\sqrt{3}}`. Math-Verify's `verify` decides on
equations, inequalities and what has no such values.

How long it takes is not bounded here, and no signals are used; the caller bounds it. Loading sympy takes seconds: this
module is imported by the first comparison that needs it.
"""

import functools
import logging
from fractions import Fraction
from typing import Any

import latex2sympy2_extended
import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from trl_drgrpo.rewards.functions.mathematics.quantities import exact_number, is_rounded

Point = dict[Any, Any]  # symbol -> value; no narrower type is one that sympy's `subs` declares

# It warns once that its time-out is off. It is: signals work in the main thread only.
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

_CACHE = 4096  # a gold answer is read once for all completions of its group
_DIGITS = 30
_MORE_DIGITS = 200  # behind the point, for two values that agree in the first 30
_MAX_DIGITS = 20_000  # a value that needs more of them is not compared, and counts as different
_MAX_JUMPS = 10  # with three points around each


@functools.lru_cache(maxsize=_CACHE)
def algebraically_equal(gold: str, answer: str) -> bool:
    """Tell whether two tidied, cheap (`is_cheap`) formulas, equations or intervals are the same by algebra. `False`
    where one of them cannot be read."""
    a = _parsed(gold)
    b = _parsed(answer)
    if a is None or b is None:
        return False
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        # A decimal may be the rounded value of an irrational one, which no comparison of values forgives.
        for decimal, exact in ((gold, b), (answer, a)):
            number = exact_number(decimal)
            if not number or not number.places:
                continue
            value = _irrational_value(exact)
            if value is not None and is_rounded(number, value):
                return True
        verdict = _same_values(a, b)
        if verdict is not None:
            return verdict
    # `allow_set_relation_comp`: `x > 5` says the same as `(5, \infty)`. No time-out: it would be a signal.
    return math_verify.verify(a, b, allow_set_relation_comp=True, timeout_seconds=None)


def _same_values(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    r"""Tell whether two expressions agree in all points where both have a value; `None` where there is no such point.

    Where roots or logarithms of symbols are taken, a symbol is positive unless it alone may be negative: `\ln(ab)` is
    `\ln a+\ln b` and `\sqrt{k/m}` is `\sqrt{km}/m`, yet `\sqrt{x^2}` is not `x`.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)  # in an order, so that a verdict can be repeated
    points = []
    if symbols and _is_meant_real(a, b):
        for point in _points_with_one_negative(len(symbols)):
            values = dict(zip(symbols, point, strict=True))
            if _is_real(a, values) and _is_real(b, values):
                points.append(values)
    if not points:
        # Two that are nowhere both real are compared as complex functions.
        for point in _points(len(symbols) or 1, a, b):
            points.append(dict(zip(symbols, point, strict=False)))
    agreed = None
    for values in points:
        x = _value(a, values)
        y = _value(b, values)
        if x is None or y is None:  # a pole, or a value that sympy does not find
            continue
        # 30 digits refute almost every incorrect answer; only those that agree are worth 200 more.
        if not _close(x, y, _DIGITS - 10) or not _still_close(a, b, values, x, y):
            return False
        agreed = True
        if not symbols:  # the value is the same in all points
            break
    return agreed


def _points(dimension: int, a: sympy.Expr, b: sympy.Expr) -> list[list[Any]]:
    """Fractions of both signs without a pattern, and points of integers for what jumps there.

    A sum up to `n` has values at integers only; `\\lfloor n/100 \\rfloor` jumps at 100.
    """
    # Several of them: one polynomial may agree with another in a single point by chance.
    integers = [_progression(dimension, 3, 2), _progression(dimension, 6, 1), _progression(dimension, 10, 3)]
    if _has(a, b, sympy.Sum, sympy.Product):
        return integers
    positive = _fractions(dimension)
    negative = [sympy.Rational(-(11 * i + 5), 7) for i in range(dimension)]
    mixed = positive.copy()
    mixed[1::2] = negative[1::2]
    points = [positive, negative, mixed, integers[0]]
    if _has(a, b, sympy.floor, sympy.ceiling, sympy.Mod):
        # It jumps at its own numbers; one point is far from the small ones.
        jumps = {1009}
        for number in a.atoms(sympy.Rational) | b.atoms(sympy.Rational):
            jumps |= {abs(number.p), number.q}
        for jump in sorted(jumps)[-_MAX_JUMPS:]:
            for offset in (-1, 0, 1):
                points.append([sympy.Integer(jump + offset)] * dimension)
    return points


def _has(a: sympy.Expr, b: sympy.Expr, *kinds: Any) -> bool:
    return a.has(*kinds) or b.has(*kinds)


def _progression(dimension: int, start: int, step: int) -> list[Any]:
    return [sympy.Integer(start + step * i) for i in range(dimension)]


def _fractions(dimension: int) -> list[Any]:
    return [sympy.Rational(17 * i + 29, 13 * (3 + i)) for i in range(dimension)]


def _is_meant_real(a: sympy.Expr, b: sympy.Expr) -> bool:
    r"""Tell whether roots or logarithms are taken of symbols, and nothing says that these may be negative or complex.

    `\ln|x|` says more than `\ln x`: what stands in bars may be negative.
    """
    if _has(a, b, sympy.I, sympy.Sum, sympy.Product):
        return False
    if bool(a.atoms(sympy.Abs)) != bool(b.atoms(sympy.Abs)):
        return False
    return bool(_complex_parts(a) or _complex_parts(b))


def _complex_parts(expression: sympy.Expr) -> list[Any]:
    """Logarithms, and powers with a fractional exponent, that are complex for some values of their symbols."""
    parts = []
    for part in expression.atoms(sympy.Pow, sympy.log):
        has_integer_power = isinstance(part, sympy.Pow) and part.exp.is_integer  # x^2 is real wherever x is
        if part.args[0].free_symbols and not has_integer_power:
            parts.append(part)
    return parts


def _is_real(expression: sympy.Expr, values: Point) -> bool:
    """Tell whether an expression and all that it takes roots and logarithms of are real in a point."""
    for part in _complex_parts(expression):
        base = _value(part.args[0], values)
        if base is None or not base.is_real or base < 0:
            return False
    value = _value(expression, values)
    return value is not None and bool(value.is_real)


def _points_with_one_negative(dimension: int) -> list[list[Any]]:
    """Points of small fractions and of large integers, rising and falling with the symbols' names: all positive, then
    one of them negative."""
    fractions = _fractions(dimension)
    points = []
    # Both orders, for what is real only where one symbol is larger than another: `\sqrt{a-b}`.
    for numbers in (fractions, _progression(dimension, 3, 2), _progression(dimension, 10, 30)):
        points += [numbers, numbers[::-1]]
    for negative in range(dimension):
        signed = fractions.copy()
        signed[negative] = -signed[negative]
        points.append(signed)
    return points


def _value(expression: sympy.Expr, values: Point, digits: int = _DIGITS) -> Any:
    try:
        value: Any = expression.subs(values).doit()
        if value.is_Rational:
            return value
        # `maxn` bounds the precision that sympy works with to make up for cancellation.
        value = value.evalf(digits, maxn=max(100, 2 * digits))
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError, NotImplementedError):
        return None
    # Cancellation leaves 0.e-165 of zero, without a digit that counts: a precision of one bit.
    zeros = [number for number in value.atoms(sympy.Float) if number._prec == 1]
    value = value.xreplace(dict.fromkeys(zeros, sympy.Integer(0)))
    if not value.is_number or not value.is_finite or value.has(sympy.nan, sympy.zoo):
        return None
    return value


def _close(x: sympy.Expr, y: sympy.Expr, digits: int) -> bool:
    if x.is_Rational and y.is_Rational:
        return x == y
    tolerance = max(abs(x), abs(y)) * sympy.Rational(1, 10**digits)
    return bool(abs(x - y) <= tolerance)


def _still_close(a: sympy.Expr, b: sympy.Expr, values: Point, x: sympy.Expr, y: sympy.Expr) -> bool:
    """Tell whether two values that agree in 30 digits do so in all before the point and in 200 behind it."""
    if x.is_Rational and y.is_Rational:
        return True  # compared exactly
    # Digits before the point from the number's bits: log10(2) is 0.301, rounded up. 2^{2019}-1 and 2^{2019}-2 differ
    # in the last of 608.
    larger = sympy.Float(max(abs(x), abs(y)), 15)
    _, _, exponent, bits = larger._mpf_
    digits = max(0, int((exponent + bits) * 0.302)) + _MORE_DIGITS
    if digits > _MAX_DIGITS:
        return False
    x = _value(a, values, digits)
    y = _value(b, values, digits)
    if x is None or y is None:
        return False
    return _close(x, y, digits - 20)  # the last digits may be noise


def real_value(text: str) -> Fraction | None:
    """The value of a formula without variables to 30 digits; `None` where it has none or cannot be read."""
    parsed = _parsed(text)
    if not isinstance(parsed, sympy.Expr) or parsed.free_symbols:
        return None
    value = _value(parsed, {})
    return Fraction(str(value)) if value is not None and value.is_real else None


def _irrational_value(expression: sympy.Expr) -> Fraction | None:
    """The value of an irrational number to 30 digits; a rational one is compared exactly, not as rounded."""
    if expression.free_symbols:
        return None
    value = _value(expression, {})
    if value is None or not value.is_real or value.is_Rational or expression.is_rational:
        return None
    return Fraction(str(value))


@functools.lru_cache(maxsize=_CACHE)
def _parsed(text: str) -> Any:
    """Read a text by Math-Verify's parser, with exact decimals and imaginary unit `i`; `None` if unreadable."""
    try:
        parsed = latex2sympy2_extended.latex2sympy(
            text,
            is_real=True,
            normalization_config=latex2sympy2_extended.NormalizationConfig(boxed="none"),
            # Math-Verify's `parse` leaves this at its default, to which R and r are one variable.
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:  # the limit of the worker, not a text that cannot be read
        raise
    except Exception:  # the parser raises bare ones
        return None
    if not isinstance(parsed, sympy.Basic):
        return parsed
    if parsed.has(sympy.zoo, sympy.nan, sympy.Derivative):
        return None  # of 1/0 any value is as good as another, and the derivative of a letter is no 0
    replaced: Point = {}
    for number in parsed.atoms(sympy.Float):
        replaced[number] = sympy.Rational(str(number))
    for symbol in parsed.free_symbols:
        if str(symbol) == "i":
            replaced[symbol] = sympy.I
    return parsed.xreplace(replaced) if replaced else parsed
