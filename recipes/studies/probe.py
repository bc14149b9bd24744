"""Is the length bias as large as the policy's knowledge of being incorrect?

Question: the update of a group cancels where correct and incorrect answers share a state. So does GRPO move their
lengths apart the more, the better the policy knows that it is incorrect?

Arms: nine small models (`measured_models.py`). Measure: the AUC of a linear probe for correctness on stopping states,
and the effect of GRPO's update on the gap between incorrect and correct lengths, minus that of Dr. GRPO's, to first
order, in tokens per update of unit length (`trl_drgrpo.check.bias`). Rule, declared before the first number was seen:
a positive rank correlation across models, its 95% interval above 0; also over the models that were not made for the
effect. As a share of the largest change of the gap that an update of this length can make (`steepest`) the effect
could not be given.

**States.** From each completion one position is drawn, in proportion to the probability that the policy gives to a
stop token there. So a position counts as much as the policy may stop there, and a long completion, also one that was
cut off, counts no more than a short one. The state is the last layer's, from which the next token is predicted.

**Probe.** A ridge regression of the centered verdict on centered states (both within the prompt: the difficulty of a
prompt is known to all of its completions alike, and drops out). Prompts are dealt into folds; a prompt is judged by
the probe that saw none of its completions, and the strength of the penalty is chosen on a fold of the training
prompts. The AUC is the share of pairs, one correct and one incorrect completion of one prompt, in order. A second
probe sees the position alone: its findings need no knowledge of the answer ("long ones are incorrect").

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
import torch
from frame import Results, Row, Study, interval, main, rows_of, table
from measured_models import MODELS, mean_of, measure_all, trainer_of

from trl_drgrpo.check.bias import GAP, Estimate, measure_model
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.upstream.batches import TokenBatch

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

    def watch(rollouts: Any, tokens: TokenBatch, mask: torch.Tensor) -> None:
        seen.append(rollouts)
        states.add(tokens, mask, rollouts.right)

    changes = measure_model(trainer, settings["batches"], watch)
    gaps = changes.differences_from_dr_grpo
    right, lengths = (np.concatenate([getattr(rollouts, key) for rollouts in seen]) for key in ("right", "lengths"))
    row = {
        "model": name,
        "seed": seed,
        "pass_rate": round(float(right.mean()), 4),
        "length_right": round(float(lengths[right].mean()), 2),
        "length_wrong": round(float(lengths[~right].mean()), 2),
        "gap": _pair(gaps["grpo"][GAP]),
        "gap_without_std": _pair(gaps["grpo_without_std"][GAP]),
        "steepest": None if np.isnan(changes.steepest_gap) else round(changes.steepest_gap, 3),
    }
    return [row | probe_correctness(**states.drawn())]


def _pair(estimate: Estimate) -> list[float]:
    return [round(estimate.value, 4), round(estimate.standard_error, 4)]


# States --------------------------------------------------------------------------------------------------------------


class StateCollector:
    """Draws a state from each completion of the batches that it is shown.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.rng = np.random.default_rng(0)  # the sampler's generator is not touched
        self.found: list[tuple[Any, ...]] = []
        self.prompts: dict[tuple[int, ...], int] = {}

    def add(self, tokens: TokenBatch, mask: torch.Tensor, right: np.ndarray) -> None:
        """Take a state of each row that has a token of its own: 1 in `mask` `(B, T)`. `right`: verdicts `(B,)`."""
        size = self.trainer.args.per_device_train_batch_size
        width = tokens.input_ids.size(1) - tokens.completion_width
        for first in range(0, len(mask), size):
            rows = slice(first, first + size)
            part = TokenBatch(tokens.input_ids[rows], tokens.attention_mask[rows], tokens.completion_width)
            states, log_stop = stopping(self.trainer, part)
            own = mask[rows].bool()
            for row in own.any(dim=1).nonzero().flatten().tolist():
                (positions,) = own[row].nonzero(as_tuple=True)
                hazards = log_stop[row, positions].double().exp()
                drawn = _draw(log_stop[row, positions].double().numpy(), self.rng)
                ids = part.input_ids[row, :width][part.attention_mask[row, :width].bool()]
                prompt = self.prompts.setdefault(tuple(ids.tolist()), len(self.prompts))
                open_stops = float((hazards * (1 - hazards)).sum())
                self.found.append(
                    (states[row, positions[drawn]].numpy(), drawn, right[first + row], prompt, open_stops)
                )

    def drawn(self) -> dict[str, np.ndarray]:
        """The arguments of [`probe_correctness`]."""
        names = ("states", "positions", "right", "prompts", "open_stops")
        return dict(zip(names, map(np.array, zip(*self.found, strict=True)), strict=True))


