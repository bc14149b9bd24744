"""The tests mirror the package: `trl_drgrpo/<room>/<file>.py` has `tests/unit/<room>/test_<file>.py`.

A test of a whole room, `tests/unit/<parent>/test_<room>.py`, counts too. What is tested elsewhere stands here.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {  # test file -> package files
    "trainer/test_adapters.py": "single_gpu/adapters",
    "trainer/test_cli_train.py": "cli/job cli/resolved",
    "trainer/test_credit.py": "upstream/batches",
    "trainer/test_description.py": "upstream/description",
    "trainer/test_diagnostics.py": "features/diagnostics/run_facts features/diagnostics/snapshot",
    "trainer/test_families.py": "upstream/translated_weights",
    "trainer/test_model_card.py": (
        "common/secrets features/model_card/card features/model_card/card_facts "
        "features/model_card/objective features/model_card/plots features/model_card/markdown_text "
        "features/model_card/snippet"
    ),
    "trainer/test_process_rewards.py": "process_rewards/rollouts",
    "trainer/test_resume.py": "features/resume/run_state",
    "trainer/test_trainer.py": "trainer config/preflight upstream/host upstream/private_state",
    "unit/config/test_validation.py": "config/group_validation",
    "unit/cli/test_eval.py": (
        "cli/eval_inputs cli/kept_recipe cli/problems cli/progress_bar cli/run_keys report/evaluations"
    ),
    "unit/cli/test_flags.py": "cli/script_arguments",
    "unit/cli/test_plan.py": "cli/plan_report",
    "unit/cli/test_recipe.py": "cli/strict_yaml",
    "unit/cli/test_score.py": "cli/score_report",
    "unit/features/diagnostics/test_watches.py": "features/diagnostics/watch",
    "unit/features/fast_path/test_packing.py": "features/fast_path/sharing",
    "unit/labs/test_check.py": "cli/check",
    "unit/process_rewards/test_scorers.py": (
        "process_rewards/step_columns process_rewards/encoding process_rewards/loading "
        "process_rewards/marker process_rewards/qwen2_prm process_rewards/step_verifiers "
        "process_rewards/scorer process_rewards/texts process_rewards/token_classification"
    ),
    "unit/process_rewards/test_training.py": (
        "cli/label_steps cli/train_prm process_rewards/labeling process_rewards/stepwise_data"
    ),
    "unit/report/test_write.py": "cli/report",
    "unit/rewards/functions/mathematics/test_equivalence.py": (
        "rewards/functions/mathematics/brackets rewards/functions/mathematics/relations"
    ),
    "unit/rewards/isolation/test_isolated.py": (
        "rewards/isolation/batch rewards/isolation/in_worker rewards/isolation/pickling"
    ),
    "unit/rewards/isolation/test_workers.py": (
        "rewards/isolation/nursery rewards/isolation/processes rewards/isolation/worker"
    ),
    "unit/rewards/test_columns.py": "rewards/foreign",
    "unit/rewards/test_contract.py": "rewards/signatures",
    "unit/rewards/test_registry.py": "rewards/paths",
    "unit/rewards/functions/strings/test_matching.py": "rewards/text",
    "unit/single_gpu/test_merging.py": "cli/merge single_gpu/adapter_folder",
    "unit/test_package.py": "common/version",
    "unit/labs/test_demo.py": "cli/demo common/drawing",
}


def test_every_file_of_the_package_has_its_test():
    package, unit = ROOT / "trl_drgrpo", ROOT / "tests/unit"
    unmirrored = []
    for path in package.rglob("*.py"):
        file = path.relative_to(package).with_suffix("")
        its_own = unit / file.parent / f"test_{file.name}.py"
        its_rooms = (unit / file.parent).parent / f"test_{file.parent.name}.py"
        if file.name not in ("__init__", "__main__") and not its_own.exists() and not its_rooms.exists():
            unmirrored.append(str(file))
    assert sorted(unmirrored) == sorted(" ".join(ELSEWHERE.values()).split())
    assert [test for test in ELSEWHERE if not (ROOT / "tests" / test).exists()] == []
