"""Rewards become advantages: the first half of Dr. GRPO (arXiv 2503.20783).

Deltas from GRPO as TRL ships it:

- the advantage is the reward minus the group's mean, and nothing divides it by the group's standard deviation;
- whether a group is live is decided on its *rewards*: equal rewards give advantages of exactly 0.0, where
  subtracting a rounded mean would leave residues of 1e-8 that Adam turns into full-sized steps;
- an optional scale is a standard deviation over *all prompts seen so far*, never within a group.

Which groups of a batch are trained on, and their weights: prompts are drawn in a fixed order until `K` groups are
selected; `M` is the index of the K-th. A group is selected if it was kept before generation (curriculum, with
probability `q`) and its group is live (dynamic sampling). Then

    (1/K) * sum over the selected groups of  g / q * (K - 1) / (M - 1)

is an unbiased estimate of the mean of `g` over all prompts, for K >= 2: given the selected groups and M, the first
draw is one of the first K - 1 of them with probability (K - 1) / (M - 1). If a cap on the draws is reached first, the
sum is divided by the cap. DAPO (arXiv 2503.14476) takes the mean over the live groups, which is 1/P(live) as large: a
factor on the learning rate that changes as the model learns.

Pure tensors, no trl and no transformers: the trainer calls these functions, the tests compare them with loops.
Shapes: `P` prompts, `G` completions per prompt (`num_generations`), `B = P * G` rows, `F` reward functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from trl_drgrpo.common.errors import InputError

AdvantageBaseline = Literal["group_mean", "leave_one_out"]
ADVANTAGE_BASELINES: tuple[str, ...] = get_args(AdvantageBaseline)


def combine_rewards(rewards_per_func: torch.Tensor, reward_weights: torch.Tensor) -> torch.Tensor:
    """Add up the weighted reward functions: one outcome reward per row.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`, floating): Rewards; NaN where a function did not apply.
        reward_weights (`torch.Tensor` of shape `(F,)`): Weight of each function.

    Returns:
        `torch.Tensor` of shape `(B,)`: `sum_f w_f * r_if` over the functions that applied; NaN (unscorable) where none
        did.

    Example:

    ```python
    >>> nan = float("nan")
    >>> combine_rewards(torch.tensor([[1.0, 2.0], [1.0, nan], [nan, nan]]), torch.tensor([1.0, 0.5]))
    tensor([2., 1., nan])

    ```
    """
    weighted = rewards_per_func * reward_weights.to(rewards_per_func.device).unsqueeze(0)  # (B, F)
    rewards = weighted.nansum(dim=1)
    # `nansum` of nothing is 0, which would be a reward: a row that no function could score stays NaN.
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def group_advantages(
    rewards: torch.Tensor | Sequence[float | None],
    num_generations: int,
    baseline: AdvantageBaseline = "group_mean",
) -> torch.Tensor:
    """Compute the outcome advantages of Dr. GRPO: reward minus a group baseline, not divided by the group's std.

    Args:
        rewards (`torch.Tensor` of shape `(B,)` or a sequence of `B` floats):
            One outcome reward per row; the `G` completions of a prompt are consecutive. `None` or NaN = unscorable.
        num_generations (`int`): `G`, completions per prompt. Must divide `B`.
        baseline (`str`, *optional*, defaults to `"group_mean"`):
            - `"group_mean"`: `r_i - mean_j r_j` (the paper);
            - `"leave_one_out"`: `r_i - mean_{j != i} r_j`, which is `n/(n-1)` times the former for `n` scorable rows.

    Returns:
        `torch.Tensor` of shape `(B,)`: Advantages, in the dtype of floating `rewards` (else the default dtype) and on
        their device. An unscorable row is left out of its group's mean and gets 0. A group with fewer than two
        scorable rows, or with equal rewards, gets exactly 0 everywhere.

    Raises:
        `InputError`: `B` is not a multiple of `num_generations`, `rewards` is not one-dimensional, holds an infinite
            value, or the baseline is unknown.

    Source: arXiv 2503.20783, section 3.2 (`A_i = r_i - mean(r)`); `leave_one_out` is RLOO's baseline (arXiv
    2402.14740).

    Example:

    ```python
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), num_generations=4)
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    >>> group_advantages([1.0, None, 0.0, 0.7, 0.7, 0.7], num_generations=3)
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000,  0.0000,  0.0000])

    ```
    """
    grouped = _grouped(rewards, num_generations)  # (P, G)
    if baseline not in ADVANTAGE_BASELINES:
        expected = f"one of {', '.join(ADVANTAGE_BASELINES)}"
        raise InputError("baseline", repr(baseline), expected, "See `group_advantages`.")
    advantages = grouped - torch.nanmean(grouped, dim=1, keepdim=True)
    if baseline == "leave_one_out":
        # r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all.
        scorable = (~grouped.isnan()).sum(dim=1, keepdim=True).to(grouped.dtype)  # (P, 1)
        advantages = advantages * (scorable / (scorable - 1).clamp(min=1))
    # Not `nan_to_num`: it would hide the infinite mean of rewards whose sum overflows, and the trainer refuses that.
    advantages = advantages.masked_fill(grouped.isnan(), 0.0)
    # Decided on rewards: three rewards of 0.7 minus their rounded mean leave 6e-8, a full step for Adam.
    advantages = advantages.masked_fill(without_signal(grouped, dim=1), 0.0)
    return advantages.flatten()


class RunningRewardScale:
    """Standard deviation of all rewards seen so far, over all prompts (Welford, merged batch by batch).

    Dividing by it keeps advantages of order one when rewards are not, and, unlike the group's std, gives every prompt
    the same divisor: an easy and a hard prompt keep their weights relative to each other.

    Degenerate cases: before two scorable rewards were seen, or while all of them were equal, the scale is 1.

    Example:

    ```python
    >>> scale = RunningRewardScale()
    >>> scale.update(torch.tensor([0.0, 2.0]))
    >>> scale.update(torch.tensor([4.0, float("nan")]))
    >>> scale.std
    2.0

    ```
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_of_squares = 0.0  # sum of squared deviations from the mean

    def update(self, rewards: torch.Tensor) -> None:
        """Add the rewards of one generation batch.

        Args:
            rewards (`torch.Tensor` of shape `(B,)`): Rewards of *all* ranks, so that every rank keeps the same scale;
                NaN = unscorable, left out.
        """
        batch = rewards[~rewards.isnan()].double()
        if batch.numel() == 0:
            return
        # Two sets of numbers merge by their means (Chan, Golub, LeVeque): no pass over earlier rewards, and no
        # difference of large sums, which would lose the digits of a small variance.
        batch_mean = batch.mean().item()
        total = self.count + batch.numel()
        delta = batch_mean - self.mean
        self.sum_of_squares += ((batch - batch_mean) ** 2).sum().item()
        self.sum_of_squares += delta**2 * self.count * batch.numel() / total
        self.mean += delta * batch.numel() / total
        self.count = total

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1), in the units of the reward; 1.0 in the degenerate cases."""
        if self.count < 2 or self.sum_of_squares <= 0.0:
            return 1.0
        return (self.sum_of_squares / (self.count - 1)) ** 0.5

    def state_dict(self) -> dict[str, float]:
        """Return the statistics, as JSON-ready numbers."""
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the statistics that `state_dict` returned."""
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self.sum_of_squares = float(state["sum_of_squares"])


def _grouped(rewards: torch.Tensor | Sequence[float | None], num_generations: int) -> torch.Tensor:
    """Return rewards as a checked floating tensor of shape (P, G)."""
    # `None` is how reward functions say "cannot be scored"; tensors have only NaN for it.
    if not isinstance(rewards, torch.Tensor):
        rewards = torch.tensor([math.nan if reward is None else reward for reward in rewards])
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if rewards.dim() != 1:
        remedy = "Combine several reward functions first."
        raise InputError("rewards", f"shape {tuple(rewards.shape)}", "shape (B,)", remedy)
    check_complete(rewards.numel(), num_generations, "rewards")
    if rewards.isinf().any():
        got = f"an infinite value in row {int(rewards.isinf().nonzero()[0])}"
        expected = "finite numbers, or NaN for a row that cannot be scored"
        remedy = "An infinite reward would make its whole group infinite: clip it, or return None."
        raise InputError("rewards", got, expected, remedy)
    return rewards.view(-1, num_generations)


def without_signal(values: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Return where fewer than two numbers along `dim` are scorable (not NaN), or all are equal; `dim` becomes 1 long.

    An advantage that is decided here is exactly 0, whatever the rounding of a mean.
    """
    unscorable = values.isnan()
    highest = values.masked_fill(unscorable, -torch.inf).amax(dim, keepdim=True)
    lowest = values.masked_fill(unscorable, torch.inf).amin(dim, keepdim=True)
    return highest <= lowest  # equal when all are alike or one is left; -inf against inf when none is


@dataclass(frozen=True)
class Selection:
    """The groups that are trained on.

    Args:
        draws (`list[int]`): Their indices among the draws, ascending; at most K.
        weights (`list[float]`): Factor of each group's advantages, in a batch of K groups.
        drawn (`int`): M, the draws that count; the cap, if it was reached first.
        capped (`bool`): True if the cap was reached before K groups were selected.
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
    """Select the first K draws, with the weights that make their sum unbiased.

    Args:
        selected (`Sequence[bool]`): One per draw, in order: True if it was kept and its group is live.
        wanted (`int`): K, groups of a batch, at least 2.
        cap (`int`): The most draws of a batch, fixed beforehand, at least K.
        probabilities (`Sequence[float]`, *optional*): Probability with which each draw was kept; 1 by default.
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
    draws = [i for i, is_selected in enumerate(selected[:cap]) if is_selected]
    draws = draws[:wanted]
    capped = len(draws) < wanted
    if capped and len(selected) < cap:
        got = f"{len(draws)} of {wanted} groups after {len(selected)} draws"
        raise InputError("selected", got, f"draws up to the cap of {cap}", "Go on drawing.")
    if capped:
        drawn = cap
        factor = wanted / cap
    else:
        # The K-th selected draw decided where to stop, so it tells nothing: the other K - 1 estimate the rate.
        drawn = draws[-1] + 1
        factor = (wanted - 1) / (drawn - 1)
    if mean_over_live:
        factor = wanted / max(1, len(draws))
    weights = [factor] * len(draws)
    if probabilities:
        # A prompt that was kept with probability q stands for 1 / q prompts.
        weights = [factor / probabilities[i] for i in draws]
    return Selection(draws, weights, drawn, capped)


def keep_probability(pass_rate: float, floor: float, softness: float = 0.01) -> float:
    """Return the probability to keep a prompt: proportional to the std of its reward, 1 at a pass rate of 1/2.

    `q = max(floor, sqrt((p (1 - p) + eps) / (1/4 + eps)))`. Any estimate `p` from before the draw leaves the gradient
    unbiased, because the weight is `1 / q`; a good one spares groups without signal. After GRESO (arXiv 2506.02177).

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
    variance = pass_rate * (1 - pass_rate)
    return max(floor, math.sqrt((variance + softness) / (0.25 + softness)))


def check_complete(rows: int, num_generations: int, what: str) -> None:
    """Refuse a batch that is not made of whole groups; `what`: its rows, for the message."""
    if num_generations < 1 or rows % num_generations != 0:
        expected = f"a positive divisor of the number of {what.split()[0]}"
        remedy = "Groups must be complete: every prompt needs the same number of completions."
        raise InputError("num_generations", f"{num_generations} for {rows} {what}", expected, remedy)
