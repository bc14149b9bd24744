"""Every kind of source loads offline, and everything wrong with one is a single clear error."""

import json
import logging

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl_drgrpo.cli.data import check_prompts, check_source, is_hub_id, load_data, rename_columns, take_split
from trl_drgrpo.common.errors import InputError

ROWS = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(4)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write_rows(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_source(kind, folder):
    """A source of the four rows, of some kind; `folder` exists and is empty."""
    dataset = Dataset.from_list(ROWS)
    if kind == "json":
        (folder / "rows.json").write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        write_rows(folder / "rows.jsonl")
    elif kind == "parquet":
        dataset.to_parquet(folder / "rows.parquet")
    elif kind == "csv":
        dataset.to_csv(folder / "rows.csv")
    elif kind == "save_to_disk":
        dataset.save_to_disk(folder)
    elif kind == "dict_save_to_disk":
        DatasetDict({"train": dataset, "test": dataset}).save_to_disk(folder)
    else:
        write_rows(folder / "train.jsonl")
        write_rows(folder / "test.jsonl")
    return str(folder / f"rows.{kind}" if (folder / f"rows.{kind}").exists() else folder)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv", "save_to_disk", "dict_save_to_disk", "folder"])
def test_local_sources(kind, streaming, tmp_path):
    dataset = load_data(write_source(kind, tmp_path), split="train", streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert [row["prompt"] for row in dataset] == [row["prompt"] for row in ROWS]
    assert check_prompts(dataset, "x") == ["prompt", "answer"]


def test_a_folder_has_its_splits(tmp_path):
    assert set(load_data(write_source("folder", tmp_path))) == {"train", "test"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl, which does not exist; .*current directory"),
        ("./nowhere", "./nowhere, which does not exist"),
        ("one/two/three", "one/two/three, which does not exist"),
        ("notes.txt", "notes.txt, a .txt file; expected a file ending in .json, .jsonl, .parquet, .csv"),
        ("blank.jsonl", "blank.jsonl, which is empty"),
        ("broken.jsonl", "broken.jsonl, which could not be read; .*JSON parse error"),
        ("bare", "bare, which could not be read; .*contain any data files"),
        ("some/name", r"some/name, which is neither a local path nor in the local cache, in offline mode"),
        ("reasoning_gym:chain_sums", "expected one of 1.. tasks. Did you mean chain_sum"),
        ("reasoning_gym:chain_sum?sise=3", r"chain_sum\?sise: got an unknown option; .*Did you mean size\?"),
        ("reasoning_gym:chain_sum?size=many", r"chain_sum\?size: got 'many'; expected a value of type int"),
        ("reasoning_gym:chain_sum?size=0", r"chain_sum\?size: got 0; expected a number of rows from 1"),
        ("reasoning_gym:chain_sum?allow_negation=5", r"allow_negation: got '5'; expected a value of type bool"),
        ("reasoning_gym:chain_sum?min_terms=9", "invalid options .*max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?system_prompt=kind", "system_prompt: got 'kind'; expected one of DeepSeekZero"),
        ("reasoning_gym:chain_sum?size", "expected options `key=value`"),
        ("reasoning_gym:chain_sum?size=1&size=2", "each once"),
        ("trl_drgrpo:list_sums", r"Did you mean trl_drgrpo:list_sum\?"),
        ("trl_drgrpo:list_sum?sice=1", "sice: got an unknown option; expected one of size, seed, test_size"),
        ("trl_drgrpo:list_sum?size=-1", "size: got '-1'; expected a whole number"),
    ],
)
def test_sources_that_do_not_load(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "blank.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n oh')
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match=message):
        load_data(source, split="train")


def test_missing_and_empty_splits(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match=r"'test' of .*its splits: train. .*put train.jsonl and test.jsonl"):
        load_data(path, split="test")
    with pytest.raises(InputError, match="some name, split train, which is empty"):
        take_split({"train": Dataset.from_list(ROWS).select([])}, "train", "some name")


def test_reasoning_gym_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r'pip install "trl-drgrpo\[tasks\]"'):
        load_data("reasoning_gym:chain_sum")


