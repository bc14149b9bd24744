import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.rewards.functions.mathematics import unreadable_gold
from trl_drgrpo.rewards.functions.mathematics.answers import (
    boxed_answer,
    extract_answer,
    final_line_answer,
    gold_answers,
    read,
    tagged_answer,
    unlabeled,
)
from trl_drgrpo.rewards.functions.mathematics.latex import tidy


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\fbox{3}", "3"),
        (r"\boxed 4.", "4"),
        (r"\boxed{\text{A}}, but \boxed{", r"\text{A}"),
        (r"{ \boxed{6}", "6"),
        (r"\boxed{}", None),
        (r"\boxed{5} \boxed{ }", "5"),
        (r"\boxed", None),
        ("6", None),
    ],
)
def test_boxes(text, due):
    assert boxed_answer(text) == due
    assert extract_answer(text, "boxed") == due


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> <answer>4</answer>", "4"),
        (r"<answer>So \boxed{4}</answer>", "4"),
        ("<answer>The answer is 4.</answer>", "4"),
        ("<answer></answer>", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("</answer>4<answer>", None),
    ],
)
def test_tags(text, due):
    assert tagged_answer(text) == due
    assert extract_answer(text, "tags") == due


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1\n#### 1,234 \n", "1,234"),
        ("####   \n", None),
        ("The answer is 42.", "42"),
        ("It is 4.5. So the answer is 4.5.", "4.5"),
        ("The answer is 3. Because of this, we stop.", "3"),
        ("The answer is 3, since 4 is not.", "3"),
        ("the final answer is: **42**.", "42"),
        ("**Answer: 18**", "18"),
        ("Answer: **18**", "18"),
        ("**The answer is 18.** Good.", "18"),
        ("**Final Answer: $18$**", "18"),
        ("The answer is **(B)**", "(B)"),
        ("The answer is *18*.", "18"),
        ("The answer is __18__.", "18"),
        ("The answer is `18`.", "18"),
        ("The answer is **18** eggs.", "18 eggs"),
        ("The answer is 2**3", "2**3"),
        ("#### 1. Compute\nstuff\nThe answer is 5.", "5"),
        ("#### Answer: 18", "18"),
        ("#### **Answer:** 18", "18"),
        ("#### Final Answer\nThe answer is 18", "18"),
        ("#### Step 1: Add\n2+3=5\n#### Answer\n5", "5"),
        ("#### 5 dollars\n\nLet me know if this helps.", "5 dollars"),
        ("#### Step 1", None),
        ("The answer is therefore 5", "5"),
        ("The answer is thus $5$", "5"),
        ("The answer is approximately 18", "18"),
        ("The answer is 5 (five)", "5"),
        ("The answer is 18 (dollars).", "18"),
        ("The answer is 101 (base two)", "101 (base two)"),
        ("The answer is 2 + 3 = 5", "2 + 3 = 5"),
        ("**Answer:** 5 apples", "5 apples"),
        ("Answer: $\\frac{1}{2}$ cm.", r"\frac{1}{2} \text{ cm }"),
        ("The answer is \\(\\sqrt{2}\\), since it is.", r"\(\sqrt{2}\)"),
        ("The answer is $x=1$ or $x=2$.", "$x=1$ or $x=2$"),
        ("The answer is $5 per hour.", "$5 per hour"),
        ("The answer is $18.90.", "$18.90"),
        ("The answer is 4? No. The answer is 5.", "5"),
        ("The answer is 3. Or it could be 4.", "3 or 4"),
        ("The answer is $3$.\nOr $4$.", "3 or 4"),
        ("The answer is **3**. Maybe 4?", "3 or 4"),
        ("The answer is 3. It might also be 4.", "3 or 4"),
        ("The answer is 3. No, it is 4.", "3 or 4"),
        ("The answer is 3. But 4 are red.", "3"),
        ("The answer is 3. Or, in words, three.", "3"),
        ("The answer is 3. It could also be written as 6/2.", "3"),
        ("The answer to the question is 7.", "7"),
        ("The correct answer is (B).", "(B)"),
        ("**Final Answer**\n$x=4$", "$x=4$"),
        ("so\n42", "42"),
        ("so\n$42$", "$42$"),
        ("we found 12 or so", None),
        ("The answer is", None),
        ("", None),
    ],
)
def test_closing_sentences(text, due):
    assert final_line_answer(text) == due
    assert extract_answer(text, "final_line") == due


