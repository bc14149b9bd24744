"""The same demo with the objective of GRPO, by stock TRL, so that a report can show both runs side by side.

Model, data, seed, steps and settings are those of the demo; only trainer and objective differ: `loss_type="grpo"` (a
mean over each answer's own tokens) and advantages divided by the group's standard deviation.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.features.diagnostics.progress import ProgressCallback, show_progress
from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.task import list_sum_reward

_OBJECTIVE = {"loss_type": "grpo", "scale_rewards": "group"}
_FOR_THE_REPORT = {"log_completions": True, "num_completions_to_print": 0}


def train_with_grpo(
    settings: dict[str, Any], train_dataset: Any, console: Console, model_dir: Path = MODEL_DIR
) -> Path:
    """Train the demo's model with stock TRL's GRPO, and leave in `settings["output_dir"]` what the report reads.
    `settings`: fields of [`trl.GRPOConfig`], those of the run to compare with; `model_dir`: what it starts from."""
    shutil.rmtree(Path(settings["output_dir"]) / "completions", ignore_errors=True)  # an earlier, longer demo's
    args = GRPOConfig(**{**settings, **_OBJECTIVE, **_FOR_THE_REPORT})
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
    return Path(str(args.output_dir))
