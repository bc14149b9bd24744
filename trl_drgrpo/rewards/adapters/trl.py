"""TRL and open-r1: the same call, but written for one of the two forms that completions come in.

With plain data completions are strings, with conversational data lists of messages; a function written for
`completion[0]["content"]` fails on the first, one written for strings on the second.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.adapters.foreign_calls import loaded
from trl_drgrpo.rewards.adapters.samples import as_messages, as_text
from trl_drgrpo.rewards.columns import pass_on_checks
from trl_drgrpo.rewards.contract import innermost, reward_name
from trl_drgrpo.rewards.registry import resolve_reward

_FORMS: dict[str, Callable[[Any, str], Any]] = {"messages": as_messages, "text": as_text}


def from_trl(
    function: Callable | str, *, completions_as: Literal["messages", "text"] | None = None, name: str | None = None
) -> Callable:
    """
    A reward function of TRL's form that is given completions in the form it was written for.

    Args:
        function (`Callable` or `str`):
            The reward function, or its name or path; sync or async.
        completions_as (`str`, *optional*):
            `"messages"`: text becomes a message of the assistant (a prompt: of the user); `"text"`: messages become
            text, of a completion the last one of the assistant. Defaults to passing them as they come.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.

    Returns:
        `Callable`: Same call, same required columns.

    Raises:
        [`InputError`]: For another form, or a function that cannot be found.

    Example:

    ```python
    >>> def open_r1_style(completions, **kwargs):
    ...     return [float(len(completion[0]["content"])) for completion in completions]
    >>> from_trl(open_r1_style, completions_as="messages")(completions=["four"])
    [4.0]

    ```
    """
    if completions_as is not None and completions_as not in _FORMS:
        remedy = "Leave it out to pass them as they come."
        raise InputError("completions_as", repr(completions_as), '"messages" or "text"', remedy)
    if isinstance(function, str):
        function = resolve_reward(function, "function")
    return _wrapped(loaded(function, "function"), completions_as, name)


def _wrapped(function: Callable, completions_as: str | None, name: str | None) -> Callable:
    convert = _FORMS.get(completions_as or "", lambda value, role: value)

    def keywords(completions: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        if given.get("prompts") is not None:
            given = {**given, "prompts": [convert(prompt, "user") for prompt in given["prompts"]]}
        return {**given, "completions": [convert(completion, "assistant") for completion in completions]}

    async def scored_later(completions: Sequence[Any], **kwargs: Any) -> Any:
        return await function(**keywords(completions, kwargs))

    def scored_now(completions: Sequence[Any], **kwargs: Any) -> Any:
        return function(**keywords(completions, kwargs))

    scored: Any = scored_later if inspect.iscoroutinefunction(innermost(function)) else scored_now
    scored.__name__ = scored.__qualname__ = name or reward_name(function)
    scored.__doc__ = inspect.getdoc(function)
    scored.__signature__ = inspect.signature(function)
    pass_on_checks(scored, function)
    return scored
