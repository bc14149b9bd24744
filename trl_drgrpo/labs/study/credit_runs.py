"""Runs of the study of step credit: the real trainer, one arm after another, each stopped at the same tokens."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.labs.study.credit_arms import ARMS, StepRewardFunc
from trl_drgrpo.labs.study.credit_tasks import CreditTask
from trl_drgrpo.labs.study.trajectories import SMALL_RUN
from trl_drgrpo.trainer import DrGRPOTrainer

_MOST_STEPS = 2_000  # more than any run takes: an arm may write short completions


@dataclass
class CreditRun:
    """Results of one arm with one seed, per optimizer step.

    Args:
        task, arm (`str`): Keys of `TASKS` and `ARMS`.
        seed (`int`): Of prompts and sampling.
        pass_rate (`list[float]`): Share of correct answers among a step's completions.
        tokens_by_step (`list[int]`): Tokens that the policy wrote.
        seconds (`float`): Wall clock.
    """

    task: str
    arm: str
    seed: int
    pass_rate: list[float] = field(default_factory=list)
    tokens_by_step: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def mean_pass_rate(self, first: float = 0.0) -> float:
        """Mean pass rate of the steps after a share of the run's tokens, weighted by tokens.

        Args:
            first (`float`, *optional*, defaults to `0.0`): From which share of the run's tokens on.
        """
        total, written, weighted, weight = sum(self.tokens_by_step), 0, 0.0, 0
        for rate, tokens in zip(self.pass_rate, self.tokens_by_step, strict=True):
            written += tokens
            if written > first * total:
                weighted, weight = weighted + rate * tokens, weight + tokens
        return weighted / weight


def build_trainer(
    task: CreditTask,
    arm: str,
    seed: int,
    model_dir: Path,
    output_dir: Path,
    prm: StepRewardFunc,
    config: Mapping[str, Any] | None = None,
    **changed: Any,
) -> DrGRPOTrainer:
    """The trainer of an arm.

    Args:
        task ([`CreditTask`]): The task.
        arm (`str`): A key of [`ARMS`].
        seed (`int`): Of prompts and sampling.
        model_dir (`Path`): The warm-started model.
        output_dir (`Path`): The trainer's folder; nothing is saved there.
        prm (`Callable`): The process reward model as a step reward function.
        config (`Mapping`, *optional*): Further fields of [`DrGRPOConfig`].
        **changed: `reward_funcs` and the like, over those of the task.
    """
    steps = ARMS[arm].step_rewards(task.rule, prm, task.due, seed)
    fields: dict[str, Any] = {**ARMS[arm].fields, **({"step_separator": task.step_separator} if steps else {})}
    args = DrGRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=_MOST_STEPS,
        per_device_train_batch_size=task.prompts * task.num_generations,
        num_generations=task.num_generations,
        max_completion_length=task.max_completion,
        learning_rate=task.learning_rate,
        **SMALL_RUN,
        run_log=False,
        run_warnings=False,
        disable_tqdm=True,
        **{**fields, **(config or {})},
    )
    return DrGRPOTrainer(
        **{
            "model": AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            "reward_funcs": task.outcome,
            "args": args,
            "train_dataset": task.make_prompts(_PROMPTS, seed),
            "processing_class": AutoTokenizer.from_pretrained(model_dir),
            "rollout_func": task.rollout(seed) if task.rollout else None,
            "step_reward_funcs": steps,
            **changed,
        }
    )


_PROMPTS = 2_048  # more than a run takes


def run_arm(
    task: CreditTask, arm: str, seed: int, model_dir: Path, output_dir: Path, prm: StepRewardFunc
) -> CreditRun:
    """Train one arm with one seed until the task's tokens are written.

    Args:
        task, arm, seed, model_dir, output_dir, prm: As in [`build_trainer`].

    Returns:
        [`CreditRun`].
    """
    run = CreditRun(task.name, arm, seed)

    def outcome(completions: Sequence[Any], **columns: Any) -> list[float]:
        rewards = task.outcome(completions, **columns)
        run.pass_rate.append(statistics.fmean(rewards))
        return rewards

    trainer = build_trainer(task, arm, seed, model_dir, output_dir, prm, reward_funcs=outcome)
    trainer.add_callback(_Stop(run, task.tokens))
    trainer.remove_callback(PrinterCallback)
    run.seconds = round(trainer.train().metrics["train_runtime"], 1)
    return run


class _Stop(TrainerCallback):
    """Counts the tokens that the policy wrote, and ends the run when they are enough."""

    def __init__(self, run: CreditRun, tokens: int):
        self.run, self.tokens = run, tokens

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "completions/mean_length" in logs:  # tokens of the environment are not in it
            self.run.tokens_by_step.append(round(logs["completions/mean_length"] * args.per_device_train_batch_size))
            control.should_training_stop = sum(self.run.tokens_by_step) >= self.tokens
