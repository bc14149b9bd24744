"""`trl-drgrpo bias`: a recipe measured instead of trained."""

import json
import re
from pathlib import Path

import pytest

from trl_drgrpo.cli.main import main

ROOT = Path(__file__).parents[3]
RECIPE = """
model_name_or_path: trl_drgrpo:demo
dataset_name: trl_drgrpo:list_sum?size=64&test_size=0
reward_funcs: [list_sum_reward]
per_device_train_batch_size: 16
gradient_accumulation_steps: 1
num_generations: 8
max_completion_length: 96
output_dir: out
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def test_a_recipe_is_measured_and_nothing_is_written(recipe, tmp_path, capsys):
    assert main(["bias", "--config", recipe, "--batches", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Change per update of unit length, 3 batches")
    assert captured.out.count("| dr_grpo, no std |") == 2  # not among its own differences
    assert captured.out.count("| grpo, no std |") == 3
    assert "Push to go on instead of stopping" in captured.out
    assert "batch 3/3: 16 completions" in captured.err
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert main(["bias", "--config", recipe, "--dry_run"]) == 0
    assert "num_generations: 8" in capsys.readouterr().out


def test_json_has_every_estimate(recipe, capsys):
    assert main(["bias", "--config", recipe, "--batches", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == 3
    wrong = found["changes"]["grpo"]["length_wrong"]
    assert wrong["standard_error"] > 0
    assert set(found["stop_push"]["grpo"]["incorrect"]) == {"value", "standard_error", "groups"}
    assert found["differences_from_dr_grpo"]["dr_grpo"]["pass_rate"] == {"value": 0.0, "standard_error": 0.0}


def test_the_probe_is_printed_beside_the_tables(recipe, capsys):
    flags = ["--probe", "--batches", "4", "--temperature", "1.2"]
    assert main(["bias", "--config", recipe, *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Change per update of unit length, 4 batches")
    rows = dict(re.findall(r"^\| (the last hidden state|the position alone|difference) \| (\S+ ± \S+) \|$", out, re.M))
    assert len(rows) == 3
    assert "Where an answer may stop, the state" in out.splitlines()[-1]
    assert not re.search("right|wrong", out)


def test_gradients_that_do_not_fit_are_left_out_with_the_probe(recipe, capsys, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.check.bias.MEMORY_LIMIT", 1000)
    sizes = ["--per_device_train_batch_size", "64", "--json"]
    assert main(["bias", "--config", recipe, "--probe", "--batches", "3", *sizes]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {"stop_push", "probe"}
    assert 0 < found["probe"]["states"]["value"] < 1
    assert "no gradients are taken: trainable parameters: got" in captured.err
    assert main(["bias", "--config", recipe, "--batches", "3"]) == 2


def test_what_was_measured_is_printed_though_nothing_can_be_probed(recipe, capsys):
    flags = ["--dataset_name", "trl_drgrpo:list_sum?size=2&test_size=0"]
    assert main(["bias", "--config", recipe, "--probe", "--batches", "3", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("Change per update of unit length")
    assert "expected at least 5. " in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batches", "2"], "--batches: got 2; expected at least 3"),
        (["--top_p", "0.9"], "top_p: got 0.9; expected 1.0"),
        (["--reward_func", "x"], "--reward_func: got an unknown flag"),
    ],
)
def test_bad_input_is_one_line(recipe, flags, message, capsys):
    assert main(["bias", "--config", recipe, *flags]) == 2
    assert message in capsys.readouterr().err
