r"""What the policy knows, where it may stop, of being incorrect: `trl-drgrpo bias --probe`.

Advantages of a group sum to 0, so an update moves the decision to stop for correct and for incorrect completions
apart only as far as the states in which they take it differ. Hence pairs within a prompt: the difficulty of the prompt
is known to all of its completions alike, and drops out. The AUC is the share of pairs, one correct and one incorrect
completion of one prompt, that the probe puts in order; 0.5 is chance.

**States.** From each completion one position is drawn, in proportion to the probability that the policy gives to a
stop token there, among the tokens that the policy wrote itself. So a position counts as much as the policy may stop
there, and a long completion, also one that was cut off, counts no more than a short one. The state is the last
layer's, from which the next token's distribution is read.

**Probe.** A ridge regression of the centered verdict on centered states (both within the prompt), which is that of
Dr. GRPO's advantage. Prompts are dealt into folds; a prompt is judged by the probe that saw none of its completions,
and the strength of the penalty is chosen on a fold of the training prompts. A second probe sees the position alone:
its findings need no knowledge of the answer ("long ones are incorrect").

Standard errors are those of a mean over prompts, times the square root of 2. Prompts of two folds are judged by probes
that learned from each other, so near chance their accidental agreement counts twice; elsewhere it is an upper bound.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_drgrpo.check.bias import Estimate, interval
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import TokenBatch

FOLDS = 5
_PENALTIES = 10.0 ** np.arange(-4, 4)  # per row, of features of variance 1
_KNOTS = np.linspace(0.1, 0.9, 5)  # quantiles of the positions at which the position's curve may bend


@dataclass(frozen=True)
class ProbeScores:
    """AUC within a prompt, out of fold.

    Args:
        states ([`Estimate`]): Of the probe on hidden states.
        position ([`Estimate`]): Of the probe that sees only how many tokens were written.
        difference ([`Estimate`]): The first minus the second, prompt by prompt.
        prompts (`int`): Prompts with correct and incorrect completions; the others have no say.
        correct, incorrect (`int`): Their completions.
        open_stops (`float`): Mean of [`StopStates.open_stops`] over all completions.
        apart (`float`): Squared distance between the mean states of correct and of incorrect completions, see
            [`relative_distance`]. A probe also reads a small difference, but then an update of one moves the other.
    """

    states: Estimate
    position: Estimate
    difference: Estimate
    prompts: int
    correct: int
    incorrect: int
    open_stops: float
    apart: float


@dataclass(frozen=True)
class StopStates:
    """One state per completion.

    Args:
        states (`np.ndarray` of shape `(N, d)`): Hidden states.
        positions (`np.ndarray` of shape `(N,)`): Tokens of its own that the policy had written there.
        right (`np.ndarray` of shape `(N,)`, bool): Whether the completion is correct.
        prompts (`np.ndarray` of shape `(N,)`, int): The same number for the same prompt.
        open_stops (`np.ndarray` of shape `(N,)`): Sum over the completion's tokens of `h (1 - h)`, h the probability
            of a stop token there: 0 where it is always clear whether to stop, however the length was decided before.
    """

    states: np.ndarray
    positions: np.ndarray
    right: np.ndarray
    prompts: np.ndarray
    open_stops: np.ndarray


def probe_correctness(found: StopStates) -> ProbeScores:
    """Cross-validated AUC of both probes.

    Args:
        found ([`StopStates`]): Of at least [`FOLDS`] prompts with correct and incorrect completions.

    Returns:
        [`ProbeScores`].

    Raises:
        [`InputError`]: One prompt only, all completions correct or all incorrect, or too few prompts with both.
    """
    chosen = _with_signal(found)
    right, prompts = found.right[chosen], found.prompts[chosen]
    names, numbers = np.unique(prompts, return_inverse=True)
    fold_of_prompt = np.random.default_rng(0).permutation(len(names)) % FOLDS
    folds = fold_of_prompt[numbers]
    counts = []
    for features in (found.states[chosen], position_features(found.positions[chosen])):
        scores = out_of_fold_scores(np.asarray(features, dtype=float), right, numbers, folds)
        counts.append(concordant_pairs(scores, right, numbers))
    (ordered, pairs), (by_position, _) = counts
    return ProbeScores(
        _ratio(ordered, pairs),
        _ratio(by_position, pairs),
        _ratio(ordered - by_position, pairs),
        len(names),
        int(right.sum()),
        int((~right).sum()),
        float(found.open_stops.mean()),
        relative_distance(found.states[chosen], right, numbers, folds),
    )


def _with_signal(found: StopStates) -> np.ndarray:
    """Mask of the completions of prompts that have correct and incorrect ones."""
    names, numbers = np.unique(found.prompts, return_inverse=True)
    if len(names) == 1:
        remedy = "The probe is evaluated on held-out prompts: measure a dataset, with more batches."
        raise InputError("prompts", "1", f"at least {FOLDS}", remedy)
    for name, count in (("correct", int(found.right.sum())), ("incorrect", int((~found.right).sum()))):
        if not count:
            remedy = "Measure more batches, or easier or harder prompts."
            raise InputError(f"{name} completions", f"0 of {len(found.right)}", "some of both kinds", remedy)
    passed = np.bincount(numbers, found.right) / np.bincount(numbers)
    mixed = (passed > 0) & (passed < 1)
    if mixed.sum() < FOLDS:
        got = f"{mixed.sum()} of {len(names)}"
        remedy = "Measure more batches, with more prompts in each."
        raise InputError("prompts with correct and incorrect completions", got, f"at least {FOLDS}", remedy)
    return mixed[numbers]


def position_features(positions: np.ndarray) -> np.ndarray:
    """A position as a line, a logarithm and a line that bends at its quantiles, `(N, 7)`.

    Args:
        positions (`np.ndarray` of shape `(N,)`): Tokens written, at least 0.
    """
    positions = positions.astype(float)
    bends = [np.maximum(positions - knot, 0) for knot in np.quantile(positions, _KNOTS)]
    return np.stack([positions, np.log1p(positions), *bends], axis=1)


def out_of_fold_scores(features: np.ndarray, right: np.ndarray, prompts: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Score of each completion `(N,)` by the probe that was fitted without its fold; comparable within a prompt.

    Args:
        features (`np.ndarray` of shape `(N, d)`): Input of the probe.
        right (`np.ndarray` of shape `(N,)`, bool): Verdicts.
        prompts (`np.ndarray` of shape `(N,)`): Prompts as numbers from 0 on.
        folds (`np.ndarray` of shape `(N,)`): Fold of each completion, the same within a prompt.
    """
    x, y = centered(features, prompts), centered(right[:, None].astype(float), prompts)[:, 0]
    scores = np.empty(len(y))
    for fold in range(FOLDS):
        held_out, validation = folds == fold, folds == (fold + 1) % FOLDS
        fitted = _ridge(x[~held_out & ~validation], y[~held_out & ~validation])  # (d, penalties)
        losses = ((x[validation] @ fitted - y[validation, None]) ** 2).sum(axis=0)
        best = int(np.argmin(losses))
        scores[held_out] = x[held_out] @ _ridge(x[~held_out], y[~held_out])[:, best]
    return scores


