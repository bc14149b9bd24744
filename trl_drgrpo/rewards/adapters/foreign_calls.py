"""Calling the functions of other stacks: what all adapters share.

A [`Convention`] says how one stack calls; [`adapted`] makes a reward function of TRL's form from its functions, called
once per completion or once for all; asynchronous where a function is.

The other stacks keep the correct answer in other columns than TRL's rewards do (verl: `reward_model["ground_truth"]`,
OpenRLHF: `label`), so a column is named by a path (`reward_model.ground_truth`), and where none is named the usual
places of that stack are looked up in order: a [`Place`].
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import PER_CALL, parameters
from trl_drgrpo.rewards.combine import AsyncComposed, Composed, composed
from trl_drgrpo.rewards.contract import Limits, OnError, check_on_error, declared, reward_name, reward_number
from trl_drgrpo.rewards.isolation.isolated import scored_in_workers, settled
from trl_drgrpo.rewards.isolation.pool import Call
from trl_drgrpo.rewards.isolation.worker import Failure, failure_of
from trl_drgrpo.rewards.recipe_rewards import resolve_object
from trl_drgrpo.rewards.sample import column_values
from trl_drgrpo.rewards.texts import completion_text

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
        got = f"a dataset with the columns {', '.join(names) or '(none)'}"
        advice = self.advice or f"Point {self.option}=... to it, or rename the column."
        raise InputError(f"reward {reward}", got, f"{self.what} in {wanted}", advice)

    def value(self, row: Mapping[str, Any], reward: str) -> Any:
        """This row's value; `None` where a mapping on the way there does not have it, or is null."""
        path = self.column(row, reward)
        if path in row:
            return row[path]
        head, *keys = path.split(".")
        value = row[head]
        for key in keys:
            if (value := decoded(value)) is None:
                return None
            if not isinstance(value, Mapping):
                got = f"a {type(value).__name__} where {path!r} needs a mapping with {key!r}"
                remedy = f"Point {self.option}=... to it."
                raise InputError(f"reward {reward}", got, f"{self.what} under {path!r}", remedy)
            value = value.get(key)
        return value


def decoded(cell: Any) -> Any:
    """A mapping or a list that a dataset stores as JSON text; anything else as it is."""
    if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    return cell


@dataclass(frozen=True)
class Convention:
    """
    How one stack calls its functions.

    Args:
        row (`Callable[[Sample], dict]`): What a call needs of one sample, under the stack's names.
        call (`Callable[[Callable, dict], Call]`): Positional and keyword arguments of a function, from the values of
            one row or, where it takes a batch, from lists of them.
        read (`Callable[[Any], Any]`, *optional*): The number in what the function returned for one completion, `None`:
            unscorable. Defaults to the result itself.
        places (`Mapping[str, Place]`, *optional*): What the dataset has to have, and under which name it is passed.
    """

    row: Callable[[Sample], dict[str, Any]]
    call: Callable[[Any, dict[str, Any]], Call]
    read: Callable[[Any], Any] = lambda result: result
    places: Mapping[str, Place] = field(default_factory=dict)

    def check_columns(self, columns: Iterable[str], reward: str) -> None:
        """Raises [`InputError`] if the dataset lacks a column that a call needs."""
        for place in self.places.values():
            place.column(columns, reward)

    def rows(self, keywords: Mapping[str, Any], reward: str) -> list[dict[str, Any]]:
        """The rows of one call of TRL's, so that missing columns are the user's error and no sample's."""
        completions, prompts = keywords["completions"], keywords.get("prompts")
        names = [name for name in keywords if name not in NOT_COLUMNS]
        columns = {name: column_values(keywords, name, len(completions), reward) for name in names}
        if len(completions):
            self.check_columns(columns, reward)
        rows, given = [], [""] * len(completions) if prompts is None else prompts
        for index, (prompt, completion) in enumerate(zip(given, completions, strict=True)):
            own = {name: values[index] for name, values in columns.items()}
            places = {name: place.value(own, reward) for name, place in self.places.items()}
            rows.append({**self.row(Sample(prompt, completion, own)), **places})
        return rows


