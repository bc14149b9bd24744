"""Gradient variance against length under each divisor, at fixed weights, from the same completions.

VL Norm (arXiv 2509.07558) says of a constant divisor that it is unbiased and that its variance grows with the length.
All quantities here are free of scale, since divisors have different units:

- `noise`: trace of the covariance of a batch's gradient over the squared length of its mean, times the groups of the
  batch: groups that it takes until the signal is as large as the noise;
- `alignment`: cosine of the mean gradient with that of Dr. GRPO, which is the policy gradient; 1: no bias;
- `exponent`: e in |grad log pi(o)|^2 ~ length^e over completions, under a constant divisor; a mean per row has e - 2;
- `shares`: of the sum of `w^2 |grad log pi(o)|^2` over completions, by thirds of their length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_drgrpo.labs.study.credit_variance import Moments, gradient_of, log_probs_of
from trl_drgrpo.labs.study.direction import REFERENCE
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.labs.study.measured_models import COMMENTS, build_trainer, measure_all
from trl_drgrpo.labs.study.objectives import OBJECTIVES, Objective
from trl_drgrpo.labs.study.probe import score_sums
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batch_rows import token_batch

DIVISORS = {  # the divisor: its objectives without and with the group's std
    "row": ("grpo_without_std", "grpo"),
    "batch": ("dapo_without_std", "dapo"),
    "constant": ("dr_grpo", "dr_grpo_with_std"),
}
FAMILY = {**OBJECTIVES, "dapo_without_std": Objective("dapo, no std", divides_by_std=False, divisor="batch")}
DIFFERENT = (
    *DIVISORS["row"],
    *DIVISORS["constant"],
)  # within a batch, that by its tokens is proportional to a constant
THIRDS = 3


@dataclass(frozen=True)
class VarianceSettings:
    """Sizes of a measurement.

    Args:
        models (`Sequence[str]`): Keys of [`MODELS`], by the length of their completions: constructed ones, others.
        prompts, num_generations, batches (`int`): P, G and K.
        single_batches (`int`): Batches in which the gradient of each completion is measured.
    """

    models: Sequence[str] = (*(f"even_{n}" for n in COMMENTS), "sums_3", "sums_6", "long_sums_high")
    prompts: int = 4
    num_generations: int = 8
    batches: int = 24
    single_batches: int = 3


SETTINGS = VarianceSettings()


def run_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    jobs: int = 1,
    settings: VarianceSettings = SETTINGS,
    on_part: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start the models, measure each with every seed.

    Args:
        seeds, output, work_dir, jobs, settings, on_part: As in [`~trl_drgrpo.labs.study.probe_study.run_study`].

    Returns:
        `dict[str, Any]`: Provenance, `settings` and `runs`, as in the file.
    """

    def said(run: dict[str, Any]) -> None:
        noise = (f"{key} {run['noise'][without] or float('nan'):.1f}" for key, (without, _) in DIVISORS.items())
        on_part(f"{run['model']}, seed {run['seed']}: {run['length']:.0f} tokens, noise {', '.join(noise)}")

    return measure_all("variance", measure_one, settings, seeds, output, work_dir, jobs, said)


