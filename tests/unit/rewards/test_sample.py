"""A reward that scores one completion at a time: its columns and settings."""

import sys

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.sample import SampleReward


class Equal(SampleReward):
    def score(self, completion, **columns):
        if completion == "exit":
            sys.exit(0)
        return float(completion == columns["answer"])


@pytest.mark.parametrize("answer", ["12", b"12", ["1"], 12, {"1": 1, "2": 2}, None])
def test_a_column_is_one_value_per_completion(answer):
    with pytest.raises(InputError, match="reward equal: got .*column 'answer'.*a list of 2 values"):
        Equal("equal", ["answer"])(completions=["1", "2"], answer=answer)


def test_a_column_that_is_not_passed():
    with pytest.raises(InputError, match="reward equal: got no column 'answer'"):
        Equal("equal", ["answer"])(completions=["1", "2"])


def test_sys_exit_is_a_failure_of_its_row_in_this_process_too():
    reward = Equal("equal", ["answer"])
    assert reward(completions=["1", "exit"], answer=["1", "1"]) == [1.0, 0.0]
    reward.lowest_reward = None  # a score whose least is not known
    assert reward(completions=["1", "exit"], answer=["1", "1"]) == [1.0, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": 5}, "limits: got 5; expected Limits"),
        ({"name": ""}, "name: got ''"),
        ({"name": 5}, "name: got 5"),
        ({"columns": [5]}, "column: got 5"),
        ({"columns": ["my column"]}, "column: got 'my column'"),
        ({"columns": ["completions"]}, "column: got 'completions'"),
        ({"on_error": ["raise"]}, "on_error: got"),
    ],
)
def test_a_sample_reward_refuses_what_would_fail_on_its_first_row(options, message):
    with pytest.raises(InputError, match=message):
        Equal(**{"name": "equal", **options})
