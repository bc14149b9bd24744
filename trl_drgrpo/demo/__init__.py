"""The embedded demo: a machine-checkable task, a tiny model that half masters it, and a run that teaches it the rest.

Reading order: `task.py` -> `build.py` -> `result.py` -> `run.py`. `trl-drgrpo demo` runs it.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "list_sum_model"  # the tiny model that comes with the package
# Runs of stock TRL to compare with: name of the run (and its folder) -> fields of GRPOConfig that make the objective.
# The last is Dr. GRPO in stock TRL.
STOCK_OBJECTIVES: dict[str, dict[str, str]] = {
    "trl_default_dapo": {},
    "trl_grpo": {"loss_type": "grpo"},
    "trl_dr_grpo_std_on": {"loss_type": "dr_grpo"},
    "trl_dr_grpo_no_std": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}
