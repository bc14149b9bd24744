"""The same demo by stock TRL, under each of its objectives, so that a report can show the runs side by side.

Model, data, seed, steps and settings are those of the demo; only trainer and objective differ. Step rewards are left
out: TRL has none.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.demo.build import MODEL_DIR
from trl_drgrpo.demo.task import list_sum_reward
from trl_drgrpo.features.diagnostics.progress import ProgressCallback, show_progress

# Name of the run (and its folder) -> fields of GRPOConfig that make the objective. The last is Dr. GRPO in stock TRL.
STOCK_OBJECTIVES: dict[str, dict[str, str]] = {
    "trl_default_dapo": {},
    "trl_grpo": {"loss_type": "grpo"},
    "trl_dr_grpo_std_on": {"loss_type": "dr_grpo"},
    "trl_dr_grpo_no_std": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}
_FOR_THE_REPORT = {"log_completions": True, "num_completions_to_print": 0}


def train_with_trl(
    objective: str, settings: dict[str, Any], train_dataset: Any, console: Console, model_dir: Path = MODEL_DIR
) -> tuple[Any, Any]:
    """
    Train the demo's model with stock TRL, and leave the files that the report reads in `settings["output_dir"]`.

    Args:
        objective (`str`): A key of [`STOCK_OBJECTIVES`].
        settings (`dict`): Fields of [`trl.GRPOConfig`], those of the run to compare with.
        train_dataset (`Dataset`): The same prompts.
        console (`rich.console.Console`): Console for progress.
        model_dir (`Path`): The model to start from.

    Returns:
        `tuple`: The trained model and its tokenizer.
    """
    shutil.rmtree(Path(settings["output_dir"]) / "completions", ignore_errors=True)  # an earlier, longer demo's
    args = GRPOConfig(**{**settings, **STOCK_OBJECTIVES[objective], **_FOR_THE_REPORT})
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rewards: Any = list_sum_reward
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=rewards,
        args=args,
        train_dataset=train_dataset,
        processing_class=tokenizer,
    )
    with show_progress(trainer, ProgressCallback(console, every_steps=20)):
        trainer.train()
    trainer.save_state()
    tokenizer.save_pretrained(str(args.output_dir))
    return trainer.model, tokenizer
