"""Every recipe parses strictly, says what it is for and what to expect, holds no key that changes nothing, and trains:
two steps of it on a tiny model and a few rows of its data's shape, through overrides alone."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import prm_pipeline
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from bubblewrap import needs_bwrap
from datasets import Dataset, DatasetDict
from published import PUBLISHED, save_published
from tiny import save_tiny
from tiny_bases import save_base
from tiny_prms import built, config
from transformers import Qwen2ForTokenClassification

from trl_drgrpo import __version__
from trl_drgrpo.cli import data, job
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
HEADER = ("Purpose", "Hardware", "Time", "Command", "Expected", "Last run")


def test_there_are_recipes_and_no_yaml_file_is_left_out():
    assert len(RECIPES) > 5
    assert sorted((ROOT / "recipes").rglob("*.yaml")) == sorted([*RECIPES, *LAUNCHERS])


@pytest.fixture(params=RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def path(request):
    return request.param


def test_parses_strictly(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = read_recipe(str(path)).values
    source = given.get("dataset_name", "")
    if data.is_hub_id(source) or source.startswith(("trl_drgrpo:", "reasoning_gym:")):
        job.check_names(given)


def test_has_its_header(path):
    lines = path.read_text().splitlines()[: len(HEADER)]
    assert [line.partition(":")[0] for line in lines] == [f"# {name}" for name in HEADER]
    assert all(line.partition(":")[2].strip() for line in lines)
    command = lines[3].partition(":")[2].strip()
    assert re.fullmatch(rf"(\w+=\S+ )*trl-drgrpo train --config {path.relative_to(ROOT)}", command)
    assert re.search(r"\d", lines[4]), "the expected result is a number"
    assert re.search(r"trl-drgrpo \d+\.\d+\S*, trl \d+\.\d+\.\d+", lines[5])
    assert __version__.split(".")[0] in lines[5]


def test_has_no_dead_keys(path):
    for key, value in read_recipe(str(path)).values.items():
        assert value != read_flags()[key].default, f"{key} is set to its default"


def test_floats_are_written_with_a_point(path):
    assert not re.findall(r"^\w+:\s*\d+e-?\d+", path.read_text(), re.MULTILINE), "write 1.0e-6, not 1e-6"


@pytest.mark.slow
def test_the_quickstart_gives_the_number_it_promises(tmp_path):
    """In a process of its own, because the recipe sets the number of threads."""
    command = [sys.executable, "-m", "trl_drgrpo.cli.main", "train", "--config", "recipes/cpu_quickstart.yaml"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = yaml.safe_load(done.stdout)
    assert result["eval_reward_first"] < 0.4
    assert result["eval_reward_last"] > 0.85  # 0.945, 0.949, 0.949 with three seeds


def test_the_guide_shows_what_the_pipeline_printed():
    numbers = json.loads((ROOT / "recipes/results/prm_pipeline.json").read_text())
    text, _, seconds = prm_pipeline.table(numbers).rpartition("\n\n")
    guide = (ROOT / "recipes/studies/prm_pipeline.md").read_text()
    assert text in guide
    assert float(re.search(r"in all (\d+)", seconds)[1]) < 300


@pytest.mark.slow
def test_the_pipeline_of_a_process_reward_model_in_miniature(tmp_path, monkeypatch, capsys):
    command = [str(ROOT / "recipes/prm_pipeline.py"), "--quick", "--seeds", "1"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| 0 | PRM as baseline |" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="2"):  # once more, before it has done anything
        runpy.run_path(command[0], run_name="__main__")
    assert "runs/prm_pipeline exists; expected a new folder" in capsys.readouterr().err
    numbers = json.loads((tmp_path / "runs/prm_pipeline/results.json").read_text())
    assert [run["arm"] for run in numbers["runs"]] == list(prm_pipeline.ARMS)
    assert 0 <= numbers["inspected"]["against"]["labels"]["auc"] <= 1


# Two steps of each

# One row in the shape of each dataset that a recipe names.
ROWS = {
    "openai/gsm8k": {"question": "What is 1+1?", "answer": "1+1=2\n#### 2"},
    "DigitalLearningGmbH/MATH-lighteval": {"problem": "What is $1+1$?", "solution": r"It is $\boxed{2}$."},
    "google-research-datasets/mbpp": {
        "text": "Write a function that adds.",
        "test_list": ["assert add(1, 1) == 2", "assert add(0, 2) == 2"],
        "test_setup_code": "",
    },
}
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_generations": 4,
    "max_completion_length": 8,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": "true",
    "bf16": "false",
}


@pytest.fixture(scope="module")
def tiny(tokenizer, tmp_path_factory):
    """Folders of a policy, wide enough for 4 bits, and of a process reward model."""
    long = {"max_position_embeddings": 1024}
    policy = save_base(tmp_path_factory.mktemp("policy"), tokenizer, bias=True, **long)
    prm = built(Qwen2ForTokenClassification, config(tokenizer, num_labels=2, **long))
    return {"policy": policy, "prm": save_tiny(tmp_path_factory.mktemp("prm"), tokenizer, prm)}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=needs_bwrap if "code_reward" in path.read_text() else (), id=path.stem)
        for path in RECIPES
    ],
)
def test_two_steps_on_a_tiny_model(path, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    given = read_recipe(str(path)).values
    changes = {**SMALL, "model_name_or_path": tiny["policy"], "output_dir": str(tmp_path / "out")}
    if given["dataset_name"] in ROWS:
        rows = Dataset.from_list([ROWS[given["dataset_name"]]] * 8)
        DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
        changes["dataset_name"] = str(tmp_path / "data")
    else:
        assert given["dataset_name"].startswith("trl_drgrpo:")
        changes["eval_strategy"], changes["eval_on_start"] = "no", "false"
    if "model_init_kwargs" in given:
        changes["model_init_kwargs"] = "{}"  # of weights that are stored in another form
    if given.get("use_vllm"):
        changes["use_vllm"] = "false"  # the engine is tested in test_vllm_*.py
    if "step_reward_funcs" in given:
        changes["step_reward_funcs"] = json.dumps({"token_classification_prm": {"model": tiny["prm"]}})
    with monkeypatch.context() as environment:
        environment.setattr(os, "environ", dict(os.environ))  # a recipe may set variables
        flags = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
        assert main(["train", "--config", str(path), *flags]) == 0
    log = [json.loads(line) for line in (tmp_path / "out" / "_drgrpo" / "metrics.jsonl").read_text().splitlines()]
    assert max(entry["step"] for entry in log) == 2
    assert ("eval" in {entry["mode"] for entry in log}) == (given["dataset_name"] in ROWS)
    saved = "adapter_config.json" if "preset" in given else "model.safetensors"
    assert (tmp_path / "out" / saved).is_file()
    if "preset" in given:
        adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert adapter["peft_type"] == "LORA"


def test_the_rows_cover_every_dataset_that_a_recipe_names():
    named = {read_recipe(str(path)).values["dataset_name"] for path in RECIPES}
    assert {name for name in named if not name.startswith("trl_drgrpo:")} == set(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_needs_what_its_header_says(name, tmp_path, capsys):
    """The plan of it, from the configuration of its model."""
    [path] = [path for path in RECIPES if read_recipe(str(path)).values["model_name_or_path"] == name]
    header = path.read_text().splitlines()[1]
    card = re.search(r"one (\d+ GB)", header)[1].replace(" ", "")
    folder = save_published(name, tmp_path)
    assert main(["plan", "--config", str(path), "--model", folder, "--memory", card, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    assert f"{peak / 2**30:.1f} GB as planned" in header


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_a_launcher_configuration_is_one_that_accelerate_reads(path):
    config = load_config_from_file(str(path))  # refuses unknown keys
    assert config.num_processes > 1
    assert yaml.safe_load(path.read_text()).keys() <= vars(config).keys()
