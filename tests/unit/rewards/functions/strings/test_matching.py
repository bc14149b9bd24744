"""Answers against columns: what counts as equal, what is ambiguous, and that hostile text costs linear time."""

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.functions.reasoning_gym import extract_answer
from trl_drgrpo.rewards.functions.strings import (
    ChoiceReward,
    ExactMatchReward,
    NumericReward,
    choice_reward,
    exact_match_reward,
    numeric_reward,
)
from trl_drgrpo.rewards.functions.strings.matching import answer_text


def score(reward, completion, truth):
    return reward(completions=[completion], answer=[truth])[0]


# Where the answer is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "marked"),
    [
        ("so\n7", "7", None),
        ("<answer>7</answer> or 8", "7", "7"),
        ("<answer>6</answer> no, <answer> 7 </answer>", "7", "7"),
        ("<think><answer>6</answer></think>\n7", "7", None),
        ("<think>\\boxed{6}</think> \\boxed{7}.", "7", "7"),
        (r"\boxed{\frac{1}{2}} is \boxed{a{b}c}", "a{b}c", "a{b}c"),
        (r"\boxed{1} but <answer>2</answer>", "2", "2"),
        ("</answer>7<answer>", "</answer>7<answer>", None),
        (r"unfinished \boxed{7", r"unfinished \boxed{7", None),
        ("  \n ", None, None),
        ("", None, None),
    ],
)
def test_answers_are_found(completion, answer, marked):
    assert answer_text(completion, "answer") == answer
    assert answer_text(completion, "marked") == marked
    assert answer_text(completion, "whole") == completion


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "\\boxed{", "}", "{", "x", "</think>", "\n"]), max_size=12))
def test_where_reasoning_gym_finds_one_pair_or_box_so_does_this(pieces):
    text = "".join(pieces)
    behind = text.rpartition("</think>")[2]
    # Of nested tags the inner pair counts here, so that the search is linear: only plain pairs are comparable.
    if behind.count("<answer>") <= 1 and behind.count("</answer>") <= 1:
        assert (answer_text(text, "answer") or None) == (extract_answer(text) or None)


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "completion", "truth", "expected"),
    [
        ({}, "I say\n<answer> Rome </answer>", "Rome", 1.0),
        ({}, "rome", "Rome", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({}, "New  York", "New York", 0.0),
        ({"whitespace": "collapse"}, "New \t York", "New York", 1.0),
        ({"whitespace": "collapse"}, "NewYork", "New York", 0.0),
        ({"whitespace": "remove"}, "[1, 2]", "[1,2]", 1.0),
        ({"where": "whole"}, " Rome", "Rome", 1.0),
        ({"where": "whole", "strip": False}, " Rome", "Rome", 0.0),
        ({"where": "whole", "strip": False}, " Rome", " Rome", 1.0),
        ({"where": "marked"}, "Rome", "Rome", 0.0),
        ({}, "Rome", ["Roma", "Rome"], 1.0),
        ({}, "Rom", ["Roma", "Rome"], 0.0),
        ({}, "42", 42, 1.0),
        ({}, "", "Rome", 0.0),
        ({}, "Rome", None, None),
        ({}, "Rome", [], None),
    ],
)
def test_equal_text(settings, completion, truth, expected):
    assert score(ExactMatchReward(**settings), completion, truth) == expected


@given(st.text(), st.sampled_from(["keep", "collapse", "remove"]), st.booleans())
def test_a_text_is_equal_to_itself_only(text, whitespace, ignore_case):
    reward = ExactMatchReward(where="whole", whitespace=whitespace, ignore_case=ignore_case)
    assert score(reward, text, text) == 1.0
    assert score(reward, text + "x", text) == 0.0


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        ("That makes $1,250.00.", "1250", 1.0),
        ("5 apples and 7 pears are 12 pieces", 12, 1.0),
        ("x=-7", "-7", 1.0),
        ("x=−7", "-7", 1.0),
        ("10-7", "7", 1.0),
        ("10-7", "-7", 0.0),
        (".5", "0.5", 1.0),
        ("-.5", "-0.5", 1.0),
        ("1.5e3", "1500", 1.0),
        ("50%", "50", 1.0),
        ("3/4", "0.75", 1.0),
        ("6/8", "3/4", 1.0),
        ("1/0", "1", 0.0),
        ("1,2,3", "3", 1.0),
        ("1,2,3", "123", 0.0),
        ("1,234,567", "1234567", 1.0),
        ("1,2345", "12345", 0.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{4, 5}", "5", 0.0),
        (r"\boxed{\frac{1}{2}}", "2", 0.0),
        ("<answer>4 or 5</answer>", "5", 0.0),
        ("<answer>none</answer> 5", "5", 0.0),
        ("72", "She sold 48+24=72.\n#### 72", 1.0),
        ("no number", "5", 0.0),
        ("", "5", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),  # 2**53 + 1 and 2**53 are the same float
        ("1" * 5000, "1" * 5000, 1.0),
        ("1" * 5000, "1" * 4999 + "2", 0.0),
        ("1e9999", "1e9998", 0.0),
        ("5", None, None),
    ],
)
def test_numbers(completion, truth, expected):
    assert score(numeric_reward, completion, truth) == expected


