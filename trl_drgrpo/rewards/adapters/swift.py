"""ms-swift: classes `ORM` and `AsyncORM`, called as `orm(completions, <columns>, **kwargs) -> list[float]`.

Completions are texts, passed by position (their parameter has more than one name there). Next to the dataset's
columns ms-swift passes `messages` (prompt and completion), `response_token_ids` and `trainer_state`. A class gets the
training arguments as `args`; here a mapping of the few it reads.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.samples import NOT_COLUMNS, as_messages
from trl_drgrpo.rewards.contract import innermost, reward_name
from trl_drgrpo.rewards.text import completion_text

_PASSED = ("messages", "response_token_ids", "trainer_state")


def from_swift(
    orm: Callable | type | str, *, args: Mapping[str, Any] | Any = None, name: str | None = None
) -> Callable:
    """
    An ms-swift reward as a reward function of TRL's form.

    Args:
        orm (`type`, `Callable` or `str`):
            A class derived from `ORM` or `AsyncORM`, an instance of one, a function of that form, or the path of any.
        args (`Mapping[str, Any]`, *optional*):
            The training arguments that the class reads, for example `{"cosine_max_len": 1024, ...}`; any object with
            such attributes will do.
        name (`str`, *optional*):
            Name in logs. Defaults to the class's or function's.

    Returns:
        `Callable`: `f(completions, completion_ids=, prompts=, <columns>) -> list[float | None]`; `async` for an
        `AsyncORM`.

    Raises:
        [`InputError`]: If `orm` cannot be called, or cannot be made from `args`.
    """
    found: Any = foreign_calls.loaded(orm, "orm", "an ORM class, an instance, or the path of one")
    title = name or reward_name(found)
    if inspect.isclass(found):
        found = _instance(found, args)
    elif args is not None:
        raise InputError("args", repr(args)[:100], "none for an instance or a function", "Name the class instead.")
    is_async = inspect.iscoroutinefunction(innermost(found))
    return (_AsyncSwift if is_async else _Swift)(found, title)


def _instance(orm: type, args: Any) -> Any:
    given = SimpleNamespace(**args) if isinstance(args, Mapping) else args
    known = signatures.parameters(orm) or ()
    takes_args = any(p.name == "args" or p.kind is p.VAR_KEYWORD for p in known)
    if not takes_args and args is not None:
        raise InputError("args", repr(args)[:100], f"none: {orm.__name__} takes no args", "Leave them out.")
    try:
        return orm(args=given) if takes_args else orm()
    except AttributeError as error:  # how the classes notice a missing argument
        got = f"{repr(args)[:100]}, with which {orm.__name__} fails: {error}"
        remedy = "Add the attribute that is missing."
        raise InputError("args", got, "the arguments that the class reads", remedy) from error


class _Swift:
    """An ORM, called as ms-swift calls it."""

    def __init__(self, orm: Callable, name: str):
        self.orm, self.__name__ = orm, name
        first, *others = signatures.required(orm) or ["completions"]
        del first  # the completions, whatever they are called
        self.__signature__ = signatures.signature_of([column for column in others if column not in _PASSED])

    def keywords(self, texts: list[str], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments that ms-swift passes by name."""
        columns = {key: values for key, values in kwargs.items() if key not in (*NOT_COLUMNS, "prompts")}
        columns["response_token_ids"] = columns.pop("completion_ids", None)
        prompts = kwargs.get("prompts") or [[]] * len(texts)
        messages = [
            [*as_messages(prompt, "user"), {"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        given = {**columns, "messages": messages, "trainer_state": kwargs.get("trainer_state")}
        return signatures.select(self.orm, given)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        texts = [completion_text(completion) for completion in completions]
        return self.orm(texts, **self.keywords(texts, kwargs))


class _AsyncSwift(_Swift):
    """An AsyncORM, called as ms-swift calls it."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        texts = [completion_text(completion) for completion in completions]
        return await self.orm(texts, **self.keywords(texts, kwargs))
