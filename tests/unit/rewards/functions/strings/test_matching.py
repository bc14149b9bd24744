"""Answers against columns: what counts as equal, what is ambiguous, and that hostile text costs linear time."""

import json
import time

import pytest
import yaml
from case_tables import cases
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.rewards.functions.reasoning_gym import extract_answer
from trl_drgrpo.rewards.functions.strings.matching import (
    ChoiceReward,
    ExactMatchReward,
    NumericReward,
    answer_text,
    choice_reward,
    exact_match_reward,
    numeric_reward,
)
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


def score(reward, completion, truth):
    return reward(completions=[completion], answer=[truth])[0]


REWARDS = [case for case in cases("text_rewards.tsv") if case[0].startswith("{")]


@pytest.mark.parametrize("case", REWARDS, ids=str)
def test_the_reward_of_a_text(case):
    section, due, completion, truth, *prompt = case
    reward = resolve_reward(yaml.safe_load(section))
    row = {"answer": [json.loads(truth)], "prompts": [json.loads(each) for each in prompt] or [None]}
    for form in (completion, [{"role": "assistant", "content": completion}]):
        assert reward(completions=[form], **row) == [due and float(due)]


# Where the answer is -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "\\boxed{", "}", "{", "x", "</think>", "\n"]), max_size=12))
def test_where_reasoning_gym_finds_one_pair_or_box_so_does_this(pieces):
    text = "".join(pieces)
    behind = text.rpartition("</think>")[2]
    # Of nested tags the inner pair counts here, so that the search is linear: only plain pairs are comparable.
    if behind.count("<answer>") <= 1 and behind.count("</answer>") <= 1:
        assert (answer_text(text, "answer") or None) == (extract_answer(text) or None)


@pytest.mark.parametrize(("_", "completion", "answer", "marked"), cases("text_rewards.tsv", "answer, marked answer"))
def test_answers_are_found(_, completion, answer, marked):
    assert answer_text(completion, "answer") == answer
    assert answer_text(completion, "marked") == marked
    assert answer_text(completion, "whole") == completion


# Text ----------------------------------------------------------------------------------------------------------------


@given(st.text(), st.booleans())
def test_a_text_is_equal_to_itself_only(text, ignore_case):
    reward = ExactMatchReward(where="whole", ignore_case=ignore_case)
    assert score(reward, text, text) == 1.0
    assert score(reward, text + "x", text) == 0.0


# Numbers -------------------------------------------------------------------------------------------------------------


def test_numbers_of_any_length_are_compared_exactly():
    assert score(numeric_reward, "1" * 5000, "1" * 5000) == 1.0
    assert score(numeric_reward, "1" * 5000, "1" * 4999 + "2") == 0.0


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


NO_NUMBERS = ["", "no number", "1 or 2", "nan", float("inf"), True, [1], {"a": 1}]
NO_CHOICES = ["", "F", "A or B", "Paris", 5, -1, True, 1.5, ["A"]]


@pytest.mark.parametrize(
    ("reward", "right", "truth"),
    [*((numeric_reward, "1", truth) for truth in NO_NUMBERS), *((choice_reward, "A", truth) for truth in NO_CHOICES)],
)
def test_a_truth_that_is_none_costs_its_row(reward, right, truth):
    metrics = {}
    assert reward(completions=[right] * 2, answer=[truth, right], log_metric=metrics.__setitem__) == [None, 1.0]
    assert metrics == {f"rewards/{reward.__name__}/failed_frac": 0.5}
    with pytest.raises(RewardError, match=reward.__name__):
        score(type(reward)(on_error="raise"), right, truth)


# Both ----------------------------------------------------------------------------------------------------------------


DIGITS = ("1", "1,", "1,111", "1/", "1.", "-", " ", "1e", "\n")
MARKS = ("<answer>", "</answer>", "<answer></answer", "</think>", "\\boxed{", "{", "}")
HOSTILE = [piece * (100_000 // len(piece)) for piece in (*DIGITS, *MARKS)]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:9]))
def test_hostile_text_takes_linear_time(text):
    begun = time.monotonic()
    for reward in (exact_match_reward, numeric_reward, NumericReward(where="whole"), NumericReward(thousands=" ")):
        assert score(reward, text, "7") == 0.0
    extract_answer(text)
    assert time.monotonic() - begun < 10  # measured: below 0.4 s; a quadratic search took 16 to 35 s


def test_a_list_of_truths_may_hold_no_null_and_no_mapping():
    assert exact_match_reward(completions=["None", "a"], answer=[["a", None], ["a", None]]) == [0.0, 1.0]
    assert exact_match_reward(completions=["a", "a"], answer=[[None], []]) == [None, None]
    assert exact_match_reward(completions=["{'a': 1}", "['a']"], answer=[{"a": 1}, [["a"]]]) == [None, None]


# Choices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("_", "completion", "answer"), cases("text_rewards.tsv", "answer of a reasoning-gym task"))
def test_answers_of_reasoning_gym(_, completion, answer):
    assert extract_answer(completion or "") == answer


@pytest.mark.parametrize(("_", "completion", "picked"), cases("text_rewards.tsv", "choice"))
def test_choices(_, completion, picked):
    assert choice_reward.choice(completion) == picked


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


def test_choices_beyond_e_are_read():
    reward = ChoiceReward(letters="ABCDEFGHIJ")
    assert reward(completions=["The answer is (J)."], answer=[9]) == [1.0]
