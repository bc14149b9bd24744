"""What holds of every answer: bounded time, whatever is written, and invariants of numbers, pairs and sets."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
from case_tables import cases
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.rewards.functions.mathematics import unreadable_gold
from trl_drgrpo.rewards.functions.mathematics.algebra import algebraically_equal, real_value
from trl_drgrpo.rewards.functions.mathematics.answers import extract_answer, gold_answers, unreadable
from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent
from trl_drgrpo.rewards.functions.mathematics.guards import is_cheap, is_well_formed
from trl_drgrpo.rewards.functions.mathematics.latex import group_end, tidy, unwrapped
from trl_drgrpo.rewards.functions.mathematics.quantities import Number, exact_number, numbers_equal, split_unit
from trl_drgrpo.rewards.functions.mathematics.relations import for_algebra, same_formula

# Answers in a text ---------------------------------------------------------------------------------------------------


def test_each_place_is_looked_at_alone():
    everywhere = "#### 3\n<answer>2</answer> \\boxed{1}"
    assert [extract_answer(everywhere, place) for place in ("boxed", "tags", "final_line")] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("gold", "due"),
    [
        *[("42", ["42"]), (42, ["42"]), (42.0, ["42"]), (0.1, ["0.1"]), (np.int64(3), ["3"])],
        *[(["1", r"\boxed{2}", None], ["1", "2"]), (("1/2", 0.5), ["1/2", "0.5"]), (np.array([1, 2]), ["1", "2"])],
        *[(r"So $x = 3$ and thus \boxed{3}.", ["3"]), ("5 * 2 = 10\n#### 10", ["10"]), ("<answer>7</answer>", ["7"])],
        *[(nothing, []) for nothing in ("", "  ", None, math.nan, math.inf, True, [], {"a": 1})],
    ],
)
def test_gold_answers(gold, due):
    assert gold_answers(gold) == due


def test_one_of_several_gold_answers_has_to_be_readable():
    assert unreadable_gold(["x +", "2"]) is unreadable_gold(3) is None
    assert unreadable_gold(None) == "empty"
    assert unreadable_gold("x" * 1001) == "longer than 1000 characters"


@given(
    st.text(alphabet=r"\boxed{} <answer>/#*$ is:.1", max_size=200),
    st.sampled_from(["auto", "boxed", "tags", "final_line"]),
)
def test_no_text_breaks_it_and_no_answer_is_empty(text, place):
    answer = extract_answer(text, place)
    assert answer is None or answer.strip()


def endless(section, size):
    """Texts of about that size."""
    for _, beginning, repeated, end in cases("math_reading.tsv", section):
        yield beginning + repeated * (size // len(repeated)) + end


NESTED = [r"\boxed{" * 10_000 + blanks + "}" * 10_000 for blanks in ("", " " * 50_000)]


@pytest.mark.parametrize("text", [*endless("endless completions", 100_000), *NESTED])
def test_a_hundred_kilobytes_cost_milliseconds(text):
    start = time.perf_counter()
    for place in ("auto", "boxed", "tags", "final_line"):
        extract_answer(text, place)
    assert time.perf_counter() - start < 2


# Spelling, guards, numbers, units ------------------------------------------------------------------------------------


@given(st.text(alphabet=r"01xy+-/^_(){}[],.\$ \frac\sqrt\text", max_size=80))
def test_tidy_ends_and_bounds_its_output(text):
    assert len(tidy(text)) <= 8 * len(text) + 8
    assert unwrapped(unwrapped(text)) == unwrapped(text)


def test_a_group_ends_at_its_own_brace():
    assert group_end(r"{a\}{b}c}d", 0) == 9
    assert group_end("{a", 0) == -1


def test_endless_text_is_neither_well_formed_nor_cheap():
    assert not is_well_formed("x" * 1001)
    assert not is_well_formed("(" * 21 + ")" * 21)
    assert not is_cheap("9" * 300)


@pytest.mark.parametrize("text", endless("endless answers: a beginning, what is repeated, an end", 990))
def test_hostile_text_is_read_quickly(text):
    start = time.perf_counter()
    is_well_formed(text), is_cheap(text), tidy(text), split_unit(text)
    assert time.perf_counter() - start < 1  # milliseconds


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


# Equivalence ---------------------------------------------------------------------------------------------------------


def test_a_letter_after_a_space_is_a_unit_in_answers_only():
    assert equivalent("12", "12 m")
    assert not equivalent("12 m", "12")  # the gold answer may be a product


LONG = [r"\frac" * 200, "9" * 5000, "{" * 100_000, "(" * 50 + "1" + ")" * 50, "½" * 500]


@pytest.mark.parametrize("answer", [text for _, text in cases("math_reading.tsv", "wrong at once")] + LONG)
def test_answers_that_would_take_for_ever_are_wrong_at_once(answer):
    start = time.perf_counter()
    assert equivalent("1/2", answer) is False
    assert time.perf_counter() - start < 2  # milliseconds


def test_costly_answers_are_decided_without_algebra():
    assert same_formula("9^{9^{9}}", "9^{9^{8}}", deep=False) is False
    assert same_formula(r"\int_{0}^{1}2 x dx", r"\int_{0}^{1}2x dx", deep=False) is True
    assert same_formula("x+1", "1+x", deep=False) is None


def test_sympy_is_not_asked_where_it_knows_no_value():
    for text in (r"\frac{1}{0}", r"\frac{d(x+y)}{dt}"):
        assert not algebraically_equal(for_algebra(text), for_algebra(text) + "+0")
    assert real_value("x") is real_value(r"\sqrt{-1}") is None
    assert abs(real_value(r"\sqrt{2}") ** 2 - 2) < 1e-20


integers = st.integers(-(10**9), 10**9)
fractions = st.fractions(max_denominator=10**4)


@st.composite
def written(draw, values=fractions):
    """A rational number and one way to write it."""
    value = draw(values)
    sign, over, under = "-" if value < 0 else "", abs(value.numerator), value.denominator
    forms = [rf"{sign}\frac{{{over}}}{{{under}}}", f"{sign}{over}/{under}", rf"\dfrac{{{sign}{over}}}{{{under}}}"]
    if under == 1:
        forms += [f"{sign}{over}", f"{sign}{over:,}", rf"{sign}{over}.0", f"{sign}{over:,}".replace(",", "{,}")]
    if under == 1 and over < 10:
        forms += [rf"{sign}{over}\text{{ cm}}", rf"${sign}{over}$"]
    if over < 10 and under < 10:
        forms += [rf"{sign}\frac{over}{under}"]
    return value, draw(st.sampled_from(forms))


@given(written(), written())
def test_numbers_are_the_same_exactly_if_their_values_are(one, other):
    assert equivalent(one[1], other[1], deep=False) is (one[0] == other[0])


@given(integers, st.data())
def test_every_form_of_a_number_is_that_number(value, data):
    _, one = data.draw(written(st.just(Fraction(value))))
    _, other = data.draw(written(st.just(Fraction(value))))
    assert equivalent(one, other, deep=False) is True


@given(st.integers(1, 10**6), st.integers(6, 12))
def test_decimals_are_never_rounded_to_each_other(value, places):
    one, other = (f"0.{number:0{places}d}" for number in (value, value + 1))
    assert equivalent(one, one) is True
    assert equivalent(one, other) is False


ENTRIES = st.sampled_from(["1", "-2", r"\frac12", "0.5", "10", r"\frac{10}{3}", "x", "2x", r"\sqrt{2}"])


@given(st.lists(ENTRIES, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_order_matters_in_pairs_and_not_in_sets(entries, random):
    shuffled = random.sample(entries, len(entries))
    pair, other = f"({', '.join(entries)})", f"({','.join(shuffled)})"
    alike = [a == b or {a, b} == {r"\frac12", "0.5"} for a, b in zip(entries, shuffled, strict=True)]
    assert equivalent(pair, other) is all(alike)
    assert equivalent(rf"\{{{', '.join(entries)}\}}", rf"\left\{{ {','.join(shuffled)} \right\}}") is True


@given(
    st.lists(ENTRIES, min_size=1, max_size=3), st.lists(ENTRIES, min_size=1, max_size=3), st.sampled_from(["()", "[]"])
)
def test_equivalence_is_symmetric(one, other, brackets):
    left, right = (brackets[0] + ", ".join(entries) + brackets[1] for entries in (one, other))
    assert equivalent(left, right) is equivalent(right, left)


@given(st.text(alphabet=r"0123456789xyz+-*/^_(){}[],.\!%$= fract sqrt", max_size=60))
def test_no_text_breaks_the_cheap_comparison(text):
    assert equivalent("5", text, deep=False) in (True, False, None)
    if not unreadable(text):
        assert equivalent(text, text, deep=False) is True
