"""Rung b: the same small model trained on the guessing game by the real trainers, one arm per objective.

Model, prompts, verdicts, seeds, steps and settings are the same in every arm; only trainer and objective differ. What
is recorded comes from the roll-outs themselves, so it is the same measurement in every arm.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.config import DrGRPOConfig
from trl_drgrpo.diagnostics.progress import ProgressCallback, show_progress
from trl_drgrpo.study.guessing import MAX_COMPLETION, guessing_rollout, make_prompts, verdict_reward
from trl_drgrpo.trainer import DrGRPOTrainer

# Trainer, configuration and the fields that make the objective, under the keys of `OBJECTIVES`.
ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, {"loss_type": "grpo", "scale_rewards": "group"}),
    "dapo": (GRPOTrainer, GRPOConfig, {}),
    "dr_grpo_with_std": (GRPOTrainer, GRPOConfig, {"loss_type": "dr_grpo"}),
    "dr_grpo": (DrGRPOTrainer, DrGRPOConfig, {"run_log": False, "run_warnings": False}),
}
LAST = 20  # steps whose mean is the end of a run


@dataclass(frozen=True)
class GuessingSettings:
    """What all arms share.

    Args:
        steps (`int`): Optimizer steps.
        prompts (`int`): P, prompts per step.
        num_generations (`int`): G.
        learning_rate (`float`): Of AdamW, constant.
    """

    steps: int = 200
    prompts: int = 16
    num_generations: int = 8
    learning_rate: float = 1e-4


@dataclass
class Trajectory:
    """What one arm did with one seed, per optimizer step.

    Args:
        arm (`str`): A key of `ARMS`.
        seed (`int`): Of prompts, verdicts and sampling.
        length_right, length_wrong (`list[float]`): Mean tokens of comments behind `ok` and `no`.
        pass_rate (`list[float]`): Share of `ok`, 0 to 1.
        entropy (`list[float]`): As the trainer logs it, in nats per token.
        tokens (`int`): Tokens that the model wrote in all.
        seconds (`float`): Wall clock.
    """

    arm: str
    seed: int
    length_right: list[float] = field(default_factory=list)
    length_wrong: list[float] = field(default_factory=list)
    pass_rate: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def end(self, name: str) -> float:
        """Mean of a curve over the last steps."""
        return statistics.fmean(getattr(self, name)[-LAST:])

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, curves rounded."""
        return {
            name: [round(x, 3) for x in value] if isinstance(value, list) else value
            for name, value in asdict(self).items()
        }


def run_arm(
    arm: str,
    seed: int,
    model_dir: Path,
    output_dir: Path,
    settings: GuessingSettings = GuessingSettings(),
) -> Trajectory:
    """Train one arm with one seed.

    Args:
        arm (`str`): A key of `ARMS`.
        seed (`int`): Seed.
        model_dir (`Path`): The warm-started model.
        output_dir (`Path`): The trainer's folder; nothing is saved there.
        settings ([`GuessingSettings`]): Sizes.

    Returns:
        [`Trajectory`].
    """
    trainer_class, config_class, objective = ARMS[arm]
    trajectory = Trajectory(arm, seed)
    rows = settings.prompts * settings.num_generations
    args = config_class(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=settings.steps,
        per_device_train_batch_size=rows,
        num_generations=settings.num_generations,
        max_completion_length=MAX_COMPLETION,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **objective,
    )
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=verdict_reward,
        args=args,
        train_dataset=make_prompts(settings.prompts * settings.steps, seed),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        rollout_func=_recorded(guessing_rollout(seed), trajectory),
    )
    with show_progress(trainer, ProgressCallback(every_steps=50)):
        trajectory.seconds = round(trainer.train().metrics["train_runtime"], 1)
    names = ("entropy", "entropy/with_signal")
    trajectory.entropy = [entry[n] for entry in trainer.state.log_history for n in names if n in entry]
    return trajectory


def _recorded(rollout: Callable[..., dict[str, Any]], trajectory: Trajectory) -> Callable[..., dict[str, Any]]:
    """The roll-out, with its lengths and verdicts noted."""

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rolled = rollout(prompts, trainer)
        written = [sum(mask) for mask in rolled["env_mask"]]  # the guess and the comment
        for right, curve in ((True, trajectory.length_right), (False, trajectory.length_wrong)):
            lengths = [n - 1 for n, verdict in zip(written, rolled["verdict"], strict=True) if verdict == right]
            curve.append(statistics.fmean(lengths) if lengths else float("nan"))
        trajectory.pass_rate.append(statistics.fmean(map(float, rolled["verdict"])))
        trajectory.tokens += sum(written)
        return rolled

    return recorded


def ends(trajectories: Sequence[Trajectory], name: str) -> dict[str, list[float]]:
    """The end of a curve per arm, one value per seed.

    Args:
        trajectories (`Sequence[Trajectory]`): Of all arms and seeds.
        name (`str`): `length_right`, `length_wrong`, `pass_rate` or `entropy`.
    """
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.arm, []).append(trajectory.end(name))
    return found
