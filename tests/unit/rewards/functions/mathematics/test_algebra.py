"""Algebra where sympy knows a value."""

from trl_drgrpo.rewards.functions.mathematics.algebra import algebraically_equal, real_value
from trl_drgrpo.rewards.functions.mathematics.relations import for_algebra


def test_sympy_is_not_asked_where_it_knows_no_value():
    for text in (r"\frac{1}{0}", r"\frac{d(x+y)}{dt}"):
        assert not algebraically_equal(for_algebra(text), for_algebra(text) + "+0")
    assert real_value("x") is real_value(r"\sqrt{-1}") is None
    assert abs(real_value(r"\sqrt{2}") ** 2 - 2) < 1e-20
