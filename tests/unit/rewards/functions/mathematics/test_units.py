import time

import pytest

from trl_drgrpo.rewards.functions.mathematics.latex import tidy
from trl_drgrpo.rewards.functions.mathematics.units import letter_unit, split_unit, units_agree


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (r"15\mbox{ cm}^2", ("15", "cm^2")),
        (r"15 \text{ square units}", ("15", "")),
        ("15 sq. feet", ("15", "ft^2")),
        (r"\$18.90", ("18.90", "dollar")),
        ("18.90 dollars", ("18.90", "dollar")),
        ("€5", ("5", "euro")),
        (r"90^\circ", ("90", "degree")),
        (r"25^\circ C", ("25", "degree C")),
        (r"20\%", ("20", "%")),
        ("5 miles per hour", ("5", "h^-1 mi")),
        ("12cm", ("12", "cm")),
        ("12m", ("12m", "")),
        ("12 m", ("12 m", "")),
        ("2x", ("2x", "")),
        (r"\frac{3}{4}\text{ hours}", (r"\frac{3}{4}", "h")),
        (r"7 \text{ men}", ("7", "men")),
        ("3 inches", ("3", "in")),
    ],
)
def test_units_are_split_off(text, due):
    assert split_unit(tidy(text)) == due


@pytest.mark.parametrize(
    ("a", "b", "due"),
    [
        ("cm", "", True),
        ("cm", "cm", True),
        ("cm", "cm^2", False),
        ("m", "g", False),
        ("%", "degree", False),
        ("apple", "red apple", True),
        ("apple", "pear", False),
        ("dollar", "apple", False),
    ],
)
def test_two_units_contradict_each_other_and_one_does_not(a, b, due):
    assert units_agree(a, b) is due
    assert units_agree(b, a) is due


# Physical units, however they are set.
@pytest.mark.parametrize(
    ("text", "due"),
    [
        (r"5\ \mathrm{m\,s^{-1}}", ("5", "m s^-1")),
        (r"9.8\ \frac{\text{m}}{\text{s}^2}", ("9.8", "m s^-2")),
        (r"8.3\ \mathrm{J/(mol\cdot K)}", ("8.3", "J K^-1 mol^-1")),
        (r"4\text{ N}\cdot\text{m}", ("4", "N m")),
        (r"5\,k\Omega", ("5", "kΩ")),
        ("470 Ω", ("470", "Ω")),
        (r"3\ \mu\mathrm{m}", ("3", "µm")),
        ("2.2 μF", ("2.2", "µF")),
        (r"1.54\ \text{\AA}", ("1.54", "Å")),
        ("1.54 Å", ("1.54", "Å")),
        ("2 cm^{-3}", ("2", "cm^-3")),
        ("8.7e8 m/s", ("8.7e8", "m s^-1")),
        (r"2.5\times10^8\ \mathrm{m/s}", (r"2.5\cdot 10^{8}", "m s^-1")),
        (r"7.2\ {\rm km/s}", ("7.2", "km s^-1")),
        (r"\SI{7.2}{km/s}", ("7.2", "km s^-1")),
        (r"5\text{ light years}", ("5", "ly")),
        (r"18\pi cm^3", (r"18\pi", "cm^3")),
        (r"\$5/\text{hour}", ("5", "dollar h^-1")),
        ("60 mph", ("60", "h^-1 mi")),
        ("5 kg of apples", ("5", "kg apple")),
        # algebra
        ("2mg", ("2mg", "")),
        ("2nm", ("2nm", "")),
        ("3 ab", ("3 ab", "")),
        ("2 a/b", ("2 a/b", "")),
        ("5 N m", ("5 N m", "")),
        (r"2\mu", (r"2\mu", "")),
        (r"2\Omega+1", (r"2\Omega+1", "")),
        (r"\sin\Omega", (r"\sin\Omega", "")),
        ("5 squared", ("5 squared", "")),
    ],
)
def test_physical_units(text, due):
    assert split_unit(tidy(text)) == due


def test_letters_with_a_space_are_a_unit_where_that_is_known_already():
    assert letter_unit("12 m") == ("12", "m")
    assert letter_unit("20 m^{2}") == ("20", "m^2")
    assert letter_unit("12 x") is letter_unit("12m") is letter_unit("m") is None


@pytest.mark.parametrize(
    ("a", "b", "due"),
    [
        ("kJ mol^-1", "kJ", False),
        ("m s^-1", "m s^-2", False),
        ("mg", "Mg", False),
        ("kg apple", "kg", True),
        ("kg apple", "apple", False),
        ("degree C", "degree", True),
        ("degree C", "degree F", False),
        ("degree K", "degree", False),
    ],
)
def test_measures_have_to_be_equal_and_nouns_may_be_left_out(a, b, due):
    assert units_agree(a, b) is due
    assert units_agree(b, a) is due


@pytest.mark.parametrize(
    "text",
    [
        "5 " + "m/" * 480 + "s",
        "5 " + "(" * 990,
        r"5\frac{\text{" * 70,
        "1" * 990 + " m",
        r"5\mu" * 200,
        r"5\text{ m}" * 90,
    ],
)
def test_a_hostile_unit_is_quick(text):
    start = time.perf_counter()
    split_unit(text)
    assert time.perf_counter() - start < 1  # milliseconds
