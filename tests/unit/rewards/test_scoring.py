"""Saved completions as rows: files, columns of a dataset, new names; rows on which two rewards differ."""

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.scoring import disagreements, renamed, with_columns_of


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


def test_renaming_in_a_row():
    assert renamed([{"a": 1, "b": 2}], ["a=c", "b=a"]) == [{"c": 1, "a": 2}]


def test_none_against_a_number_is_a_difference():
    [pair] = disagreements({"a": [None, None, 1.0, 1.0], "b": [None, 0.0, 1.0 + 1e-9, 0.9]}, tolerance=1e-6)
    assert pair.rows == [1, 3]