@pytest.mark.parametrize(
    ("settings", "completion", "truth", "expected"),
    [
        ({"abs_tol": 0.01}, "3.14", 3.1415, 1.0),
        ({"abs_tol": 0.001}, "3.14", 3.1415, 0.0),
        ({"rel_tol": 0.01}, "101", 100, 1.0),
        ({"rel_tol": 0.009}, "101", 100, 0.0),
        ({"rel_tol": 0.01}, "0.001", 0, 0.0),
        ({"abs_tol": 1.0}, "1e9999", "1e9998", 0.0),
        ({"thousands": "."}, "1.234,5", "1234,5", 1.0),
        ({"thousands": " "}, "1 234.5", "1234.5", 1.0),
        ({"thousands": ""}, "1,234", "234", 1.0),
        ({"where": "whole"}, "first 3\nthen nothing", "3", 1.0),
        ({}, "first 3\nthen nothing", "3", 0.0),
        ({"where": "marked"}, "3", "3", 0.0),
    ],
)
def test_tolerances_and_separators(settings, completion, truth, expected):
    assert score(NumericReward(**settings), completion, truth) == expected


@given(st.integers(-(10**30), 10**30), st.booleans())
def test_whole_numbers_are_equal_to_themselves_only(number, separated):
    text = f"{number:,}" if separated else str(number)
    assert score(numeric_reward, f"It is {text}.", number) == 1.0
    assert score(numeric_reward, f"It is {text}.", number + 1) == 0.0


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1), st.floats(-2, 2))
def test_a_tolerance_is_what_it_says(truth, tolerance, share):
    if 0.999 < abs(share) < 1.001 or abs(truth) > 1e9 * tolerance:
        return  # at the edge, or the number's own rounding is of that size
    reward = NumericReward(abs_tol=tolerance, where="whole")
    assert score(reward, f"{truth + share * tolerance:.17g}", truth) == float(abs(share) <= 1)


@pytest.mark.parametrize("truth", ["", "no number", "1 or 2", "nan", float("inf"), True, [1], {"a": 1}])
def test_a_truth_that_is_no_number_costs_its_row(truth):
    metrics = {}
    rewards = numeric_reward(completions=["1", "1"], answer=[truth, "1"], log_metric=metrics.__setitem__)
    assert rewards == [None, 1.0]
    assert metrics == {"rewards/numeric_reward/failed_frac": 0.5}
    with pytest.raises(RewardError, match="numeric_reward"):
        score(NumericReward(on_error="raise"), "1", truth)


# Both ----------------------------------------------------------------------------------------------------------------


HOSTILE = [
    piece * (100_000 // len(piece))
    for piece in ("1", "1,", "1,111", "1/", "1.", "-", " ", "<answer>", "</answer>", "\\boxed{", "{", "}", "1e", "\n")
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:9]))
def test_hostile_text_takes_linear_time(text):
    begun = time.monotonic()
    for reward in (exact_match_reward, numeric_reward, NumericReward(where="whole"), NumericReward(thousands=" ")):
        assert score(reward, text, "7") == 0.0
    assert time.monotonic() - begun < 10  # measured: below 0.4 s; a quadratic search took 16 to 35 s


@pytest.mark.parametrize("reward", [exact_match_reward, numeric_reward, ExactMatchReward("solution", name="other")])
def test_they_travel_and_ask_for_their_column(reward):
    column = reward.columns[0]
    copy = pickle.loads(pickle.dumps(reward))
    assert copy.__name__ == reward.__name__
    messages = [{"role": "assistant", "content": "7"}]
    assert copy(completions=["7", messages], **{column: ["7", "7"]}, prompts=["p", "p"]) == [1.0, 1.0]
    check_columns(reward, ["prompt", column], reward.__name__)
    with pytest.raises(InputError, match=f"a column '{column}', which the function requires"):
        check_columns(reward, ["prompt"], reward.__name__)


