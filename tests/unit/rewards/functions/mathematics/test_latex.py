import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.rewards.functions.mathematics.latex import group_end, tidy, unwrapped


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}2", r"\frac{1}{2}"),
        (r"\tfrac 1{72}", r"\frac{1}{72}"),
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        (r"\frac{\frac12}3", r"\frac{\frac{1}{2}}{3}"),
        (r"\sqrt2 + \sqrt[3]5", r"\sqrt{2}+\sqrt[3]{5}"),
        (r"\left( 1,\, 2 \right]", "(1,2]"),
        (r"\left\{ 1 \right\}", r"\{1\}"),
        (r"\cot x", r"\cot x"),
        ("$$42$$.", "42"),
        (r"\(\text{ 7 }\)", "7"),
        (r"\boxed{\boxed{x^2}}", "x^{2}"),
        (r"10,\!080", "10080"),
        ("100, 200", "100, 200"),
        ("1 2", "1 2"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("x**2", "x^{2}"),
        ("−3 × 2", r"-3\cdot 2"),
        (r"1 \text{ and } 2", "1,2"),
        ("90^{\\circ}", "90\\degree "),
    ],
)
def test_one_spelling(text, due):
    assert tidy(text) == due.strip()


@given(st.text(alphabet=r"01xy+-/^_(){}[],.\$ \frac\sqrt\text", max_size=80))
def test_tidy_ends_and_bounds_its_output(text):
    assert len(tidy(text)) <= 8 * len(text) + 8
    assert unwrapped(unwrapped(text)) == unwrapped(text)


def test_a_group_ends_at_its_own_brace():
    assert group_end(r"{a\}{b}c}d", 0) == 9
    assert group_end("{a", 0) == -1
