"""Is the length bias as large as the policy's knowledge of being incorrect?

Question: the update of a group cancels where correct and incorrect answers share a state. So does GRPO move their
lengths apart the more, the better the policy knows that it is incorrect?

Arms: nine small models (`measured_models.py`). Measure: the AUC of a linear probe for correctness on stopping states
(`trl_drgrpo.check.probe`), and the effect of GRPO's update on the gap between incorrect and correct lengths,
minus that of Dr. GRPO's, to first order, in tokens per update of unit length (`trl_drgrpo.check.bias`). Rule,
declared before the first number was seen: a positive rank correlation across models, its 95% interval above 0; also
over the models that were not made for the effect. As a share of the largest change of the gap that an update of this
length can make (`steepest`) the effect could not be given.

Added after a pilot on two of the models with another seed, before the study: `open_stops`, the extent to which
stopping is left to chance. Where a model always knows whether to stop, its length is decided at other tokens. Added
after one seed, in which a verdict that was read off the states with an AUC of 0.98 had no effect: `apart`, the
distance between the states of correct and of incorrect completions, and not only whether they can be told apart.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from frame import Results, Row, Study, interval, main, rows_of, table
from measured_models import MODELS, mean_of, measure_all, trainer_of

from trl_drgrpo.check.bias import GAP, Estimate, measure_model
from trl_drgrpo.check.probe import StateCollector
from trl_drgrpo.common.drawing import COLORS, new_figure

_GUESSING = ("guess_coin", "guess_three_in_four", "guess", "guess_one_letter")
SETTINGS: dict[str, Any] = {
    "models": (*_GUESSING, "sums_3", "sums_demo", "sums_6", "long_sums", "chains"),
    "prompts": 16,
    "num_generations": 8,
    "batches": 5,
}
_PREDICTORS = {  # key of a run, of which pairs are an estimate and its error
    "states": "AUC",
    "difference": "AUC above the position's",
    "open_stops": "open stops",
    "apart": "distance of the states",
}


def measure_one(settings: dict[str, Any], folder: Path, seed: int, name: str) -> list[Row]:
    """Probe and one-step effect of a model, from the same batches. Estimates are pairs of value and standard error."""
    trainer = trainer_of(name, seed, folder, settings)
    states, seen = StateCollector(trainer), []

    def watch(number: int, rollouts: Any, tokens: Any, mask: Any) -> None:
        seen.append(rollouts)
        states.add(tokens, mask, rollouts.right)

    changes = measure_model(trainer, settings["batches"], watch)
    scores, gaps = states.probe(), changes.differences_from_dr_grpo
    right, lengths = (np.concatenate([getattr(rollouts, key) for rollouts in seen]) for key in ("right", "lengths"))
    row = {
        "model": name,
        "seed": seed,
        "pass_rate": round(float(right.mean()), 4),
        "length_right": round(float(lengths[right].mean()), 2),
        "length_wrong": round(float(lengths[~right].mean()), 2),
        "prompts": scores.prompts,
        "open_stops": round(scores.open_stops, 4),
        "apart": round(scores.apart, 5),
        "gap": _pair(gaps["grpo"][GAP]),
        "gap_without_std": _pair(gaps["grpo_without_std"][GAP]),
        "steepest": None if np.isnan(changes.steepest_gap) else round(changes.steepest_gap, 3),
    }
    return [row | {key: _pair(getattr(scores, key)) for key in ("states", "position", "difference")}]


def _pair(estimate: Estimate) -> list[float]:
    return [round(estimate.value, 4), round(estimate.standard_error, 4)]


class RankCorrelation(NamedTuple):
    """Spearman's rho, its 95% interval, and the share of permutations with one at least as high."""

    rho: float
    low: float
    high: float
    p_value: float
    points: int

    def __str__(self) -> str:
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> RankCorrelation:
    """Spearman's rank correlation of at least four points; ties share their mean rank. Interval by Fisher's z with
    Fieller's variance (from -1 to 1 where rho is either), one-sided test by permutation.

    >>> print(rank_correlation([1, 2, 3, 4, 5], [2, 4, 5, 7, 9]))
    +1.00 [+1.00, +1.00]
    """
    ranks_x, ranks_y = (_centered_ranks(np.asarray(values, dtype=float)) for values in (x, y))
    rho = float(ranks_x @ ranks_y / np.sqrt((ranks_x @ ranks_x) * (ranks_y @ ranks_y)))
    shuffled = np.random.default_rng(0).permuted(np.tile(ranks_y, (20_000, 1)), axis=1)
    reached = int((shuffled @ ranks_x >= ranks_y @ ranks_x - 1e-9).sum())
    p_value = (1 + reached) / (1 + len(shuffled))
    if abs(rho) > 1 - 1e-9:
        return RankCorrelation(round(rho), round(rho), round(rho), p_value, len(ranks_x))
    middle, spread = math.atanh(rho), 1.96 * math.sqrt(1.06 / (len(ranks_x) - 3))
    return RankCorrelation(rho, math.tanh(middle - spread), math.tanh(middle + spread), p_value, len(ranks_x))