def test_a_list_of_truths_may_hold_no_null_and_no_mapping():
    assert exact_match_reward(completions=["None", "a"], answer=[["a", None], ["a", None]]) == [0.0, 1.0]
    assert exact_match_reward(completions=["a", "a"], answer=[[None], []]) == [None, None]
    assert exact_match_reward(completions=["{'a': 1}", "['a']"], answer=[{"a": 1}, [["a"]]]) == [None, None]


# Choices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "picked"),
    [
        ("The answer is (B).", "B"),
        ("The answer is: B", "B"),
        ("The correct answer is **(C)**.", "C"),
        ("Answer: C", "C"),
        ("Choice: D", "D"),
        ("The answer is $\\boxed{E}$.", "E"),
        ("the final answer is (C) Paris, not (A)", "C"),
        ("The correct option is B.", "B"),
        ("I looked at (A). So it must be that. The answer is option D.", "D"),
        ("B", "B"),
        (" B.\n", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("It can only be (D)", "D"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(D)}}", "D"),
        ("<answer>option C</answer>", "C"),
        ("<answer>B. A dog</answer>", "B"),
        ("<answer>the answer is B</answer>", "B"),
        ("<think>(A), the answer is A</think> so (B)", "B"),
        ("The answer is A. <answer>B</answer>", "B"),
        # two of them
        ("(A) or (B)", None),
        ("(A) (B)", None),
        ("A) Paris\nB) Rome\nC) Bonn", None),
        ("The answer is A or B", None),
        ("The answer is (A), (B), (C) and (D)", None),
        ("The answer is A. Wait, the answer is B.", None),
        ("<answer>A and B</answer>", None),
        ("<answer>A. or B.</answer>", None),
        (r"\boxed{A, B}", None),
        ("A or B", None),
        # none
        ("A dog is a good pet", None),
        ("The answer is a good question", None),
        ("Answer: Bob", None),
        ("The answer is not B", None),
        ("I don't know", None),
        ("A's are good", None),
        ("<answer>F</answer>", None),
        ("<answer></answer> (A)", None),
        ("", None),
    ],
)
def test_choices(completion, picked):
    assert choice_reward.choice(completion) == picked


@pytest.mark.parametrize(
    ("truth", "letter"), [("B", "B"), ("(b)", "B"), ("b", "B"), ("B. Paris", "B"), ("B)", "B"), (1, "B"), (0, "A")]
)
def test_true_choices(truth, letter):
    completions = [f"The answer is ({each})." for each in "ABCDE"]
    assert choice_reward(completions=completions, answer=[truth] * 5) == [float(each == letter) for each in "ABCDE"]


@pytest.mark.parametrize("truth", ["", "F", "A or B", "Paris", 5, -1, True, 1.5, ["A"]])
def test_a_truth_that_is_no_choice_costs_its_row(truth):
    metrics = {}
    rewards = choice_reward(completions=["A", "A"], answer=[truth, "A"], log_metric=metrics.__setitem__)
    assert rewards == [None, 1.0]
    assert metrics == {"rewards/choice_reward/failed_frac": 0.5}


def test_a_row_without_a_truth_is_left_unscored():
    assert choice_reward(completions=["A"], answer=[None]) == [None]


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from(["({})", "answer is {}.", "\\boxed{{{}}}"]))
def test_naming_another_choice_in_the_same_way_never_gains(first, second, form):
    one, both = form.format(first), f"{form.format(first)} {form.format(second)}"
    assert choice_reward.choice(one) == first
    if form.startswith("\\"):  # of boxes the last counts, as everywhere
        assert choice_reward.choice(both) == second
    else:
        assert choice_reward.choice(both) == (first if first == second else None)


@given(st.text(alphabet="ABE ().:isanwer\\boxed{}<>/\n"))
def test_any_text_is_one_choice_or_none(text):
    assert choice_reward.choice(text) in (None, *"ABCDE")


@pytest.mark.parametrize("piece", ["answer is ", "answer is A,", "(A", "answer", "answer: ", "A or ", "\\text{", "* "])
def test_hostile_text_takes_a_choice_linear_time(piece):
    begun = time.monotonic()
    for text in (piece * (100_000 // len(piece)), f"<answer>{piece * (100_000 // len(piece))}</answer>"):
        assert choice_reward.choice(text) in (None, "A")
    assert time.monotonic() - begun < 10


def test_other_letters():
    reward = ChoiceReward(letters="ABCDEFGHIJ")
    assert reward(completions=["The answer is (J)."], answer=[9]) == [1.0]
