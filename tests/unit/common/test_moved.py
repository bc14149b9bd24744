"""Import paths of release 0.1.0: what its README, recipes and notebooks import, and what its pickles name."""

import ast
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch

import trl_drgrpo
from trl_drgrpo.common.moved import MOVED

# As in `git show 10cedc0:README.md`, `recipes/` and `notebooks/`: module -> names imported from it.
MOVED_IN_DOCS = {
    "demo.build": "MODEL_DIR",
    "demo.evaluate": "evaluate",
    "demo.process": "line_reward",
    "demo.task": "check_steps demonstrate list_sum_reward make_dataset make_problems",
    "diagnostics.series": "moved",
    "diagnostics.statistics": "BUCKETS bucket_index",
    "errors": "InputError",
    "rewards.judge": "JudgeReward",
    "rewards.mathematics": "MathReward math_reward",
    "step_credit": "STEP_BASELINES STEP_CREDITS step_advantages",
    "steps": "step_segmenter",
}
STILL_THERE = {
    "cli.demo": "stay_offline_and_quiet",
    "cli.main": "main",
    "config": "DrGRPOConfig",
    "process_rewards": "TokenClassificationScorer train_prm",
    "report.figure": "smoothed",
    "report.reading": "read_run",
    "rewards": "format_reward from_r1_zero from_verl gated isolate math_reward weighted_sum",
    "rewards.isolation": "Limits isolate",
    "rewards.scoring": "score_rows",
    "single_gpu": "merge_adapter",
    "single_gpu.memory": "Planner",
    "trainer": "DrGRPOTrainer",
}
# No page names these, but scripts may: public functions of modules at the top of the package.
MOVED_BESIDES = {
    "advantages": "combine_rewards group_advantages",
    "check.parity": "cases run_case",
    "data": "load_data take_split",
    "loss": "dr_grpo_loss",
    "prompts": "prompted template_text",
    "rewards.code": "CodeReward code_reward",
    "rewards.reasoning_gym": "make_splits",
    "rewards.strings": "choice_reward format_reward",
    "seams": "check_upstream require_seams",
}


@pytest.mark.parametrize(("old", "names"), (MOVED_IN_DOCS | MOVED_BESIDES).items())
def test_an_old_path_warns_and_leads_to_the_same_objects(old, names, monkeypatch):
    top = next(top for top in sorted(MOVED, key=len, reverse=True) if f"{old}.".startswith(f"{top}."))
    new = MOVED[top] + old.removeprefix(top)
    monkeypatch.delitem(sys.modules, f"trl_drgrpo.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=rf"trl_drgrpo\.{old} has moved to trl_drgrpo\.{new};"):
        moved = importlib.import_module(f"trl_drgrpo.{old}")
    here = importlib.import_module(f"trl_drgrpo.{new}")
    for name in names.split():
        if not hasattr(here, name):  # a module: `from trl_drgrpo.study import tabular_report` imports it
            importlib.import_module(f"trl_drgrpo.{new}.{name}")
        assert getattr(moved, name) is getattr(here, name)
    assert set(dir(here)) <= set(dir(moved))


@pytest.mark.parametrize(("module", "names"), STILL_THERE.items())
def test_a_path_that_stays_says_nothing(module, names):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has moved to", category=DeprecationWarning)
        here = importlib.import_module(f"trl_drgrpo.{module}")
        assert [name for name in names.split() if not hasattr(here, name)] == []


def test_every_line_of_the_table_is_tested_and_hides_no_module():
    tested = MOVED_IN_DOCS | MOVED_BESIDES
    assert [top for top in MOVED if not any(f"{old}.".startswith(f"{top}.") for old in tested)] == []
    package = Path(trl_drgrpo.__file__).parent
    for top in MOVED:
        place = package / top.replace(".", "/")
        assert not place.with_suffix(".py").exists(), top
        assert not (place / "__init__.py").exists(), top


def test_a_module_that_never_was_is_still_not_found():
    with pytest.raises(ModuleNotFoundError, match="trl_drgrpo.nothing"):
        importlib.import_module("trl_drgrpo.nothing")


def test_the_arguments_of_release_0_1_0_load():
    checkpoint = Path(__file__).parents[2] / "data" / "checkpoint_0_1_0"
    args = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert isinstance(args, trl_drgrpo.DrGRPOConfig)
    assert (args.scale_by_running_std, args.overwrite_output_dir) == (True, False)


def test_the_package_itself_imports_from_the_new_places():
    def imported(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))

    places = {f"trl_drgrpo.{old}" for old in MOVED}
    for path in Path(trl_drgrpo.__file__).parent.rglob("*.py"):
        assert not places.intersection(imported(path)), path
