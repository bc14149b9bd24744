"""A process reward model as a baseline: it tells the steps of a row apart, and no row is rewarded for its scores.

`A_ik = (R_i - mean_j R_j) - c * (V_ik - mean_j V_jk)`, where `V_ik` is the model's score of what row i has written
*before* step k. The gradient stays unbiased exactly if (1) where a step ends and (2) that score depend on nothing
behind the end of step k-1, and (3) no row is without an outcome because of what it wrote. A bad score costs variance
only, because the tokens of a row from step k on cannot change it. A score that reads later text biases the gradient;
`trl-drgrpo check --credit` shows both. With `c = 1` and the exact value function this is the advantage itself
(VinePPO, arXiv 2410.01679).

Shapes: `B = P * G` rows, `K` the largest number of steps of a row.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from trl_drgrpo.objective.step_advantages import Ragged, padded_groups


def value_differences(step_values: Ragged, num_generations: int) -> torch.Tensor:
    """Compute the value before each step, minus the mean of the group.

    Args:
        step_values (`B` lists of `K_i` floats): Score of each step; after `None` or NaN the earlier score stays.
        num_generations (`int`): `G`; the completions of a prompt are consecutive rows.

    Returns:
        `torch.Tensor` of shape `(P, G, K)`, float64: `V_ik - mean_j V_jk`, with `V_ik` the newest score before step k.
        A row that has ended stays in the mean with its last score. 0 before the first score of a row.

    Raises:
        `InputError`: Infinite scores.

    Example:

    ```python
    >>> value_differences([[0.9, 0.3, 0.2], [0.5]], num_generations=2)[0]
    tensor([[ 0.0000,  0.2000, -0.1000],
            [ 0.0000, -0.2000,  0.1000]], dtype=torch.float64)

    ```
    """
    scores = padded_groups(step_values, num_generations, "step_values")
    # Scores 0.9, NaN, 0.2 have the newest steps 0, 0, 2 and so the values 0.9, 0.9, 0.2; -1: no score so far.
    steps = torch.arange(scores.size(2)).expand_as(scores)
    newest = torch.where(scores.isnan(), -1, steps).cummax(dim=2).values
    values = scores.gather(2, newest.clamp(min=0))
    values = values.masked_fill(newest < 0, math.nan)
    # Shifted by one: the value before step k is the score of step k - 1. It must not read step k itself.
    no_score = torch.full_like(values[..., :1], math.nan)
    values_before = torch.cat([no_score, values[..., :-1]], dim=2)
    differences = values_before - values_before.nanmean(dim=1, keepdim=True)
    return differences.nan_to_num(nan=0.0)


class ValueBaseline:
    """Fits `c` by least squares: the multiple of the value differences that leaves the smallest advantages.

    `c` of a group is fitted on the batches before and on the *other* groups of its batch, never on the group itself.

    Args:
        memory (`float`, *optional*, defaults to `0.9`): Weight that the sums over earlier batches keep per batch.
    """

    def __init__(self, memory: float = 0.9):
        self.memory = memory
        self.squares = 0.0  # of value differences, over earlier batches
        self.products = 0.0  # of value differences and outcome advantages

    def subtract(
        self,
        outcome: torch.Tensor,
        step_values: Ragged,
        step_ends: Sequence[Sequence[int]],
        num_generations: int,
        *,
        update: bool,
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Subtract the fitted baseline from outcome advantages.

        Args:
            outcome (`torch.Tensor` of shape `(B,)`): Outcome advantages; NaN for a row without an outcome, in no
                mean.
            step_values (`B` lists of `K_i` floats): As for [`value_differences`].
            step_ends (`B` lists of `K_i` ints): Inclusive last token of each step: tokens are the weights of the fit.
            num_generations (`int`): `G`.
            update (`bool`): Whether to keep the batch for later ones.

        Returns:
            `tuple`: The advantage of each step, `B` lists of `K_i` floats, 0 in rows without an outcome; and metrics:
            the mean `coefficient`, and the share of the squared advantages that the baseline `removes` (below 0: it
            adds), with tokens as weights.
        """
        counts = [len(row) for row in step_ends]
        if not any(counts):
            return [[] for _ in counts], {}
        outcomes = outcome.double().cpu().view(-1, num_generations, 1)  # (P, G, 1)
        unscorable = outcomes.isnan()
        outcomes = outcomes.nan_to_num(nan=0.0)

        # A row without an outcome is in no mean, neither of outcomes nor of values, and has no weight in the fit.
        scorable_values = list(step_values)
        for row in unscorable.flatten().nonzero().flatten().tolist():
            scorable_values[row] = [None] * len(step_values[row])
        differences = value_differences(scorable_values, num_generations)  # (P, G, K)
        # A step weighs as many tokens as it has, because each of them carries its advantage into the gradient.
        step_lengths = [np.diff(ends, prepend=-1).tolist() for ends in step_ends]
        weights = padded_groups(step_lengths, num_generations).nan_to_num(nan=0.0)
        weights = weights.masked_fill(unscorable, 0.0)

        # Least squares without the group itself: a coefficient that saw a row's outcome would bias its gradient.
        squares = (weights * differences**2).sum(dim=(1, 2))  # (P,)
        products = (weights * outcomes * differences).sum(dim=(1, 2))
        other_squares = self.squares + squares.sum() - squares
        other_products = self.products + products.sum() - products
        # Sums below 1e-12 are the rounding of `sum() - squares`: without a difference to fit on, c is 0.
        has_differences = other_squares > 1e-12
        fitted = other_products / other_squares.clamp(min=1e-12)
        coefficients = torch.where(has_differences, fitted, 0.0)
        advantages = outcomes - coefficients.view(-1, 1, 1) * differences

        if update and advantages.isfinite().all():  # else the batch is refused: its sums must not outlive it
            self.squares = self.memory * self.squares + squares.sum().item()
            self.products = self.memory * self.products + products.sum().item()

        metrics = {"coefficient": coefficients.mean().item()}
        total = (weights * outcomes**2).sum().item()
        if total > 0:
            remaining = (weights * advantages**2).sum().item()
            metrics["removes"] = 1 - remaining / total
        advantages = advantages.masked_fill(unscorable, 0.0)
        rows = advantages.flatten(0, 1).tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)], metrics

    def state_dict(self) -> dict[str, float]:
        """Return the sums over earlier batches, as JSON-ready numbers."""
        return {"squares": self.squares, "products": self.products}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the sums that `state_dict` returned."""
        self.squares = float(state["squares"])
        self.products = float(state["products"])
