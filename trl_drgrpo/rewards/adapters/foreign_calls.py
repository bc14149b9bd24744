"""Calling the functions of other stacks: what all adapters share.

A [`Convention`] says how one stack calls; [`adapted`] makes a reward function of TRL's form from its functions, called
once per completion or once for all; asynchronous where a function is. [`translated`] is for functions that have TRL's
form but for the keywords.

The other stacks keep the correct answer in other columns than TRL's rewards do (verl: `reward_model["ground_truth"]`,
OpenRLHF: `label`), so a column is named by a path (`reward_model.ground_truth`), and where none is named the usual
places of that stack are looked up in order: a [`Place`].
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import PER_CALL
from trl_drgrpo.rewards.combine import Composed, Part, PartCall, Steps, composed
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
from trl_drgrpo.rewards.isolation.pool import Call
from trl_drgrpo.rewards.isolation.worker import Failure, failure_of
from trl_drgrpo.rewards.recipe_rewards import resolve_object
from trl_drgrpo.rewards.sample import column_values, completion_text
from trl_drgrpo.rewards.signatures import signature_of

# What TRL passes to a reward function that is not a column of the dataset.
NOT_COLUMNS = (*PER_CALL, "environments", "prompts", "completions")


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


def read_samples(keywords: Mapping[str, Any], reward: str) -> list[Sample]:
    """The rows of one call, from the lists that TRL passes; `InputError` where one of them is none."""
    completions, prompts = keywords["completions"], keywords.get("prompts")
    count = len(completions)
    given = [""] * count if prompts is None else prompts
    names = [name for name in keywords if name not in NOT_COLUMNS]
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
        advice (`str`, *optional*): What to do where it is missing. Defaults to naming another column.
    """

    what: str
    option: str
    path: str | None
    usual: tuple[str, ...] = ()
    advice: str = ""

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
            self.advice or f"Point {self.option}=... to it, or rename the column.",
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


@dataclass(frozen=True)
class Convention:
    """
    How one stack calls its functions.

    Args:
        row (`Callable[[Sample, str], Any]`): What a call needs of one sample; the second argument is the reward's
            name, for messages.
        call (`Callable[[Callable, list], Call]`): Positional and keyword arguments of a function, for one row or,
            where it takes a batch, for all.
        read (`Callable[[Any], Any]`, *optional*): The number in what the function returned for one completion, `None`:
            unscorable. Defaults to the result itself.
        places (`tuple[Place, ...]`, *optional*): Where the dataset has to have something.
    """

    row: Callable[[Sample, str], Any]
    call: Callable[[Callable, list[Any]], Call]
    read: Callable[[Any], Any] = lambda result: result
    places: tuple[Place, ...] = ()

    def check_columns(self, columns: Iterable[str], reward: str) -> None:
        """Raises [`InputError`] if the dataset lacks a column that a call needs."""
        for place in self.places:
            place.column(columns, reward)

    def rows(self, keywords: Mapping[str, Any], reward: str) -> list[Any]:
        """The rows of one call of TRL's, so that missing columns are the user's error and no sample's."""
        samples = read_samples(keywords, reward)
        for sample in samples[:1]:
            self.check_columns(sample.columns, reward)
        return [self.row(sample, reward) for sample in samples]


def translated(
    function: Callable,
    name: str,
    translate: Callable[[dict[str, Any], str], Call],
    read: Callable[..., Any] | None = None,
    columns: Sequence[str] | None = None,
) -> Composed:
    """A reward function that calls another one once, with what `translate` makes of TRL's keywords, and gives what
    `read(result, log)` finds in its result."""
    return composed(name, [Part(function)], _translated, columns, translate=translate, read=read)


def _translated(
    reward: Composed, kwargs: dict[str, Any], translate: Callable[..., Call], read: Callable[..., Any] | None
) -> Steps:
    [result] = yield [PartCall(reward.parts[0], *translate(kwargs, reward.__name__))]
    return result if read is None else read(result, functools.partial(reward.log, kwargs))


def adapted_batch(function: Callable, convention: Convention, name: str, read: Callable[..., Any]) -> Callable:
    """A reward function of TRL's form from one of another stack that takes a batch; `read(result, log)` finds the
    rewards in what it returns."""
    check_name(name)

    def translate(kwargs: dict[str, Any], reward: str) -> Call:
        return convention.call(function, convention.rows(kwargs, reward))

    reward: Any = translated(function, name, translate, read, columns=())
    reward.check_columns = functools.partial(convention.check_columns, reward=name)
    return reward


