r"""Effect of one update on the length of correct and incorrect answers, estimated without taking it.

A step of unit length along the update direction `u` changes a quantity `f(theta)` by `u . grad f`, to first order.
Both factors are sums over rollouts of the policy as it is, `sum_i w_i grad log pi(o_i)`:

- the update direction of an objective, with its token weights (`objectives.py`), divided by its own length, as
  gradient clipping or a normalizing optimizer does;
- the gradient of `f`, by the score function. For the mean length of incorrect answers, a ratio of two expectations:
  `grad E[|o| | incorrect] = E[1_incorrect (|o| - E[|o| | incorrect]) grad log pi(o)] / P(incorrect)`.

The two factors come from different batches: in one and the same batch their noise is correlated, and the product
would be biased. Standard errors are a jackknife over batches. No run is needed, so the measurement also shows a drift
that a run of a few hundred steps hides in its diffusion.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.objectives import OBJECTIVES

QUANTITIES = ("length_right", "length_wrong", "length", "pass_rate")
GAP = "length_gap"  # mean length of incorrect answers minus that of correct ones, from the two
REPORTED = (*QUANTITIES, GAP)
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
        stopped (`np.ndarray` of shape `(B,)`, bool, *optional*): Completions that ended by themselves.
    """

    rewards: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    num_generations: int
    loss_normalizer: float
    stopped: np.ndarray | None = None

    def direction_weights(self) -> np.ndarray:
        """Per objective, the weight of each row's `grad log pi(o_i)`, `(O, B)` in the order of `OBJECTIVES`."""
        return np.stack(
            [
                objective.token_weights(self.rewards, self.lengths, self.num_generations, self.loss_normalizer)
                for objective in OBJECTIVES.values()
            ]
        )

    def quantity_weights(self) -> np.ndarray:
        """The same for the gradients of `QUANTITIES`, `(4, B)`; NaN in the row of a length that no completion has."""
        rows = len(self.lengths)
        # The group's other members as baseline: the same expectation, less noise.
        scale = self.num_generations / (self.num_generations - 1) / rows
        passed = self.right.astype(float)
        groups = passed.reshape(-1, self.num_generations)
        centered = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
        lengths = self.lengths.astype(float).reshape(-1, self.num_generations)
        centered_lengths = (lengths - lengths.mean(axis=1, keepdims=True)).reshape(-1)
        parts = [self._given(self.right), self._given(~self.right), scale * centered_lengths, scale * centered]
        return np.stack(parts)

    def _given(self, chosen: np.ndarray) -> np.ndarray:
        if not chosen.any():
            return np.full(len(chosen), np.nan)
        return np.where(chosen, self.lengths - self.lengths[chosen].mean(), 0.0) / chosen.sum()


@dataclass(frozen=True)
class Estimate:
    """An estimate and its standard error."""

    value: float
    standard_error: float

    @property
    def z(self) -> float:
        """Distance from 0 in standard errors."""
        return self.value / self.standard_error if self.standard_error > 0 else float("nan")


@dataclass(frozen=True)
class Changes:
    """First-order changes per update of unit length, in tokens (lengths) or as a share from 0 to 1 (pass rate).

    Args:
        changes (`dict[str, dict[str, Estimate]]`): Per objective and quantity.
        differences (`dict[str, dict[str, Estimate]]`): The same minus that of Dr. GRPO, from the same batches.
        batches (`int`): Batches that the estimates are from.
        steepest_gap (`float`): The largest change of the gap that an update of unit length can make: the length of its
            gradient. NaN where that is not above its noise.
    """

    changes: dict[str, dict[str, Estimate]]
    differences: dict[str, dict[str, Estimate]]
    batches: int
    steepest_gap: float


def changes_per_step(directions: np.ndarray, gradients: np.ndarray) -> Changes:
    """Changes of the quantities along the objectives' update directions.

    Args:
        directions (`np.ndarray` of shape `(K, O, n)`): Per batch and objective (order of `OBJECTIVES`), the weighted
            sum of `grad log pi`, over n parameters.
        gradients (`np.ndarray` of shape `(K, Q, n)`): The same for `QUANTITIES`; NaN where a batch had none.

    Returns:
        [`Changes`]: A quantity that some batch lacked is NaN.

    Raises:
        [`InputError`]: Fewer than 3 batches: a standard error needs more.
    """
    batches = len(directions)
    if batches < 3:
        raise InputError(
            "batches", str(batches), "at least 3", "Raise it: the standard error is a jackknife over batches."
        )
    norms = np.linalg.norm(directions, axis=2, keepdims=True)
    units = np.divide(directions, norms, out=np.zeros_like(directions), where=norms > 0)
    products = np.einsum("aon,bqn->aboq", units, gradients)  # (K, K, O, Q)
    right, wrong = QUANTITIES.index("length_right"), QUANTITIES.index("length_wrong")
    gap = products[..., wrong : wrong + 1] - products[..., right : right + 1]
    products = np.concatenate([products, gap], axis=3)
    reference = list(OBJECTIVES).index(REFERENCE)
    return Changes(
        _estimates(products),
        _estimates(products - products[:, :, reference : reference + 1]),
        batches,
        _expected_length(gradients[:, wrong] - gradients[:, right]),
    )


def _expected_length(vectors: np.ndarray) -> float:
    """Length of the mean of independent vectors `(K, n)`: a vector's product with itself, which is noise, left out."""
    gram = vectors @ vectors.T
    squared = (gram.sum() - np.trace(gram)) / (len(gram) * (len(gram) - 1))
    return float(np.sqrt(squared)) if squared > 0 else float("nan")


def _estimates(products: np.ndarray) -> dict[str, dict[str, Estimate]]:
    """Mean over pairs of different batches, and its jackknife standard error; `products` is `(K, K, O, Q)`."""
    batches = len(products)
    off_diagonal = products * (1 - np.eye(batches))[:, :, None, None]
    total = off_diagonal.sum(axis=(0, 1))
    mean = total / (batches * (batches - 1))
    without = total - off_diagonal.sum(axis=0) - off_diagonal.sum(axis=1)  # (K, O, Q): one batch left out
    left_out = without / ((batches - 1) * (batches - 2))
    errors = np.sqrt((batches - 1) / batches * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    return {
        objective: {quantity: Estimate(float(mean[o, q]), float(errors[o, q])) for q, quantity in enumerate(REPORTED)}
        for o, objective in enumerate(OBJECTIVES)
    }


def measure(batches: Iterable[tuple[Rollouts, ScoreSums]]) -> Changes:
    """The whole measurement.

    Args:
        batches (`Iterable[tuple[Rollouts, Callable]]`): K independent batches of one policy, each with a function
            `f(weights (W, B)) -> (W, n)` that gives the sums `sum_i weights[w, i] * grad log pi(o_i)`, NaN where
            the weights are.

    Returns:
        [`Changes`].
    """
    directions, gradients = [], []
    for rollouts, score_sums in batches:
        sums = score_sums(np.concatenate([rollouts.direction_weights(), rollouts.quantity_weights()]))
        directions.append(sums[: len(OBJECTIVES)])
        gradients.append(sums[len(OBJECTIVES) :])
    return changes_per_step(np.stack(directions), np.stack(gradients))
