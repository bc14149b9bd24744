"""A call of each reward function before a run: does it read completions in the form that the run's prompts give?

Prompts that are texts give completions that are texts, lists of messages give lists of messages. TRL's own
`accuracy_reward` reads messages only, most functions of other projects read texts only, and some read either without
an error and score nothing: `1 / len(completion)` is 1 for every message. A dry run finds all three.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, told
from trl_drgrpo.rewards.columns import NEVER_PASSED, users_own
from trl_drgrpo.rewards.contract import Rewards, form_note, reward_name, validate_rewards
from trl_drgrpo.rewards.isolation.isolated import IsolatedReward
from trl_drgrpo.rewards.texts import are_messages, as_messages, in_other_form

logger = logging.getLogger(__name__)

_SAMPLES = (
    "I do not know.",
    r"6 times 7 is 42, so the answer is \boxed{42}.",
    "<think>\nLet me see: 6 times 7.\n</think>\n<answer>42</answer>",
)


def try_rewards(reward_funcs: Sequence[Any], row: Mapping[str, Any]) -> None:
    """
    Call every reward function that holds one of the user's or of TRL's with sample completions of one row.

    Args:
        reward_funcs (`Sequence`): Reward functions; models, ids of models and functions of this package are passed
            over: these read both forms.
        row (`Mapping[str, Any]`): A row of the dataset, its prompt included.

    Raises:
        [`InputError`]: A function that fails in the form of this prompt, and not in the other one. One that fails in
            both, or gives messages one value and texts several, is a warning.
    """
    for reward_func in reward_funcs:
        if users_own(reward_func):
            # Without its worker: what it raises is to be seen here.
            _try(reward_func.reward if isinstance(reward_func, IsolatedReward) else reward_func, row)


def _try(reward_func: Callable, row: Mapping[str, Any]) -> None:
    name, kwargs = reward_name(reward_func), _keywords(row)
    note = form_note(kwargs["completions"])
    rewards, error = _called(reward_func, kwargs, name)
    if error is None and len(set(rewards)) > 1:
        return
    of_others, error_of_others = _called(reward_func, in_other_form(kwargs), name)
    if error is None:
        if error_of_others is None and len(set(of_others)) > 1 and are_messages(kwargs["completions"]):
            logger.warning("reward %s gives different messages one value, and their texts several. %s", name, note)
        return
    if error_of_others is not None:
        logger.warning("reward %s fails on a sample completion: %s.", name, told(error))
        return
    forms = ("messages", "texts") if are_messages(kwargs["completions"]) else ("texts", "messages")
    got = f"a function that fails on {forms[0]} ({told(error)}) and not on {forms[1]}"
    raise InputError(f"reward {name}", got, f"a function that reads {forms[0]}", note)


def _keywords(row: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of TRL's call for a group of completions of that row."""
    from transformers import TrainerState

    prompt, count = row["prompt"], len(_SAMPLES)
    completions: list[Any] = [*_SAMPLES]
    if not isinstance(prompt, str):
        completions = [as_messages(text, "assistant") for text in _SAMPLES]
    columns = {name: [value] * count for name, value in row.items() if name not in NEVER_PASSED}
    return {
        "prompts": [prompt] * count,
        "completions": completions,
        "completion_ids": [list(range(len(text))) for text in _SAMPLES],
        "trainer_state": TrainerState(),
        **columns,
    }


def _called(reward_func: Callable, kwargs: dict[str, Any], name: str) -> tuple[Rewards, Exception | SystemExit | None]:
    """The rewards of a call, or its exception."""

    def unheard(*args: Any) -> None:
        """Stands in for TRL's loggers."""

    try:
        output = reward_func(**kwargs, log_extra=unheard, log_metric=unheard)
        output = asyncio.run(_result(output)) if inspect.isawaitable(output) else output
        return validate_rewards(output, len(_SAMPLES), name), None
    except (Exception, SystemExit) as error:
        return [], error


async def _result(awaitable: Any) -> Any:
    return await awaitable
