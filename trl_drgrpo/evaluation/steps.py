"""How well step scores tell good steps from bad ones, and correct completions from incorrect ones.

Every comparison holds scores against truths, true or false: `labels`, each step's score against its label; `min`,
`product` and `last`, that path value of a completion's scores against whether the completion is correct. What has no
score or no truth counts in none.

- AUC: the chance that a random true one has a higher score than a random false one; of equal scores one half. The
  interval is the percentile bootstrap over prompts: the steps and completions of a prompt stay together.
- Brier: mean of (score - truth)^2, the truth as 1 or 0. ECE: over ten bins of equal width from 0 to 1, the mean of
  |mean score - share of true ones| weighted by their sizes. Both only where every score is a probability, 0 to 1.
- First error, as in ProcessBench (arXiv 2412.06559): a completion's first step below the threshold is compared with
  its first step labeled bad; without such a step it is taken for, or is, correct throughout. Accuracy on incorrect
  completions (the very step is found) and on correct ones (no step is blamed), and their harmonic mean, F1.
  Completions with a step without label before the first bad one are left out; a step without a score blames nobody.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.evaluation.results import bootstrap
from trl_drgrpo.search.problem import PATH_VALUES

BINS = 10
RESAMPLES = 1_000

StepScores = Sequence[Sequence[float | None]]


def compared(
    scores: StepScores,
    labels: Sequence[Sequence[bool | None] | None],
    correct: Sequence[bool | None],
    prompts: Sequence[str],
    threshold: float = 0.5,
) -> dict[str, Any]:
    """The numbers of one step reward function, as the module defines them.

    Args:
        scores (`N` sequences of `K_i` floats or `None`): Of each step.
        labels (`N` sequences of `K_i` booleans or `None`): `None` for a completion without labels.
        correct (`N` booleans or `None`): Whether the completion is correct.
        prompts (`N` texts): Equal for completions of one prompt.
        threshold (`float`, *optional*, defaults to `0.5`): A step below it is taken for an error.

    Returns:
        `dict`: `against`: by comparison, where there is something to compare, `count`, `true_frac`, `auc`, `auc_low`,
        `auc_high`, `brier`, `ece` and `bins` (each `count`, `score`, `true_frac`); and `first_error`: `threshold`,
        `incorrect`, `correct` (counts), `incorrect_accuracy`, `correct_accuracy` and `f1`. A number that cannot be
        told is `None`.
    """
    comparisons: dict[str, list[tuple[float, bool, str]]] = {"labels": []}
    for row, of_steps, prompt in zip(scores, labels, prompts, strict=True):
        steps = zip(row, of_steps or (), strict=of_steps is not None)
        comparisons["labels"] += [(s, label, prompt) for s, label in steps if s is not None and label is not None]
    for name, value in PATH_VALUES.items():
        scored_steps = [[score for score in row if score is not None] for row in scores]
        rows = zip(scored_steps, correct, prompts, strict=True)
        comparisons[name] = [(value(row), truth, prompt) for row, truth, prompt in rows if row and truth is not None]
    return {
        "against": {
            name: _numbers(*zip(*scored_truths, strict=True))
            for name, scored_truths in comparisons.items()
            if scored_truths
        },
        "first_error": _first_error(scores, labels, threshold),
    }


def _numbers(scores: Sequence[float], truths: Sequence[bool], prompts: Sequence[str]) -> dict[str, Any]:
    score = np.asarray(scores, dtype=np.float64)
    truth = np.asarray(truths, dtype=np.float64)
    auc, low, high = _auc(score, truth, prompts)
    numbers = {"count": len(score), "true_frac": float(truth.mean()), "auc": auc, "auc_low": low, "auc_high": high}
    if score.min() < 0 or score.max() > 1:
        return {**numbers, "brier": None, "ece": None, "bins": []}
    place = np.minimum((score * BINS).astype(int), BINS - 1)
    within = [place == bin_index for bin_index in range(BINS)]
    bins = [
        {"count": int(mask.sum()), "score": float(score[mask].mean()), "true_frac": float(truth[mask].mean())}
        for mask in within
        if mask.any()
    ]
    ece = sum(one_bin["count"] * abs(one_bin["score"] - one_bin["true_frac"]) for one_bin in bins) / len(score)
    return {**numbers, "brier": float(((score - truth) ** 2).mean()), "ece": ece, "bins": bins}


def _auc(score: np.ndarray, truth: np.ndarray, prompts: Sequence[str]) -> tuple[float | None, ...]:
    """AUC and its interval; `None` where all truths, or all prompts, are the same."""
    values, rank = np.unique(score, return_inverse=True)

    def area(weight: np.ndarray) -> float:
        good, bad = (np.bincount(rank, weight * labels, len(values)) for labels in (truth, 1 - truth))
        total = good.sum() * bad.sum()
        return float((good * (bad.cumsum() - bad / 2)).sum() / total) if total else math.nan

    area_of_all = area(np.ones(len(score)))
    different, problem = np.unique(np.asarray(prompts), return_inverse=True)
    if math.isnan(area_of_all) or len(different) == 1:
        return None if math.isnan(area_of_all) else area_of_all, None, None
    num = len(different)
    return area_of_all, *bootstrap(num, lambda drawn: area(np.bincount(drawn, minlength=num)[problem]), RESAMPLES)


def _first_error(scores: StepScores, labels: Sequence[Sequence[bool | None] | None], threshold: float) -> Any:
    hits_by_outcome: dict[bool, list[bool]] = {True: [], False: []}  # by whether the completion is correct
    for row, of_steps in zip(scores, labels, strict=True):
        decided = [label for label in of_steps or () if label is not True]  # the first one decides
        if of_steps and (not decided or decided[0] is False):
            first = next((k for k, score in enumerate(row) if score is not None and score < threshold), None)
            hits_by_outcome[not decided].append(first == (list(of_steps).index(False) if decided else None))
    accuracy = {kind: sum(hits) / len(hits) if hits else None for kind, hits in hits_by_outcome.items()}
    accuracies = [share for share in accuracy.values() if share is not None]
    return {
        "threshold": threshold,
        "incorrect": len(hits_by_outcome[False]),
        "correct": len(hits_by_outcome[True]),
        "incorrect_accuracy": accuracy[False],
        "correct_accuracy": accuracy[True],
        "f1": statistics.harmonic_mean(accuracies) if len(accuracies) == 2 else None,
    }


def draw(numbers: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """One panel per step reward function into a PNG file: in each bin of its scores the share of true ones, for
    every comparison. `numbers`: of [`compared`], by name."""
    from trl_drgrpo.common.drawing import new_figure, save_figure

    figure, panels = new_figure(1, len(numbers), 4.4 * len(numbers), 4.0, sharey=True)
    for axes, (name, comparison) in zip(panels, numbers.items(), strict=True):
        axes.plot((0, 1), (0, 1), color="#888888", linewidth=0.8, linestyle="--")
        for kind, calibration in comparison["against"].items():
            bins = calibration["bins"]
            auc = "-" if calibration["auc"] is None else f"{calibration['auc']:.2f}"
            line = [[one_bin[key] for one_bin in bins] for key in ("score", "true_frac")]
            axes.plot(*line, marker="o", markersize=4, label=f"{kind} (AUC {auc})")
        axes.set(title=name.replace("$", r"\$"), xlabel="score", ylabel="share good or correct")
    return save_figure(figure, path)
