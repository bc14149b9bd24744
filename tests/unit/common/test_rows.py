"""Every row is looked at, also behind a selection and in later batches, and a stream is left as it was."""

import json

import pytest
from case_tables import cases
from datasets import Dataset, IterableDataset, load_dataset

from trl_drgrpo.common import rows
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.rows import ColumnValues, check_prompt_values, column_values

USER = {"role": "user", "content": "1+1"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(rows, "_BATCH", 2)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("_", "prompts", "message"), cases("rows.tsv", "bad prompts"))
def test_the_first_bad_prompt_is_named(_, prompts, message, is_stream):
    dataset = Dataset.from_dict({"prompt": json.loads(prompts)})
    dataset = dataset.to_iterable_dataset() if is_stream else dataset
    with pytest.raises(InputError) as error:
        check_prompt_values(dataset, "prompt", " of x")
    assert message in str(error.value)


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[USER], [USER, USER]], [[USER], [USER, CALL, USER]]])
def test_texts_messages_and_tool_calls_are_prompts(prompts):
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    check_prompt_values(dataset, "prompt")
    check_prompt_values(dataset.to_iterable_dataset(), "prompt")


def test_content_in_parts_beside_plain_content(tmp_path):
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    lines = [{"prompt": [USER]}, {"prompt": [parts]}, {"prompt": [USER, {"role": "user", "content": None}]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset: Dataset = load_dataset("json", data_files=str(tmp_path / "x.jsonl"), split="train", cache_dir=tmp_path)
    check_prompt_values(dataset.select([0, 1]), "prompt")
    with pytest.raises(InputError, match="without content, as the prompt in row 2"):
        check_prompt_values(dataset, "prompt")


def test_rows_that_a_selection_leaves_out_do_not_count():
    dataset = Dataset.from_dict({"prompt": [None, "a", "b", ""], "answer": [None, 1, None, 2]})
    check_prompt_values(dataset.select([2, 1]), "prompt")
    with pytest.raises(InputError, match="an empty text as the prompt in row 2"):
        check_prompt_values(dataset.select([2, 1, 3]), "prompt")
    assert column_values(dataset.select([1, 3]), ["answer"]) == {"answer": ColumnValues("number", 2, 0, None)}
    assert column_values(dataset.select([3, 1, 2]), ["answer"]) == {"answer": ColumnValues("number", 3, 1, 2)}


@pytest.mark.parametrize(("_", "value", "kind"), cases("rows.tsv", "kinds"))
def test_kinds_of_values(_, value, kind):
    dataset = Dataset.from_dict({"answer": [json.loads(value), None]})
    for each in (dataset, dataset.to_iterable_dataset()):
        found = column_values(each, ["answer"])["answer"]
        assert (found.kind, found.rows, found.nulls) == (kind, 2, 2 if kind == "null" else 1)


def test_a_stream_is_read_to_a_bound_and_can_be_read_again(monkeypatch):
    monkeypatch.setattr(rows, "STREAMED_ROWS", 3)
    stream = Dataset.from_dict({"prompt": ["a", "b", "c", None]}).to_iterable_dataset()
    check_prompt_values(stream, "prompt")
    shuffled = Dataset.from_dict({"prompt": list("abcdef")}).to_iterable_dataset().shuffle(seed=1)
    before = [row["prompt"] for row in shuffled]
    check_prompt_values(shuffled, "prompt")
    assert [row["prompt"] for row in shuffled] == before


def test_what_a_generator_makes_is_not_read():
    source = iter([{"prompt": "a"}, {"prompt": None}])
    stream = IterableDataset.from_generator(lambda: source)
    check_prompt_values(stream.map(lambda row: row), "prompt")
    assert column_values(stream, ["prompt"]) == {}
    assert len(list(stream)) == 2


def test_a_transform_of_the_users_is_not_run():
    dataset = Dataset.from_dict({"prompt": ["a"]})
    dataset.set_transform(lambda batch: pytest.fail("was run"))
    check_prompt_values(dataset, "prompt")
    assert column_values(dataset, ["prompt"]) == {}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_list_without_a_value_counts_as_null(is_stream):
    rows = [["1"], ["2", None], [], None, [None], ["3"]]
    dataset = Dataset.from_dict({"prompt": ["p"] * 6, "answer": rows})
    found = column_values(dataset.to_iterable_dataset() if is_stream else dataset, ["answer"])["answer"]
    assert (found.kind, found.rows, found.nulls, found.first_null) == ("list", 6, 3, 2)
    whole = Dataset.from_dict({"prompt": ["p"] * 2, "answer": [["1"], ["2"]]})
    assert column_values(whole, ["answer"])["answer"].first_null is None
