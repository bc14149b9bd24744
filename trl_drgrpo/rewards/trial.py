"""A trial call of each reward function before a run, with completions in the form that the run's prompts give.

Prompts that are texts give completions that are texts, lists of messages give lists of messages. TRL's own
`accuracy_reward` reads messages only, most functions of other projects read texts only, and some read either without
an error and score nothing: `1 / len(completion)` is 1 for every message. A dry run finds all three.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError, told
from trl_drgrpo.rewards.columns import NEVER_PASSED, Keywords, users_own
from trl_drgrpo.rewards.contract import Rewards, awaited, form_note, reward_name, unheard, validate_rewards
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
        [`RewardError`]: A function that returns no rewards in either form: strings, one number, too few.
    """
    for reward_func in reward_funcs:
        if users_own(reward_func):  # those of this package read both forms
            if isinstance(reward_func, IsolatedReward):
                reward_func = reward_func.reward  # without its worker: its exception must reach this process
            _try(reward_func, row)


def _try(reward_func: Callable, row: Mapping[str, Any]) -> None:
    name = reward_name(reward_func)
    kwargs = _keywords(row)
    # First in the run's own form. Only a function that fails there, or tells nothing apart, is tried in the other one.
    has_messages = are_messages(kwargs["completions"])
    note = form_note(kwargs["completions"])
    rewards, error = _called(reward_func, kwargs, name)
    if len(set(rewards)) > 1:  # it tells the samples apart, so it reads them
        return
    other_rewards, other_error = _called(reward_func, in_other_form(kwargs), name)
    if error is None:
        # One value for all messages may be right, unless their texts get several.
        if len(set(other_rewards)) > 1 and has_messages:
            logger.warning("reward %s gives different messages one value, and their texts several. %s", name, note)
        return
    if _has_returned(error) and _has_returned(other_error):  # in both forms, and what no run can train on
        raise error
    if other_error is not None:  # perhaps it needs a column that only a run has: no reason to refuse it
        logger.warning("reward %s fails on a sample completion: %s.", name, told(error).rstrip("."))
        return
    form, other_form = ("messages", "texts") if has_messages else ("texts", "messages")
    got = f"a function that fails on {form} ({told(error)}) and not on {other_form}"
    raise InputError(f"reward {name}", got, f"a function that reads {form}", note)


def _has_returned(error: BaseException | None) -> bool:
    return isinstance(error, RewardError) and error.has_returned


def _keywords(row: Mapping[str, Any]) -> Keywords:
    """Return the keywords of TRL's call for a group of completions of that row."""
    from transformers import TrainerState

    prompt = row["prompt"]
    count = len(_SAMPLES)
    completions: list[Any] = [*_SAMPLES]
    if not isinstance(prompt, str):
        completions = [as_messages(text, "assistant") for text in _SAMPLES]
    columns = {name: [value] * count for name, value in row.items() if name not in NEVER_PASSED}
    # Three samples of one prompt, as a group of a run. Token ids are made up: no tokenizer is loaded yet.
    return {
        "prompts": [prompt] * count,
        "completions": completions,
        "completion_ids": [list(range(len(text))) for text in _SAMPLES],
        "trainer_state": TrainerState(),
        **columns,
    }


def _called(reward_func: Callable, kwargs: Keywords, name: str) -> tuple[Rewards, Exception | SystemExit | None]:
    """Return the rewards of a call, or no rewards and its exception."""
    try:
        output = awaited(reward_func(**kwargs, log_extra=unheard, log_metric=unheard))
        return validate_rewards(output, len(_SAMPLES), name), None
    except (Exception, SystemExit) as error:
        return [], error