@torch.no_grad()
def stopping(trainer: Any, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """States `(B, T, d)` that the completion's tokens were drawn from, and log-probabilities `(B, T)` of a stop token
    in each, at the trainer's temperature."""
    caught: list[torch.Tensor] = []
    head = trainer.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0].detach()))
    try:
        logits = trainer.model(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            position_ids=(tokens.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            logits_to_keep=tokens.completion_width + 1,
            use_cache=False,
        ).logits
    finally:
        hook.remove()
    predicting = slice(-tokens.completion_width - 1, -1)
    scaled = logits[:, predicting] / trainer.args.temperature
    log_stop = scaled[..., sorted(trainer.stop_token_ids)].logsumexp(dim=2) - scaled.logsumexp(dim=2)
    return caught[0][:, predicting], log_stop


def _draw(log_weights: np.ndarray, rng: np.random.Generator) -> int:
    weights = np.exp(log_weights - log_weights.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))


# Probe ---------------------------------------------------------------------------------------------------------------

FOLDS = 5
_PENALTIES = 10.0 ** np.arange(-4, 4)  # per row, of features of variance 1
_KNOTS = np.linspace(0.1, 0.9, 5)  # quantiles of the positions at which the position's curve may bend


def probe_correctness(
    states: np.ndarray, positions: np.ndarray, right: np.ndarray, prompts: np.ndarray, open_stops: np.ndarray
) -> Row:
    """Cross-validated AUC of both probes and of their difference, prompt by prompt; over prompts that have correct and
    incorrect completions.

    Args:
        states (`np.ndarray` of shape `(N, d)`): Hidden states, one per completion.
        positions (`np.ndarray` of shape `(N,)`): Tokens of its own that the policy had written there.
        right (`np.ndarray` of shape `(N,)`, bool): Whether the completion is correct.
        prompts (`np.ndarray` of shape `(N,)`, int): The same number for the same prompt.
        open_stops (`np.ndarray` of shape `(N,)`): Sum over the completion's tokens of `h (1 - h)`, h the probability
            of a stop token there: 0 where it is always clear whether to stop, however the length was decided before.
    """
    numbers = np.unique(prompts, return_inverse=True)[1]
    passed = np.bincount(numbers, right) / np.bincount(numbers)
    mixed = ((passed > 0) & (passed < 1))[numbers]
    states, right = states[mixed].astype(float), right[mixed]
    names, numbers = np.unique(prompts[mixed], return_inverse=True)
    folds = (np.random.default_rng(0).permutation(len(names)) % FOLDS)[numbers]
    counts = []
    for features in (states, position_features(positions[mixed])):
        counts.append(concordant_pairs(out_of_fold_scores(features, right, numbers, folds), right, numbers))
    (ordered, pairs), (by_position, _) = counts
    return {
        "prompts": len(names),
        "open_stops": round(float(open_stops.mean()), 4),
        "apart": round(relative_distance(states, right, numbers, folds), 5),
        "states": _pair(_ratio(ordered, pairs)),
        "position": _pair(_ratio(by_position, pairs)),
        "difference": _pair(_ratio(ordered - by_position, pairs)),
    }


