"""The baselines that were published for step rewards. They are biased: `step_advantages.py` says why.

They are kept to reproduce a published run. Each is subtracted from every step's reward, and the differences are then
added up over the remaining steps.
"""

import math
from collections.abc import Sequence

import torch


def to_go(values: torch.Tensor) -> torch.Tensor:
    """Sums over each step and all later ones `(P, G, K)`."""
    return values.flip(2).cumsum(dim=2).flip(2)


def published_advantages(rewards: torch.Tensor, credit: str, baseline: str) -> torch.Tensor:
    """Advantages under a published baseline `(P, G, K)`.

    Args:
        rewards (`torch.Tensor` of shape `(P, G, K)`, float64): NaN where there is no step, or no number for it.
        credit, baseline (`str`): As in [`step_advantages`].

    Returns:
        `torch.Tensor` of shape `(P, G, K)`: An unscored step adds 0; a group of equal rewards gets exactly 0.
    """
    known = ~rewards.isnan()
    if credit == "min_to_go":
        minima = rewards.nan_to_num(nan=math.inf).flip(2).cummin(dim=2).values.flip(2)
        values = minima.masked_fill(minima.isinf(), math.nan)
        compared = values - _mean(values[..., :1], baseline)
    else:
        compared = rewards - _mean(rewards, baseline)
    compared = compared.nan_to_num(nan=0.0)
    highest = rewards.masked_fill(~known, -math.inf).amax(dim=(1, 2), keepdim=True)
    lowest = rewards.masked_fill(~known, math.inf).amin(dim=(1, 2), keepdim=True)
    compared = compared.masked_fill(highest <= lowest, 0.0)
    return to_go(compared) if credit == "return_to_go" else compared


def _mean(rewards: torch.Tensor, baseline: str) -> torch.Tensor:
    """The mean that is subtracted from each reward: broadcasts to `(P, G, K)`, NaN where there is nothing to take."""
    if baseline == "same_index":
        return rewards.nanmean(dim=1, keepdim=True)
    if baseline == "per_completion":
        return rewards.nanmean(dim=2, keepdim=True).nanmean(dim=1, keepdim=True)
    if baseline == "deepseekmath":
        return rewards.nanmean(dim=(1, 2), keepdim=True)
    sums, counts = rewards.nansum(dim=2, keepdim=True), (~rewards.isnan()).sum(dim=2, keepdim=True)
    return (sums.sum(dim=1, keepdim=True) - sums) / (counts.sum(dim=1, keepdim=True) - counts)  # of the other rows


def pooled_std(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation (n - 1) of all step rewards of each group `(P, 1, 1)`; infinite where it is 0."""
    std = [_std(group[~group.isnan()].tolist()) for group in rewards]
    return torch.tensor([each or math.inf for each in std], dtype=torch.float64).view(-1, 1, 1)


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
