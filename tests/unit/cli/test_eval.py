"""`trl-drgrpo eval` from end to end: an adapter beside its base, its files and their readers, bad input."""

import json
from pathlib import Path

import pytest
import yaml
from case_tables import cases
from evaluations import result, samples
from runs import read_lines, write_lines, written_elsewhere

from trl_drgrpo.cli.main import main, parse
from trl_drgrpo.cli.run_keys import keep_recipe, kept_recipe, read_settings, run_folder
from trl_drgrpo.evaluation import models
from trl_drgrpo.features.sampling.pass_rates import read_pass_rates

REWARD = """
def short(completions, **kwargs):
    return [float(len(c) < 6) for c in completions]
def partly(completions, **kwargs):
    return [0.25 for c in completions]
def moody(completions, **kwargs):
    raise KeyError("one")
"""
PROBLEMS = 6


@pytest.fixture(scope="module")
def adapter(saved_model, tmp_path_factory):
    """A run's folder: an adapter that moves the model, its recipe, and a card."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("runs") / "first"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(saved_model),
        LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    (folder / "README.md").write_text("# first\n\n## Limits\n")
    recipe = {"model_name_or_path": saved_model, "dataset_name": "data", "rename_columns": ["question=prompt"]}
    recipe |= {"reward_funcs": ["mine.py:short"], "max_completion_length": 8, "top_k": 20, "output_dir": str(folder)}
    recipe |= {"vllm_server_base_url": "http://127.0.0.1:9"}  # of the training: nobody asks it now
    keep_recipe(folder, yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with data (a training and a test split) and rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for split, first in (("train", 20), ("test", 0)):
        rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(first, first + PROBLEMS)]
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def test_a_run_is_measured_beside_the_model_it_came_from(folder, adapter, saved_model, monkeypatch, capsys):
    argv = ["eval", "--model", str(adapter), "--num_samples", "4", "--batch_size", "8", "--pass_rates", "rates.jsonl"]
    argv += ["--output_dir", "out", "--trust_recipe"]  # its reward is in a file
    assert main(argv) == 0
    printed = capsys.readouterr()
    [path] = Path("out").glob("data-test-*.json")
    content = json.loads(path.read_text())
    assert [(each["role"], each["name"]) for each in content["models"]] == [
        ("baseline", saved_model),
        ("model", str(adapter)),
    ]
    assert content["sampling"]["top_k"] == 20  # the run's recipe
    assert (content["dataset"]["split"], content["dataset"]["prompts"]) == ("test", PROBLEMS)
    files = {
        each: next(Path("out/samples").glob(f"{Path(each).name}-*.jsonl")) for each in (saved_model, str(adapter))
    }
    rows = {name: read_lines(file) for name, file in files.items()}
    rates = {}
    for model in content["models"]:
        found = rows[model["name"]]
        assert [row["eval"]["rewards"]["short"] for row in found] == [
            float(len(row["completion"]) < 6) for row in found
        ]
        rates[model["role"]] = sum(row["eval"]["rewards"]["short"] for row in found) / len(found)
        assert model["pass_at"]["1"]["value"] == pytest.approx(rates[model["role"]])
        assert model["truncated"] == sum(row["eval"]["finish_reason"] == "length" for row in found)
    texts = [[row["completion"] for row in rows[model["name"]]] for model in content["models"]]
    assert texts[0] != texts[1]  # the adapter was on, and only there
    assert content["difference"]["1"]["value"] == pytest.approx(rates["model"] - rates["baseline"])
    assert f"model: {adapter}" in printed.out
    known = read_pass_rates(Path("rates.jsonl"))
    assert sum(rate for rate, _ in known.values()) / PROBLEMS == pytest.approx(rates["model"])
    assert {count for _, count in known.values()} == {4}
    card = (adapter / "README.md").read_text()
    assert "| model: this one |" in card
    assert "a local dataset, split test" in card
    assert saved_model not in card
    assert main([*argv, "--limit", "2", "--num_samples", "1"]) == 0
    assert "Not stated in the model card, as it is of the first 2 prompts only." in capsys.readouterr().err
    assert (adapter / "README.md").read_text() == card

    assert main(["score", "--rewards", "mine.py:short", "--data", str(files[str(adapter)]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"]["short"]["mean"] == pytest.approx(rates["model"])

    # Again: nothing is sampled. Killed in the middle: the same file.
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_model", lambda *args: pytest.fail("nothing is left to sample"))
        assert main([*argv, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["models"] == content["models"]
    whole = files[str(adapter)].read_bytes()
    files[str(adapter)].write_bytes(b"".join(whole.splitlines(keepends=True)[:9]) + b'{"prom')
    assert main(argv) == 0
    assert files[str(adapter)].read_bytes() == whole
    assert f"2 of {PROBLEMS} prompts of {adapter} are in" in capsys.readouterr().err


def test_a_recipe_names_the_model_that_it_has_trained(folder, saved_model, capsys):
    recipe = {"model_name_or_path": saved_model, "dataset_name": "data", "rename_columns": ["question=prompt"]}
    recipe |= {"reward_funcs": ["mine.py:short"], "max_completion_length": 4, "output_dir": "runs/none"}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = ["--limit", "2", "--split", "train", "--temperature", "0", "--json"]
    assert main(["eval", "--config", "recipe.yaml", *options]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in content["models"]] == [saved_model]  # nothing is trained yet
    assert content["difference"] is None
    assert (content["dataset"]["split"], content["dataset"]["prompts"]) == ("train", 2)
    assert list(content["models"][0]["pass_at"]) == ["1"]


def test_the_folder_of_the_results_is_not_taken_for_that_of_the_trained_model(folder, adapter):
    Path("recipe.yaml").write_text(kept_recipe(str(adapter)).read_text())
    given = read_settings(parse(["eval", "--config", "recipe.yaml", "--output_dir", "out"]))
    assert given.model == given.values["model_name_or_path"] == str(adapter)


def test_a_partial_reward_is_refused_early_and_the_samples_stay(folder, saved_model, capsys):
    argv = ["eval", "--model", saved_model, "--dataset_name", "data", "--rename_columns", "question=prompt"]
    argv += ["--reward_funcs", "mine.py:partly", "--max_completion_length", "4", "--batch_size", "2"]
    assert main(argv) == 2
    assert "error: correct_threshold: got none for partly, which gave 0.25" in capsys.readouterr().err
    [file] = Path("eval_output/samples").glob("*.jsonl")
    assert len(read_lines(file)) < PROBLEMS
    with written_elsewhere(file, is_file=True) as other:
        assert main([*argv, "--correct_threshold", "0.2"]) == 2
        assert f"samples/{file.name}, to which process {other.pid} on " in capsys.readouterr().err
    assert main([*argv, "--correct_threshold", "0.2"]) == 0
    assert "100.0%" in capsys.readouterr().out
    assert main([*argv, "--reward_funcs", "mine.py:moody"]) == 2
    assert "reward function 'moody': got KeyError: 'one', on every completion of the" in capsys.readouterr().err
    Path("mine.py").write_text(REWARD.replace("0.25", "0.15"))  # another reward under the same name
    assert main([*argv, "--correct_threshold", "0.2"]) == 0
    assert "are in" not in capsys.readouterr().err  # nothing of the old rewards is used
    assert len(list(Path("eval_output/samples").glob("*.jsonl"))) == 3


@pytest.mark.parametrize(("_", "changes", "message"), cases("cli.tsv", "eval"))
def test_bad_input_is_one_line_before_a_model_loads(_, changes, message, folder, saved_model, monkeypatch, capsys):
    monkeypatch.setattr(models, "load_model", lambda *args: pytest.fail("too late"))
    given = {"model": saved_model, "dataset_name": "data", "rename_columns": "question=prompt"}
    given |= {"reward_funcs": "mine.py:short", **yaml.safe_load(changes)}
    argv = [part for name, value in given.items() if value is not None for part in (f"--{name}", value)]
    assert main(["eval", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err.splitlines()[-1]


def test_a_checkpoint_belongs_to_its_run(tmp_path):
    checkpoint = tmp_path / "first" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    assert (run_folder(str(checkpoint)), kept_recipe(str(checkpoint))) == (None, None)
    keep_recipe(checkpoint.parent, "seed: 1\n")
    assert kept_recipe(str(checkpoint)) == kept_recipe(str(checkpoint.parent))
    assert run_folder("some/name") is None


def test_evaluations_of_a_run_are_in_its_report(tmp_path):
    from trl_drgrpo.evaluation.results import as_json
    from trl_drgrpo.report import write_report

    evaluations = tmp_path / "_drgrpo" / "evaluations"
    evaluations.mkdir(parents=True)
    (tmp_path / "_drgrpo" / "run.json").write_text('{"format": 1}')
    hostile = "<script>alert(1)</script>.jsonl"
    content = result(samples([1, 0], [1, 1]), samples([0, 0], [1, 0]), dataset=hostile)
    (evaluations / "a.json").write_text(as_json(content))
    page = write_report(tmp_path).read_text("utf-8")
    assert '<details id="evaluations"' in page
    assert "difference, paired" in page
    assert "+50.0 points" in page
    assert hostile not in page
    [shown] = json.loads(write_report(tmp_path, format="json").read_text("utf-8"))["runs"][0]["evaluations"]
    assert shown["rows"][1][0] == "model: model"  # names no folder
