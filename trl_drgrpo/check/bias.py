r"""Effect of one update on the length of correct and incorrect answers: `trl-drgrpo bias`.

**Objectives.** On policy (ratio 1, no KL) every objective of this family has a gradient of one form,

    sum_i c_i * sum_{t < |o_i|} grad log pi(o_it),        c_i = A_i / d_i,

so two choices say it all: the advantage `A_i` (divided by the group's std or not) and the divisor `d_i` (`B * |o_i|`
for a mean per row, `sum_j |o_j|` for a mean over the batch's tokens, `B * L` for a constant). Dr. GRPO is `r_i - mean`
over `B * L`; the others differ from it in one choice or in both, so the two biases can be told apart. Rows `g * G` to
`(g + 1) * G - 1` are the group of prompt g.

**Changes.** A step of unit length along the update direction `u` changes a quantity `f(theta)` by `u . grad f`, to
first order. Both factors are sums over rollouts of the policy as it is, `sum_i w_i grad log pi(o_i)`:

- the update direction of an objective, with its token weights, divided by its own length, as gradient clipping or a
  normalizing optimizer does;
- the gradient of `f`, by the score function. For the mean length of incorrect answers, a ratio of two expectations:
  `grad E[|o| | incorrect] = E[1_incorrect (|o| - E[|o| | incorrect]) grad log pi(o)] / P(incorrect)`.

The two factors come from different batches: in one and the same batch their noise is correlated, and the product
would be biased. Standard errors are a jackknife over batches. No run is needed, so the measurement also shows a drift
that a run of a few hundred steps hides in its diffusion.

**On a model.** Completions come from the trainer's own generation and rewards, so a measurement is about the very run
that would start from this configuration. Per batch there is one forward of its rows and one backward per objective and
quantity. Only trainable parameters count, the adapter of a LoRA run for example.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from trl_drgrpo.check.stop_push import Push, decision_scores, stop_push
from trl_drgrpo.common import markdown
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.rules import refuse_distorted_sampling
from trl_drgrpo.features.diagnostics.statistics import STD_FLOOR
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import CreditedBatch, TokenBatch, token_batch
from trl_drgrpo.upstream.batches import Rollouts as TrainedRows
from trl_drgrpo.upstream.private_state import swapped


@dataclass(frozen=True)
class Objective:
    """One member of the family.

    Args:
        label (`str`): For tables and legends: the settings of TRL, `loss_type` and whether `scale_rewards` is on.
        divides_by_std (`bool`): Whether advantages are divided by the group's standard deviation.
        divisor (`str`): Divisor of a token's loss: `"row"` (its row's length, times B), `"batch"` (the tokens
            of the batch) or `"constant"` (`B * L`).
    """

    label: str
    divides_by_std: bool
    divisor: str

    def advantages(self, rewards: np.ndarray, num_generations: int) -> np.ndarray:
        """Advantages of rows, `(B,)`, 0 in groups of equal rewards.

        Args:
            rewards (`np.ndarray` of shape `(B,)`): Rewards, none missing.
            num_generations (`int`): G, at least 2.
        """
        if num_generations < 2 or len(rewards) % num_generations:
            got = f"{num_generations} for {len(rewards)} rows"
            raise InputError("num_generations", got, "at least 2, and a divisor of the rows", "Pass whole groups.")
        groups = np.asarray(rewards, dtype=np.float64).reshape(-1, num_generations)  # (P, G)
        advantages = groups - groups.mean(axis=1, keepdims=True)
        # Equal rewards leave a rounding residue, which a division by their std, nearly 0, would blow up.
        advantages[groups.max(axis=1) == groups.min(axis=1)] = 0.0
        if self.divides_by_std:
            std = groups.std(axis=1, ddof=1, keepdims=True)  # of a sample, as TRL's
            advantages = advantages / (std + STD_FLOOR)
        return advantages.reshape(-1)

    def token_weights(
        self,
        rewards: np.ndarray,
        lengths: np.ndarray,
        num_generations: int,
        loss_normalizer: float,
    ) -> np.ndarray:
        """Return `c_i`, the weight of every token of row i in the update direction, `(B,)`.

        Args:
            rewards (`np.ndarray` of shape `(B,)`): Rewards.
            lengths (`np.ndarray` of shape `(B,)`): Completion lengths in tokens, at least 1.
            num_generations (`int`): G.
            loss_normalizer (`float`): L, in tokens; read by a constant divisor only.
        """
        advantages = self.advantages(rewards, num_generations)
        rows = len(advantages)
        divisors = {
            "row": rows * lengths,
            "batch": lengths.sum(),
            "constant": rows * loss_normalizer,
        }
        # A length or L divides every token of its row, so c_i is the weight of each of them.
        return advantages / divisors[self.divisor]


OBJECTIVES = {
    "grpo": Objective("grpo", divides_by_std=True, divisor="row"),
    "grpo_without_std": Objective("grpo, no std", divides_by_std=False, divisor="row"),
    "dapo": Objective("dapo (TRL's default)", divides_by_std=True, divisor="batch"),
    "dr_grpo_with_std": Objective("dr_grpo, std on", divides_by_std=True, divisor="constant"),
    "dr_grpo": Objective("dr_grpo, no std", divides_by_std=False, divisor="constant"),
}


def gradient_weight(num_generations: int, divides_by_std: bool) -> list[float]:
    """Return `sum_i |A_i|` of a group with k correct answers, for k = 0 to G: the pull of the update on such a prompt.

    Args:
        num_generations (`int`): G.
        divides_by_std (`bool`): With the std of GRPO, or without it.

    Returns:
        `list[float]` of length `G + 1`. Without std `2 k (G - k) / G`, largest at half; with it the square root of
        that shape: prompts that are nearly always or nearly never solved weigh more than their share.

    Example:

    ```python
    >>> gradient_weight(4, divides_by_std=False)
    [0.0, 1.5, 2.0, 1.5, 0.0]

    ```
    """
    objective = Objective("", divides_by_std, "constant")
    rewards = np.tri(num_generations + 1, num_generations, k=-1)  # row k: a group with k correct answers
    advantages = objective.advantages(rewards.reshape(-1), num_generations)
    magnitudes = np.abs(advantages).reshape(rewards.shape)
    return magnitudes.sum(axis=1).tolist()


# The change of a quantity by one update ------------------------------------------------------------------------------


QUANTITIES = ("length_right", "length_wrong", "length", "pass_rate")
GAP = "length_gap"  # mean length of incorrect answers minus that of correct ones, from the two
REFERENCE = "dr_grpo"  # the others are compared with it
ScoreSums = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rollouts:
    """One batch of rollouts, reduced to the inputs of the weights.

    Args:
        rewards (`np.ndarray` of shape `(B,)`): Combined rewards, none missing.
        right (`np.ndarray` of shape `(B,)`, bool): Whether each completion is correct.
        lengths (`np.ndarray` of shape `(B,)`): Tokens, at least 1.
        num_generations (`int`): G.
        loss_normalizer (`float`): L, in tokens.
        stopped (`np.ndarray` of shape `(B,)`, bool): Completions that ended by themselves.
    """

    rewards: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    num_generations: int
    loss_normalizer: float
    stopped: np.ndarray

    def direction_weights(self) -> np.ndarray:
        """Return per objective the weight of each row's `grad log pi(o_i)`, `(O, B)` in the order of `OBJECTIVES`."""
        inputs = (self.rewards, self.lengths, self.num_generations, self.loss_normalizer)
        weights = [objective.token_weights(*inputs) for objective in OBJECTIVES.values()]
        return np.stack(weights)

    def quantity_weights(self) -> np.ndarray:
        """Return the same for the gradients of `QUANTITIES`, `(4, B)`.

        The row of a length is NaN where the batch holds no completion of that kind.
        """
        weights = []
        for counted in (self.right, ~self.right):
            row_weights = np.full(len(counted), np.nan)
            if counted.any():
                # Gradient of a conditional mean, as in the module's docstring: each length minus their mean.
                # The count stands for B * P(incorrect), since sums over rows are not divided by B otherwise.
                deviations = self.lengths - self.lengths[counted].mean()
                row_weights = np.where(counted, deviations, 0.0) / counted.sum()
            weights.append(row_weights)
        # For plain means the group's other rows are the baseline, which leaves the expectation as it is and lowers the
        # noise. A value minus the mean of the others is G / (G - 1) times the value minus the mean of all.
        scale = self.num_generations / (self.num_generations - 1) / len(self.lengths)
        for values in (self.lengths, self.right):
            groups = values.astype(float).reshape(-1, self.num_generations)
            deviations = groups - groups.mean(axis=1, keepdims=True)
            weights.append(scale * deviations.reshape(-1))
        return np.stack(weights)


