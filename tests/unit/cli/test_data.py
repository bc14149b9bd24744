"""Every kind of source loads offline; templates, system messages and pass rates; whatever is wrong is one clear
error."""

import json
import logging

import pytest
from case_tables import cases
from datasets import Dataset, DatasetDict, IterableDataset
from runs import write_lines

from trl_drgrpo.cli.data import (
    TEMPLATES,
    check_prompts,
    check_source,
    is_hub_id,
    load_data,
    prompted,
    rename_columns,
    take_split,
    template_text,
)
from trl_drgrpo.common.errors import InputError

ROWS = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(4)]


def write_rows(path):
    write_lines(path, ROWS)


WRITERS = {
    "rows.json": lambda path: path.write_text(json.dumps(ROWS)),
    "rows.jsonl": write_rows,
    "a[1].jsonl": write_rows,  # a file's name is no pattern
    "rows.parquet": lambda path: Dataset.from_list(ROWS).to_parquet(path),
    "rows.csv": lambda path: Dataset.from_list(ROWS).to_csv(path),
    "saved": lambda path: Dataset.from_list(ROWS).save_to_disk(path),
    "saved_splits": lambda path: DatasetDict(dict.fromkeys(("train", "test"), Dataset.from_list(ROWS))).save_to_disk(
        path
    ),
    "folder/train.jsonl": write_rows,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_local_sources(name, streaming, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    WRITERS[name](path)
    source = str(path.parent if path.parent.name == "folder" else path)
    dataset = load_data(source, split="train", streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert [row["prompt"] for row in dataset] == [row["prompt"] for row in ROWS]
    assert check_prompts(dataset, "x") == ["prompt", "answer"]


@pytest.mark.parametrize(("_", "source", "message"), cases("cli.tsv", "data"))
def test_sources_that_do_not_load(_, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "blank.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n oh')
    (tmp_path / "bare").mkdir()
    write_rows(tmp_path / "one.jsonl")
    with pytest.raises(InputError, match=message):
        load_data(source, split="test" if source == "one.jsonl" else "train")


def test_an_empty_split_and_a_missing_library(monkeypatch):
    with pytest.raises(InputError, match="some name, split train, which is empty"):
        take_split({"train": Dataset.from_list(ROWS).select([])}, "train", "some name")
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r'pip install "trl-drgrpo\[tasks\]"'):
        load_data("reasoning_gym:chain_sum")


def test_reasoning_gym_rows(caplog):
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
    # A task that is too small for a test split says so.
    with caplog.at_level(logging.WARNING):
        data = load_data("reasoning_gym:chain_sum?size=400&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    assert "test questions also occur among the" in caplog.text
    assert 0 < len(data["test"]) < 100
    train = {row["prompt"][-1]["content"] for row in data["train"]}
    assert not any(row["prompt"][-1]["content"] in train for row in data["test"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["a"], "answer": ["b"]}, r"question, answer; .*it with `rename_columns: \[question=prompt"),
        ({"a": ["a"]}, r"columns a; expected a column .prompt.. Rename the one .*\[<column>=prompt\]"),
        ({"prompt": [1]}, r"prompt: got int 1 as the prompt in row 0 \(the first is 0\) of x; expected a non-empty"),
    ],
)
def test_prompts_that_are_none(columns, message):
    with pytest.raises(InputError, match=message):
        check_prompts(Dataset.from_dict(columns), "x")
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


def test_forms_of_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    assert is_hub_id("org/name-v1.5")
    assert is_hub_id("name")
    for source in ("local", "./org/name", "org/name.jsonl", "/a", "reasoning_gym:x", "trl_drgrpo:list_sum"):
        assert not is_hub_id(source)
    check_source("org/name")  # nothing to say about it without the network


# Prompts as the model sees them --------------------------------------------------------------------------------------

PROBLEMS = Dataset.from_dict({"prompt": ["What is {1,2}?", "1+1="], "solution": ["{1,2}", "2"]})
CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]]})
SYSTEM = Dataset.from_dict({"prompt": [[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]]})
TESTS = Dataset.from_dict({"prompt": ["Add."], "tests": [["assert f(1)", "assert f(2)"]], "level": [3]})
MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\nWhat is {1,2}?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("dataset", "template", "prompt"),
    [
        (PROBLEMS, "qwen_math", MATH),
        (PROBLEMS, "Q: {prompt}\nA:", "Q: What is {1,2}?\nA:"),
        (PROBLEMS.to_iterable_dataset(), "{prompt}!", "What is {1,2}?!"),
        (Dataset.from_dict({"prompt": ["{prompt}{prompt}"]}), "<{prompt}>", "<{prompt}{prompt}>"),  # filled in once
        (
            TESTS,  # other columns have their slots, and lists their lines
            "{prompt} Level {level}, {{unknown}}, \\boxed{x}, x^{n}, {1,2}.\n{tests}",
            "Add. Level 3, {unknown}, \\boxed{x}, x^{n}, {1,2}.\nassert f(1)\nassert f(2)",
        ),
        (TESTS, "{prompt} {{level}}", "Add. {3}"),
    ],
)
def test_a_template_surrounds_the_problem(dataset, template, prompt):
    first = next(iter(dataset))
    assert next(iter(prompted(dataset, template))) == {**first, "prompt": prompt}


def test_the_r1_template_opens_the_thinking():
    prompt = prompted(PROBLEMS, "r1")[1]["prompt"]
    assert prompt.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant ")
    assert prompt.endswith("\nUser: 1+1=\nAssistant: <think>")
    assert [template_text(name).count("{prompt}") for name in TEMPLATES] == [1, 1]
    assert prompted(PROBLEMS) is PROBLEMS


@pytest.mark.parametrize(
    ("dataset", "template", "last"),
    [(PROBLEMS, None, "1+1="), (PROBLEMS, "Q: {prompt}", "Q: 1+1="), (CHAT, None, "hi")],
)
def test_a_system_prompt_makes_a_conversation(dataset, template, last):
    """In front of messages, too; a template of one's own is the user's message."""
    found = prompted(dataset, template, "Be short.")[-1]["prompt"]
    assert [(each["role"], each["content"]) for each in found] == [("system", "Be short."), ("user", last)]


SLIP = {"prompt_template": "{prompt} {soluton}"}
NO_SOLUTON = r"got the slot \{soluton\}; .* the columns prompt, solution. Did you mean \{solution\}\?"
BOTH = {"prompt_template": "r1", "system_prompt": "x"}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (
            PROBLEMS,
            {"prompt_template": "qwen_maths"},
            "got 'qwen_maths'; .* Did you mean 'qwen_math'?",
        ),
        (PROBLEMS, {"prompt_template": "no slot"}, "a template with {prompt} in it"),
        (PROBLEMS, BOTH, "system_prompt: got one together with prompt_template 'r1'"),
        (SYSTEM, {"prompt_template": "r1"}, "a template for prompts that are messages"),
        (SYSTEM, {"system_prompt": "x"}, "one for prompts that begin with a system message"),
        (PROBLEMS, SLIP, NO_SOLUTON),
        (PROBLEMS.to_iterable_dataset(), SLIP, NO_SOLUTON),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused(dataset, options, message):
    with pytest.raises(InputError, match=message):
        prompted(dataset, **options)
