"""Formulas on their way to algebra, and algebra where sympy knows a value."""

import pytest

from trl_drgrpo.rewards.functions.mathematics.algebra import algebraically_equal, real_value
from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent
from trl_drgrpo.rewards.functions.mathematics.relations import for_algebra, same_formula

SAME = [
    (r"\gamma^2-1", r"(\gamma-1)(\gamma+1)"),
    (r"\beta+\Gamma", r"\Gamma+\beta"),
    (r"\frac{dx}{dt}=kx-a", r"\frac{\mathrm{d}x}{\mathrm{d}t} = -a+kx"),
    (r"\frac{d^2x}{dt^2}=-\omega^2 x", r"\frac{d^2x}{dt^2} = -x\omega^2"),
    ("P(1+r)^T", "P(r+1)^T"),
    (r"\frac{1}{\sqrt{2\pi}}e^{-x^2/2}", r"\frac{e^{-\frac{x^2}{2}}}{\sqrt{2\pi}}"),
    (r"\binom{n}{k}", r"\frac{n!}{k!(n-k)!}"),
    (r"\frac{(2n)!}{n!^2}", r"\frac{(2n)!}{(n!)^2}"),
    (r"\sum_{i=1}^n i", r"\frac{n(n+1)}{2}"),
    (r"\sum_{k=0}^{5} 2^k", "63"),
    (r"\lfloor n/2\rfloor", r"\left\lfloor \frac{n}{2}\right\rfloor"),
    ("kx-a", "-a+kx"),
    # by spelling
    (r"\sum_{k=1}^\infty k^{-2}", r"\sum_{k = 1}^{\infty}k^{-2}"),
    (r"\int_0^1 x dx", r"\int_{0}^{1} x\,\mathrm{d}x"),
    (r"\lim_{x\to 0} f(x)", r"\lim_{x \to 0}f(x)"),
    ("2^{2^n}", "2^{2^{n}}"),
    ("9^{9^{9}}", "9^{9^{9}}"),
]
DIFFERENT = [
    (r"\gamma^2-1", r"\gamma^2-2"),
    (r"\gamma_1+1", r"\gamma_2+1"),
    (r"\Gamma", r"\gamma"),
    (r"\frac{dx}{dt}=kx-a", "0=kx-a"),
    (r"\frac{dx}{dt}", "0"),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dt}=2x"),
    (r"\frac{d^2x}{dt^2}=-x", r"\frac{dx}{dt}=-x"),
    (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"),
    ("A^T", "A"),
    ("(AB)^T", "AB"),
    ("P(1+r)^T", "P(1+r)"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("e^{x^2}", "e^{x^3}"),
    (r"\binom{n}{2}", r"\frac{n(n+1)}{2}"),
    (r"\sum_{k=1}^n k", r"\frac{n(n-1)}{2}"),
    (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2"),
    (r"\lfloor n/2\rfloor", r"\lfloor n/3\rfloor"),
    (r"\lfloor (n+1)/100\rfloor", r"\lfloor n/100\rfloor"),
    (r"\lfloor n/2\rfloor+\lfloor m/2\rfloor", r"\lfloor (n+m)/2\rfloor"),
    (r"\lceil x\rceil", r"\lfloor x\rfloor+1"),
    (r"\int_0^1 12 dx", r"\int_0^1 1\cdot 2 dx"),
    (r"\int_0^1 x dx", r"\int_0^2 x dx"),
    ("9^{9^{9}}", "9^{9^{8}}"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_one_formula(gold, answer):
    assert equivalent(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_two_formulas(gold, answer):
    assert equivalent(gold, answer) is False
    assert equivalent(answer, gold) is False


def test_what_is_costly_is_decided_without_algebra():
    assert same_formula("9^{9^{9}}", "9^{9^{8}}", deep=False) is False
    assert same_formula(r"\int_{0}^{1}2 x dx", r"\int_{0}^{1}2x dx", deep=False) is True
    assert same_formula("x+1", "1+x", deep=False) is None


def test_sympy_is_not_asked_where_it_knows_no_value():
    for text in (r"\frac{1}{0}", r"\frac{d(x+y)}{dt}"):
        assert not algebraically_equal(for_algebra(text), for_algebra(text) + "+0")
    assert real_value("x") is real_value(r"\sqrt{-1}") is None
    assert abs(real_value(r"\sqrt{2}") ** 2 - 2) < 1e-20
