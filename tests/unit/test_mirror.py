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
    "unit/labs/study/test_credit.py": (
        "labs/study/credit_arms labs/study/credit_report labs/study/credit_runs labs/study/credit_study "
        "labs/study/credit_tasks labs/study/credit_variance"
    ),
    "unit/labs/study/test_forks.py": "labs/study/forks_report labs/study/forks_runs",
    "unit/labs/study/test_guessing.py": "labs/study/turn_sampling",
    "unit/labs/study/test_probe.py": "labs/study/generation_batches",
    "unit/labs/study/test_probe_study.py": "labs/study/measured_models labs/study/probe_report",
    "unit/labs/study/test_resumable.py": "labs/study/markdown",
    "unit/labs/study/test_search.py": "labs/study/search_arms labs/study/search_report",
    "unit/labs/study/test_signal.py": "labs/study/signal_arms labs/study/signal_report labs/study/signal_runs",
    "unit/labs/study/test_tabular.py": "cli/study labs/study/intervals labs/study/tables labs/study/tabular_report",
    "unit/labs/study/test_trajectories.py": ("labs/study/results_file labs/study/rungs labs/study/trajectory_report"),
    "unit/labs/test_check.py": "cli/check",
    "unit/labs/study/test_variance_study.py": "labs/study/variance_report",
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