def test_reasoning_gym_rows():
    pytest.importorskip("reasoning_gym")
    source = "reasoning_gym:chain_sum?size=30&test_size=10&min_digits=4&max_digits=4&system_prompt=simple"
    data = load_data(source)
    assert {name: len(split) for name, split in data.items()} == {"train": 30, "test": 10}
    assert data["train"].column_names == ["prompt", "answer", "entry"]
    assert [message["role"] for message in data["train"][0]["prompt"]] == ["system", "user"]
    assert load_data(source)["train"][:] == data["train"][:]  # the seed has a default
    questions = {name: {row["prompt"][-1]["content"] for row in split} for name, split in data.items()}
    assert not questions["train"] & questions["test"]
    # The trap that the distance between the seeds is for: row i comes from seed + i.
    shifted = load_data(source.replace("size=30", "seed=1&size=30"), split="train")
    assert shifted[0]["prompt"] == data["train"][1]["prompt"]


def test_reasoning_gym_says_when_a_task_is_too_small_for_a_test_split(caplog):
    pytest.importorskip("reasoning_gym")
    source = "reasoning_gym:chain_sum?size=400&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    with caplog.at_level(logging.WARNING):
        data = load_data(source)
    assert "test questions also occur among the" in caplog.text
    assert 0 < len(data["test"]) < 100
    train = {row["prompt"][-1]["content"] for row in data["train"]}
    assert not any(row["prompt"][-1]["content"] in train for row in data["test"])


def test_list_sum():
    data = load_data("trl_drgrpo:list_sum?size=50&test_size=20")
    assert {name: len(split) for name, split in data.items()} == {"train": 50, "test": 20}
    row = data["train"][0]
    assert row["answer"] == str(sum(map(int, row["prompt"][0]["content"].split("+"))))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"question": ["a"], "answer": ["b"]},
            r"question, answer; .*rename it with `rename_columns: \[question=prompt",
        ),
        ({"a": ["a"]}, r"columns a; expected a column .prompt.. Rename the one .*\[<column>=prompt\]"),
        (
            {"prompt": [1]},
            r"prompt: got int 1 as the prompt in row 0 \(the first is 0\) of x; expected a non-empty string",
        ),
        ({"prompt": [""]}, "prompt: got an empty text"),
        ({"prompt": [["a"]]}, "prompt: got 'a', which is not a message"),
    ],
)
def test_prompts_that_are_none(columns, message):
    with pytest.raises(InputError, match=message):
        check_prompts(Dataset.from_dict(columns), "x")


def test_prompts_may_be_messages():
    messages = [[{"role": "user", "content": "1+1"}]]
    assert check_prompts(Dataset.from_dict({"prompt": messages}), "x") == ["prompt"]


def test_rename_columns():
    dataset = Dataset.from_dict({"question": ["a"], "answer": ["b"]})
    renamed = rename_columns(dataset, ["question=prompt", "answer=solution"])
    assert renamed.column_names == ["prompt", "solution"]
    for renaming, message in {
        "question": "expected old=new",
        "problem=prompt": "expected one of the columns: question, answer",
        "question=answer": "there is a column answer already",
    }.items():
        with pytest.raises(InputError, match=message):
            rename_columns(dataset, [renaming])


def test_what_counts_as_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    assert is_hub_id("org/name-v1.5")
    assert is_hub_id("name")
    for source in ("local", "./org/name", "org/name.jsonl", "/a", "reasoning_gym:x", "trl_drgrpo:list_sum"):
        assert not is_hub_id(source)
    check_source("org/name")  # nothing to say about it without the network


def test_a_files_name_is_no_pattern(tmp_path):
    write_rows(tmp_path / "a[1].jsonl")
    assert len(load_data(str(tmp_path / "a[1].jsonl"), split="train")) == len(ROWS)
