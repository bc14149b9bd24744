"""Order, identity and end of the prompts beyond the dataloader's."""

from itertools import islice

import pytest
from datasets import Dataset

from trl_drgrpo.features.sampling import prompt_stream
from trl_drgrpo.features.sampling.prompt_stream import PromptStream

DATA = Dataset.from_dict({"prompt": list("abcdef"), "answer": [1, 2, 3, 4, 5, 6]})


def prompts(stream, count):
    return [example["prompt"] for example in islice(stream, count)]


def sources():
    return {"stored": DATA, "streamed": DATA.to_iterable_dataset()}.items()


@pytest.mark.parametrize(("name", "data"), sources())
def test_each_pass_has_every_example_in_an_order_of_its_own(name, data):
    seen = prompts(PromptStream(data, seed=0, shuffle=True), 12)
    assert sorted(seen[:6]) == sorted(seen[6:]) == list("abcdef")
    assert seen[:6] != seen[6:]
    assert prompts(PromptStream(data, 1, True), 12) != seen
    assert prompts(PromptStream(data, 0, False), 8) == list("abcdefab")


@pytest.mark.parametrize("position", [0, 4, 6, 9])
@pytest.mark.parametrize(("name", "data"), sources())
def test_a_position_is_gone_on_from(name, data, position):
    whole = prompts(PromptStream(data, 0, True), 15)
    stream = PromptStream(data, 0, True)
    next(stream)
    stream.position = position
    assert prompts(stream, 15 - position) == whole[position:]
    assert stream.position == 15


def test_an_empty_stream_ends():
    assert prompts(PromptStream(DATA.to_iterable_dataset().filter(lambda row: False), 0, True), 3) == []


def test_each_prompt_once():
    seen: set[str] = set()
    different = PromptStream(DATA, 0, False).different([{"prompt": "c"}, {"prompt": "c"}], seen)
    assert [example["prompt"] for example, _ in islice(different, 6)] == list("cabdef")
    assert len(seen) == 6


def test_a_stream_that_brings_nothing_new_ends(monkeypatch):
    monkeypatch.setattr(prompt_stream, "_MOST_REPEATS", 20)
    stream = PromptStream(DATA.to_iterable_dataset(), 0, True)
    assert len(list(stream.different([], set()))) == 6


def test_rows_of_an_environment_differ_by_any_column():
    data = Dataset.from_dict({"prompt": ["play"] * 3, "secret": ["x", "y", "x"]})
    assert PromptStream(data, 0, True).count_different(3) == 1
    assert PromptStream(data, 0, True, whole_rows=True).count_different(3) == 2
    without = data.remove_columns("prompt")
    assert PromptStream(without, 0, True, whole_rows=True).count_different(3) == 2


def test_no_more_is_read_than_has_to_be(monkeypatch):
    read = []
    monkeypatch.setattr(PromptStream, "key", lambda self, example: read.append(example) or example["prompt"])
    stream = PromptStream(DATA, 0, True)
    assert stream.count_different(2) == 2
    assert len(read) == 2
    monkeypatch.setattr(prompt_stream, "_LOOKED_UP", 2)
    assert stream.count_known({"a"}) == (1, 2)  # a and d
    assert len(read) == 4
    assert stream.count_known({"b"}) == (1, 6)
    assert stream.count_known({"z"}) == (0, 6)
    assert PromptStream(DATA.to_iterable_dataset(), 0, True).count_known({"a"}) is None
    assert PromptStream(DATA.to_iterable_dataset(), 0, True).count_different(2) is None
