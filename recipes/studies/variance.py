"""What a constant divisor costs in variance: gradient noise against length under each divisor.

Question: VL Norm (arXiv 2509.07558) says of a constant divisor that it is unbiased and that its variance grows with
the length. How does it compare with the other divisors?

Arms: the divisors, each with and without the group's std, at fixed weights of seven models (`measured_models.py`), on
the same completions. Measures, all free of scale, since divisors have different units:

- `noise`: trace of the covariance of a batch's gradient over the squared length of its mean, times the groups of the
  batch: groups that it takes until the signal is as large as the noise;
- `alignment`: cosine of the mean gradient with that of Dr. GRPO, which is the policy gradient; 1: no bias;
- `exponent`: e in |grad log pi(o)|^2 ~ length^e over completions, under a constant divisor; a mean per row has e - 2;
- `shares`: of the sum of `w^2 |grad log pi(o)|^2` over completions, by thirds of their length.

Rule: divisors differ if the interval of the ratio of their noise over seeds leaves out 1.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame import Results, Row, Study, interval, main, rows_of, table
from measured_models import COMMENTS, MODELS, mean_of, measure_all, trainer_of
from small_models import gradient_of, log_probs_of

from trl_drgrpo.check.bias import OBJECTIVES, REFERENCE, Objective, sampled_batches, score_sums
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.upstream.batches import token_batch

SETTINGS: dict[str, Any] = {
    "models": (*(f"even_{n}" for n in COMMENTS), "sums_3", "sums_6", "long_sums_high"),
    "prompts": 4,
    "num_generations": 8,
    "batches": 24,
    "single_batches": 3,  # those in which the gradient of each completion is measured
}
DIVISORS = {  # the divisor: its objectives without and with the group's std
    "row": ("grpo_without_std", "grpo"),
    "batch": ("dapo_without_std", "dapo"),
    "constant": ("dr_grpo", "dr_grpo_with_std"),
}
_LABELS = {"row": "mean per row (grpo)", "batch": "batch's tokens (dapo)", "constant": "constant (dr_grpo)"}
FAMILY = {**OBJECTIVES, "dapo_without_std": Objective("dapo, no std", divides_by_std=False, divisor="batch")}
DIFFERENT = (*DIVISORS["row"], *DIVISORS["constant"])  # in a batch, that by its tokens is proportional to a constant


def measure_one(settings: dict[str, Any], folder: Path, seed: int, name: str) -> list[Row]:
    """The quantities of a model with one seed."""
    trainer, size = trainer_of(name, seed, folder, settings), settings["num_generations"]
    trainer.model.train()
    batches: dict[str, list[torch.Tensor]] = {key: [] for key in FAMILY}
    lengths, rewards, squares = [], [], []
    for number, (batch, inputs) in enumerate(islice(sampled_batches(trainer), settings["batches"])):
        mask = batch.trained_mask
        lengths.append(mask.sum(dim=1).clamp(min=1).numpy())
        rewards.append(batch.rewards.double().numpy())
        known = (rewards[-1], lengths[-1], size, trainer.loss_normalizer)
        weights = np.stack([FAMILY[key].token_weights(*known) for key in DIFFERENT])
        sums = torch.from_numpy(score_sums(trainer, token_batch(inputs), mask, weights))
        vectors = dict(zip(DIFFERENT, sums, strict=True))
        for same, other in zip(DIVISORS["batch"], DIVISORS["constant"], strict=True):
            vectors[same] = vectors[other] * len(mask) * trainer.loss_normalizer / float(lengths[-1].sum())
        for key, vector in vectors.items():
            batches[key].append(vector.double())
        for row in range(len(mask)) if number < settings["single_batches"] else ():
            rows = slice(row, row + 1)
            gradient = gradient_of(trainer, (log_probs_of(trainer, inputs, rows) * mask[rows]).sum())
            squares.append(float(gradient @ gradient))
    gradients = {key: torch.stack(vectors) for key, vectors in batches.items()}  # (K, n) each
    every, squared = np.concatenate(lengths), np.array(squares)
    some = every[: len(squared)]
    advantages = FAMILY[REFERENCE].advantages(np.concatenate(rewards)[: len(squared)], size)
    row = {
        "model": name,
        "seed": seed,
        "pass_rate": round(float(np.concatenate(rewards).mean()), 4),
        "length": round(float(every.mean()), 2),
        "spread": round(float(every.std() / every.mean()), 3),
        "noise": {key: _rounded(noise_of(each, settings["prompts"])) for key, each in gradients.items()},
        "alignment": {key: _rounded(alignment_of(each, gradients[REFERENCE])) for key, each in gradients.items()},
        "exponent": _rounded(exponent(some, squared)),
    }
    parts = {"row": (advantages / some) ** 2 * squared, "constant": advantages**2 * squared}
    return [row | {"shares": {key: shares(some, part) for key, part in parts.items()}}]


def product_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Product of two expected gradients, from products of different batches, `(K, n)` each."""
    return float(a.sum(dim=0) @ b.sum(dim=0) - (a * b).sum()) / (len(a) * (len(a) - 1))


def noise_of(gradients: torch.Tensor, groups: int) -> float:
    """Groups until signal and noise are equal; NaN where no mean is told from 0. `groups`: of a batch."""
    signal = product_of(gradients, gradients)
    return groups * (float((gradients**2).sum()) / len(gradients) / signal - 1) if signal > 0 else float("nan")