def measure_one(name: str, seed: int, work_dir: Path, settings: VarianceSettings) -> dict[str, Any]:
    """The quantities of a model with one seed.

    Args:
        name, seed, work_dir: As in [`~trl_drgrpo.labs.study.probe_study.measure_one`].
        settings ([`VarianceSettings`]): Sizes.
    """
    trainer = build_trainer(name, seed, work_dir, settings.prompts, settings.num_generations, settings.batches)
    trainer.model.train()
    gradients = Gradients(list(FAMILY))
    lengths, rewards, squares = [], [], []
    for number, (batch, inputs) in enumerate(islice(sampled_batches(trainer), settings.batches)):
        mask = batch.trained_mask
        own_lengths, own_rewards = mask.sum(dim=1).clamp(min=1).numpy(), batch.rewards.double().numpy()
        sizes = (own_rewards, own_lengths, settings.num_generations, trainer.loss_normalizer)
        weights = {key: objective.token_weights(*sizes) for key, objective in FAMILY.items()}
        sums = score_sums(trainer, token_batch(inputs), mask, np.stack([weights[key] for key in DIFFERENT]))
        vectors = dict(zip(DIFFERENT, torch.from_numpy(sums), strict=True))
        for same, other in zip(DIVISORS["batch"], DIVISORS["constant"], strict=True):
            vectors[same] = vectors[other] * len(mask) * trainer.loss_normalizer / float(own_lengths.sum())
        gradients.add(vectors)
        lengths.append(own_lengths)
        rewards.append(own_rewards)
        if number < settings.single_batches:
            squares.extend(_squares(trainer, inputs, mask))
    some = slice(settings.single_batches)
    looked_at, advantages = np.concatenate(lengths[some]), _advantages(rewards[some], settings.num_generations)
    squared, every = np.array(squares), np.concatenate(lengths)
    return {
        "model": name,
        "seed": seed,
        "pass_rate": round(float(np.concatenate(rewards).mean()), 4),
        "length": round(float(every.mean()), 2),
        "spread": round(float(every.std() / every.mean()), 3),
        "noise": {key: _rounded(gradients.noise(key, settings.prompts)) for key in FAMILY},
        "alignment": {key: _rounded(gradients.alignment(key, REFERENCE)) for key in FAMILY},
        "exponent": _rounded(exponent(looked_at, squared)),
        "shares": {
            "row": shares(looked_at, (advantages / looked_at) ** 2 * squared),
            "constant": shares(looked_at, advantages**2 * squared),
        },
    }


class Gradients:
    """Gradients of independent batches under several objectives, as moments.

    Args:
        names (`Sequence[str]`): The objectives.
    """

    def __init__(self, names: Sequence[str]):
        self.moments = {name: Moments() for name in names}
        self.products: dict[tuple[str, str], float] = {}

    def add(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """The gradient of one batch under each objective, `(n,)`."""
        for first, moments in self.moments.items():
            moments.add(vectors[first])
            for second in self.moments:
                product = float(vectors[first] @ vectors[second])
                self.products[first, second] = self.products.get((first, second), 0.0) + product

    def noise(self, name: str, groups: int) -> float:
        """Groups until signal and noise are equal; NaN where no mean is told from 0. `groups`: of a batch."""
        moments = self.moments[name]
        return groups * moments.variance / moments.squared_mean if moments.squared_mean > 0 else float("nan")

    def alignment(self, first: str, second: str) -> float:
        """Cosine of two expected gradients, from products of different batches; NaN where one is not told from 0."""
        squared = self._product(first, first) * self._product(second, second)
        positive = min(self._product(first, first), self._product(second, second)) > 0
        return self._product(first, second) / squared**0.5 if positive else float("nan")

    def _product(self, first: str, second: str) -> float:
        one, other = self.moments[first], self.moments[second]
        count = len(one.squares)
        return (float(one.sum @ other.sum) - self.products[first, second]) / (count * (count - 1))


def exponent(lengths: np.ndarray, squares: np.ndarray) -> float:
    """Slope of the logarithm of squared gradients over that of lengths; NaN where all are equally long.

    Args:
        lengths (`np.ndarray` of shape `(N,)`): Tokens.
        squares (`np.ndarray` of shape `(N,)`): Squared length of each completion's `grad log pi`.
    """
    x, y = np.log(lengths), np.log(squares)
    x = x - x.mean()
    return float(x @ y / (x @ x)) if x.any() else float("nan")


def shares(lengths: np.ndarray, parts: np.ndarray) -> list[float]:
    """Share of a sum that is from the shortest, the middle and the longest third of the completions.

    Args:
        lengths (`np.ndarray` of shape `(N,)`): Tokens.
        parts (`np.ndarray` of shape `(N,)`): The summands, not all 0.
    """
    ordered = parts[np.argsort(lengths, kind="stable")]
    return [round(float(third.sum() / parts.sum()), 4) for third in np.array_split(ordered, THIRDS)]


def _squares(trainer: DrGRPOTrainer, inputs: dict[str, Any], mask: torch.Tensor) -> Iterator[float]:
    """Squared length of `grad log pi` of each completion."""
    for row in range(len(mask)):
        rows = slice(row, row + 1)
        gradient = gradient_of(trainer, (log_probs_of(trainer, inputs, rows) * mask[rows]).sum())
        yield float(gradient @ gradient)


def _advantages(rewards: Sequence[np.ndarray], num_generations: int) -> np.ndarray:
    return FAMILY[REFERENCE].advantages(np.concatenate(rewards), num_generations)


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)
