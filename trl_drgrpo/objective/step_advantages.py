"""Step rewards become token advantages: process supervision for Dr. GRPO.

A row's steps partition its completion; each step has one reward. Two choices turn them into advantages:

- the *credit*: the step rewards that count for a token;
- the *baseline*: the number that is subtracted from the credit, computed from the completions of the same prompt.

The gradient is unbiased if the baseline of a token does not depend on what this row writes from that token on: it may
read the row's prefix and all *other* rows. `to_go` keeps to this. The baselines that were published for step rewards
do not: they are subtracted once per remaining step, so the sum depends on how many steps the row still writes. They
are here to reproduce a published run. `trl-drgrpo check --credit` shows both by enumeration.

Pure tensors. Lists become arrays through numpy, which takes a quarter of torch's time for it.
Shapes: `B = P * G` rows, `T` completion tokens (padded), `K_i` steps of row i, `K` the largest of them.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.advantages import check_complete, without_signal
from trl_drgrpo.objective.step_choices import StepBaseline, StepCredit, check_choices

Ragged = Sequence[Sequence[float | None]]


def step_token_advantages(
    step_rewards: Ragged,
    step_ends: Sequence[Sequence[int]],
    completion_mask: torch.Tensor,
    num_generations: int,
    credit: StepCredit = "return_to_go",
    baseline: StepBaseline = "to_go",
    *,
    deepseekmath_std: bool = False,
) -> torch.Tensor:
    """Compute token advantages from step rewards.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step; `None` or NaN = unscorable.
        step_ends (`B` lists of `K_i` ints): Inclusive index of each step's last token, strictly increasing.
        completion_mask (`torch.Tensor` of shape `(B, T)`):
            1 or True on tokens that are trained on. Masked tokens, tool results for example, belong to a step but get
            advantage 0.
        num_generations (`int`): `G`; the completions of a prompt are consecutive rows.
        credit (`str`, *optional*, defaults to `"return_to_go"`): See [`step_advantages`].
        baseline (`str`, *optional*, defaults to `"to_go"`): See [`step_advantages`].
        deepseekmath_std (`bool`, *optional*, defaults to `False`): See [`step_advantages`].

    Returns:
        `torch.Tensor` of shape `(B, T)`, of the default dtype, on the device of `completion_mask`: the advantage of
        each token is that of its step. Tokens behind the last step, and rows without steps, get 0.

    Raises:
        `InputError`: Shapes that do not fit, ends that do not increase or lie outside `T`, an unknown choice.

    Example: two completions of two steps, rewards (1, 0) and (1, 1). From the first step on they earn 1 and 2, from
    the second on 0 and 1; each is compared with the other.

    ```python
    >>> step_token_advantages([[1, 0], [1, 1]], [[0, 2], [1, 2]], torch.ones(2, 4), num_generations=2)
    tensor([[-1., -1., -1.,  0.],
            [ 1.,  1.,  1.,  0.]])

    ```
    """
    advantages = step_advantages(step_rewards, num_generations, credit, baseline, deepseekmath_std=deepseekmath_std)
    return broadcast_to_tokens(advantages, step_ends, completion_mask)


def step_advantages(
    step_rewards: Ragged,
    num_generations: int,
    credit: StepCredit = "return_to_go",
    baseline: StepBaseline = "to_go",
    *,
    deepseekmath_std: bool = False,
    state_keys: Sequence[Sequence[Hashable | None]] | None = None,
    unscorable: torch.Tensor | None = None,
) -> list[list[float]]:
    """Compute the advantage of every step; each of its tokens will carry it.

    Args:
        step_rewards (`B` lists of `K_i` floats):
            Reward of each step; `None` or NaN = no score. It adds 0 to a sum and leaves a running minimum as it is,
            because the gradient is biased where what a row wrote decides whether its score counts. The published
            baselines leave it out.
        num_generations (`int`): `G`; the completions of a prompt are consecutive rows.
        credit (`str`, *optional*, defaults to `"return_to_go"`):
            - `"return_to_go"`: the sum of `s` over this step and all later ones;
            - `"immediate"`: `s` of this step alone;
            - `"min_increments"`: the sum over this step and all later ones of `m_k - m_{k-1}`, the increments of the
              running minimum `m_k = min(s_1..s_k)`, with `m_0 = 0`. They add up to the smallest reward of the row, so
              nothing is gained by more steps, and steps behind the worst one earn 0.
        baseline (`str`, *optional*, defaults to `"to_go"`): Over the group:
            - `"to_go"`: the mean of the *other* rows' credit from the same step on, 0 once they ended. Unbiased, if
              the tokens up to a step's end determine that end and the step's reward. Without another row: advantage 0;
            - `"none"`: 0. Unbiased under the same condition, and noisy;
            - `"deepseekmath"`: the mean of all step rewards (arXiv 2402.03300, section 4.1.3), subtracted from each;
              biased: the decision to write another step gets no gradient;
            - `"pooled_others"`: the same over the other rows; biased in the same way;
            - `"per_completion"`: the mean over rows of each row's mean; biased in the same way;
            - `"same_index"`: the mean over rows of the reward of step k; biased in the same way.

            The last four go with the first two credits.
        deepseekmath_std (`bool`, *optional*, defaults to `False`):
            Divide by the standard deviation (n - 1) of all step rewards of the group, as the DeepSeekMath paper does:
            the difficulty bias that Dr. GRPO removes. With `"deepseekmath"`.
        state_keys (`B` lists of `K_i` hashables, *optional*):
            The state that each step begins in, `None` = unknown; with `"to_go"`. The baseline of a step is then the
            mean, over the other rows of the group that passed the same state at any step, of their credit from there
            on (mean over a row's visits); no such row: the baseline without keys. After GiGPO (arXiv 2505.10978),
            which counts the row itself and divides by a std.
        unscorable (`torch.Tensor` of shape `(B,)`, bool, *optional*):
            Rows that cannot be judged, whatever was written: left out of all means, advantage 0.

    Returns:
        `list[list[float]]`: `B` lists of `K_i` finite numbers; exactly 0 where a step has nothing to distinguish it.

    Raises:
        `InputError`: Incomplete groups, infinite rewards, an unknown or contradictory choice.

    Example:

    ```python
    >>> step_advantages([[0.9, 0.2, 0.5], [0.8]], num_generations=2, credit="min_increments")
    [[-0.5999999999999999, -0.7, 0.0], [0.6000000000000001]]

    ```
    """
    check_choices(credit, baseline, deepseekmath_std)
    check_complete(len(step_rewards), num_generations, "rows of step rewards")
    counts = [len(row) for row in step_rewards]
    if not any(counts):
        return [[] for _ in counts]
    rewards = padded_groups(step_rewards, num_generations)  # (P, G, K)
    if unscorable is None:
        unscorable = torch.zeros(len(counts), dtype=torch.bool)
    left_out = unscorable.cpu().view(-1, num_generations, 1)
    rewards = rewards.masked_fill(left_out, math.nan)
    if baseline in ("to_go", "none"):
        # `step_values` takes NaN as a reward of 0. That is right for a step without a score. A row that cannot be
        # judged must leave the means of the others as well, so it becomes NaN again.
        values = step_values(rewards, credit).masked_fill(left_out, math.nan)
        advantages = values.nan_to_num(nan=0.0)
        if baseline == "to_go":
            advantages = _less_others(values)
            if state_keys is not None:
                means = _state_means(values, state_keys, counts)
                # A state that no other row passed keeps the baseline without keys.
                by_state = (values - means).nan_to_num(nan=0.0)
                advantages = torch.where(means.isnan(), advantages, by_state)
    else:
        advantages = _published_advantages(rewards, credit, baseline)
    if deepseekmath_std:
        advantages = advantages / _pooled_std(rewards)
    # Undo the padding: each row gets back as many numbers as it has steps.
    padded = advantages.flatten(0, 1).tolist()
    return [row[:count] for row, count in zip(padded, counts, strict=True)]


def broadcast_to_tokens(
    values: Sequence[Sequence[float]],
    step_ends: Sequence[Sequence[int]],
    completion_mask: torch.Tensor,
) -> torch.Tensor:
    """Give every token the value of its step.

    Args:
        values (`B` lists of `K_i` floats): One value per step.
        step_ends (`B` lists of `K_i` ints): Inclusive index of each step's last token, strictly increasing.
        completion_mask (`torch.Tensor` of shape `(B, T)`): 1 or True on tokens that are trained on.

    Returns:
        `torch.Tensor` of shape `(B, T)`, of the default dtype, on the mask's device; 0 where the mask is.

    Raises:
        `InputError`: Counts that differ, ends that do not increase or lie outside `T`.
    """
    rows, width = completion_mask.shape
    if not len(values) == len(step_ends) == rows:
        got = f"{len(values)} rows of values, {len(step_ends)} of step_ends, {rows} of mask"
        raise InputError("step_ends", got, "as many rows of each", "Pass one list of steps per completion.")
    for i, (row, row_ends) in enumerate(zip(values, step_ends, strict=True)):
        if len(row) != len(row_ends):
            got = f"{len(row_ends)} ends for {len(row)} step rewards in row {i}"
            raise InputError("step_ends", got, "one end per step", "Score every step that the segmenter found.")

    # Every step of every row stands in one array, because a loop over rows in Python costs more than the sums do. The
    # length of a step is its end minus the end before it, or minus -1 at the start of a row.
    counts = np.array([len(row) for row in values])
    ends = np.fromiter(chain.from_iterable(step_ends), np.int64)
    first_steps = (np.cumsum(counts) - counts)[counts > 0]
    previous_ends = np.roll(ends, 1)
    previous_ends[first_steps] = -1
    invalid_steps = np.flatnonzero((ends <= previous_ends) | (ends >= width))
    if len(invalid_steps):
        row_of_step = np.repeat(np.arange(rows), counts)
        i = int(row_of_step[invalid_steps[0]])
        expected = f"strictly increasing token indices from 0 to {width - 1}"
        got = f"{list(step_ends[i])} in row {i}"
        raise InputError("step_ends", got, expected, "Ends are inclusive, in completion tokens.")

    # Steps leave no gaps. So the tokens up to the last end of each row, read row by row, are the repeated values:
    # values 5 and 7 with the ends 1 and 2 become 5, 5, 7.
    last_tokens = np.array([row_ends[-1] if len(row_ends) else -1 for row_ends in step_ends])
    in_a_step = np.arange(width) <= last_tokens[:, None]  # (B, T)
    flat_values = np.fromiter(chain.from_iterable(values), np.float64)
    token_values = np.zeros((rows, width))
    token_values[in_a_step] = np.repeat(flat_values, ends - previous_ends)
    on_tokens = torch.from_numpy(token_values).to(completion_mask.device, torch.get_default_dtype())
    return on_tokens.masked_fill(~completion_mask.bool(), 0.0)


def with_closings(
    step_rewards: Ragged,
    step_ends: Sequence[Sequence[int]],
    *,
    apart: bool,
) -> tuple[list[list[float | None]], list[list[int]]]:
    """Place the closing of each row: the tokens after its last separator, usually EOS alone.

    The closing is the decision to stop. No reward comes after it, so its return to go is 0.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step.
        step_ends (`B` lists of `K_i` or `K_i + 1` ints): Inclusive ends; one more where there is a closing.
        apart (`bool`): `True`: a step of its own without a reward. `False`: part of the last step, as published.

    Returns:
        `tuple`: Rewards and ends, as many of each in a row.

    Example:

    ```python
    >>> with_closings([[1.0, 0.5], [0.2]], [[3, 7, 8], [5]], apart=True)
    ([[1.0, 0.5, None], [0.2]], [[3, 7, 8], [5]])
    >>> with_closings([[1.0, 0.5], [0.2]], [[3, 7, 8], [5]], apart=False)
    ([[1.0, 0.5], [0.2]], [[3, 8], [5]])

    ```
    """
    rewards = []
    ends = []
    for row, row_ends in zip(step_rewards, step_ends, strict=True):
        row_rewards = list(row)
        row_ends = list(row_ends)
        has_closing = len(row_ends) > len(row)
        if has_closing and apart:
            row_rewards.append(None)
        elif has_closing:
            # The last step ends where its closing does. There is none without a step before it.
            row_ends[len(row) - 1 :] = row_ends[-1:]
        rewards.append(row_rewards)
        ends.append(row_ends)
    return rewards, ends


def padded_groups(values: Ragged, num_generations: int, field: str = "step_rewards") -> torch.Tensor:
    """Pad the numbers of each step to a float64 tensor `(P, G, K)`; NaN where there is no step, or no number for it.

    Raises:
        `InputError`: An infinite number.
    """
    counts = np.array([len(row) for row in values])
    longest = max(1, counts.max())
    has_step = np.arange(longest) < counts[:, None]
    padded = np.full(has_step.shape, math.nan)
    # Rows and columns in the order of the numbers. None becomes NaN.
    padded[has_step] = np.fromiter(chain.from_iterable(values), np.float64)
    infinite = np.argwhere(np.isinf(padded))
    if len(infinite):
        row, step = infinite[0]
        got = f"{padded[row, step]} for step {step} of row {row}"
        raise InputError(field, got, "a finite number, or None for a step that cannot be scored", "Clip it.")
    return torch.from_numpy(padded).view(-1, num_generations, longest)


def step_values(rewards: torch.Tensor, credit: str) -> torch.Tensor:
    """Credit each step with its rewards `(P, G, K)`, by any of the three rules; 0 once a row ended."""
    step_credit = rewards.nan_to_num(nan=0.0)
    if credit == "immediate":
        return step_credit
    if credit == "min_increments":
        # Rewards 0.9, 0.2, 0.5 have the running minima 0.9, 0.2, 0.2 and the increments 0.9, -0.7, 0.
        lowest = rewards.nan_to_num(nan=math.inf).cummin(dim=2).values
        lowest = lowest.masked_fill(lowest.isinf(), 0.0)  # nothing scorable yet: m_0
        start = torch.zeros_like(lowest[..., :1])
        step_credit = lowest.diff(dim=2, prepend=start)
    return _sum_from_here_on(step_credit)


def _less_others(values: torch.Tensor) -> torch.Tensor:
    """Subtract from each value the other rows' mean at the same step `(P, G, K)`; NaN is in no mean and gets 0."""
    sum_of_others = values.nansum(dim=1, keepdim=True) - values
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    mean_of_others = sum_of_others / (count - 1).clamp(min=1)
    # Decided on values, not on rounded differences: a step that is worth the same in all rows gets exactly 0.
    advantages = (values - mean_of_others).masked_fill(without_signal(values, dim=1), 0.0)
    return advantages.nan_to_num(nan=0.0)


def _state_means(
    values: torch.Tensor,
    state_keys: Sequence[Sequence[Hashable | None]],
    counts: Sequence[int],
) -> torch.Tensor:
    """Compute the other rows' mean value at the state of each step `(P, G, K)`; NaN where none of them passed it."""
    for i, (keys, count) in enumerate(zip(state_keys, counts, strict=True)):
        if len(keys) != count:  # a mixture of baselines would not be unbiased
            got = f"{len(keys)} keys for {count} steps in row {i}"
            raise InputError("state_keys", got, "one per step, a closing included", "Give None for an unknown state.")

    means = torch.full_like(values, math.nan)
    group_size = values.size(1)
    for p, group_values in enumerate(values.tolist()):
        group_keys = state_keys[p * group_size : (p + 1) * group_size]
        # visits[key][i]: the values of row i at each of its visits to the state.
        visits: dict[Hashable, dict[int, list[float]]] = {}
        for i, keys in enumerate(group_keys):
            for key, value in zip(keys, group_values[i], strict=False):  # a row is padded behind its last key
                if key is not None and not math.isnan(value):
                    visits.setdefault(key, {}).setdefault(i, []).append(value)
        for i, keys in enumerate(group_keys):
            for k, key in enumerate(keys):
                # Without the row itself, which would make the baseline depend on its own tokens.
                of_others = [row_values for j, row_values in visits.get(key, {}).items() if j != i]
                if not of_others:
                    continue
                # `fsum` rounds once: the result must not depend on the order in which rows arrive.
                row_means = [math.fsum(row_values) / len(row_values) for row_values in of_others]
                mean = math.fsum(row_means) / len(row_means)
                value = group_values[i][k]
                if all(set(row_values) == {value} for row_values in of_others):
                    mean = value  # a mean of equal numbers may round to another one, a full step for Adam
                means[p, i, k] = mean
    return means


def _sum_from_here_on(values: torch.Tensor) -> torch.Tensor:
    """Sum over each step and all later ones `(P, G, K)`."""
    return values.flip(2).cumsum(dim=2).flip(2)


def _published_advantages(rewards: torch.Tensor, credit: str, baseline: str) -> torch.Tensor:
    """Compute advantages under a published baseline `(P, G, K)`.

    Args:
        rewards (`torch.Tensor` of shape `(P, G, K)`, float64): NaN where there is no step, or no number for it.
        credit, baseline (`str`): As in [`step_advantages`].

    Returns:
        `torch.Tensor` of shape `(P, G, K)`: An unscored step adds 0; a group of equal rewards gets exactly 0.
    """
    advantages = (rewards - _published_mean(rewards, baseline)).nan_to_num(nan=0.0)
    # Decided on rewards: equal ones minus their rounded mean would leave residues.
    advantages = advantages.masked_fill(without_signal(rewards, dim=(1, 2)), 0.0)
    if credit == "return_to_go":
        # The papers subtract the baseline from each reward and then sum: once per step that the row still writes.
        # This is where their bias comes from.
        return _sum_from_here_on(advantages)
    return advantages


def _published_mean(rewards: torch.Tensor, baseline: str) -> torch.Tensor:
    """Compute the mean that is subtracted from each reward: broadcasts to `(P, G, K)`, NaN where nothing is scored."""
    if baseline == "same_index":
        return rewards.nanmean(dim=1, keepdim=True)
    if baseline == "per_completion":
        return rewards.nanmean(dim=2, keepdim=True).nanmean(dim=1, keepdim=True)
    if baseline == "deepseekmath":
        return rewards.nanmean(dim=(1, 2), keepdim=True)
    # "pooled_others": all step rewards of the other rows. Without any, 0 / 0 is the NaN of the docstring.
    sums = rewards.nansum(dim=2, keepdim=True)
    counts = (~rewards.isnan()).sum(dim=2, keepdim=True)
    sums_of_others = sums.sum(dim=1, keepdim=True) - sums
    counts_of_others = counts.sum(dim=1, keepdim=True) - counts
    return sums_of_others / counts_of_others


def _pooled_std(rewards: torch.Tensor) -> torch.Tensor:
    """Compute the standard deviation (n - 1) of all step rewards of each group `(P, 1, 1)`; infinite where it is 0."""
    divisors = []
    for group in rewards:
        scores = group[~group.isnan()].tolist()
        std = 0.0
        if len(scores) > 1:
            # Python computes with exact fractions: equal scores have a std of exactly 0.
            std = statistics.stdev(scores)
        # The advantages of a group without spread are 0, and 0 / inf keeps them; 0 / 0 would be NaN.
        divisors.append(std or math.inf)
    return torch.tensor(divisors, dtype=torch.float64).view(-1, 1, 1)
