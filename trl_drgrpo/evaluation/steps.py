"""Quality of step scores: do they tell good steps from bad ones, and correct completions from incorrect ones?

Every comparison holds scores against truths, true or false: `labels`, each step's score against its label; `min`,
`product` and `last`, that path value of a completion's scores against the correctness of the completion. Steps and
completions without a score or without a truth do not count.

- AUC: the chance that a random true one has a higher score than a random false one; equal scores count one half. The
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
from collections import defaultdict
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
    """Return the numbers of one step reward function, as the module defines them.

    Args:
        scores (`N` sequences of `K_i` floats or `None`): One per step.
        labels (`N` sequences of `K_i` booleans or `None`): `None` for a completion without labels.
        correct (`N` booleans or `None`): Whether the completion is correct.
        prompts (`N` texts): Equal for completions of one prompt.
        threshold (`float`, *optional*, defaults to `0.5`): A step with a lower score is taken for an error.

    Returns:
        `dict`: `against`: by comparison, where there is something to compare, `count`, `true_frac`, `auc`, `auc_low`,
        `auc_high`, `brier`, `ece` and `bins` (each `count`, `score`, `true_frac`); and `first_error`: `threshold`,
        `incorrect`, `correct` (counts), `incorrect_accuracy`, `correct_accuracy` and `f1`. A number that cannot be
        computed is `None`.
    """
    # By comparison, triples of a score, its truth and its prompt.
    comparisons: dict[str, list[tuple[float, bool, str]]] = defaultdict(list)
    for row, step_labels, is_correct, prompt in zip(scores, labels, correct, prompts, strict=True):
        if step_labels is not None:
            for score, label in zip(row, step_labels, strict=True):
                if score is not None and label is not None:
                    comparisons["labels"].append((score, label, prompt))
        scored = [score for score in row if score is not None]
        if scored and is_correct is not None:
            for name, path_value in PATH_VALUES.items():
                comparisons[name].append((path_value(scored), is_correct, prompt))
    numbers = {}
    for name in ("labels", *PATH_VALUES):  # in this order, whichever comes first in the rows
        if name in comparisons:
            columns = zip(*comparisons[name], strict=True)
            numbers[name] = _numbers(*columns)
    return {"against": numbers, "first_error": _first_error(scores, labels, threshold)}


def _numbers(scores: Sequence[float], truths: Sequence[bool], prompts: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of one comparison."""
    # As floats, so that the mean of truths is a share and a difference to a score can be squared.
    score = np.asarray(scores, dtype=np.float64)
    truth = np.asarray(truths, dtype=np.float64)
    auc, low, high = _auc(score, truth, prompts)
    numbers: dict[str, Any] = {
        "count": len(score),
        "true_frac": float(truth.mean()),
        "auc": auc,
        "auc_low": low,
        "auc_high": high,
        "brier": None,
        "ece": None,
        "bins": [],
    }
    if score.min() < 0 or score.max() > 1:  # no probabilities, so there is nothing to calibrate
        return numbers
    place = np.minimum((score * BINS).astype(int), BINS - 1)  # a score of 1 is in the last bin
    error = 0.0
    for index in np.unique(place):  # an empty bin has no mean
        mask = place == index
        count = int(mask.sum())
        mean_score = float(score[mask].mean())
        true_frac = float(truth[mask].mean())
        numbers["bins"].append({"count": count, "score": mean_score, "true_frac": true_frac})
        error += count * abs(mean_score - true_frac)
    numbers["brier"] = float(((score - truth) ** 2).mean())
    numbers["ece"] = error / len(score)
    return numbers


