"""A reward that scores one completion at a time, its columns; limits, and shares of the cores."""

import os
import sys

import numpy as np
import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.contract import Limits, available_workers
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


@pytest.mark.parametrize(("processes", "workers"), [("1", 8), ("2", 4), ("3", 2), ("64", 1), ("0", 8), ("x", 8)])
def test_trainer_processes_share_the_cores(monkeypatch, processes, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert available_workers() == workers


def test_limits_take_numbers_of_numpy():
    assert Limits(np.float32(2.0), np.int64(128), np.int32(2)) == Limits(2.0, 128, 2)
