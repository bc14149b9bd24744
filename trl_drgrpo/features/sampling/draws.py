"""Prompts that a generation batch drew, and what is said of them: metrics, and a warning at the cap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.features.diagnostics.statistics import BUCKETS, bucket_index
from trl_drgrpo.objective.group_selection import Selection


@dataclass
class Draw:
    """A prompt that was drawn.

    Args:
        example (`dict`): Its row of the dataset.
        key (`str`): Its identity by content.
        estimate (`float`): Of its pass rate, before it was drawn; NaN without a curriculum.
        probability (`float`): With which it was kept.
        place (`tuple[int, int]`, *optional*): Round and group in it; `None`: it was not kept.
        live (`bool`): Whether its group carries a signal.
        reward (`float`): Mean reward of its group; NaN = unscorable, or not generated.
    """

    example: dict[str, Any]
    key: str
    estimate: float = math.nan
    probability: float = 1.0
    place: tuple[int, int] | None = None
    live: bool = False
    reward: float = math.nan


def sampling_metrics(
    drawn: Sequence[Draw], selection: Selection, *, rounds: int, tokens: int, dapo: bool = False
) -> dict[str, float]:
    """Metrics of a batch.

    Args:
        drawn (`Sequence[Draw]`): All draws.
        selection ([`Selection`]): Those that are trained on.
        rounds (`int`): Rounds of generation.
        tokens (`int`): Generated tokens.
        dapo (`bool`, *optional*, defaults to `False`): Whether the weights are DAPO's.

    Returns:
        `dict[str, float]`: By name; without those that have nothing to be computed from.
    """
    generated = [draw for draw in drawn if draw.place is not None]
    live = sum(draw.live for draw in generated)
    metrics: dict[str, float] = {
        "sampling/draws": len(drawn),
        "sampling/groups_generated": len(generated),
        "sampling/groups_live": live,
        "sampling/groups_trained": len(selection.draws),
        "sampling/groups_dropped": live - sum(drawn[i].live for i in selection.draws),
        "sampling/rounds": rounds,
        "sampling/capped_frac": float(selection.capped),
    }
    if live:
        metrics["sampling/tokens_per_live_group"] = tokens / live
    if weights := selection.weights:
        metrics["sampling/weight_mean"] = sum(weights) / len(weights)
        metrics["sampling/weight_max"] = max(weights)
        metrics["sampling/effective_groups"] = sum(weights) ** 2 / sum(weight * weight for weight in weights)
    if dapo and (trained := len(selection.draws)) > (0 if selection.capped else 1):
        # what the mean over live groups multiplies the gradient by, beside the unbiased weight
        unbiased = trained / selection.drawn if selection.capped else (trained - 1) / (selection.drawn - 1)
        metrics["sampling/dapo_factor"] = 1 / unbiased
    if estimated := [draw for draw in drawn if not math.isnan(draw.estimate)]:
        metrics["sampling/keep_probability"] = sum(draw.probability for draw in estimated) / len(estimated)
        for index, bucket in enumerate(BUCKETS):
            if kept := [draw.probability for draw in estimated if bucket_index(draw.estimate) == index]:
                metrics[f"sampling/keep_probability/{bucket}"] = sum(kept) / len(kept)
    return metrics


def cap_warning(drawn: Sequence[Draw], wanted: int, rounds: int) -> str:
    """Message for a cap reached before a batch is full.

    Args:
        drawn (`Sequence[Draw]`): All draws.
        wanted (`int`): Groups of a batch.
        rounds (`int`): `max_sampling_rounds`.
    """
    generated = [draw for draw in drawn if draw.place is not None]
    rewards = [draw.reward for draw in generated if not draw.live and not math.isnan(draw.reward)]
    seen = ""
    if rewards:
        highest = sum(reward == max(rewards) for reward in rewards) / len(rewards)
        seen = f" Groups without a signal: rewards from {min(rewards):g} to {max(rewards):g}, "
        seen += f"{highest:.0%} of them at the highest."
    return (
        f"Sampling: {sum(draw.live for draw in generated)} of {wanted} groups carried a signal after the "
        f"{wanted * rounds} prompts that max_sampling_rounds={rounds} allows; the step trains on those.{seen} Use "
        "prompts of another difficulty, or raise num_generations. Shown once; sampling/capped_frac counts."
    )