def test_auto_takes_the_first_place_that_is_there():
    everywhere = "#### 3\n<answer>2</answer> \\boxed{1}"
    assert extract_answer(everywhere) == "1"
    assert extract_answer("#### 3\n<answer>2</answer> \\boxed{}") == "2"
    assert extract_answer("#### 3\n<answer>") == "3"
    assert extract_answer("It may be 3 or 4") is None
    assert [extract_answer(everywhere, place) for place in ("boxed", "tags", "final_line")] == ["1", "2", "3"]


def test_a_draft_in_the_reasoning_is_no_answer():
    assert extract_answer(r"<think>\boxed{3}</think> <answer>4</answer>") == "4"
    assert extract_answer(r"<think>\boxed{3}</think> It is done.") is None
    assert extract_answer(r"\boxed{3}</think> \boxed{4}") == "4"  # the template opened the tag
    assert extract_answer(r"<think>so \boxed{5}") is None  # cut off
    assert extract_answer("<think> unfinished, the answer is 5") is None
    assert extract_answer(r"<think>a</think><think>\boxed{5}") is None


@pytest.mark.parametrize(
    ("gold", "due"),
    [
        ("42", ["42"]),
        (42, ["42"]),
        (42.0, ["42"]),
        (0.1, ["0.1"]),
        (np.int64(3), ["3"]),
        (["1", r"\boxed{2}", None], ["1", "2"]),
        (("1/2", 0.5), ["1/2", "0.5"]),
        (np.array([1, 2]), ["1", "2"]),
        (r"So $x = 3$ and thus \boxed{3}.", ["3"]),
        ("5 * 2 = 10\n#### 10", ["10"]),
        ("<answer>7</answer>", ["7"]),
        ("", []),
        ("  ", []),
        (None, []),
        (math.nan, []),
        (math.inf, []),
        (True, []),
        ([], []),
        ({"a": 1}, []),
    ],
)
def test_gold_answers(gold, due):
    assert gold_answers(gold) == due


@given(
    st.text(alphabet=r"\boxed{} <answer>/#*$ is:.1", max_size=200),
    st.sampled_from(["auto", "boxed", "tags", "final_line"]),
)
def test_no_text_breaks_it_and_no_answer_is_empty(text, place):
    answer = extract_answer(text, place)
    assert answer is None or answer.strip()


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{" * 10_000 + "}" * 10_000,
        "{" * 100_000,
        "The answer is " * 10_000,
        "<answer>" * 20_000,
        "####" * 30_000,
        " " * 100_000 + "####",
        "#### " + " " * 100_000,
        "answer to " * 10_000,
        "answer: **" * 10_000,
        "the answer is " + "(" * 100_000,
        "the answer is " + "$" * 100_000,
        "$" * 100_000,
        "a\n" * 50_000,
        "\n" * 100_000,
        " \n" * 50_000 + "x",
        "<think>" + "\n" * 100_000,
        "answer:" + " " * 100_000,
        "answer" + ": " * 50_000,
        "#### a" + " " * 100_000 + "b",
        r"\boxed{" * 10_000 + " " * 50_000 + "}" * 10_000,
    ],
)
def test_a_hundred_kilobytes_cost_milliseconds(text):
    start = time.perf_counter()
    for place in ("auto", "boxed", "tags", "final_line"):
        extract_answer(text, place)
    assert time.perf_counter() - start < 2


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