def _centered_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse] - (len(values) + 1) / 2


def correlation(results: Results, predictor: str, natural: bool = False) -> RankCorrelation:
    """Rank correlation of a predictor with the effect over models, means over seeds; `natural`: over models that were
    not constructed."""
    names = [name for name in results["settings"]["models"] if not (natural and MODELS[name].constructed)]
    keys = (predictor, "gap")
    return rank_correlation(
        *([fmean(_first(run[k]) for run in rows_of(results, model=n)) for n in names] for k in keys)
    )


def _first(value: Any) -> float:
    return value[0] if isinstance(value, list) else value


def report(results: Results) -> list[str]:
    head = ["model", "correct, %", "incorrect / correct, tokens", "AUC, state", "AUC, position", "open stops"]
    rows = []
    for name in results["settings"]["models"]:
        runs = rows_of(results, model=name)
        cells = [MODELS[name].title, f"{100 * mean_of(runs, 'pass_rate'):.0f}"]
        cells.append(f"{mean_of(runs, 'length_wrong'):.1f} / {mean_of(runs, 'length_right'):.1f}")
        cells += [interval(run[key][0] for run in runs).text(3) for key in ("states", "position")]
        cells += [f"{mean_of(runs, 'open_stops'):.2f}", f"{mean_of(runs, 'apart'):.3f}"]
        rows.append([*cells, interval(run["gap"][0] for run in runs).text(1, signed=True)])
    correlations = [
        [title, *(str(correlation(results, key, natural)) for natural in (False, True))]
        for key, title in _PREDICTORS.items()
    ]
    return [
        table([*head, "distance", "GRPO minus Dr. GRPO, tokens"], rows),
        table(["rank correlation of the effect with", "all", "not constructed"], correlations),
        sentence(results),
    ]


def sentence(results: Results) -> str:
    """Sentence on the prediction, from the declared correlation."""
    found, natural = (correlation(results, "states", only) for only in (False, True))
    parts = [f"{each} (p = {each.p_value:.3f}, one-sided): {_verdict(each)}" for each in (found, natural)]
    return (
        f"Over {found.points} models the rank correlation of the AUC with the effect in tokens is {parts[0]}. "
        f"Over the {natural.points} that were not constructed it is {parts[1]}."
    )


def _verdict(found: RankCorrelation) -> str:
    if found.low > 0:
        return "the prediction is borne out"
    return "the prediction is contradicted" if found.high < 0 else "the prediction is not borne out"


def draw(results: Results) -> Any:
    """The effect over the AUC, a point per model with its interval over seeds."""
    figure, (axes,) = new_figure(1, 1, 7.5, 4.2)
    for number, name in enumerate(results["settings"]["models"], start=1):
        x, y = (interval(run[key][0] for run in rows_of(results, model=name)) for key in ("states", "gap"))
        color = COLORS[1] if MODELS[name].constructed else COLORS[0]
        axes.errorbar(x.mean, y.mean, y.half_width, x.half_width, "o", color=color, markersize=5, linewidth=0.8)
        axes.annotate(str(number), (x.mean, y.mean), (4, 4), textcoords="offset points", fontsize=8)
        axes.plot([], [], "o", color=color, label=f"{number} {MODELS[name].title}")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.axvline(0.5, color="black", linewidth=0.6)
    axes.set(xlabel="AUC of the probe where an answer may stop", ylabel="gap, GRPO minus Dr. GRPO, in tokens")
    return figure


QUICK = {"models": ("sums_3", "sums_demo"), "prompts": 8, "num_generations": 2, "batches": 3}
STUDY = Study("probe", "evidence", 3, SETTINGS, QUICK, partial(measure_all, measure_one), report, draw)


if __name__ == "__main__":
    main(STUDY)
