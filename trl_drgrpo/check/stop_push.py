"""Push of an update on the decision to stop: the length bias, measured before a model has moved."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Push:
    """Mean over groups, its standard error, and their number. In decisions per unit of weight."""

    value: float
    standard_error: float
    groups: int


def decision_scores(
    lengths: np.ndarray,
    stopped: np.ndarray,
    groups: np.ndarray,
    batches: np.ndarray,
) -> np.ndarray:
    """Return `k_i - c T_i` of each row `(B,)`, see [`stop_push`]; NaN in a batch of one group.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): T, tokens of each row.
        stopped (`np.ndarray` of shape `(B,)`, bool): Rows that ended by themselves; the others were cut off.
        groups (`np.ndarray` of shape `(B,)`, int), batches (`np.ndarray` of shape `(B,)`, int):
            Group of each row, different between batches, and its batch.
    """
    # k: a token of a row is a decision to go on, but for the last one of a row that stopped.
    went_on = lengths - stopped
    shares = np.full(len(lengths), math.nan)  # c of each row
    for batch in np.unique(batches):
        inside = batches == batch
        for group in np.unique(groups[inside]):
            other_rows = inside & (groups != group)
            decisions = lengths[other_rows].sum()
            if decisions:
                shares[groups == group] = went_on[other_rows].sum() / decisions
    return went_on - shares * lengths


def stop_push(
    weights: np.ndarray,
    scores: np.ndarray,
    chosen: np.ndarray,
    groups: np.ndarray,
) -> Push:
    """Return the push of an update on the decision to stop, of some rows of each group, per weight of the whole group.

    At each token a policy goes on or stops. Were that one coin with probability c of going on, the gradient of its
    logit over a row of T decisions, k of them to go on, would be `k - c T`, and the push of an update

        sum_i w_i (k_i - c T_i),    w_i: weight of each token of row i, its advantage included.

    Above 0 it makes answers longer. Over correct and incorrect answers apart it is the length bias at its source:
    under a mean per row (`w_i = A_i / T_i`) incorrect answers are pushed to go on and correct ones to stop, about as
    hard, so that the two cancel in whatever a policy shares between them. How much is left depends on how well it
    tells them apart. c is that of the *other* groups of a batch: with the own group's, a row's length would be
    compared with itself.

    Args:
        weights (`np.ndarray` of shape `(B,)`): Of each token of a row, the advantage included.
        scores (`np.ndarray` of shape `(B,)`): From [`decision_scores`].
        chosen (`np.ndarray` of shape `(B,)`, bool): The rows whose push is asked for: the correct ones, say.
        groups (`np.ndarray` of shape `(B,)`, int): Group of each row.

    Returns:
        [`Push`]: Over the live groups; NaN where there is none.
    """
    weighted_scores = weights * scores
    pushes = []
    for group in np.unique(groups):
        rows = groups == group
        weight = np.abs(weights[rows]).sum()
        has_scores = not np.isnan(scores[rows]).any()
        # A group of equal rewards has no weight: it pushes nothing and is not counted.
        if weight > 0 and has_scores:
            pushes.append(weighted_scores[rows & chosen].sum() / weight)
    count = len(pushes)
    if count == 0:
        return Push(math.nan, math.nan, 0)
    if count == 1:
        return Push(pushes[0], math.nan, 1)
    std = float(np.std(pushes, ddof=1))
    return Push(float(np.mean(pushes)), std / math.sqrt(count), count)