@dataclass(frozen=True)
class Estimate:
    """An estimate and its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Changes:
    """First-order changes per update of unit length, in tokens (lengths) or as a share from 0 to 1 (pass rate).

    Args:
        batches (`int`): Batches that the estimates are from.
        changes (`dict[str, dict[str, Estimate]]`): Per objective and quantity.
        differences_from_dr_grpo (`dict[str, dict[str, Estimate]]`): The same minus that of Dr. GRPO, from the same
            batches.
        steepest_gap (`float`): The largest change of the gap that an update of unit length can make: the length of its
            gradient. NaN where that is not above its noise.
    """

    batches: int
    changes: dict[str, dict[str, Estimate]]
    differences_from_dr_grpo: dict[str, dict[str, Estimate]]
    steepest_gap: float


def changes_per_step(directions: np.ndarray, gradients: np.ndarray) -> Changes:
    """Changes of the quantities along the objectives' update directions.

    Args:
        directions (`np.ndarray` of shape `(K, O, n)`): Per batch (at least 3) and objective (order of
            `OBJECTIVES`), the weighted sum of `grad log pi`, over n parameters.
        gradients (`np.ndarray` of shape `(K, Q, n)`): The same for `QUANTITIES`; NaN where a batch had none.

    Returns:
        [`Changes`]: A quantity that some batch lacked is NaN.
    """
    norms = np.linalg.norm(directions, axis=2, keepdims=True)
    # A batch without signal has no direction: it counts as a step of length 0.
    zeros = np.zeros_like(directions)
    units = np.divide(directions, norms, out=zeros, where=norms > 0)
    # Entry (a, b) pairs the directions of batch a with the gradients of batch b.
    products = np.einsum("aon,bqn->aboq", units, gradients)  # (K, K, O, Q)
    right = QUANTITIES.index("length_right")
    wrong = QUANTITIES.index("length_wrong")
    gap_products = products[..., [wrong]] - products[..., [right]]
    products = np.concatenate([products, gap_products], axis=3)
    reference = list(OBJECTIVES).index(REFERENCE)
    # The squared length of the gap's expected gradient. The product of a batch's vector with itself also holds the
    # square of its noise, so only products of different batches count.
    gaps = gradients[:, wrong] - gradients[:, right]  # (K, n)
    batches = len(gaps)
    gram = gaps @ gaps.T
    off_diagonal = gram.sum() - np.trace(gram)
    squared = off_diagonal / (batches * (batches - 1))
    steepest_gap = math.nan
    if squared > 0:
        steepest_gap = float(np.sqrt(squared))
    # Differences are taken before the jackknife: the noise that objectives share in one batch cancels.
    differences = products - products[:, :, [reference]]
    return Changes(batches, _estimates(products), _estimates(differences), steepest_gap)


def _estimates(products: np.ndarray) -> dict[str, dict[str, Estimate]]:
    """Mean over pairs of different batches, and its jackknife standard error; `products` is `(K, K, O, Q)`."""
    batches = len(products)
    # Within one batch the noise of both factors is correlated, so the diagonal does not count.
    off_diagonal = products * (1 - np.eye(batches))[:, :, None, None]
    total = off_diagonal.sum(axis=(0, 1))
    means = total / (batches * (batches - 1))
    # Leaving a batch out takes away its row and its column.
    without = total - off_diagonal.sum(axis=0) - off_diagonal.sum(axis=1)  # (K, O, Q)
    left_out = without / ((batches - 1) * (batches - 2))
    deviations = left_out - left_out.mean(axis=0)
    squares = (deviations**2).sum(axis=0)
    errors = np.sqrt((batches - 1) / batches * squares)
    estimates = {}
    for o, objective in enumerate(OBJECTIVES):
        estimates[objective] = {}
        for q, quantity in enumerate((*QUANTITIES, GAP)):
            mean = means[o, q].item()
            error = errors[o, q].item()
            estimates[objective][quantity] = Estimate(mean, error)
    return estimates


def measure(batches: Iterable[tuple[Rollouts, ScoreSums]]) -> Changes:
    """Measure the changes from batches.

    Args:
        batches (`Iterable[tuple[Rollouts, Callable]]`): K independent batches of one policy, each with a function
            `f(weights (W, B)) -> (W, n)` that gives the sums `sum_i weights[w, i] * grad log pi(o_i)`, NaN where
            the weights are.

    Returns:
        [`Changes`].
    """
    directions = []
    gradients = []
    for rollouts, score_sums in batches:
        # One call for both kinds of weights: on a model they share the forwards.
        weights = np.concatenate([rollouts.direction_weights(), rollouts.quantity_weights()])
        sums = score_sums(weights)
        directions.append(sums[: len(OBJECTIVES)])
        gradients.append(sums[len(OBJECTIVES) :])
    return changes_per_step(np.stack(directions), np.stack(gradients))


# On a model ----------------------------------------------------------------------------------------------------------


MEMORY_LIMIT = 16 * 2**30  # bytes for the gradients of all batches, on the CPU


OnBatch = Callable[[Rollouts, TokenBatch, torch.Tensor], None]  # rollouts, rows, mask of own tokens


def measure_model(
    trainer: DrGRPOTrainer,
    batches: int,
    on_batch: OnBatch = lambda *batch: None,
) -> Changes:
    """Effect of one update of each objective on the lengths of correct and incorrect answers and on the pass rate.

    Args:
        trainer ([`DrGRPOTrainer`]): Not trained; in one process. Its configuration says how many rows a batch has
            (`per_device_train_batch_size * steps_per_generation`), L, and what is correct (`correct_reward`,
            `correct_threshold`).
        batches (`int`): K, generation batches to sample, at least 3. Standard errors fall with `1 / sqrt(K)`.
        on_batch (`Callable`, *optional*): `f(rollouts, tokens, mask)`, called with each batch.

    Returns:
        [`Changes`]: Per update of unit length (Euclidean, over the trainable parameters).

    Raises:
        [`InputError`]: Several processes, a sampler that is not the policy
            (`top_p`, `top_k`, `min_p`), too many trainable parameters, missing rewards, or a reward without a known
            value from which a completion is correct.
    """
    if trainer.accelerator.num_processes > 1:
        got = f"{trainer.accelerator.num_processes} processes"
        raise InputError("launch", got, "one process", "Run the measurement without accelerate or torchrun.")
    remedy = "Leave it at its default: the score function is that of the whole distribution."
    refuse_distorted_sampling(trainer.args, remedy)
    trainable = sum(parameter.numel() for parameter in _trained_parameters(trainer))
    # One vector in float32 for each objective and quantity of each batch: all batches are compared in the end.
    vectors = batches * (len(OBJECTIVES) + len(QUANTITIES))
    needed = trainable * vectors * 4
    if needed > MEMORY_LIMIT:
        got = f"{trainable:,} of them, {needed / 2**30:.0f} GiB of gradients for {batches} batches"
        expected = f"at most {MEMORY_LIMIT / 2**30:.0f} GiB"
        raise InputError("trainable parameters", got, expected, "Measure with LoRA, or with fewer batches.")

    def sampled() -> Iterator[tuple[Rollouts, ScoreSums]]:
        trainer.model.train()
        for batch, inputs in islice(sampled_batches(trainer), batches):
            tokens = token_batch(inputs)
            rollouts = _reduced(trainer, batch)
            on_batch(rollouts, tokens, batch.trained_mask)
            yield rollouts, partial(score_sums, trainer, tokens, batch.trained_mask)

    return measure(sampled())


def score_sums(
    trainer: DrGRPOTrainer,
    tokens: TokenBatch,
    mask: torch.Tensor,
    weights: np.ndarray,
) -> np.ndarray:
    """Return `sum_i w_i grad log pi(o_i)` over a batch, for several weights at once.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy.
        tokens ([`TokenBatch`]): The rows; `per_device_train_batch_size` of them run at a time.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on the tokens that count.
        weights (`np.ndarray` of shape `(W, B)`): NaN in a row of weights gives NaN.

    Returns:
        `np.ndarray` of shape `(W, n)`, float32: Over the n trainable parameters.
    """
    parameters = _trained_parameters(trainer)
    width = sum(parameter.numel() for parameter in parameters)
    sums = np.zeros((len(weights), width), dtype=np.float32)
    is_finite = np.isfinite(weights).all(axis=1)
    sums[~is_finite] = np.nan
    finite_weights = np.flatnonzero(is_finite).tolist()
    size = trainer.args.per_device_train_batch_size
    for first in range(0, len(mask), size):
        rows = slice(first, first + size)
        part = TokenBatch(
            tokens.input_ids[rows],
            tokens.attention_mask[rows],
            tokens.completion_width,
        )
        log_probs = trainer.score_tokens(trainer.model, part)[0]
        row_log_probs = (log_probs * mask[rows]).sum(dim=1)
        for w in finite_weights:
            factors = torch.as_tensor(weights[w, rows]).to(row_log_probs)
            gradients = torch.autograd.grad(
                factors @ row_log_probs,
                parameters,
                # One forward serves all weights; the last one frees its graph.
                retain_graph=w != finite_weights[-1],
                materialize_grads=True,
            )
            # The sums of all weights may be too large for a GPU, so they are kept on the CPU.
            parts = [gradient.float().flatten().cpu() for gradient in gradients]
            sums[w] += torch.cat(parts).numpy()
    return sums


def _trained_parameters(trainer: DrGRPOTrainer) -> list[torch.nn.Parameter]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def _reduced(trainer: DrGRPOTrainer, batch: CreditedBatch) -> Rollouts:
    """Reduce a batch to the inputs of the weights; an error where a reward or its threshold is missing."""
    rule = trainer.diagnostics.correctness_rule
    verdicts = None
    if rule:
        rewards_of_rule = batch.scored.rewards_per_func[:, rule.index]
        verdicts = rule.judge(rewards_of_rule.tolist())
    if verdicts is None:
        expected = "a reward of 0 or 1, or the value from which on a completion is correct"
        raise InputError("correct_threshold", "none", expected, "Set it, and correct_reward for another reward.")
    rewards = batch.rewards.cpu().double().numpy()
    missing = np.isnan(rewards).sum()
    if missing:
        got = f"{missing} of {len(rewards)} completions without a reward"
        raise InputError("reward_funcs", got, "a reward for each", "Measure with a reward that scores everything.")
    # A row whose tokens are masked has none, and 0 is no divisor.
    lengths = batch.trained_mask.sum(dim=1).clamp(min=1)
    stopped = [ids[-1] in trainer.stop_token_ids for ids in batch.scored.completion_ids]
    return Rollouts(
        rewards,
        right=np.array([verdict is True for verdict in verdicts]),
        lengths=lengths.cpu().numpy(),
        num_generations=batch.num_generations,
        loss_normalizer=trainer.loss_normalizer,
        stopped=np.array(stopped),
    )


def sampled_batches(trainer: DrGRPOTrainer) -> Iterator[tuple[CreditedBatch, TrainedRows]]:
    """Yield generation batches as the training loop would see them, with the tensors that TRL trains on; without end.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer; its model does not change.
    """
    credited = []
    while True:
        # A dataloader ends with its dataset, and the next one goes on with other prompts.
        for inputs in trainer.get_train_dataloader():
            # Swapped for the call alone: whoever takes a batch may run the trainer before the next one.
            with swapped(trainer, on_credit=credited.append):
                rollouts = trainer.sample_rollouts(inputs)
            yield credited.pop(), rollouts


# To read and to keep -------------------------------------------------------------------------------------------------


_HEADINGS = {
    "length_right": "correct answers, tokens",
    "length_wrong": "incorrect answers, tokens",
    "length": "all answers, tokens",
    "pass_rate": "pass rate, points",
    GAP: "incorrect minus correct, tokens",
}
_SCALES = {"pass_rate": 100.0}  # shares become percentage points


def changes_table(changes: Changes) -> str:
    """Return a Markdown table of changes, one of their differences from Dr. GRPO, each with its standard error.

    Args:
        changes ([`Changes`]): Of the measurement.
    """
    differences = dict(changes.differences_from_dr_grpo)
    del differences[REFERENCE]  # a row of zeros
    tables = {
        f"Change per update of unit length, {changes.batches} batches, ± standard error:\n": changes.changes,
        f"\nDifference from {OBJECTIVES[REFERENCE].label}, from the same batches:\n": differences,
    }
    head = markdown.head(["objective", *_HEADINGS.values()])
    lines = []
    for title, estimates in tables.items():
        lines += [title, head]
        for name, estimate_of_quantity in estimates.items():
            cells = [OBJECTIVES[name].label]
            for quantity in _HEADINGS:
                scale = _SCALES.get(quantity, 1.0)
                estimate = estimate_of_quantity[quantity]
                text = "unknown"
                if not math.isnan(estimate.value):
                    text = f"{scale * estimate.value:+.3g} ± {scale * estimate.standard_error:.2g}"
                cells.append(text)
            lines.append(markdown.row(cells, first=str))
    return "\n".join(lines)


def pushes(
    batches: Sequence[Rollouts],
    decisions: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> dict[str, dict[str, Push]]:
    """Return the push of an update on the decision to stop, see `features/diagnostics/statistics.py`.

    Args:
        batches (`Sequence[Rollouts]`): Batches that say which completions stopped.
        decisions (`Callable`, *optional*): `f(lengths, stopped)` -> decisions to go on or to stop in each row; by
            default each token is one.

    Returns:
        `dict`: Per key of `OBJECTIVES` the push of the `correct` and of the `incorrect` completions.
    """
    lengths = np.concatenate([rollouts.lengths for rollouts in batches])
    right = np.concatenate([rollouts.right for rollouts in batches])
    stopped = np.concatenate([rollouts.stopped for rollouts in batches])
    weights_of_batches = [rollouts.direction_weights() for rollouts in batches]
    weights = np.concatenate(weights_of_batches, axis=1)  # (O, rows)
    # A row is compared with the other groups of its own batch, so it carries the numbers of both.
    rows_of_batches = [len(rollouts.lengths) for rollouts in batches]
    batch = np.repeat(np.arange(len(batches)), rows_of_batches)
    group = np.arange(len(lengths)) // batches[0].num_generations
    if decisions is not None:
        lengths = decisions(lengths, stopped)
    scores = decision_scores(lengths, stopped, group, batch)
    pushes_of_objectives = {}
    for name, row_weights in zip(OBJECTIVES, weights, strict=True):
        pushes_of_objectives[name] = {
            "correct": stop_push(row_weights, scores, right, group),
            "incorrect": stop_push(row_weights, scores, ~right, group),
        }
    return pushes_of_objectives


def push_table(pushes_of_objectives: dict[str, dict[str, Push]]) -> str:
    """Return the same as a Markdown table, with its intervals (95%)."""
    groups = 0
    rows = []
    for name, push_of_verdict in pushes_of_objectives.items():
        cells = [OBJECTIVES[name].label]
        for verdict in ("correct", "incorrect"):
            push = push_of_verdict[verdict]
            groups = max(groups, push.groups)
            text = "unknown"
            if not math.isnan(push.standard_error):
                text = f"{push.value:+.3f} ± {1.96 * push.standard_error:.3f}"
            cells.append(text)
        rows.append(markdown.row(cells, first=str))
    title = f"Push to go on instead of stopping, in decisions per unit of weight, {groups} live groups, ± 95%:\n"
    head = markdown.head(["objective", "correct answers", "incorrect answers"])
    return "\n".join([title, head, *rows])


def plain(value: object) -> Any:
    """Return estimates, however nested, as plain types for JSON; unknown values (NaN) are `None`."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if value != value:  # NaN, which JSON does not have
        return None
    return value
