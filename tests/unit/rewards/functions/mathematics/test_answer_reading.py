import pytest

from trl_drgrpo.rewards.functions.mathematics import unreadable_gold
from trl_drgrpo.rewards.functions.mathematics.answers import read, unlabeled
from trl_drgrpo.rewards.functions.mathematics.latex import tidy


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        (r"\theta = 30^\circ", r"\theta", "30"),
        (r"v_{\max}=5", "v_{max}", "5"),
        (r"v_\max=5", "v_{max}", "5"),
        (r"v_{\text{max}}=5", "v_{max}", "5"),
        (r"\overline{AB} = 5", r"\overline{AB}", "5"),
        (r"\hat x = 5", r"\hat{x}", "5"),
        ("S_{10}=5", "S_{10}", "5"),
        ("P(X=2)=5", "P(X=2)", "5"),
        (r"\mathbb{E}[X]=5", r"\mathbb{E}[X]", "5"),
        (r"\operatorname{Var}(X) = 5", r"\text{Var}(X)", "5"),
        (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}", "2x"),
        (r"\text{Area} = 5", "", "5"),
        (r"\text{The value of } x \text{ is } 5", "", "5"),
        (r"\{x \mid x>5\}", "", "x>5"),
        (r"\sqrt{x}=5", "", r"\sqrt{x}=5"),
        (r"\alpha+\beta=5", "", r"\alpha+\beta=5"),
    ],
)
def test_names_and_values(text, variable, value):
    answer = read(tidy(text))
    assert (answer.variable, answer.text) == (variable, value)


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (r"\text{The answer is } N", "N"),
        ("The final answer is 5", "5"),
        (r"\text{Total: } 10", "10"),
        (r"\text{The answer is not } 5", None),
        (r"\text{It is wrong that the answer is } 5", None),
        (r"\text{If } x \text{ is } 5", None),
        (r"\text{There is } 5", None),
    ],
)
def test_labels(text, due):
    assert unlabeled(tidy(text)) == (tidy(text) if due is None else due)


@pytest.mark.parametrize(
    ("gold", "due"),
    [
        (r"\boxed{\frac12}", None),
        ("e^{x^2}", None),
        (r"\sum_{k=1}^n k", None),
        ("9^{9^{9}}", None),
        (["x +", "2"], None),
        (3, None),
        ("", "empty"),
        (None, "empty"),
        ("...", "empty"),
        (r"\frac{1", "a bracket is not closed, or more than 20 are nested"),
        ("x +", "a formula that breaks off"),
        ("x" * 1001, "longer than 1000 characters"),
        ("one of the two is larger than the other by three", "prose: more than 6 words"),
    ],
)
def test_why_a_gold_answer_cannot_be_read(gold, due):
    assert unreadable_gold(gold) == due
