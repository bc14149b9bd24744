"""Step rewards become token advantages: process supervision for Dr. GRPO.

A row's steps partition its completion; each step has one reward. Two choices turn them into advantages:

- the *baseline*: what a step reward is compared with, taken over the group of completions of one prompt;
- the *credit*: which later steps a token answers for.

Deltas from process supervision in GRPO (arXiv 2402.03300, section 4.1.3): no division by the group's standard
deviation unless asked for by name, more baselines, and min-form credit (arXiv 2504.15275), which cannot be raised by
writing more steps. Known hazards: a pooled mean weighs rows by their number of steps; `return_to_go` pays for every
further good step, so completions grow; a learned process reward model gets exploited.

Pure Python and tensors. Shapes: `B = P * G` rows, `T` completion tokens (padded), `K_i` steps of row i.
"""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Literal, get_args

import torch

from trl_drgrpo.common.errors import InputError

StepCredit = Literal["return_to_go", "immediate", "min_to_go"]
StepBaseline = Literal["pooled", "per_completion", "leave_one_out", "same_index", "none"]
STEP_CREDITS: tuple[str, ...] = get_args(StepCredit)
STEP_BASELINES: tuple[str, ...] = get_args(StepBaseline)

Ragged = Sequence[Sequence[float | None]]


def step_token_advantages(
    step_rewards: Ragged,
    step_ends: Sequence[Sequence[int]],
    completion_mask: torch.Tensor,
    num_generations: int,
    credit: StepCredit = "return_to_go",
    baseline: StepBaseline = "pooled",
    *,
    deepseekmath_std: bool = False,
) -> torch.Tensor:
    """Token advantages from step rewards.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step; `None` or NaN = unscorable.
        step_ends (`B` lists of `K_i` ints): Inclusive index of each step's last token, strictly increasing.
        completion_mask (`torch.Tensor` of shape `(B, T)`): 1 or True on tokens that are trained on. Masked tokens,
        tool
            results for example, belong to a step but get advantage 0.
        num_generations (`int`): `G`; the completions of a prompt are consecutive rows.
        credit (`str`, *optional*, defaults to `"return_to_go"`): See [`step_advantages`].
        baseline (`str`, *optional*, defaults to `"pooled"`): See [`step_advantages`].
        deepseekmath_std (`bool`, *optional*, defaults to `False`): See [`step_advantages`].

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32, on the device of `completion_mask`: the advantage of each token is
        that of its step. Tokens behind the last step, and rows without steps, get 0.

    Raises:
        `InputError`: Shapes that do not fit, ends that do not increase or lie outside `T`, an unknown choice.

    Source: arXiv 2402.03300, section 4.1.3 (return to go, pooled, there with std); arXiv 2504.15275 (min form).

    Example: two completions of two steps, rewards (1, 0) and (1, 1); pooled mean 0.75. Step values minus the mean are
    (0.25, -0.75) and (0.25, 0.25), summed from the end: (-0.5, -0.75) and (0.5, 0.25).

    ```python
    >>> step_token_advantages([[1, 0], [1, 1]], [[0, 2], [1, 2]], torch.ones(2, 4), num_generations=2)
    tensor([[-0.5000, -0.7500, -0.7500,  0.0000],
            [ 0.5000,  0.5000,  0.2500,  0.0000]])

    ```
    """
    credits = step_advantages(step_rewards, num_generations, credit, baseline, deepseekmath_std=deepseekmath_std)
    return broadcast_to_tokens(credits, step_ends, completion_mask)