def position_features(positions: np.ndarray) -> np.ndarray:
    """A position as a line, a logarithm and a line that bends at its quantiles, `(N, 7)`."""
    positions = positions.astype(float)
    bends = [np.maximum(positions - knot, 0) for knot in np.quantile(positions, _KNOTS)]
    return np.stack([positions, np.log1p(positions), *bends], axis=1)


def out_of_fold_scores(features: np.ndarray, right: np.ndarray, prompts: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Score of each completion `(N,)` by the probe that was fitted without its fold; comparable within a prompt."""
    x, y = centered(features, prompts), centered(right[:, None].astype(float), prompts)[:, 0]
    scores = np.empty(len(y))
    for fold in range(FOLDS):
        held_out, validation = folds == fold, folds == (fold + 1) % FOLDS
        fitted = _ridge(x[~held_out & ~validation], y[~held_out & ~validation])  # (d, penalties)
        losses = ((x[validation] @ fitted - y[validation, None]) ** 2).sum(axis=0)
        scores[held_out] = x[held_out] @ _ridge(x[~held_out], y[~held_out])[:, int(np.argmin(losses))]
    return scores


def relative_distance(states: np.ndarray, right: np.ndarray, prompts: np.ndarray, folds: np.ndarray) -> float:
    """Squared distance of the mean states of correct and incorrect completions within a prompt, over the mean squared
    length of a state; from products of different folds, so that noise adds nothing. A probe also reads a small
    distance, but then an update of one kind moves the other."""
    x, y = centered(states, prompts), centered(right[:, None].astype(float), prompts)[:, 0]
    slopes = np.stack([y[folds == fold] @ x[folds == fold] / (y[folds == fold] ** 2).sum() for fold in range(FOLDS)])
    gram = slopes @ slopes.T
    distance = (gram.sum() - np.trace(gram)) / (FOLDS * (FOLDS - 1))
    return float(distance / (states**2).sum(axis=1).mean())


def centered(values: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Values `(N, d)` minus their prompt's mean."""
    sums = np.zeros((prompts.max() + 1, values.shape[1]))
    np.add.at(sums, prompts, values)
    return values - (sums / np.bincount(prompts)[:, None])[prompts]


def concordant_pairs(scores: np.ndarray, right: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per prompt, pairs of a correct and an incorrect completion in order (a tie is half a pair), and all pairs."""
    ordered, pairs = np.zeros(prompts.max() + 1), np.zeros(prompts.max() + 1)
    for prompt in range(len(pairs)):
        own = prompts == prompt
        margins = scores[own & right][:, None] - scores[own & ~right]
        ordered[prompt] = (margins > 0).sum() + 0.5 * (margins == 0).sum()
        pairs[prompt] = margins.size
    return ordered, pairs


def _ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients `(d, penalties)`."""
    scale = x.std(axis=0)
    scale = np.where(scale > 1e-9 * scale.max(initial=0), scale, np.inf)  # a feature that does not vary is left out
    scaled = x / scale
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    projected = vectors.T @ (scaled.T @ y)
    return vectors @ (projected[:, None] / (values[:, None] + len(x) * _PENALTIES)) / scale[:, None]


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    """Ratio of two sums over prompts, and its linearized standard error times the square root of 2: prompts of two
    folds are judged by probes that learned from each other, so near chance their accidental agreement counts twice."""
    count, total = len(numerators), denominators.sum()
    ratio = numerators.sum() / total
    residuals = numerators - ratio * denominators
    return Estimate(float(ratio), float(np.sqrt(2 * count / (count - 1) * (residuals**2).sum()) / total))


# Report --------------------------------------------------------------------------------------------------------------


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
STUDY = Study("probe", "probe", 3, SETTINGS, QUICK, partial(measure_all, measure_one), report, draw)


if __name__ == "__main__":
    main(STUDY)
