"""`trl-drgrpo search` from end to end: what it writes, who reads it, how it goes on, what it refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from case_tables import cases
from runs import read_lines, write_lines, written_elsewhere

from trl_drgrpo.cli.main import main
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.task import list_sum_reward
from trl_drgrpo.process_rewards.training import labeled_steps
from trl_drgrpo.rewards.scoring import read_json_lines

DEMO_MODEL = str(MODEL_DIR)
PROBLEMS = 5
MOODY = """
import os
def score(completions, answer, **kwargs):
    if os.environ.get('BROKEN') and '15' in answer:
        raise KeyError('answer')
    return [float(f'boxed{{{a}}}' in c[-1]['content']) for c, a in zip(completions, answer)]
"""


def search(output, *more, strategy="puct", prm="list_sum_line_reward", reward="list_sum_reward", **options):
    source = f"trl_drgrpo:list_sum?size={PROBLEMS}&test_size=0"
    given = {"model": "trl_drgrpo:demo", "dataset_name": source, "strategy": strategy, "budget_tokens": 160}
    given |= {"max_completion_length": 48, "output": output, "reward_funcs": reward, "prm": prm}
    given |= {"problems_at_once": 2, "step_separator": r"\n", **options}
    flags = [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
    return main(["search", *flags, *more])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A whole search, with what it says."""
    import contextlib
    import io

    folder, out = tmp_path_factory.mktemp("search"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert search(folder / "found.jsonl", "--sft_output", str(folder / "found-sft.jsonl")) == 0
    printed = dict(line.split() for line in out.getvalue().splitlines())
    return folder / "found.jsonl", folder / "found-sft.jsonl", printed


def test_the_summary_is_that_of_the_rows(found):
    output, sft, printed = found
    rows = read_lines(output)
    counts = {row["search"]["problem"]: row["search"] for row in rows}
    assert list(counts) == list(range(PROBLEMS)) == list(range(int(printed["problems"])))
    assert int(printed["sampled_tokens"]) == sum(each["sampled_tokens"] for each in counts.values())
    assert float(printed["tokens_per_problem"]) == pytest.approx(int(printed["sampled_tokens"]) / PROBLEMS)
    assert all(each["sampled_tokens"] <= 160 for each in counts.values())
    selected = [row for row in rows if row["selected"]]
    assert len(selected) == PROBLEMS
    assert float(printed["pass_rate_selected"]) == sum(row["correct"] for row in selected) / PROBLEMS
    any_correct = {row["search"]["problem"] for row in rows if row["correct"]}
    assert float(printed["pass_rate_any"]) == len(any_correct) / PROBLEMS > 0
    assert int(printed["completions"]) == len(rows)
    assert int(printed["sft_rows"]) == len(read_lines(sft)) == sum(row["correct"] for row in rows) > 0
    for row in rows:
        assert row["outcome"] == list_sum_reward([row["completion"]], [row["answer"]])[0]
        assert "".join(row["steps"]) == row["completion"][0]["content"]
        assert "<|im_end|>" not in row["completion"][0]["content"]


def test_train_prm_label_steps_and_score_read_the_file(found, tmp_path, capsys):
    output, _, printed = found
    labeled = labeled_steps(read_json_lines(output), output)
    assert len(labeled) == int(printed["completions"])
    assert {label for row in labeled for label in row["labels"]} == {True, False}
    prm = ["--data", str(output), "--output_dir", str(tmp_path / "prm"), "--max_steps", "1"]
    assert main(["train-prm", "--model", "trl_drgrpo:demo", *prm]) == 0
    assert f"rows {len(labeled)}" in capsys.readouterr().out
    assert main(["score", "--rewards", "list_sum_reward", "--data", str(output), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["rewards"]["list_sum_reward"]
    assert scores["mean"] == pytest.approx(sum(row["correct"] for row in read_lines(output)) / len(labeled))
    labels = ["--data", str(output), "--reward", "list_sum_reward", "--output", str(tmp_path / "labels.jsonl")]
    labels += ["--step_separator", r"\n"]
    assert main(["label-steps", "--model", DEMO_MODEL, "--rollouts", "1", "--max_new_tokens", "32", *labels]) == 0
    assert [row["steps"] for row in read_lines(tmp_path / "labels.jsonl")] == [
        [step.removesuffix("\n") for step in row["steps"]] for row in read_lines(output)
    ]
    named = ["--model", "trl_drgrpo:demo", "--max_new_tokens", "48"]
    named += ["--data", "trl_drgrpo:list_sum?size=2&test_size=0"]
    labels = ["--reward", "list_sum_reward", "--rollouts", "1", "--output", str(tmp_path / "named.jsonl")]
    assert main(["label-steps", *named, *labels]) == 0
    assert len({row["answer"] for row in read_lines(tmp_path / "named.jsonl")}) == 2
    # And what train-prm saved guides a search, by its folder.
    assert search(tmp_path / "guided.jsonl", prm=tmp_path / "prm", limit=1, budget_tokens=100) == 0
    assert all(0 < score < 1 for row in read_lines(tmp_path / "guided.jsonl") for score in row["prm_scores"])


def test_trls_sft_trainer_reads_the_file_of_right_completions(found, tmp_path):
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    dataset = load_dataset("json", data_files=str(found[1]), split="train")
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1)
    trainer = SFTTrainer(DEMO_MODEL, args=args, train_dataset=dataset)
    example, row = trainer.train_dataset[0], dataset[0]
    trained = [token for token, label in zip(example["input_ids"], example["labels"], strict=True) if label != -100]
    text = trainer.processing_class.decode(trained)
    assert text.startswith(row["completion"][0]["content"])  # the completion's tokens and no others
    assert row["prompt"][0]["content"] not in text


def test_the_same_command_gives_the_same_file_also_when_it_was_killed(found, tmp_path, capsys):
    whole = found[0].read_bytes()
    output = tmp_path / "found.jsonl"
    lines = whole.splitlines(keepends=True)
    problems = [json.loads(line)["search"]["problem"] for line in lines]
    sft = tmp_path / "found-sft.jsonl"
    facts = found[0].with_suffix(".search.json").read_bytes()
    third = problems.index(2)
    for kept, done in ((b"".join(lines[: third + 1]) + b'{"prompt": [{"ro', 2), (whole[:-1], 4), (b"", 0), (whole, 5)):
        output.write_bytes(kept)
        output.with_suffix(".search.json").write_bytes(facts)
        assert search(output, "--sft_output", str(sft)) == 0
        assert output.read_bytes() == whole
        assert sft.read_bytes() == found[1].read_bytes()
        printed = capsys.readouterr()
        due = " ".join(f"{name} {value}" for name, value in found[2].items())
        assert printed.out.replace(str(output), str(found[0])).split() == due.split()
        assert (f"{done} of 5 problems are in" in printed.err) == bool(done)


def test_a_file_to_which_another_search_writes(tmp_path, capsys):
    with written_elsewhere(tmp_path / "found.jsonl", is_file=True) as other:
        assert search(tmp_path / "found.jsonl") == 2
    assert re.fullmatch(f"error: output: got .*, to which process {other.pid} on .*\n", capsys.readouterr().err)


def test_a_reward_that_fails_keeps_the_finished_problems(tmp_path, capsys, monkeypatch):
    module = tmp_path / "mine.py"
    module.write_text(MOODY)
    data = tmp_path / "sums.jsonl"
    sums = ["3+8", "2+5", "7+8", "1+4"]
    rows = [{"q": [{"role": "user", "content": text}], "answer": str(sum(map(int, text.split("+"))))} for text in sums]
    write_lines(data, rows)
    options = {"dataset_name": data, "rename_columns": "q=prompt", "reward": f"{module}:score", "prm": None}
    options |= {"strategy": "best_of_n", "budget_tokens": 96}
    monkeypatch.setenv("BROKEN", "1")
    assert search(tmp_path / "found.jsonl", **options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: reward function 'score': got KeyError" in printed.err
    assert {row["search"]["problem"] for row in read_lines(tmp_path / "found.jsonl")} == {0, 1}
    monkeypatch.delenv("BROKEN")
    assert search(tmp_path / "found.jsonl", **options) == 0
    assert search(tmp_path / "at_once.jsonl", **options) == 0
    assert (tmp_path / "found.jsonl").read_bytes() == (tmp_path / "at_once.jsonl").read_bytes()


@pytest.mark.parametrize(("_", "changes", "message"), cases("cli.tsv", "search"))
def test_bad_input_is_one_line_before_a_model_loads(_, changes, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trl_drgrpo.process_rewards.loading.load_model", lambda *a, **k: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    Path("steps.jsonl").write_text('{"prompt": "3+8", "answer": "11", "steps": ["a"]}\n')
    Path("sums.jsonl").write_text('{"prompt": "3+8", "answer": "11"}\n')
    Path("other.jsonl").write_text("")
    Path("other.search.json").write_text('{"budget_tokens": 512}')
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert search(**{"output": "new.jsonl", **yaml.safe_load(changes)}) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"error: {message}")
    assert {path: path.read_bytes() for path in before} == before
    assert not Path("new.jsonl").exists() or "vllm" in message
