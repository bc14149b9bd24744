"""The other way round: a reward function of TRL's form, called by a trainer that passes less than TRL does.

Goes away in 0.3 with `to_verl`, `to_openrlhf`, `to_swift` and `to_verifiers`.
"""

import asyncio
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.adapters.samples import NOT_COLUMNS
from trl_drgrpo.rewards.contract import reward_name, validate_rewards
from trl_drgrpo.rewards.signatures import required, select


def _no_log(*_: Any) -> None:
    """Stands in for TRL's `log_metric` and `log_extra` where another trainer calls."""


def call_keywords(
    reward: Callable,
    completions: Sequence[Any],
    prompts: Sequence[Any] | None,
    columns: Mapping[str, Sequence[Any]],
    **more: Any,
) -> dict[str, Any]:
    """The keywords with which TRL would call a reward function, for a trainer that has fewer of them."""
    offered = {
        "prompts": [""] * len(completions) if prompts is None else prompts,
        "completions": completions,
        "trainer_state": None,
        "log_extra": _no_log,
        "log_metric": _no_log,
        **{name: values for name, values in columns.items() if name not in ("prompts", "completions", *NOT_COLUMNS)},
        **more,
    }
    return select(reward, offered)


def score_now(reward: Callable, keywords: dict[str, Any]) -> list[float | None]:
    """Calls a reward function, sync or async, and validates what it returns. Not from within an event loop."""
    result = reward(**keywords)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return validate_rewards(result, len(keywords["completions"]), reward_name(reward))


async def score_later(reward: Callable, keywords: dict[str, Any]) -> list[float | None]:
    """[`score_now`] from within an event loop."""
    result = reward(**keywords)
    if inspect.isawaitable(result):
        result = await result
    return validate_rewards(result, len(keywords["completions"]), reward_name(reward))


async def _awaited(result: Any) -> Any:
    return await result


def warn_of_removal(adapter: str, stack: str) -> None:
    """Says, to the caller of an adapter, that it goes away."""
    message = (
        f"{adapter} will be removed in 0.3. Write the three lines for {stack} yourself (recipes/guides/rewards.md)."
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def refuse_token_ids(reward: Callable, stack: str) -> None:
    """Raises [`InputError`] for a reward that counts tokens, where the other stack passes none."""
    if "completion_ids" in required(reward):
        raise InputError(
            f"reward {reward_name(reward)}",
            "a reward that needs completion_ids",
            f"one that scores text, which is all that {stack} passes to a reward function",
            "Use that stack's own length penalty.",
        )
