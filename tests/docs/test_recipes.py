"""Every recipe parses strictly, says what it is for and what to expect, and holds no key that changes nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_drgrpo import __version__
from trl_drgrpo.cli import data, job
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
HEADER = ("Purpose", "Hardware", "Command", "Expected", "Last run")


def test_there_are_recipes_and_no_yaml_file_is_left_out():
    assert len(RECIPES) > 5
    assert sorted((ROOT / "recipes").rglob("*.yaml")) == sorted([*RECIPES, *LAUNCHERS])


@pytest.fixture(params=RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def path(request):
    return request.param


def test_parses_strictly(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = read_recipe(str(path), read_flags()).values
    source = given.get("dataset_name", "")
    if data.is_hub_id(source) or source.startswith(("trl_drgrpo:", "reasoning_gym:")):
        job.check_given(given)


def test_has_its_header(path):
    lines = path.read_text().splitlines()[: len(HEADER)]
    assert [line.partition(":")[0] for line in lines] == [f"# {name}" for name in HEADER]
    assert all(line.partition(":")[2].strip() for line in lines)
    command = lines[2].partition(":")[2].strip()
    assert re.fullmatch(rf"(\w+=\S+ )*trl-drgrpo train --config {path.relative_to(ROOT)}", command)
    assert re.search(r"\d", lines[3]), "the expected result is a number"
    assert re.search(r"trl-drgrpo \d+\.\d+\S*, trl \d+\.\d+\.\d+", lines[4])
    assert __version__.split(".")[0] in lines[4]


def test_has_no_dead_keys(path):
    for key, value in read_recipe(str(path), read_flags()).values.items():
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