def alignment_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two expected gradients; NaN where one is not told from 0."""
    own, other = product_of(a, a), product_of(b, b)
    return product_of(a, b) / (own * other) ** 0.5 if min(own, other) > 0 else float("nan")


def exponent(lengths: np.ndarray, squares: np.ndarray) -> float:
    """Slope of the logarithm of squared gradients `(N,)` over that of lengths `(N,)`; NaN where all are equal."""
    x = np.log(lengths) - np.log(lengths).mean()
    return float(x @ np.log(squares) / (x @ x)) if x.any() else float("nan")


def shares(lengths: np.ndarray, parts: np.ndarray) -> list[float]:
    """Share of the sum of `parts`, `(N,)`, that is from the shortest, the middle and the longest third, `(N,)`."""
    ordered = parts[np.argsort(lengths, kind="stable")]
    return [round(float(third.sum() / parts.sum()), 4) for third in np.array_split(ordered, 3)]


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)


def report(results: Results) -> list[str]:
    return [noise_table(results, False), noise_table(results, True), shape_table(results), sentence(results)]


def noise_table(results: Results, with_std: bool) -> str:
    """Groups until signal and noise are equal, per divisor: mean and 95% interval over seeds."""
    head = [f"{'with' if with_std else 'without'} std", "tokens", "correct, %", *_LABELS.values()]
    rows = []
    for name in results["settings"]["models"]:
        runs, (row, constant) = rows_of(results, model=name), (DIVISORS[key][with_std] for key in ("row", "constant"))
        cells = [MODELS[name].title, f"{mean_of(runs, 'length'):.1f}", f"{100 * mean_of(runs, 'pass_rate'):.0f}"]
        cells += [_cell([run["noise"][pair[with_std]] for run in runs], 1) for pair in DIVISORS.values()]
        rows.append([*cells, _cell([_ratio(run["noise"][constant], run["noise"][row]) for run in runs], 2)])
    return table([*head, "constant over mean per row"], rows)


def shape_table(results: Results) -> str:
    """Growth of a completion's gradient with its length, shares of the variance, and bias."""
    head = ["without std", "spread of lengths", "exponent of the length"]
    head += [f"longest third, {divisor}, %" for divisor in ("mean per row", "constant")]
    head += [f"alignment, {divisor}" for divisor in ("mean per row", "batch's tokens")]
    rows = []
    for name in results["settings"]["models"]:
        runs = rows_of(results, model=name)
        cells = [MODELS[name].title, f"{mean_of(runs, 'spread'):.2f}", _cell([run["exponent"] for run in runs], 2)]
        cells += [_cell([100 * run["shares"][key][-1] for run in runs], 0) for key in ("row", "constant")]
        cells += [_cell([run["alignment"][DIVISORS[key][0]] for run in runs], 2) for key in ("row", "batch")]
        rows.append(cells)
    return table(head, rows)


def sentence(results: Results) -> str:
    """Growth of the noise with the length, from the shortest to the longest completions of the constructed models."""
    names = [name for name in results["settings"]["models"] if MODELS[name].constructed]
    if len(names) < 2:
        return "Growth of the noise with the length: nothing to compare, as there is one constructed task only."
    first, last = rows_of(results, model=names[0]), rows_of(results, model=names[-1])
    grown = {
        divisor: _cell([_ratio(b["noise"][key], a["noise"][key]) for a, b in zip(first, last, strict=True)], 2)
        for divisor, (key, _) in DIVISORS.items()
    }
    return (
        f"With {mean_of(last, 'length') / mean_of(first, 'length'):.1f} times as many tokens of the constructed task, "
        f"the noise is {grown['constant']} times as large under a constant divisor, {grown['batch']} under the "
        f"batch's tokens and {grown['row']} under a mean per row."
    )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _cell(values: Sequence[float | None], decimals: int) -> str:
    known = [value for value in values if value is not None]
    return "unknown" if len(known) < len(values) else interval(known).text(decimals)


def draw(results: Results) -> Any:
    """Noise over the mean length per divisor, constructed models and others."""
    figure, panels = new_figure(1, 2, 9.0, 3.8)
    kinds = {True: "even digit, comments of growing length", False: "list sums of growing length"}
    for axes, (constructed, title) in zip(panels, kinds.items(), strict=True):
        names = [name for name in results["settings"]["models"] if MODELS[name].constructed == constructed]
        for color, (divisor, (key, _)) in zip(COLORS, DIVISORS.items(), strict=False):
            x = [mean_of(rows_of(results, model=name), "length") for name in names]
            noise = [[run["noise"][key] for run in rows_of(results, model=name)] for name in names]
            y = [interval(value for value in values if value is not None) for values in noise]
            means, spread = [each.mean for each in y], [each.half_width for each in y]
            axes.errorbar(x, means, spread, fmt="o-", color=color, markersize=4, label=_LABELS[divisor])
        axes.set(title=title, xlabel="mean length (tokens)", ylabel="groups until signal = noise")
        axes.set_ylim(bottom=0)
    return figure


QUICK = {"models": ("even_4", "sums_3"), "prompts": 2, "num_generations": 4, "batches": 4, "single_batches": 1}
QUICK |= {"warm_start": 40}
STUDY = Study("variance", "variance", 3, SETTINGS, QUICK, partial(measure_all, measure_one), report, draw)


if __name__ == "__main__":
    main(STUDY)