def step_advantages(
    step_rewards: Ragged,
    num_generations: int,
    credit: StepCredit = "return_to_go",
    baseline: StepBaseline = "pooled",
    *,
    deepseekmath_std: bool = False,
) -> list[list[float]]:
    """The advantage of every step: what each of its tokens will carry.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step; `None` or NaN = unscorable: left out of every
            mean, sum and minimum.
        num_generations (`int`): `G`; the completions of a prompt are consecutive rows.
        credit (`str`, *optional*, defaults to `"return_to_go"`):
            - `"return_to_go"`: sum of `s - b` over this step and all later ones (the paper). `|A|` grows with the
              number of steps left.
            - `"immediate"`: `s - b` of this step; 0 if it is unscorable.
            - `"min_to_go"`: the smallest `s` of this step and all later ones, minus the group mean of the rows'
              smallest rewards (PURE). Bounded whatever the number of steps. 0 where nothing scorable is left.
        baseline (`str`, *optional*, defaults to `"pooled"`): `b`, over the group:
            - `"pooled"`: mean of all step rewards (the paper);
            - `"per_completion"`: mean over rows of each row's mean;
            - `"leave_one_out"`: mean of the *other* rows' step rewards; without any, the row's advantages are 0;
            - `"same_index"`: mean over rows of the reward of step k; not with `"min_to_go"`;
            - `"none"`: 0.

            With `"min_to_go"`, `b` is the mean of the rows' minima (of the other rows' with `"leave_one_out"`, 0 with
            `"none"`).
        deepseekmath_std (`bool`, *optional*, defaults to `False`): Divide `s - b` by the standard deviation (n - 1) of
            all step rewards of the group, as the DeepSeekMath paper does. It brings back the difficulty bias that Dr.
            GRPO removes. With `"return_to_go"` or `"immediate"` and `"pooled"` only.

    Returns:
        `list[list[float]]`: `B` lists of `K_i` finite numbers. A group whose scorable step rewards are all equal has
        exactly 0 everywhere, unless the baseline is `"none"`.

    Raises:
        `InputError`: Incomplete groups, infinite rewards, an unknown or contradictory choice.

    Example:

    ```python
    >>> step_advantages([[0.9, 0.2, 0.5], [0.8]], num_generations=2, credit="min_to_go")
    [[-0.3, -0.3, 0.0], [0.30000000000000004]]

    ```
    """
    check_choices(credit, baseline, deepseekmath_std)
    if num_generations < 1 or len(step_rewards) % num_generations != 0:
        raise InputError(
            "num_generations",
            f"{num_generations} for {len(step_rewards)} rows of step rewards",
            "a positive divisor of the number of rows",
            "Groups must be complete: every prompt needs the same number of completions.",
        )
    rows = [[_number(reward, i, k) for k, reward in enumerate(row)] for i, row in enumerate(step_rewards)]
    credited: list[list[float]] = []
    for start in range(0, len(rows), num_generations):
        group = rows[start : start + num_generations]
        credited.extend(_min_to_go(group, baseline) if credit == "min_to_go" else _sums(group, credit, baseline))
        if deepseekmath_std:
            std = _std([s for row in group for s in _scorable(row)])
            credited[start:] = [[value / std if std > 0 else 0.0 for value in row] for row in credited[start:]]
    return credited


def broadcast_to_tokens(
    values: Sequence[Sequence[float]], step_ends: Sequence[Sequence[int]], completion_mask: torch.Tensor
) -> torch.Tensor:
    """Give every token the value of its step.

    Args:
        values (`B` lists of `K_i` floats): One value per step.
        step_ends (`B` lists of `K_i` ints): Inclusive index of each step's last token, strictly increasing.
        completion_mask (`torch.Tensor` of shape `(B, T)`): 1 or True on tokens that are trained on.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32, on the device of `completion_mask`; 0 where the mask is.

    Raises:
        `InputError`: Counts that differ, ends that do not increase or lie outside `T`.
    """
    if not len(values) == len(step_ends) == completion_mask.size(0):
        got = f"{len(values)} rows of values, {len(step_ends)} of step_ends, {completion_mask.size(0)} of mask"
        raise InputError("step_ends", got, "as many rows of each", "Pass one list of steps per completion.")
    advantages = torch.zeros(completion_mask.shape, dtype=torch.float32)
    for i, (row_values, ends) in enumerate(zip(values, step_ends, strict=True)):
        if len(row_values) != len(ends):
            got = f"{len(ends)} ends for {len(row_values)} step rewards in row {i}"
            raise InputError("step_ends", got, "one end per step", "Score every step that the segmenter found.")
        first = 0
        for value, end in zip(row_values, ends, strict=True):
            if not first <= end < completion_mask.size(1):
                got = f"{list(ends)} in row {i}"
                expected = f"strictly increasing token indices from 0 to {completion_mask.size(1) - 1}"
                raise InputError("step_ends", got, expected, "Ends are inclusive, in completion tokens.")
            advantages[i, first : end + 1] = value
            first = end + 1
    return advantages.to(completion_mask.device).masked_fill(~completion_mask.bool(), 0.0)


