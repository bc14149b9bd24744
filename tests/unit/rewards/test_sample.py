"""Rewards that score one completion at a time: columns, pickles, limits, shares of the cores; saved completions."""

import csv
import os
import pickle
import sys

import cloudpickle
import numpy as np
import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards import (
    ExactMatchReward,
    JsonSchemaReward,
    MathReward,
    RegexReward,
    exact_match_reward,
    format_reward,
    numeric_reward,
)
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.contract import Limits, available_workers
from trl_drgrpo.rewards.sample import SampleReward
from trl_drgrpo.rewards.scoring import disagreements, read_rows, with_columns_of


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


RIGHT = "<think>2+2 is 4</think> <answer>4</answer>"


@pytest.mark.parametrize(
    ("reward", "right", "columns"),
    [
        (format_reward, RIGHT, {}),
        (RegexReward(r"<", name="tag"), RIGHT, {}),
        (JsonSchemaReward({"type": "object"}, name="person"), '{"name": "Ada"}', {}),
        (exact_match_reward, [{"role": "assistant", "content": "7"}], {"answer": "7"}),
        (ExactMatchReward("solution", name="other"), "7", {"solution": "7"}),
        (numeric_reward, "7", {"answer": "7"}),
        (MathReward(limits=None), r"\boxed{2+x}", {"solution": "x+2"}),
    ],
)
@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
def test_they_travel_and_ask_for_their_column(reward, right, columns, dump):
    copy = pickle.loads(dump(reward))
    assert (copy.__name__, copy.limits) == (reward.__name__, None)
    given = {name: [value] * 2 for name, value in columns.items()}
    assert copy(completions=[right, "8"], prompts=["p", "p"], **given) == [1.0, 0.0]
    check_columns(reward, ["prompt", *columns], reward.__name__)
    for column in columns:
        with pytest.raises(InputError, match=f"a column '{column}', which the function requires.*rename"):
            check_columns(reward, ["prompt", "nothing"], reward.__name__)


# Saved completions ---------------------------------------------------------------------------------------------------


def test_csv_keeps_long_fields_line_breaks_and_quotes(tmp_path):
    text = 'a "quoted",\nsecond line \u2028 x' + "y" * 200_000
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["p", text]])
    assert read_rows(tmp_path / "rows.csv") == [{"prompt": "p", "completion": text}]


def test_a_dataset_gives_the_columns_that_are_missing():
    messages = [{"role": "user", "content": "q"}]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "q"}], "tool_calls": None}]
    dataset = [{"prompt": messages, "answer": "1", "completion": "of the dataset"}, {"prompt": "p", "answer": "2"}]
    rows = [{"prompt": in_parts, "completion": "c"}, {"prompt": "p", "completion": "d"}]
    joined = with_columns_of(rows, dataset)
    assert [(row["answer"], row["completion"]) for row in joined] == [("1", "c"), ("2", "d")]
    with pytest.raises(InputError, match="data, row 1: got a prompt that the dataset does not have: 'x'"):
        with_columns_of([{"prompt": "x", "completion": "c"}], dataset)
    with pytest.raises(InputError, match="dataset, row 2: got the prompt of an earlier row with other columns"):
        with_columns_of(rows, [{"prompt": "p", "answer": "2"}, {"prompt": "p", "answer": "3"}])


def test_none_against_a_number_is_a_difference():
    [pair] = disagreements({"a": [None, None, 1.0, 1.0], "b": [None, 0.0, 1.0 + 1e-9, 0.9]}, tolerance=1e-6)
    assert pair == {"first": "a", "second": "b", "count": 2, "rows": [2, 4]}
