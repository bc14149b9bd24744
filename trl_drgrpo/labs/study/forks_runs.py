"""Forks against flat groups on long list sums: variance of the gradient, and runs that stop at the same tokens.

Every arm goes through the trainer. Tokens are those that were sampled: tokens that branches share count once.

A batch's gradient is a sum over groups that are drawn independently, so its variance times its tokens is that of one
group: `tr Cov(g) * E[tokens]`. At equal tokens, arms compare as these numbers do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_drgrpo.features.forks.cuts import step_means
from trl_drgrpo.labs.demo.evaluate import evaluate
from trl_drgrpo.labs.demo.long_sums import GAP_PROBABILITY, MAX_COMPLETION, make_long_problems, warm_start
from trl_drgrpo.labs.study.credit_arms import OUTCOME
from trl_drgrpo.labs.study.credit_runs import build_trainer
from trl_drgrpo.labs.study.credit_tasks import LONG_SUMS
from trl_drgrpo.labs.study.credit_variance import Moments, gradient_of, log_probs_of
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import CreditedBatch
from trl_drgrpo.upstream.swapping import swapped

FLAT, STEPS = "flat", "rule/to_go"  # STEPS: rewards of the study of credit, the outcome is paid beside them
FORKS: dict[str, dict[str, Any]] = {  # and the fields of the configuration
    FLAT: {"advantage_baseline": "leave_one_out"},
    "2": {"forks": 2},
    "2_twice": {"forks": 2, "fork_depth": 2},
    "4": {"forks": 4},
    "2_entropy": {"forks": 2, "fork_at": "entropy"},  # and the threshold that belongs to the model
}
LEARNING = ((FLAT, OUTCOME), ("2", OUTCOME), ("2_entropy", OUTCOME), (FLAT, STEPS), ("2", STEPS))
_STAGE_SEED = 10_000  # of no run


@dataclass(frozen=True)
class ForksSettings:
    """Sizes.

    Args:
        stages (`dict[str, float]`): How often the demonstrator that a stage's model is warm-started on errs where it
            does not know the pair. Runs begin at the first stage.
        entropy_quantile (`float`): Of the entropies of a stage's steps; the threshold of `fork_at: entropy`.
        prompts, batches (`int`): Groups of a batch, and batches of each arm and seed whose gradients are measured.
        tokens (`int`): Sampled in a run.
        held_out, evaluations (`int`): Problems of an evaluation, and evaluations of a run behind the first.
    """

    stages: dict[str, float]
    entropy_quantile: float = 0.75
    prompts: int = 32
    batches: int = 4
    tokens: int = 40_000
    held_out: int = 256
    evaluations: int = 2


SETTINGS = ForksSettings({"low": GAP_PROBABILITY, "high": 0.08})


@dataclass
class ForksRun:
    """One arm with one seed: lists have an entry per evaluation, the first one before training.

    Args:
        forks, rewards (`str`): Keys of [`FORKS`] and of the arms of the study of credit.
        seed (`int`): Of prompts and sampling.
        steps (`int`): Optimizer steps.
        tokens (`list[int]`): Sampled so far.
        pass_rate (`list[float]`): Of held-out problems, sampled at temperature 1.
        cut (`list[float]`): Of each step, the share of rows that fork.
        seconds (`float`): Wall clock.
    """

    forks: str
    rewards: str
    seed: int
    steps: int = 0
    tokens: list[int] = field(default_factory=list)
    pass_rate: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)
    seconds: float = 0.0


def trainer_of(
    forks: str, rewards: str, seed: int, model_dir: Path, output_dir: Path, stage: dict[str, Any], **changed: Any
) -> DrGRPOTrainer:
    """The trainer of an arm.

    Args:
        forks, rewards, seed: As in [`ForksRun`].
        model_dir (`Path`): The model to start from.
        output_dir (`Path`): The trainer's folder; nothing is saved there.
        stage (`dict[str, Any]`): Of [`make_stage`].
        **changed: Fields of the task.
    """
    config = dict(FORKS[forks])
    if "forks" in config:
        config["step_separator"] = LONG_SUMS.step_separator
    if config.get("fork_at") == "entropy":
        config["fork_threshold"] = stage["threshold"]
    task = replace(LONG_SUMS, **changed)
    trainer = build_trainer(task, rewards, seed, model_dir, output_dir, LONG_SUMS.rule, config)
    trainer.forks.mean_length = stage.get("mean_length")  # known from the first batch on
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_stage(settings: ForksSettings, name: str, work_dir: Path) -> dict[str, Any]:
    """Warm-start the model of a stage, and look at it before anything is compared.

    Args:
        settings ([`ForksSettings`]): Sizes.
        name (`str`): Of the stage.
        work_dir (`Path`): Gets the model, in a folder of this name.

    Returns:
        `dict[str, Any]`: `stage`, held-out `pass_rate`, `mean_length` of completions and `threshold`.
    """
    warm_start(work_dir / name, gap_probability=settings.stages[name])
    folder = work_dir / "runs" / name
    trainer = trainer_of(FLAT, STEPS, _STAGE_SEED, work_dir / name, folder, {}, prompts=settings.prompts)
    batch, rollouts = next(sampled_batches(trainer))
    completions = batch.scored.completion_ids
    both = zip(rollouts["prompt_ids"], rollouts["prompt_mask"].bool(), strict=True)
    entropies = trainer.completion_entropies([ids[mask].tolist() for ids, mask in both], completions)
    ends = [trainer.forks.segmenter(ids, trainer.text_tokenizer).ends for ids in completions]
    steps = [step for row, end in zip(entropies, ends, strict=True) for step in step_means(row, end)]
    return {
        "stage": name,
        "pass_rate": _pass_rate(trainer.model, settings.held_out),
        "mean_length": round(sum(map(len, completions)) / len(completions), 1),
        "threshold": round(float(torch.tensor(steps).quantile(settings.entropy_quantile)), 4),
    }


def measure(
    settings: ForksSettings, stage: dict[str, Any], forks: str, seed: int, work_dir: Path
) -> list[dict[str, Any]]:
    """Gradients of an arm's groups at a stage, with either rewards, on the same completions.

    Args:
        settings ([`ForksSettings`]): Sizes.
        stage (`dict[str, Any]`): Of [`make_stage`].
        forks, seed: As in [`ForksRun`].
        work_dir (`Path`): Has the model; gets the mean gradients, see [`mean_gradients`].

    Returns:
        `list[dict[str, Any]]`: For each kind of `rewards` the `variance` of a group's gradient, and its mean `tokens`
            (`all_tokens`: those that rows share counted in each).
    """
    name, groups = stage["stage"], settings.batches * settings.prompts
    folder = work_dir / "runs" / f"{name}-{forks}-{seed}"
    trainer = trainer_of(forks, STEPS, seed, work_dir / name, folder, stage, prompts=settings.prompts)
    trainer.model.train()  # groups fork in training alone
    moments, tokens = _measured(trainer, settings.batches)
    torch.save({kind: each.mean for kind, each in moments.items()}, _means_file(work_dir, name, forks, seed))
    arm = {"stage": name, "forks": forks, "seed": seed, **{key: count / groups for key, count in tokens.items()}}
    return [{**arm, "rewards": kind, "variance": each.variance} for kind, each in moments.items()]


def _means_file(work_dir: Path, stage: str, forks: str, seed: int) -> Path:
    return work_dir / f"{stage}-{forks}-{seed}.pt"


def mean_gradients(work_dir: Path, stage: str, forks: str, rewards: str, seeds: Sequence[int]) -> torch.Tensor:
    """Mean gradient of an arm's groups at a stage, a row per seed.

    Args:
        work_dir (`Path`): Has the files of [`measure`].
        stage, forks, rewards (`str`), seeds (`Sequence[int]`): The arm and its seeds.
    """
    return torch.stack([torch.load(_means_file(work_dir, stage, forks, seed))[rewards] for seed in seeds])


def _measured(trainer: DrGRPOTrainer, batches: int) -> tuple[dict[str, Moments], dict[str, int]]:
    """Moments of groups' gradients by kind of rewards, and tokens."""
    moments = {OUTCOME: Moments(), STEPS: Moments()}
    tokens = {"tokens": 0, "all_tokens": 0}
    nothing = torch.zeros(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    for batch, rollouts in islice(sampled_batches(trainer), batches):
        lengths = [len(ids) for ids in batch.scored.completion_ids]
        tokens["all_tokens"] += sum(lengths)
        tokens["tokens"] += sampled_tokens(batch.forks, lengths)
        advantages = {STEPS: _advantages(trainer, batch)}
        with swapped(trainer.args, process_weight=0.0):
            advantages[OUTCOME] = _advantages(trainer, batch)
        for first in range(0, len(lengths), batch.num_generations):
            rows = slice(first, first + batch.num_generations)
            log_probs = log_probs_of(trainer, rollouts, rows)  # (G, T)
            for kind, values in advantages.items():
                is_live = bool(values[rows].any())
                moments[kind].add(gradient_of(trainer, (values[rows] * log_probs).sum()) if is_live else nothing)
    return moments, tokens


def _advantages(trainer: DrGRPOTrainer, batch: CreditedBatch) -> torch.Tensor:
    return replace(batch, advantages=trainer.compute_advantages(batch)).token_advantages


def sampled_tokens(forks: Forks | None, lengths: Sequence[int]) -> int:
    """Tokens of rows, those that several share counted once.

    Args:
        forks ([`Forks`], *optional*): Of the rows.
        lengths (`Sequence[int]`): Tokens of each row.

    Example: a parent of 10 tokens that forks behind 4, and one of 6 that does not.

    ```python
    >>> sampled_tokens(Forks(2, [[4], [4], [6], [6]]), [10, 9, 6, 6])
    21

    ```
    """
    if forks is None:
        return sum(lengths)
    b, depth, shared = forks.branches, forks.depth, 0
    for i, cuts in enumerate(forks.cuts):
        if i % b**depth:  # not the first leaf of its parent: it left an earlier one at a cut
            shared += next(cut for level, cut in enumerate(cuts, start=1) if i % b ** (depth - level) == 0)
    return sum(lengths) - shared


def run_arm(
    settings: ForksSettings, stage: dict[str, Any], forks: str, rewards: str, seed: int, work_dir: Path
) -> ForksRun:
    """Train one arm with one seed until its tokens are sampled.

    Args:
        settings ([`ForksSettings`]): Sizes.
        stage (`dict[str, Any]`): Of [`make_stage`], to start from.
        forks, rewards, seed: As in [`ForksRun`].
        work_dir (`Path`): Has the model.
    """
    run = ForksRun(forks, rewards, seed, tokens=[0], pass_rate=[stage["pass_rate"]])
    name = f"{forks}-{rewards.replace('/', '-')}-{seed}"
    trainer = trainer_of(forks, rewards, seed, work_dir / stage["stage"], work_dir / "runs" / name, stage)
    trainer.add_callback(_Evaluations(run, settings))
    run.seconds = round(trainer.train().metrics["train_runtime"], 1)
    return run


class _Evaluations(TrainerCallback):
    """Counts sampled tokens, evaluates at equal distances, and ends the run."""

    def __init__(self, run: ForksRun, settings: ForksSettings):
        self.run, self.settings, self.sampled = run, settings, 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        rows = logs["completions/mean_length"] * args.per_device_train_batch_size
        self.sampled += rows * logs.get("forks/sampled_token_frac", 1.0)
        self.run.steps += 1
        self.run.cut.append(round(logs.get("forks/cut_frac", 0.0), 3))
        settings = self.settings
        if self.sampled * settings.evaluations >= settings.tokens * len(self.run.tokens):
            self.run.tokens.append(round(self.sampled))
            self.run.pass_rate.append(_pass_rate(kwargs["model"], settings.held_out))
        control.should_training_stop = self.sampled >= settings.tokens


def _pass_rate(model: Any, held_out: int) -> float:
    problems, tokenizer = make_long_problems(held_out, "held_out"), AutoTokenizer.from_pretrained(model.name_or_path)
    found = evaluate(model, tokenizer, problems, sample=True, batch_size=held_out, max_new_tokens=MAX_COMPLETION)
    return round(found.accuracy, 4)
