"""The same small model trained on the same task by the real trainers, one arm per objective.

Model, prompts, seeds, steps and settings are the same in every arm; only trainer and objective differ. Curves are
recorded from the completions that reach the reward function, so the measurement is the same in every arm.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.diagnostics.progress import ProgressCallback, show_progress
from trl_drgrpo.trainer import DrGRPOTrainer

# Trainer, configuration and the fields that make the objective, under the keys of `OBJECTIVES`.
ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, {"loss_type": "grpo", "scale_rewards": "group"}),
    "dapo": (GRPOTrainer, GRPOConfig, {}),
    "dr_grpo_with_std": (GRPOTrainer, GRPOConfig, {"loss_type": "dr_grpo"}),
    "dr_grpo": (DrGRPOTrainer, DrGRPOConfig, {"run_log": False, "run_warnings": False}),
}
LAST = 20  # steps whose mean is the end of a run
SMALL_RUN: dict[str, Any] = {  # fields of every run of a study: small, on the CPU, seen by the study alone
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass(frozen=True)
class RunSettings:
    """Settings that all arms share.

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


@dataclass(frozen=True)
class Rung:
    """A task, the model that starts on it, and its runs.

    Args:
        name (`str`): Of the study.
        warm_start (`Callable`): Makes the model in a folder.
        make_prompts (`Callable`): `f(size, seed)` -> dataset.
        reward (`Callable`): Reward function, 1 for a correct answer, else 0.
        max_completion (`int`): Tokens of a completion at most.
        rollout (`Callable`, *optional*): `f(seed)` -> `rollout_func`; by default the trainers generate by themselves.
        environment_tokens (`int`): Tokens of a completion that the environment writes.
        fixed_tokens (`int`): Tokens of a completion that the model writes and that the answer's length leaves out.
        learnable (`bool`): Whether correct answers can be learned.
        verdict (`Callable`, *optional*): A second reward function, 1 for a true verdict on the own answer, else 0.
        verdict_weight (`float`): Its weight, the other one's being 1.
        chance (`float`): Where there is a verdict, the pass rate of a guess, which stays if nothing is learned.
        decisions (`Callable`, *optional*): `f(lengths, stopped)` -> decisions to go on or to stop in each row, where
            these are not its tokens.
        settings ([`RunSettings`]): Sizes of a run.
        measured_rows, measured_batches (`int`): Sizes of the one-step measurement.
    """

    name: str
    warm_start: Callable[[Path], Path]
    make_prompts: Callable[[int, int], Dataset]
    reward: Callable[..., list[float]]
    max_completion: int
    rollout: Callable[[int], Callable[..., dict[str, Any]]] | None = None
    environment_tokens: int = 0
    fixed_tokens: int = 0
    learnable: bool = False
    verdict: Callable[..., list[float]] | None = None
    verdict_weight: float = 1.0
    chance: float = 0.0
    decisions: Callable[[Any, Any], Any] | None = None
    settings: RunSettings = RunSettings()
    measured_rows: int = 256
    measured_batches: int = 12

    @property
    def rewards(self) -> list[Callable[..., list[float]]]:
        """The reward functions; the first one decides what is correct."""
        return [self.reward] if self.verdict is None else [self.reward, self.verdict]

    @property
    def reward_weights(self) -> list[float] | None:
        """Their weights, for the configuration."""
        return None if self.verdict is None else [1.0, self.verdict_weight]


