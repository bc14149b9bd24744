"""Variance of each arm's gradient at the model that all runs start from, from the same completions.

The estimate is a sum over groups that are drawn independently, so its covariance is that of a group's gradient over
their number: with `g_p` the gradient of group p, `tr Cov = 1/(P - 1) * sum_p |g_p - mean|^2`. Times the tokens that a
group takes, that is the variance per token generated.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trl_drgrpo.labs.study.credit_arms import ARMS, OUTCOME, StepRewardFunc
from trl_drgrpo.labs.study.credit_runs import build_trainer
from trl_drgrpo.labs.study.credit_tasks import CreditTask
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batch_rows import token_batch
from trl_drgrpo.upstream.batches import ScoredBatch

_SEED = 10_000  # no run has it
WARM_UP_BATCHES = 8  # not measured: an arm's coefficient is fitted on earlier batches


def measure_variance(
    task: CreditTask, batches: int, model_dir: Path, output_dir: Path, prm: StepRewardFunc
) -> dict[str, Any]:
    """Gradient variance of every arm.

    Args:
        task ([`CreditTask`]), model_dir, output_dir, prm: As in [`run_arm`].
        batches (`int`): Generation batches to measure on, of `task.prompts` groups each.

    Returns:
        `dict[str, Any]`: `groups` and `tokens` that were sampled, and for each arm `variance`, the trace of the
            covariance of a group's gradient times the mean tokens of a group, with `ratio`, that over the variance of
            the outcome alone, its jackknife `standard_error`, and both at `half` the fitted coefficient.
    """
    trainers = {
        arm: build_trainer(task, arm, _SEED, model_dir, output_dir / arm.replace("/", "-"), prm)
        for arm in ARMS
        if ARMS[arm].use in (None, "baseline")
    }
    for trainer in trainers.values():
        trainer.model.train()  # as in a run: the coefficient of a baseline is fitted as batches come
    sampler = trainers[OUTCOME]
    moments, halved = ({arm: Moments() for arm in trainers} for _ in range(2))
    tokens = 0
    for number, (sampled, rollouts) in enumerate(islice(sampled_batches(sampler), WARM_UP_BATCHES + batches)):
        scored = sampled.scored
        advantages = {arm: _advantages(trainer, scored, rollouts) for arm, trainer in trainers.items()}
        if number < WARM_UP_BATCHES:
            continue
        tokens += int(_trained(rollouts).sum())
        for first in range(0, len(scored.prompts), task.num_generations):
            rows = slice(first, first + task.num_generations)
            log_probs = log_probs_of(sampler, rollouts, rows)  # (G, T)
            outcome = gradient_of(sampler, (advantages[OUTCOME][rows] * log_probs).sum())
            for arm, values in advantages.items():
                gradient = outcome if arm == OUTCOME else gradient_of(sampler, (values[rows] * log_probs).sum())
                moments[arm].add(gradient)
                halved[arm].add((outcome + gradient) / 2)
    reference = moments[OUTCOME]
    numbers: dict[str, Any] = {"groups": len(reference.squares), "tokens": tokens}
    for arm, each in moments.items():
        numbers[arm] = {"variance": each.variance * tokens / len(each.squares), **each.over(reference)}
        numbers[arm]["half"] = halved[arm].over(reference)
    return numbers


def _advantages(trainer: DrGRPOTrainer, scored: ScoredBatch, rollouts: dict[str, Any]) -> torch.Tensor:
    """The token advantages `(B, T)` that an arm's trainer gives to the batch."""
    trainer.on_rewards(scored)
    advantages: torch.Tensor = trainer.on_rollouts(dict(rollouts))["advantages"]
    return (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)) * _trained(rollouts)


def _trained(rollouts: dict[str, Any]) -> torch.Tensor:
    return rollouts["completion_mask"] * rollouts.get("tool_mask", 1)


def log_probs_of(trainer: DrGRPOTrainer, rollouts: dict[str, Any], rows: slice) -> torch.Tensor:
    """Log-probabilities `(b, T)` of the completions of some rows, with gradient.

    Args:
        trainer ([`DrGRPOTrainer`]): Its model scores them.
        rollouts (`dict`): Of [`sampled_batches`].
        rows (`slice`): The rows.
    """
    some = {key: rollouts[key][rows] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    return trainer.score_tokens(trainer.model, token_batch(some))[0]


def gradient_of(trainer: DrGRPOTrainer, objective: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar as one vector; its graph is kept.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the parameters.
        objective (`torch.Tensor`): The scalar.
    """
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, parameters, retain_graph=True)])


class Moments:
    """Squared lengths of vectors and their mean."""

    def __init__(self) -> None:
        self.squares: list[float] = []
        self.sum: Any = 0.0

    def add(self, vector: torch.Tensor) -> None:
        self.squares.append(float(vector @ vector))
        self.sum = self.sum + vector

    @property
    def mean(self) -> torch.Tensor:
        """Mean of the vectors."""
        return self.sum / len(self.squares)

    @property
    def variance(self) -> float:
        """Trace of the covariance."""
        count = len(self.squares)
        return (sum(self.squares) - float(self.sum @ self.sum) / count) / (count - 1)

    @property
    def squared_mean(self) -> float:
        """Unbiased squared length of the expected vector: that of the mean, less its noise."""
        return float(self.mean @ self.mean) - self.variance / len(self.squares)

    def over(self, other: "Moments") -> dict[str, float]:
        """Ratio of the variances, with the jackknife's standard error (of the mean squares: the means are small)."""
        own, reference, count = sum(self.squares), sum(other.squares), len(self.squares)
        pairs = zip(self.squares, other.squares, strict=True)
        without = [(own - a) / (reference - b) for a, b in pairs]
        mean = sum(without) / count
        squared = (count - 1) / count * sum((ratio - mean) ** 2 for ratio in without)
        return {"ratio": self.variance / other.variance, "standard_error": squared**0.5}
