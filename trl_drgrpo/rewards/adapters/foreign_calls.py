"""Calling the functions of other stacks: what all adapters share.

A [`Convention`] says how one stack calls. [`per_completion`] makes a reward function of TRL's form from functions that
score one completion each, [`batched`] from one that scores all of a call; both are asynchronous where the function is.

The other stacks keep the correct answer in other columns than TRL's rewards do (verl: `reward_model["ground_truth"]`,
OpenRLHF: `label`), so a column is named by a path (`reward_model.ground_truth`), and where none is named the usual
places of that stack are looked up in order: a [`Place`].
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import PER_CALL
from trl_drgrpo.rewards.contract import (
    OnError,
    check_name,
    check_on_error,
    declared,
    innermost,
    log_mean,
    reward_name,
    reward_number,
)
from trl_drgrpo.rewards.isolation.isolated import Limits, scored_in_workers, settled
from trl_drgrpo.rewards.isolation.pool import Call, Failure
from trl_drgrpo.rewards.isolation.worker import failure_of
from trl_drgrpo.rewards.recipe_rewards import resolve_object
from trl_drgrpo.rewards.sample import column_values, completion_text, prompt_text
from trl_drgrpo.rewards.signatures import signature_of

# What TRL passes to a reward function that is not a column of the dataset.
NOT_COLUMNS = (*PER_CALL, "environments")


@dataclass(frozen=True)
class Sample:
    """One completion and its row.

    Args:
        prompt (`str` or `list[dict]`): As TRL hands it over; the empty string where it does not.
        completion (`str` or `list[dict]`): As TRL hands it over.
        columns (`dict[str, Any]`): This row's values of the other columns.
    """

    prompt: Any
    completion: Any
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """The completion as one string."""
        return completion_text(self.completion)


def read_samples(completions: Sequence[Any], keywords: Mapping[str, Any], reward: str) -> list[Sample]:
    """The rows of one call, from the lists that TRL passes; `InputError` where one of them is none."""
    count, prompts = len(completions), keywords.get("prompts")
    given = [""] * count if prompts is None else prompts
    names = [name for name in keywords if name not in (*NOT_COLUMNS, "prompts")]
    columns = {name: column_values(keywords, name, count, reward) for name in names}
    return [
        Sample(prompt, completion, {name: values[row] for name, values in columns.items()})
        for row, (prompt, completion) in enumerate(zip(given, completions, strict=True))
    ]


@dataclass(frozen=True)
class Place:
    """
    Where a value stands in a row.

    Args:
        what (`str`): What is looked for, for the message: `"the ground truth"`.
        option (`str`): The adapter's option that names the column.
        path (`str`, *optional*): The column, or a path into it: `reward_model.ground_truth`.
        usual (`Sequence[str]`): Paths that are tried, in order, where no `path` is given.
    """

    what: str
    option: str
    path: str | None
    usual: tuple[str, ...]

    def column(self, columns: Iterable[str], reward: str) -> str:
        """The path that applies to a dataset with these columns; refuses one without. `reward`: its name, for the
        message."""
        names = list(columns)
        for path in (self.path,) if self.path else self.usual:
            if path in names or path.split(".")[0] in names:
                return path
        wanted = f"the column {self.path!r}" if self.path else f"one of the columns {', '.join(self.usual)}"
        raise InputError(
            f"reward {reward}",
            f"a dataset with the columns {', '.join(names) or '(none)'}",
            f"{self.what} in {wanted}",
            f"Point {self.option}=... to it, or rename the column.",
        )

    def value(self, row: Mapping[str, Any], reward: str) -> Any:
        """This row's value; `None` where a mapping on the way there does not have it, or is null."""
        path = self.column(row, reward)
        if path in row:
            return row[path]
        head, *keys = path.split(".")
        value = decoded(row[head])
        for key in keys:
            if value is None:
                return None
            if not isinstance(value, Mapping):
                raise InputError(
                    f"reward {reward}",
                    f"a {type(value).__name__} where {path!r} needs a mapping with {key!r}",
                    f"{self.what} under {path!r}",
                    f"Point {self.option}=... to it.",
                )
            value = decoded(value.get(key)) if key != keys[-1] else value.get(key)
        return value


