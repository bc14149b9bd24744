"""Rewards become advantages: the first half of Dr. GRPO (arXiv 2503.20783).

Deltas from GRPO as TRL ships it:

- the advantage is the reward minus the group's mean, and nothing divides it by the group's standard deviation;
- whether a group carries signal is decided on its *rewards*: equal rewards give advantages of exactly 0.0, where
  subtracting a rounded mean would leave residues of 1e-8 that Adam turns into full-sized steps;
- an optional scale is a standard deviation over *all prompts seen so far*, never within a group.

Pure tensors, no trl and no transformers: the trainer calls these functions, the tests compare them with loops.
Shapes: `P` prompts, `G` completions per prompt (`num_generations`), `B = P * G` rows, `F` reward functions.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.step_advantages import check_complete

AdvantageBaseline = Literal["group_mean", "leave_one_out"]
ADVANTAGE_BASELINES: tuple[str, ...] = get_args(AdvantageBaseline)


def combine_rewards(rewards_per_func: torch.Tensor, reward_weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the reward functions: one outcome reward per row.

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
    rewards = (rewards_per_func * reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def group_advantages(
    rewards: torch.Tensor | Sequence[float | None],
    num_generations: int,
    baseline: AdvantageBaseline = "group_mean",
) -> torch.Tensor:
    """Outcome advantages of Dr. GRPO: the reward minus a group baseline, without division by the group's std.

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
        scorable = (~grouped.isnan()).sum(dim=1, keepdim=True).to(grouped.dtype)  # (P, 1)
        advantages = advantages * (scorable / (scorable - 1).clamp(min=1))
    advantages = advantages.nan_to_num(nan=0.0)
    return advantages.masked_fill(_without_signal(grouped).unsqueeze(1), 0.0).flatten()


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
        """Take in the rewards of one generation batch.

        Args:
            rewards (`torch.Tensor` of shape `(B,)`): Rewards of *all* ranks, so that every rank keeps the same scale;
                NaN = unscorable, left out.
        """
        batch = rewards[~rewards.isnan()].double()
        if batch.numel() == 0:
            return
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
        """The statistics, as JSON-ready numbers."""
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self.sum_of_squares = float(state["sum_of_squares"])


def _grouped(rewards: torch.Tensor | Sequence[float | None], num_generations: int) -> torch.Tensor:
    """Rewards as a checked floating tensor of shape (P, G)."""
    if not isinstance(rewards, torch.Tensor):
        rewards = torch.tensor([torch.nan if reward is None else reward for reward in rewards])
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if rewards.dim() != 1:
        remedy = "Combine several reward functions first."
        raise InputError("rewards", f"shape {tuple(rewards.shape)}", "shape (B,)", remedy)
    check_complete(rewards.numel(), num_generations, "rewards")
    if rewards.isinf().any():
        got, expected = f"an infinite value in row {int(rewards.isinf().nonzero()[0])}", "finite numbers, or NaN"
        remedy = "An infinite reward would make its whole group infinite: clip it, or return None."
        raise InputError("rewards", got, f"{expected} for a row that cannot be scored", remedy)
    return rewards.view(-1, num_generations)


def _without_signal(grouped: torch.Tensor) -> torch.Tensor:
    """(P,) bool: groups of shape (P, G) whose scorable rewards are fewer than two or all equal."""
    unscorable = grouped.isnan()
    highest = grouped.masked_fill(unscorable, -torch.inf).amax(dim=1)
    lowest = grouped.masked_fill(unscorable, torch.inf).amin(dim=1)
    return highest <= lowest  # equal when all are alike or one is left; -inf against inf when none is
