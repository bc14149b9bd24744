"""TRL's penalties under checked settings, and a length penalty with both of its ends named."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.functions.strings import length_penalty, overlong_penalty, repetition_penalty

IDS = [[1, 2, 3, 1, 2, 3], [7] * 10, [], [1, 2], list(range(95)), list(range(200))]


def test_they_are_trls():
    assert repetition_penalty(2, -0.5)(completion_ids=IDS) == get_repetition_penalty_reward(2, -0.5)(IDS)
    assert overlong_penalty(100, 20)(completion_ids=IDS) == get_soft_overlong_punishment(100, 20)(IDS)
    assert overlong_penalty(100, 20)(completion_ids=[[0] * 90]) == [-0.5]  # half way from 80 to 100


@given(st.integers(0, 50), st.integers(1, 50), st.floats(-10, 0), st.integers(0, 150))
def test_a_length_costs_nothing_then_more_then_no_more(free, ramp, max_penalty, length):
    [penalty] = length_penalty(free, free + ramp, max_penalty)(completion_ids=[[0] * length])
    share = min(max((length - free) / ramp, 0.0), 1.0)
    assert penalty == pytest.approx(max_penalty * share)


@pytest.mark.parametrize("reward", [repetition_penalty(), overlong_penalty(100, 20), length_penalty(10, 20)])
def test_they_travel_and_read_token_ids(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(completions=["x"], completion_ids=[[1] * 200]) == reward(completion_ids=[[1] * 200])
    assert reward(completion_ids=[[1] * 200])[0] < -0.9
    check_columns(reward, ["prompt"], reward.__name__)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: repetition_penalty(0), "ngram_size: got 0; expected a whole number, at least 1"),
        (lambda: repetition_penalty(3, 1.0), "max_penalty: got 1.0; expected a finite number, at most 0"),
        (lambda: repetition_penalty(3, float("nan")), "max_penalty: got nan"),
        (lambda: overlong_penalty(0, 0), "max_completion_length: got 0"),
        (lambda: overlong_penalty(10, 11), "soft_tokens: got 11; expected at most max_completion_length=10"),
        (lambda: overlong_penalty(10.5, 1), "max_completion_length: got 10.5"),
        (lambda: length_penalty(10, 10), "limit_tokens: got 10; expected more than free_tokens=10"),
        (lambda: length_penalty(-1, 10), "free_tokens: got -1"),
        (lambda: length_penalty(1, 10, 0.5), "max_penalty: got 0.5"),
    ],
)
def test_settings_that_do_not_fit(make, message):
    with pytest.raises(InputError, match=message):
        make()