def adapted(
    functions: Sequence[Callable],
    convention: Convention,
    name: str,
    *,
    read_batch: Callable[..., Any] | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
    weights: Sequence[float] = (1.0,),
    columns: Sequence[str] = (),
) -> Composed:
    """
    A reward function of TRL's form from those of another stack.

    Args:
        functions (`Sequence[Callable]`): The functions; their weighted scores are added. Where there are several, the
            mean of each is logged as `rewards/<name>/<function>`. All calls of an asynchronous one run at the same
            time.
        convention ([`Convention`]): How they are called.
        name (`str`): Name in logs and metrics.
        read_batch (`Callable`, *optional*): The only function is called once per batch, and `read_batch(result, log)`
            finds the rewards in what it returns. By default a function scores one completion.
        timeout (`float`, *optional*): Seconds of one call, after which its worker is killed; `None`: no limit, in this
            process.
        on_error (`str`): What a failure makes of its completion: the function's `lowest_reward`, where it declares one
            and is the only one, else `None`, and a count in `rewards/<name>/failed_frac`; or with `"raise"` an error.
        weights (`Sequence[float]`, *optional*): One per function. Defaults to 1 for one function.
        columns (`Sequence[str]`, *optional*): Columns that a call needs, whatever else it finds.
    """
    check_on_error(on_error)
    limits = None if timeout is None else Limits(timeout=timeout)
    if read_batch is None:
        settings = {"limits": limits, "on_error": on_error, "weights": list(weights)}
        reward: Any = composed(name, functions, _each, columns, convention=convention, **settings)
    else:
        reward = composed(name, functions, _batch, columns, convention=convention, read=read_batch)
    reward.lowest_reward = declared(functions[0], "lowest_reward") if len(functions) == 1 else None
    reward.check_columns = functools.partial(convention.check_columns, reward=name)
    return reward


async def _batch(
    reward: Composed, kwargs: dict[str, Any], convention: Convention, read: Callable[..., Any]
) -> Sequence[Any]:
    rows = convention.rows(kwargs, reward.__name__)
    if not rows:
        return []
    [function] = reward.reward_funcs
    args, given = convention.call(function, {name: [row[name] for row in rows] for name in rows[0]})
    return read(await reward.called(function, *args, **given), functools.partial(reward.log, kwargs))


async def _each(
    reward: Composed,
    kwargs: dict[str, Any],
    convention: Convention,
    limits: Limits | None,
    on_error: OnError,
    weights: list[float],
) -> list[float | None]:
    functions, log_metric = reward.reward_funcs, kwargs.get("log_metric")
    calls = [
        (part, *convention.call(function, row))
        for row in convention.rows(kwargs, reward.__name__)
        for part, function in enumerate(functions)
    ]
    if isinstance(reward, AsyncComposed):
        outcomes = await reward.together([_outcome(reward, convention.read, limits, *call) for call in calls])
        scores = settled(outcomes, reward.__name__, on_error, log_metric, reward.lowest_reward)
    else:
        scores = scored_in_workers(
            functools.partial(_score, functions, convention.read),
            [(call, {}) for call in calls],
            name=reward.__name__,
            limits=limits,
            on_error=on_error,
            log_metric=log_metric,
            failed=reward.lowest_reward,
        )
    if weights == [1.0]:
        return scores
    of_functions = [scores[part :: len(functions)] for part in range(len(functions))]
    for function, own in zip(functions, of_functions, strict=True):
        reward.log(kwargs, reward_name(function), own)
    return [_weighted(row, weights) for row in zip(*of_functions, strict=True)]


def _score(
    functions: Sequence[Callable], read: Callable[[Any], Any], part: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Score that one of the functions gives one completion; runs in a worker where there is a time limit."""
    return read(functions[part](*args, **kwargs))


async def _outcome(
    reward: Composed, read: Callable, limits: Limits | None, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | Failure | None:
    try:
        result = reward.reward_funcs[part](*args, **kwargs)
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, limits and limits.timeout)
        return reward_number(read(result), f"reward function '{reward.__name__}'")
    except (Exception, SystemExit) as error:  # one completion's; SystemExit would end the event loop
        return failure_of(error)


def _weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    # A function that only watches (weight 0) cannot make a row unscorable.
    counted = [(weight, score) for weight, score in zip(weights, row, strict=True) if weight]
    if any(score is None for _, score in counted):
        return None
    return sum((weight * score for weight, score in counted if score is not None), 0.0)


def loaded(function: Any, option: str, what: str = "a function, or the path of one") -> Any:
    """The object that an adapter's first argument stands for: itself, or its path `package.module.name` or
    `path/to/file.py:name`. Refuses a path that leads nowhere. `option` and `what` are for the message."""
    found = resolve_object(function, option) if isinstance(function, str) else function
    if not callable(found):
        remedy = "Paths are written `package.module.function` or `path/to/file.py:function`."
        raise InputError(option, f"{type(found).__name__} {found!r}"[:100], what, remedy)
    return found


def taking(function: Any, option: str, form: str, count: int, keyword: str = "") -> Any:
    """
    As [`loaded`]; refuses also a function that cannot be called as its stack calls it, before a run rather than on
    every completion of it. It must take `count` positional arguments, and gets a `keyword` that it names; `form` says
    so in the message. A signature that Python cannot read passes.
    """
    found = loaded(function, option)
    if (known := parameters(found)) is not None:
        signature = inspect.Signature(known)
        try:
            signature.bind(*[None] * count, **({keyword: None} if keyword in signature.parameters else {}))
        except TypeError as error:
            got, remedy = f"{reward_name(found)}{signature} ({error})", "Use the adapter that matches its signature."
            raise InputError(option, got, f"a function of the form {form}", remedy) from error
    return found
