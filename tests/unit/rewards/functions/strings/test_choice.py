"""Multiple choice: the ways in which models name a choice, and the ways in which they name two."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.strings import ChoiceReward, choice_reward


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
def test_truths(truth, letter):
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
def test_hostile_text_takes_linear_time(piece):
    begun = time.monotonic()
    for text in (piece * (100_000 // len(piece)), f"<answer>{piece * (100_000 // len(piece))}</answer>"):
        assert choice_reward.choice(text) in (None, "A")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("letters", ["", "A", "AA", "abc", "A1"])
def test_letters_that_are_none(letters):
    with pytest.raises(InputError, match="letters"):
        ChoiceReward(letters=letters)


def test_other_letters():
    reward = ChoiceReward(letters="ABCDEFGHIJ")
    assert reward(completions=["The answer is (J)."], answer=[9]) == [1.0]