def _sums(group: list[list[float]], credit: str, baseline: str) -> list[list[float]]:
    """`s - b` per step, as it is or summed from the end."""
    if baseline != "none" and _all_equal(group):
        return [[0.0] * len(row) for row in group]
    b = _baseline(group, baseline)
    compared = [[_deviation(s, b(i, k)) for k, s in enumerate(row)] for i, row in enumerate(group)]
    return [_from_the_end(row, operator.add) for row in compared] if credit == "return_to_go" else compared


def _min_to_go(group: list[list[float]], baseline: str) -> list[list[float]]:
    """The smallest reward from each step on, minus the mean of the rows' smallest ones."""
    if baseline != "none" and _all_equal(group):
        return [[0.0] * len(row) for row in group]
    minima = [[min(_scorable(row), default=math.nan)] for row in group]
    b = _baseline(minima, baseline)
    return [[_deviation(m, b(i, 0)) for m in _from_the_end(row, _smaller)] for i, row in enumerate(group)]


def _baseline(group: list[list[float]], baseline: str) -> Callable[[int, int], float]:
    """`b` as a function of row i and step k; NaN where nothing is there to take a mean of."""
    if baseline == "leave_one_out":
        of_row = [
            _mean([s for j, row in enumerate(group) if j != i for s in _scorable(row)]) for i in range(len(group))
        ]
        return lambda i, k: of_row[i]
    if baseline == "same_index":
        of_index = [_mean(_scorable(rewards)) for rewards in zip_longest(*group, fillvalue=math.nan)]
        return lambda i, k: of_index[k]
    if baseline == "per_completion":
        of_group = _mean([_mean(_scorable(row)) for row in group if _scorable(row)])
    else:
        of_group = 0.0 if baseline == "none" else _mean([s for row in group for s in _scorable(row)])
    return lambda i, k: of_group


def _deviation(reward: float, mean: float) -> float:
    """`s - b`; 0 for an unscorable step, or where there is nothing to compare with."""
    return 0.0 if math.isnan(reward) or math.isnan(mean) else reward - mean


def _from_the_end(row: list[float], operation: Callable[[float, float], float]) -> list[float]:
    """The operation over each step and all later ones."""
    return list(accumulate(reversed(row), operation))[::-1]


def _smaller(later: float, step: float) -> float:
    return step if math.isnan(later) or step < later else later


def _all_equal(group: list[list[float]]) -> bool:
    """Whether a group's scorable step rewards carry no signal: decided on rewards, not on rounded differences."""
    rewards = [s for row in group for s in _scorable(row)]
    return not rewards or min(rewards) == max(rewards)


def _scorable(rewards: Sequence[float]) -> list[float]:
    return [reward for reward in rewards if not math.isnan(reward)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _number(reward: float | None, row: int, step: int) -> float:
    if reward is None:
        return math.nan
    if math.isinf(reward):
        expected = "a finite number, or None for a step that cannot be scored"
        raise InputError("step_rewards", f"{reward} for step {step} of row {row}", expected, "Clip it.")
    return float(reward)


def check_choices(credit: str, baseline: str, deepseekmath_std: bool, prefix: str = "") -> None:
    """Refuse an unknown or contradictory choice.

    Args:
        credit, baseline (`str`), deepseekmath_std (`bool`): As in [`step_advantages`].
        prefix (`str`, *optional*): Put before field names in messages: `"step_"` for the configuration's.

    Raises:
        `InputError`: Names the field.
    """
    for name, value, allowed in (("credit", credit, STEP_CREDITS), ("baseline", baseline, STEP_BASELINES)):
        if value not in allowed:
            raise InputError(f"{prefix}{name}", repr(value), f"one of {', '.join(allowed)}", "Pick one of them.")
    if credit == "min_to_go" and baseline == "same_index":
        remedy = "A minimum over later steps has no index to compare at: take 'pooled' or 'leave_one_out'."
        raise InputError(f"{prefix}baseline", "'same_index' with credit 'min_to_go'", "another baseline", remedy)
    if deepseekmath_std and (credit == "min_to_go" or baseline != "pooled"):
        remedy = "The paper divides over the pooled mean: use that, or leave the division out."
        got = f"True with credit {credit!r} and baseline {baseline!r}"
        raise InputError(f"deepseekmath_{prefix}std", got, "baseline 'pooled' and not 'min_to_go'", remedy)