def decoded(cell: Any) -> Any:
    """A mapping or a list that a dataset stores as JSON text; anything else as it is."""
    if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    return cell


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Text as one message of that role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def as_text(value: Any, role: str) -> str:
    """Messages as text: of a completion what the model wrote, of a prompt all messages."""
    return completion_text(value) if role == "assistant" else prompt_text(value)


class Convention:
    """Calling convention of one stack: per completion, per batch, or both."""

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        """Positional and keyword arguments for one completion."""
        raise NotImplementedError

    def read(self, result: Any) -> Any:
        """The number in what the function returned for one completion; `None`: unscorable."""
        return result

    def batch_arguments(
        self, function: Callable, completions: Sequence[Any], kwargs: dict[str, Any], reward: str
    ) -> Call:
        """Positional and keyword arguments for all completions. `kwargs`: the others that TRL passes."""
        raise NotImplementedError

    def read_batch(self, result: Any, reward: str, log_metric: Callable[[str, float], None] | None) -> Any:
        """The rewards in what the function returned for all completions."""
        return result

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        """Raises [`InputError`] if the dataset lacks a column that a call needs."""


class Batched:
    """A reward function of TRL's form from one that is called once for all completions."""

    def __init__(self, function: Callable, convention: Convention, name: str, columns: Sequence[str] = ()):
        self.function, self.convention, self.__name__ = function, convention, name
        self.__signature__ = signature_of(columns)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises [`InputError`] if the dataset lacks a column that a call needs."""
        self.convention.check_columns(columns, self.__name__)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        args, keywords = self.convention.batch_arguments(self.function, completions, kwargs, self.__name__)
        result = self.function(*args, **keywords)
        return self.convention.read_batch(result, self.__name__, kwargs.get("log_metric"))


class AsyncBatched(Batched):
    """[`Batched`] for a function that is `async`."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        args, keywords = self.convention.batch_arguments(self.function, completions, kwargs, self.__name__)
        result = await self.function(*args, **keywords)
        return self.convention.read_batch(result, self.__name__, kwargs.get("log_metric"))


def batched(function: Callable, convention: Convention, name: str, columns: Sequence[str] = ()) -> Batched:
    """[`Batched`], or its async form if the function is `async`."""
    kind = AsyncBatched if inspect.iscoroutinefunction(innermost(function)) else Batched
    return kind(function, convention, name, columns)


class PerCompletion:
    """
    A reward function of TRL's form from functions that score one completion each.

    Args:
        functions (`Sequence[Callable]`): The functions; their weighted scores are added. Where there are several, the
            mean of each is logged as `rewards/<name>/<function>`.
        convention ([`Convention`]): Their calling convention.
        name (`str`): Name in logs and metrics.
        weights (`Sequence[float]`, *optional*): One per function. Defaults to 1.
        columns (`Sequence[str]`, *optional*): Columns that a call needs, whatever else it finds.
        timeout (`float`, *optional*): Seconds per completion, after which its worker is killed; `None`: no limit, in
            this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What a failure makes of its completion: the
            function's `lowest_reward`, where it declares one and is the only one, else `None`, and a count in
            `rewards/<name>/failed_frac`; or with `"raise"` an error.
    """

    def __init__(
        self,
        functions: Sequence[Callable],
        convention: Convention,
        *,
        name: str,
        weights: Sequence[float] | None = None,
        columns: Sequence[str] = (),
        timeout: float | None = None,
        on_error: OnError = "unscorable",
    ):
        check_options(timeout, on_error)
        check_name(name)
        self.functions, self.convention, self.__name__ = list(functions), convention, name
        self.weights = [1.0] * len(self.functions) if weights is None else list(weights)
        self.columns, self.timeout = tuple(columns), timeout
        self.on_error: OnError = on_error
        only = self.functions[0] if len(self.functions) == 1 else None
        self.lowest_reward: float | None = declared(only, "lowest_reward")
        self.__signature__ = signature_of(columns)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises [`InputError`] if the dataset lacks a column that a call needs."""
        self.convention.check_columns(columns, self.__name__)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        log_metric = kwargs.get("log_metric")
        scores = scored_in_workers(
            self.score,
            [((part, *call), {}) for part, call in self._calls(completions, kwargs)],
            name=self.__name__,
            limits=None if self.timeout is None else Limits(timeout=self.timeout),
            on_error=self.on_error,
            log_metric=log_metric,
            failed=self.lowest_reward,
        )
        return self._added(scores, log_metric)

    def score(self, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Score that one of the functions gives one completion; runs in a worker where there is a time limit."""
        return self.convention.read(self.functions[part](*args, **kwargs))

    def _calls(self, completions: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, Call]]:
        """All calls, completion by completion, so that missing columns are the user's error and no sample's."""
        return [
            (part, self.convention.arguments(function, sample, self.__name__))
            for sample in read_samples(completions, kwargs, self.__name__)
            for part, function in enumerate(self.functions)
        ]

    def _added(
        self, scores: list[float | None], log_metric: Callable[[str, float], None] | None
    ) -> list[float | None]:
        count = len(self.functions)
        if count == 1 and self.weights == [1.0]:
            return scores
        rows = [scores[start : start + count] for start in range(0, len(scores), count)]
        for part, function in enumerate(self.functions):
            log_mean(log_metric, f"rewards/{self.__name__}/{reward_name(function)}", [row[part] for row in rows])
        return [_weighted(row, self.weights) for row in rows]