def _auc(score: np.ndarray, truth: np.ndarray, prompts: Sequence[str]) -> tuple[float | None, ...]:
    """Return the AUC and its interval; `None` where all truths, or all prompts, are the same."""
    # Counts per distinct score take the place of ranks: every resample needs two of them, and no sorting.
    values, rank = np.unique(score, return_inverse=True)

    # The Mann-Whitney statistic: of all pairs of a true and a false one, the share in which the true one is higher.
    def area(weight: np.ndarray) -> float:
        # True and false ones per distinct score. A pair of equal scores counts one half.
        good = np.bincount(rank, weight * truth, len(values))
        bad = np.bincount(rank, weight * (1 - truth), len(values))
        pairs_in_order = (good * (bad.cumsum() - bad / 2)).sum()
        total = good.sum() * bad.sum()
        return float(pairs_in_order / total) if total else math.nan

    area_of_all = area(np.ones(len(score)))
    if math.isnan(area_of_all):  # there is no pair
        return None, None, None
    distinct, problem = np.unique(np.asarray(prompts), return_inverse=True)
    if len(distinct) == 1:  # every resample would be the sample itself
        return area_of_all, None, None

    def resampled_area(drawn: np.ndarray) -> float:
        # A resample only changes the weights: how often each prompt was drawn.
        times_drawn = np.bincount(drawn, minlength=len(distinct))
        return area(times_drawn[problem])

    return area_of_all, *bootstrap(len(distinct), resampled_area, RESAMPLES)


def _first_error(
    scores: StepScores, labels: Sequence[Sequence[bool | None] | None], threshold: float
) -> dict[str, float | None]:
    """Compare the first step that the scores blame with the first one labeled bad."""
    incorrect_hits: list[bool] = []
    correct_hits: list[bool] = []
    for row, step_labels in zip(scores, labels, strict=True):
        if not step_labels:
            continue
        # The first step that the scores blame, and the first that is not labeled good.
        is_blamed = [score is not None and score < threshold for score in row]
        blamed = is_blamed.index(True) if True in is_blamed else None
        first = next((k for k, label in enumerate(step_labels) if label is not True), None)
        if first is None:  # all steps are good: none may be blamed
            correct_hits.append(blamed is None)
        elif step_labels[first] is False:  # else a step without label comes first, and nothing is known
            incorrect_hits.append(blamed == first)
    result: dict[str, float | None] = {
        "threshold": threshold,
        "incorrect": len(incorrect_hits),
        "correct": len(correct_hits),
        "incorrect_accuracy": None,
        "correct_accuracy": None,
        "f1": None,
    }
    # An accuracy for each kind of completion that is there.
    accuracies = []
    for kind, hits in (("incorrect", incorrect_hits), ("correct", correct_hits)):
        if hits:
            accuracies.append(statistics.fmean(hits))
            result[f"{kind}_accuracy"] = accuracies[-1]
    if len(accuracies) == 2:  # with completions of one kind only, F1 would be the accuracy on these
        result["f1"] = statistics.harmonic_mean(accuracies)
    return result


def draw(numbers: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Draw one panel per step reward function into a PNG file: the share of true ones in each bin of its scores, for
    every comparison. `numbers`: results of [`compared`], by name."""
    from trl_drgrpo.common.drawing import new_figure, save_figure

    figure, panels = new_figure(1, len(numbers), 4.4 * len(numbers), 4.0, sharey=True)
    for axes, (name, comparison) in zip(panels, numbers.items(), strict=True):
        # The diagonal is perfect calibration: of steps with a score of 0.7, 70% are good.
        axes.plot((0, 1), (0, 1), color="#888888", linewidth=0.8, linestyle="--")
        for kind, calibration in comparison["against"].items():
            auc = "-"
            if calibration["auc"] is not None:
                auc = f"{calibration['auc']:.2f}"
            scores = [entry["score"] for entry in calibration["bins"]]
            shares = [entry["true_frac"] for entry in calibration["bins"]]
            axes.plot(scores, shares, marker="o", markersize=4, label=f"{kind} (AUC {auc})")
        # To matplotlib, a pair of dollar signs would be a formula.
        axes.set(title=name.replace("$", r"\$"), xlabel="score", ylabel="share good or correct")
    return save_figure(figure, path)
