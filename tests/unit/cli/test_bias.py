"""`trl-drgrpo bias`: a recipe measured instead of trained."""

import json
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