def adapted(
    functions: Sequence[Callable],
    convention: Convention,
    *,
    name: str,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
    **options: Any,
) -> Callable:
    """A reward function of TRL's form from those of another stack that score one completion: [`PerCompletion`], whose
    options these are, or its asynchronous form."""
    limits = None if timeout is None else Limits(timeout=timeout)
    check_on_error(on_error)
    check_name(name)
    is_async = any(inspect.iscoroutinefunction(innermost(function)) for function in functions)
    kind = AsyncPerCompletion if is_async else PerCompletion
    reward: Any = kind(functions, convention, name, limits, on_error, **options)
    reward.check_columns = functools.partial(convention.check_columns, reward=name)
    return reward


@dataclass(eq=False)
class PerCompletion:
    """
    A reward function of TRL's form from functions that score one completion each.

    Args:
        functions (`Sequence[Callable]`): The functions; their weighted scores are added. Where there are several, the
            mean of each is logged as `rewards/<name>/<function>`.
        convention ([`Convention`]): How they are called.
        name (`str`): Name in logs and metrics.
        limits ([`Limits`], *optional*): Limits of one call, after which its worker is killed; `None`: none, in this
            process.
        on_error (`str`): What a failure makes of its completion: the function's `lowest_reward`, where it declares one
            and is the only one, else `None`, and a count in `rewards/<name>/failed_frac`; or with `"raise"` an error.
        weights (`Sequence[float]`, *optional*): One per function. Defaults to 1 for one function.
        columns (`Sequence[str]`, *optional*): Columns that a call needs, whatever else it finds.
    """

    functions: Sequence[Callable]
    convention: Convention
    name: str
    limits: Limits | None
    on_error: OnError
    weights: Sequence[float] = (1.0,)
    columns: Sequence[str] = ()

    def __post_init__(self):
        self.__name__, self.__signature__ = self.name, signature_of(self.columns)
        only = self.functions[0] if len(self.functions) == 1 else None
        self.lowest_reward: float | None = declared(only, "lowest_reward")

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        log_metric = kwargs.get("log_metric")
        scores = scored_in_workers(
            self.score,
            [(call, {}) for call in self._calls(completions, kwargs)],
            name=self.__name__,
            limits=self.limits,
            on_error=self.on_error,
            log_metric=log_metric,
            failed=self.lowest_reward,
        )
        return self._added(scores, log_metric)

    def score(self, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Score that one of the functions gives one completion; runs in a worker where there is a time limit."""
        return self.convention.read(self.functions[part](*args, **kwargs))

    def _calls(self, completions: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, Any, Any]]:
        """All calls, completion by completion."""
        return [
            (part, *self.convention.call(function, [row]))
            for row in self.convention.rows({**kwargs, "completions": completions}, self.__name__)
            for part, function in enumerate(self.functions)
        ]

    def _added(
        self, scores: list[float | None], log_metric: Callable[[str, float], None] | None
    ) -> list[float | None]:
        count = len(self.functions)
        if list(self.weights) == [1.0]:
            return scores
        rows = [scores[start : start + count] for start in range(0, len(scores), count)]
        for part, function in enumerate(self.functions):
            log_mean(log_metric, f"rewards/{self.__name__}/{reward_name(function)}", [row[part] for row in rows])
        return [_weighted(row, self.weights) for row in rows]


class AsyncPerCompletion(PerCompletion):
    """[`PerCompletion`] where a function is `async`: all calls of a batch run concurrently, each under the limit."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        log_metric = kwargs.get("log_metric")
        outcomes = await asyncio.gather(*(self._outcome(*call) for call in self._calls(completions, kwargs)))
        scores = settled(list(outcomes), self.__name__, self.on_error, log_metric, self.lowest_reward)
        return self._added(scores, log_metric)

    async def _outcome(self, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | Failure | None:
        try:
            result = self.functions[part](*args, **kwargs)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, self.limits and self.limits.timeout)
            return reward_number(self.convention.read(result), f"reward function '{self.__name__}'")
        except (Exception, SystemExit) as error:  # one completion's; SystemExit would end the event loop
            return failure_of(error)


def _weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    # A function that only watches (weight 0) cannot make a row unscorable.
    counted = [(weight, score) for weight, score in zip(weights, row, strict=True) if weight]
    if any(score is None for _, score in counted):
        return None
    return sum((weight * score for weight, score in counted if score is not None), 0.0)


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
