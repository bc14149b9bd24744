"""Penalties on length and repetition: TRL's own functions under checked settings; only the scale is added.

Each reads `completion_ids`, that is tokens, and gives 0 or less: add one to an outcome reward with `weighted_sum`, or
as a further reward function. Under Dr. GRPO length needs no penalty to stay unbiased (arXiv 2503.20783, section 3.1);
these are for runs that want shorter answers, or that degenerate.
"""

import importlib
from collections.abc import Callable

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import Range, refuse_outside, whole

_PENALTY = Range(highest=0, remedy="A penalty lowers the reward: negate it.")


def repetition_penalty(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable:
    """TRL's `get_repetition_penalty_reward`: share of repeated token n-grams times `max_penalty`.

    Args:
        ngram_size (`int`, *optional*, defaults to 3): Tokens per n-gram.
        max_penalty (`float`, *optional*, defaults to -1.0): What a fully repetitive completion comes near; 0 or less.

    Returns:
        `Callable`: A reward function, called `repetition_penalty_reward` in logs.

    Raises:
        [`InputError`]: `ngram_size` below 1, a positive `max_penalty`.

    Example:

    ```python
    >>> repetition_penalty(ngram_size=2)(completion_ids=[[1, 2, 3], [5, 5, 5, 5, 5]])  # 1 - 1/4 of the second repeat
    [0.0, -0.75]

    ```
    """
    refuse_outside("ngram_size", ngram_size, whole(1, remedy="It counts tokens."))
    refuse_outside("max_penalty", max_penalty, _PENALTY)
    return _trl("get_repetition_penalty_reward")(ngram_size=ngram_size, max_penalty=max_penalty)


def overlong_penalty(max_completion_length: int, soft_tokens: int) -> Callable:
    """TRL's `get_soft_overlong_punishment` (DAPO, arXiv 2503.14476, eq. 13): 0, then linear, -1 at the end.

    Args:
        max_completion_length (`int`): Tokens at which it reaches -1; the run's own `max_completion_length` as a rule.
        soft_tokens (`int`): Length of the linear part in front of that, at most `max_completion_length`.

    Returns:
        `Callable`: A reward function, called `soft_overlong_punishment_reward` in logs.

    Raises:
        [`InputError`]: A length below 1, or a linear part longer than the whole.
    """
    refuse_outside("max_completion_length", max_completion_length, whole(1, remedy="It counts tokens."))
    refuse_outside("soft_tokens", soft_tokens, whole(0, remedy="It counts tokens."))
    if soft_tokens > max_completion_length:
        expected = f"at most max_completion_length={max_completion_length}"
        raise InputError("soft_tokens", str(soft_tokens), expected, "Lower it: it is a part of that length.")
    return _trl("get_soft_overlong_punishment")(
        max_completion_len=max_completion_length, soft_punish_cache=soft_tokens
    )


def length_penalty(free_tokens: int, limit_tokens: int, max_penalty: float = -1.0) -> Callable:
    """A soft price on length: 0 up to `free_tokens`, linear to `max_penalty` at `limit_tokens`, and that beyond.

    TRL's overlong punishment with another scale and both ends named.

    Args:
        free_tokens (`int`): Tokens that cost nothing.
        limit_tokens (`int`): Tokens from which on it costs `max_penalty`; more than `free_tokens`.
        max_penalty (`float`, *optional*, defaults to -1.0): The highest price; 0 or less.

    Returns:
        `Callable`: A reward function, called `length_penalty` in logs.

    Raises:
        [`InputError`]: Lengths out of order, or a positive `max_penalty`.

    Example:

    ```python
    >>> length_penalty(2, 6, max_penalty=-0.5)(completion_ids=[[0] * 2, [0] * 4, [0] * 9])
    [0.0, -0.25, -0.5]

    ```
    """
    refuse_outside("free_tokens", free_tokens, whole(0, remedy="It counts tokens."))
    refuse_outside("limit_tokens", limit_tokens, whole(1, remedy="It counts tokens."))
    refuse_outside("max_penalty", max_penalty, _PENALTY)
    if limit_tokens <= free_tokens:
        remedy = "Raise it, or lower free_tokens."
        raise InputError("limit_tokens", str(limit_tokens), f"more than free_tokens={free_tokens}", remedy)
    return _Scaled(overlong_penalty(limit_tokens, limit_tokens - free_tokens), -max_penalty)


class _Scaled:
    """A reward function times a factor; a class, so that it pickles."""

    __name__ = "length_penalty"

    def __init__(self, reward_func: Callable, factor: float):
        self.reward_func, self.factor = reward_func, factor

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        return [reward * self.factor + 0.0 for reward in self.reward_func(completion_ids=completion_ids)]


def _trl(name: str) -> Callable:
    return getattr(importlib.import_module("trl.rewards"), name)
