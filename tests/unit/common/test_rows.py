"""Every row is looked at, also behind a selection and in later batches, and a stream is left as it was."""

import json
import random
from functools import partial

import pytest
from case_tables import cases
from datasets import Dataset, IterableDataset, load_dataset

from trl_drgrpo.common import rows
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.rows import ColumnValues, check_batch, check_prompt_values, column_values, known_length

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


def test_a_generator_is_not_consumed():
    source = iter([{"prompt": "a"}, {"prompt": None}])
    stream = IterableDataset.from_generator(lambda: source)
    check_prompt_values(stream.map(lambda row: row), "prompt")
    assert column_values(stream, ["prompt"]) == {}
    assert len(list(stream)) == 2


def rows_of(*prompts):
    def generate():
        for prompt in prompts:
            yield {"prompt": prompt}

    return generate


def from_options(prompts):
    for prompt in prompts:
        yield {"prompt": prompt}


def one_shot():
    source = iter([{"prompt": "a"}, {"prompt": "b"}])

    def generate():
        yield from source

    return generate


def drawn_at_random():
    random_generator = random.Random(0)
    return lambda: ({"prompt": str(random_generator.random())} for _ in range(2))


def test_a_generator_that_starts_anew_is_checked():
    streams = [
        IterableDataset.from_generator(rows_of("a", None)),
        IterableDataset.from_generator(rows_of("a", None)).map(lambda row: row).shuffle(seed=1),
        IterableDataset.from_generator(from_options, gen_kwargs={"prompts": ["a", None]}),
        IterableDataset.from_generator(partial(from_options, ["a", None])),
    ]
    for stream in streams:
        with pytest.raises(InputError, match="got null as the prompt in row"):
            check_prompt_values(stream, "prompt")
        assert column_values(stream, ["prompt"])["prompt"].nulls == 1
        assert known_length(stream) == 2


@pytest.mark.parametrize("make", [one_shot, drawn_at_random])
def test_a_generator_that_goes_on_where_it_stopped_is_not_read(make):
    stream = IterableDataset.from_generator(make())
    expected = list(IterableDataset.from_generator(make()))
    check_prompt_values(stream, "prompt")
    assert known_length(stream) is None
    assert list(stream) == expected


def test_a_long_stream_is_not_counted():
    assert known_length(IterableDataset.from_generator(from_options, gen_kwargs={"prompts": ["a"] * 1000})) is None
    assert known_length(Dataset.from_dict({"prompt": ["a"] * 3})) == 3


def test_rows_of_a_batch():
    check_batch([{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "1"}], "train_dataset")
    check_batch([{}], "train_dataset")  # an environment brings the prompt
    with pytest.raises(InputError, match="train_dataset: got an empty text as the prompt in row 1 .* of a batch"):
        check_batch([{"prompt": "a"}, {"prompt": ""}], "train_dataset")
    with pytest.raises(InputError, match="differs from the first in the columns answer"):
        check_batch([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], "train_dataset")


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