@dataclass
class Trajectory:
    """Curves of one arm with one seed, per optimizer step.

    Args:
        arm (`str`): A key of `ARMS`.
        seed (`int`): Of prompts, verdicts and sampling.
        length_right, length_wrong (`list[float]`): Mean tokens of correct and of incorrect answers; NaN where there is
            none.
        pass_rate (`list[float]`): Share of correct answers, 0 to 1.
        entropy (`list[float]`): As the trainer logs it, in nats per token; that of `DrGRPOTrainer` is over rows with a
            signal.
        tokens_by_step (`list[int]`): Tokens that the model wrote.
        tokens (`int`): The same in all.
        seconds (`float`): Wall clock.
        verdicts (`list[float]`): Share of answers with a true verdict; empty where none is asked for.
    """

    arm: str
    seed: int
    length_right: list[float] = field(default_factory=list)
    length_wrong: list[float] = field(default_factory=list)
    pass_rate: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    tokens_by_step: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    verdicts: list[float] = field(default_factory=list)

    def end(self, name: str) -> float:
        """Mean of a curve over the last steps, those without a value left out."""
        values = [value for value in getattr(self, name)[-LAST:] if value == value]
        return statistics.fmean(values) if values else float("nan")

    def gap(self) -> float:
        """Length of incorrect answers minus that of correct ones at the end."""
        return self.end("length_wrong") - self.end("length_right")

    def tokens_until(self, pass_rate: float) -> int | None:
        """Tokens written until the pass rate, as a mean over [`LAST`] steps, first was this high; `None`: never."""
        written = list(accumulate(self.tokens_by_step))
        return next((written[step] for step, rate in self._smoothed() if rate >= pass_rate), None)

    def best(self) -> float:
        """The highest pass rate, as a mean over [`LAST`] steps."""
        return max(rate for _, rate in self._smoothed())

    def _smoothed(self) -> Iterator[tuple[int, float]]:
        for step in range(min(LAST, len(self.pass_rate)) - 1, len(self.pass_rate)):
            yield step, statistics.fmean(self.pass_rate[max(0, step + 1 - LAST) : step + 1])

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, curves rounded, missing values `None`."""

        def plain(value: Any) -> Any:
            return [None if x != x else round(x, 4) for x in value] if isinstance(value, list) else value

        return {name: plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, run: dict[str, Any]) -> "Trajectory":
        """The reverse of [`Trajectory.as_dict`]."""

        def read(value: Any) -> Any:
            return [float("nan") if x is None else x for x in value] if isinstance(value, list) else value

        return cls(**{name: read(value) for name, value in run.items()})


def run_arm(rung: Rung, arm: str, seed: int, model_dir: Path, output_dir: Path) -> Trajectory:
    """Train one arm with one seed.

    Args:
        rung ([`Rung`]): The task.
        arm (`str`): A key of `ARMS`.
        seed (`int`): Seed.
        model_dir (`Path`): The warm-started model.
        output_dir (`Path`): The trainer's folder; nothing is saved there.

    Returns:
        [`Trajectory`].
    """
    trainer_class, config_class, objective = ARMS[arm]
    trajectory, settings = Trajectory(arm, seed), rung.settings
    args = config_class(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts * settings.num_generations,
        num_generations=settings.num_generations,
        max_completion_length=rung.max_completion,
        learning_rate=settings.learning_rate,
        reward_weights=rung.reward_weights,
        **SMALL_RUN,
        **objective,
    )
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=[_recorded(rung, trajectory), *rung.rewards[1:]],
        args=args,
        train_dataset=rung.make_prompts(settings.prompts * settings.steps, seed),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        rollout_func=rung.rollout(seed) if rung.rollout else None,
    )
    with show_progress(trainer, ProgressCallback(every_steps=50)):
        trajectory.seconds = round(trainer.train().metrics["train_runtime"], 1)
    trajectory.entropy = [entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry]
    return trajectory


def _recorded(rung: Rung, trajectory: Trajectory) -> Callable[..., list[float]]:
    """The reward function, with a record of its calls."""

    def recorded(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        rewards = rung.reward(completions, **columns)
        written = [len(ids) - rung.environment_tokens for ids in completion_ids]
        for right, curve in ((1.0, trajectory.length_right), (0.0, trajectory.length_wrong)):
            lengths = [n - rung.fixed_tokens for n, reward in zip(written, rewards, strict=True) if reward == right]
            curve.append(statistics.fmean(lengths) if lengths else float("nan"))
        trajectory.pass_rate.append(statistics.fmean(rewards))
        if rung.verdict is not None:
            trajectory.verdicts.append(statistics.fmean(rung.verdict(completions, **columns)))
        trajectory.tokens_by_step.append(sum(written))
        trajectory.tokens += sum(written)
        return rewards

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