def relative_distance(states: np.ndarray, right: np.ndarray, prompts: np.ndarray, folds: np.ndarray) -> float:
    """Squared distance of the mean states of correct and incorrect completions within a prompt, over the mean squared
    length of a state; from products of different folds, so that noise adds nothing.

    Args:
        states, right, prompts, folds: As in [`out_of_fold_scores`].
    """
    x, y = centered(np.asarray(states, dtype=float), prompts), centered(right[:, None].astype(float), prompts)[:, 0]
    slopes = np.stack([y[folds == fold] @ x[folds == fold] / (y[folds == fold] ** 2).sum() for fold in range(FOLDS)])
    gram = slopes @ slopes.T
    distance = (gram.sum() - np.trace(gram)) / (FOLDS * (FOLDS - 1))
    return float(distance / (np.asarray(states, dtype=float) ** 2).sum(axis=1).mean())


def centered(values: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Values `(N, d)` minus their prompt's mean.

    Args:
        values (`np.ndarray` of shape `(N, d)`): Per completion.
        prompts (`np.ndarray` of shape `(N,)`): Prompts as numbers from 0 on.
    """
    sums = np.zeros((prompts.max() + 1, values.shape[1]))
    np.add.at(sums, prompts, values)
    return values - (sums / np.maximum(np.bincount(prompts), 1)[:, None])[prompts]


def concordant_pairs(scores: np.ndarray, right: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per prompt, pairs of a correct and an incorrect completion in order (a tie is half a pair), and all pairs.

    Args:
        scores (`np.ndarray` of shape `(N,)`): Higher: correct, says the probe.
        right (`np.ndarray` of shape `(N,)`, bool): Verdicts.
        prompts (`np.ndarray` of shape `(N,)`): Prompts as numbers from 0 on.
    """
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
    """Ratio of two sums over prompts, and its standard error (linearized, see above)."""
    count, total = len(numerators), denominators.sum()
    ratio = numerators.sum() / total
    residuals = numerators - ratio * denominators
    return Estimate(float(ratio), float(np.sqrt(2 * count / (count - 1) * (residuals**2).sum()) / total))


# States of a policy --------------------------------------------------------------------------------------------------


class StateCollector:
    """Draws a state from each completion of the batches that it is shown.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy.
    """

    def __init__(self, trainer: DrGRPOTrainer):
        if trainer.model.get_output_embeddings() is None:
            got = f"{type(trainer.model).__name__} without an output embedding"
            raise InputError("--probe", got, "a causal language model", "Leave the probe out.")
        self.trainer = trainer
        self.rng = np.random.default_rng(0)  # the sampler's generator is not touched
        self.found: list[tuple[Any, ...]] = []  # the fields of `StopStates`, by row
        self.prompts: dict[tuple[int, ...], int] = {}

    def add(self, tokens: TokenBatch, mask: torch.Tensor, right: np.ndarray) -> None:
        """Take a state of each row.

        Args:
            tokens ([`TokenBatch`]): The rows.
            mask (`torch.Tensor` of shape `(B, T)`): 1 on tokens that the policy wrote; rows without one are left out.
            right (`np.ndarray` of shape `(B,)`, bool): Verdicts.
        """
        size = self.trainer.args.per_device_train_batch_size
        for first in range(0, len(mask), size):
            rows = slice(first, first + size)
            part = TokenBatch(tokens.input_ids[rows], tokens.attention_mask[rows], tokens.completion_width)
            states, log_stop = stopping(self.trainer, part)
            own = mask[rows].bool().cpu()
            for row in own.any(dim=1).nonzero().flatten().tolist():
                (positions,) = own[row].nonzero(as_tuple=True)
                hazard = log_stop[row, positions].double().exp()
                drawn = _draw(log_stop[row, positions].double().numpy(), self.rng)
                state = states[row, positions[drawn]].float().cpu().numpy()
                open_stops = float((hazard * (1 - hazard)).sum())
                self.found.append((state, drawn, right[first + row], self._prompt(part, row), open_stops))

    def probe(self) -> ProbeScores:
        """The probe on everything that was collected, see [`probe_correctness`]."""
        return probe_correctness(StopStates(*map(np.array, zip(*self.found, strict=True))))

    def _prompt(self, tokens: TokenBatch, row: int) -> int:
        """A number for the row's prompt, the same whenever it comes."""
        width = tokens.input_ids.size(1) - tokens.completion_width
        ids = tokens.input_ids[row, :width][tokens.attention_mask[row, :width].bool()]
        return self.prompts.setdefault(tuple(ids.tolist()), len(self.prompts))


@torch.no_grad()
def stopping(trainer: DrGRPOTrainer, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """States that the completion's tokens were drawn from, and the log-probability of a stop token in each.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy; its temperature counts.
        tokens ([`TokenBatch`]): Rows, in one forward.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]` of shapes `(B, T, d)` and `(B, T)`, the second on the CPU.
    """
    caught: list[torch.Tensor] = []

    def catch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        caught.append(inputs[0].detach())

    hook = trainer.model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        with trainer.accelerator.autocast():
            output = trainer.model(
                input_ids=tokens.input_ids,
                attention_mask=tokens.attention_mask,
                position_ids=(tokens.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
                logits_to_keep=tokens.completion_width + 1,
                use_cache=False,
            )
    finally:
        hook.remove()
    predicting = slice(-tokens.completion_width - 1, -1)
    stops = sorted(trainer.stop_token_ids)
    log_stop = []
    for logits in output.logits[:, predicting]:  # row by row: a vocabulary is large
        scaled = logits.float() / trainer.args.temperature
        log_stop.append((scaled[:, stops].logsumexp(dim=1) - scaled.logsumexp(dim=1)).cpu())
    return caught[0][:, predicting], torch.stack(log_stop)


def _draw(log_weights: np.ndarray, rng: np.random.Generator) -> int:
    weights = np.exp(log_weights - log_weights.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def probe_table(scores: ProbeScores) -> str:
    """AUC of the probes as a Markdown table, with intervals (95%), and a conclusion."""
    lines = [
        f"Linear probe for correctness where an answer may stop, pairs of answers to one of {scores.prompts} prompts, "
        "AUC ± 95%:\n",
        "| the probe sees | AUC |",
        "|---|---|",
        f"| the last hidden state | {interval(scores.states, '')} |",
        f"| the position alone | {interval(scores.position, '')} |",
        f"| difference | {interval(scores.difference)} |",
    ]
    return "\n".join([*lines, "", probe_sentence(scores)])


def probe_sentence(scores: ProbeScores) -> str:
    """Sentence on the length bias, from the numbers."""
    tells = "the state tells correct from incorrect answers to the same prompt"
    if scores.states.value <= 0.5 + 1.96 * scores.states.standard_error:
        same = "the state does not tell correct from incorrect answers to the same prompt"
        found = f"{same}: the pushes of a mean per row cancel there."
    elif scores.difference.value > 1.96 * scores.difference.standard_error:
        found = f"{tells}, and better than its position does: a mean per row can move their lengths apart."
    else:
        found = f"{tells} no better than its position does: it may know no more than that one kind is longer."
    return (
        f"Where an answer may stop, {found} How far depends on the distance of the states, whose square is "
        f"{scores.apart:.3f} of a state's squared length, and on what is left to decide there: the sum of h (1 - h) "
        f"over an answer's tokens, h the probability to stop, is {scores.open_stops:.2f} (near 1: a coin at every "
        "token; 0: when to stop is decided elsewhere)."
    )
