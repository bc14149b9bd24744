from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.rewards.functions.mathematics.quantities import (
    Number,
    exact_number,
    numbers_equal,
    percent_equal,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-12", Fraction(-12)),
        (".35625", Fraction(35625, 100000)),
        ("16,800,000", Fraction(16_800_000)),
        ("10 080", Fraction(10_080)),
        (r"\frac{-0.5}{3}", Fraction(-1, 6)),
        ("-3/4", Fraction(-3, 4)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"6.72\cdot 10^{-5}", Fraction(672, 10**7)),
        ("10^{3}", Fraction(1000)),
        ("1e3", Fraction(1000)),
    ],
)
def test_exact_values(text, value):
    number = exact_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text", ["", "-", ".", "1/0", "1,23", "1234,567", r"\frac{1}{x}", "1e9999", "2\\frac{5}{2}", "1 2"]
)
def test_what_is_no_number(text):
    assert exact_number(text) is None


@given(st.fractions(), st.integers(0, 12))
def test_a_decimal_stands_for_what_rounds_to_it_if_it_has_six_digits(value, places):
    rounded = Fraction(round(value * 10**places), 10**places)
    digits = f"{abs(rounded.numerator * 10**places // rounded.denominator):0{places + 1}d}"
    text = ("-" if rounded < 0 else "") + (digits[:-places] + "." + digits[-places:] if places else digits)
    decimal = exact_number(text)
    assert decimal is not None
    assert decimal.value == rounded
    ends = all(prime in (2, 5) for prime in prime_factors(value.denominator))
    is_long = places > 0 and len(digits.lstrip("0")) >= 6
    assert numbers_equal(decimal, Number(value)) is (rounded == value or (is_long and not ends))


def prime_factors(number):
    factor, found = 2, set()
    while number > 1 and factor < 6:
        while number % factor == 0:
            found.add(factor)
            number //= factor
        factor += 1
    return found | ({number} if number > 1 else set())


def test_percents():
    number = exact_number
    assert percent_equal(number("50"), number("50"))
    assert percent_equal(number("50"), number("0.5"))
    assert percent_equal(number("0.5"), number("0.005"))
    assert not percent_equal(number("0.5"), number("0.5"))
    assert not percent_equal(number("50"), number("5000"))
