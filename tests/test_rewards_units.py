import pytest

from trl_drgrpo.rewards.mathematics.latex import tidy
from trl_drgrpo.rewards.mathematics.units import split_unit, units_agree


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
