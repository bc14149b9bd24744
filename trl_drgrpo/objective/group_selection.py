"""Selection and weights of the groups of a batch.

Prompts are drawn in a fixed order until `K` groups are selected; `M` is the index of the K-th. A group is selected if
it was kept before generation (curriculum, with probability `q`) and carries a signal (dynamic sampling). Then

    (1/K) * sum over the selected groups of  g / q * (K - 1) / (M - 1)

is an unbiased estimate of the mean of `g` over all prompts, for K >= 2: given the selected groups and M, the first
draw is one of the first K - 1 of them with probability (K - 1) / (M - 1). If a cap on the draws is reached first, the
sum is divided by the cap. DAPO (arXiv 2503.14476) takes the mean over the live groups, which is 1/P(live) as large: a
factor on the learning rate that changes as the model learns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trl_drgrpo.common.errors import InputError


@dataclass(frozen=True)
class Selection:
    """The groups that are trained on.

    Args:
        draws (`list[int]`): Their indices among the draws, ascending; at most K.
        weights (`list[float]`): Factor of each group's advantages, in a batch of K groups.
        drawn (`int`): M, the draws that count; the cap, if it was reached first.
        capped (`bool`): Whether the cap was reached before K groups were selected.
    """

    draws: list[int]
    weights: list[float]
    drawn: int
    capped: bool


def select_groups(
    selected: Sequence[bool],
    wanted: int,
    cap: int,
    probabilities: Sequence[float] | None = None,
    *,
    mean_over_live: bool = False,
) -> Selection:
    """The first K selected draws, with the weights that make their sum unbiased.

    Args:
        selected (`Sequence[bool]`): For each draw, in order, whether it was kept and carries a signal.
        wanted (`int`): K, groups of a batch, at least 2.
        cap (`int`): The most draws of a batch, fixed beforehand, at least K.
        probabilities (`Sequence[float]`, *optional*): With which each draw was kept; 1 by default.
        mean_over_live (`bool`, *optional*, defaults to `False`): DAPO's weights: the mean over the live groups.

    Returns:
        [`Selection`]: In a batch of K groups the missing ones count as 0.

    Raises:
        `InputError`: `wanted` below 2, a cap below it, or draws that end before either is reached.

    Example:

    ```python
    >>> select_groups([True, False, False, True, True], wanted=2, cap=8)
    Selection(draws=[0, 3], weights=[0.3333333333333333, 0.3333333333333333], drawn=4, capped=False)
    >>> select_groups([False, True, False, False], wanted=2, cap=4)
    Selection(draws=[1], weights=[0.5], drawn=4, capped=True)

    ```
    """
    if wanted < 2:
        remedy = "The weights need at least two groups: raise the batch size."
        raise InputError("wanted", str(wanted), "at least 2 groups", remedy)
    if cap < wanted:
        raise InputError("cap", str(cap), f"at least the {wanted} groups of a batch", "Raise it.")
    draws = [i for i, is_selected in enumerate(selected[:cap]) if is_selected][:wanted]
    capped = len(draws) < wanted
    if capped and len(selected) < cap:
        got = f"{len(draws)} of {wanted} groups after {len(selected)} draws"
        raise InputError("selected", got, f"draws up to the cap of {cap}", "Go on drawing.")
    drawn = cap if capped else draws[-1] + 1
    if mean_over_live:
        factor = wanted / len(draws) if draws else 0.0
    elif capped:
        factor = wanted / cap
    else:
        factor = (wanted - 1) / (drawn - 1)
    weights = [factor / (probabilities[i] if probabilities else 1.0) for i in draws]
    return Selection(draws, weights, drawn, capped)


def keep_probability(pass_rate: float, floor: float, softness: float = 0.01) -> float:
    """Probability to keep a prompt: proportional to the standard deviation of its reward, 1 at a pass rate of 1/2.

    `q = max(floor, sqrt((p (1 - p) + eps) / (1/4 + eps)))`. An estimate `p` from before the draw is unbiased, as the
    weight is `1 / q`; a good one spares the groups that would not tell anything. After GRESO (arXiv 2506.02177).

    Args:
        pass_rate (`float`): Estimate of the prompt's pass rate, 0 to 1.
        floor (`float`): The least probability, above 0: it bounds the weights.
        softness (`float`, *optional*, defaults to `0.01`): eps.

    Example:

    ```python
    >>> round(keep_probability(0.5, 0.1), 3), round(keep_probability(0.05, 0.1), 3), round(keep_probability(0, 0.3), 3)
    (1.0, 0.47, 0.3)

    ```
    """
    return max(floor, math.sqrt((pass_rate * (1 - pass_rate) + softness) / (0.25 + softness)))