class AsyncPerCompletion(PerCompletion):
    """[`PerCompletion`] where a function is `async`: all calls of a batch run concurrently, each under the limit."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, completions: Sequence[Any], **kwargs: Any
    ) -> list[float | None]:
        log_metric = kwargs.get("log_metric")
        calls = self._calls(completions, kwargs)
        outcomes = await asyncio.gather(*(self._outcome(part, *call) for part, call in calls))
        scores = settled(list(outcomes), self.__name__, self.on_error, log_metric, self.lowest_reward)
        return self._added(scores, log_metric)

    async def _outcome(self, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | Failure | None:
        try:
            result = self.functions[part](*args, **kwargs)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, self.timeout)
            return reward_number(self.convention.read(result), f"reward function '{self.__name__}'")
        except (Exception, SystemExit) as error:  # one completion's; SystemExit would end the event loop
            return Failure(*failure_of(error))


def per_completion(functions: Sequence[Callable], convention: Convention, **options: Any) -> PerCompletion:
    """[`PerCompletion`], or its async form if one of the functions is `async`."""
    is_async = any(inspect.iscoroutinefunction(innermost(function)) for function in functions)
    return (AsyncPerCompletion if is_async else PerCompletion)(functions, convention, **options)


def _weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    # A function that only watches (weight 0) cannot make a row unscorable.
    counted = [(weight, score) for weight, score in zip(weights, row, strict=True) if weight]
    if any(score is None for _, score in counted):
        return None
    return sum((weight * score for weight, score in counted if score is not None), 0.0)


def check_options(timeout: float | None, on_error: OnError) -> None:
    """Raises [`InputError`] for a time limit or an `on_error` that means nothing."""
    if timeout is not None:
        Limits(timeout=timeout)
    check_on_error(on_error)


def check_takes(function: Callable, option: str, form: str, count: int, keywords: Sequence[str] = ()) -> None:
    """
    Refuses a function that cannot be called as its stack calls it, before a run rather than on every completion of it.

    `option` is the adapter's name for it, `form` how it is called, both for the message. It must take `count`
    positional arguments, and gets those `keywords` that it names. A signature that Python cannot read passes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * count, **{name: None for name in keywords if name in signature.parameters})
    except TypeError as error:
        got = f"{reward_name(function)}{signature} ({error})"
        raise InputError(
            option, got, f"a function of the form {form}", "Use the adapter that matches its signature."
        ) from error


def loaded(function: Any, option: str, what: str = "a function, or the path of one") -> Any:
    """The object that an adapter's first argument stands for: itself, or its path `package.module.name` or
    `path/to/file.py:name`. Refuses a path that leads nowhere. `option` and `what` are for the message."""
    found = resolve_object(function, option) if isinstance(function, str) else function
    if not callable(found):
        remedy = "Paths are written `package.module.function` or `path/to/file.py:function`."
        raise InputError(option, f"{type(found).__name__} {found!r}"[:100], what, remedy)
    return found
