"""Calls of other stacks' functions, which all adapters share.

A [`Convention`] says how one stack calls; [`adapted`] makes a reward function of TRL's form from its functions, called
once per completion or once for all; asynchronous where a function is.

The other stacks keep the correct answer in other columns than TRL's rewards do (verl: `reward_model["ground_truth"]`,
OpenRLHF: `label`). So a column is named by a path (`reward_model.ground_truth`), and without a name the usual places
of that stack are tried in order: a [`Place`]. Checkpoints record names of rules and of variables that closures hold.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import PER_CALL, Keywords, parameters
from trl_drgrpo.rewards.combine import AsyncComposed, Composed, composed
from trl_drgrpo.rewards.contract import Limits, OnError, Rewards, check_on_error, declared, reward_name, reward_number
from trl_drgrpo.rewards.isolation.isolated import scored_in_workers, settled
from trl_drgrpo.rewards.isolation.pool import Call
from trl_drgrpo.rewards.isolation.worker import Failure, failure_of
from trl_drgrpo.rewards.recipe_rewards import resolve_object
from trl_drgrpo.rewards.sample import column_values
from trl_drgrpo.rewards.texts import completion_text

# Keywords of TRL's call that are no column of the dataset.
NOT_COLUMNS = (*PER_CALL, "environments", "prompts", "completions")


@dataclass(frozen=True)
class Sample:
    """One completion and its row.

    Args:
        prompt (`str` or `list[dict]`): The prompt in TRL's form; the empty string if TRL does not pass it.
        completion (`str` or `list[dict]`): The completion in TRL's form.
        columns (`dict[str, Any]`): This row's values of the other columns.
    """

    prompt: Any
    completion: Any
    columns: Keywords

    @property
    def text(self) -> str:
        """The completion as one string."""
        return completion_text(self.completion)


@dataclass(frozen=True)
class Place:
    """
    Place of a value in a row.

    Args:
        what (`str`): Its name in messages: `"the ground truth"`.
        option (`str`): The adapter's option that names the column.
        path (`str`, *optional*): The column, or a path into it: `reward_model.ground_truth`.
        usual (`Sequence[str]`): Paths that are tried, in order, without a `path`.
        advice (`str`, *optional*): Remedy if it is missing. Defaults to naming another column.
    """

    what: str
    option: str
    path: str | None
    usual: tuple[str, ...] = ()
    advice: str = ""

    def column(self, columns: Iterable[str], reward: str) -> str:
        """Return the path that applies to a dataset with these columns. Refuses a dataset without any. `reward` is
        its name, for the message."""
        names = list(columns)
        paths = self.usual
        place = f"one of the columns {', '.join(paths)}"
        if self.path:
            paths = (self.path,)
            place = f"the column {self.path!r}"
        for path in paths:
            if path in names or path.split(".")[0] in names:  # a column's own name may have a point in it
                return path
        got = f"a dataset with the columns {', '.join(names) or '(none)'}"
        advice = self.advice or f"Point {self.option}=... to it, or rename the column."
        raise InputError(f"reward {reward}", got, f"{self.what} in {place}", advice)

    def value(self, row: Mapping[str, Any], reward: str) -> Any:
        """Return this row's value; `None` if a mapping on the way there does not have it, or is null."""
        path = self.column(row, reward)
        if path in row:
            return row[path]
        head, *keys = path.split(".")
        value = row[head]
        for key in keys:
            value = decoded(value)  # on each level: Parquet holds mappings, CSV has JSON text
            if value is None:
                return None
            if not isinstance(value, Mapping):
                got = f"a {type(value).__name__} where {path!r} needs a mapping with {key!r}"
                remedy = f"Point {self.option}=... to it."
                raise InputError(f"reward {reward}", got, f"{self.what} under {path!r}", remedy)
            value = value.get(key)
        return value


def decoded(cell: object) -> Any:
    """Return a mapping or a list that a dataset stores as JSON text; anything else as it is."""
    # By its first character: a ground truth `42` is a text, and must not become a number.
    if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    return cell


@dataclass(frozen=True)
class Convention:
    """
    The way in which one stack calls its functions.

    Args:
        row (`Callable[[Sample], dict]`): Makes the values of a call from one sample, under the stack's names.
        call (`Callable[[Callable, dict], Call]`): Makes positional and keyword arguments of a function from the values
            of one row or, if it takes a batch, from lists of them.
        read (`Callable[[Any], Any]`, *optional*): Finds the number in a function's result for one completion, `None`:
            unscorable. Defaults to the result itself.
        places (`Mapping[str, Place]`, *optional*): Values that the dataset must have, by the name of their argument.
    """

    row: Callable[[Sample], Keywords]
    call: Callable[[Any, Keywords], Call]
    read: Callable[[Any], Any] = lambda result: result
    places: Mapping[str, Place] = field(default_factory=dict)

    def check_columns(self, columns: Iterable[str], reward: str) -> None:
        """Refuse a dataset that lacks a column that a call needs."""
        for place in self.places.values():
            place.column(columns, reward)

    def rows(self, keywords: Keywords, reward: str) -> list[Keywords]:
        """Return the rows of one call of TRL's. A missing column is an error of the call, and not of each sample."""
        completions = keywords["completions"]
        prompts = keywords.get("prompts")
        if prompts is None:  # a call by hand may leave them out
            prompts = [""] * len(completions)
        columns = {}
        for name in keywords:
            if name not in NOT_COLUMNS:
                columns[name] = column_values(keywords, name, len(completions), reward)
        if len(completions):
            self.check_columns(columns, reward)
        rows = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[index] for name, values in columns.items()}
            placed = {name: place.value(row, reward) for name, place in self.places.items()}
            # Placed values last: OpenRLHF's functions get the values by position, in this order.
            rows.append({**self.row(Sample(prompt, completion, row)), **placed})
        return rows


def adapted(
    functions: Sequence[Callable],
    convention: Convention,
    name: str,
    *,
    read_batch: Callable | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
    weights: Sequence[float] = (1.0,),
    columns: Sequence[str] = (),
) -> Composed:
    """
    Return a reward function of TRL's form that calls functions of another stack.

    Args:
        functions (`Sequence[Callable]`): The functions; their weighted scores are added. The mean of each of several
            is logged as `rewards/<name>/<function>`. All calls of an asynchronous one run at the same time.
        convention ([`Convention`]): The way in which they are called.
        name (`str`): Name in logs and metrics.
        read_batch (`Callable`, *optional*): The only function is called once per batch, and `read_batch(result, log)`
            finds the rewards in its result. By default a function scores one completion.
        timeout (`float`, *optional*): Seconds of one call, after which its worker is killed; `None`: no limit, in this
            process.
        on_error (`str`): Result of a failure for its completion: the function's `lowest_reward`, if it declares one
            and is the only one, else `None`, and a count in `rewards/<name>/failed_frac`; or with `"raise"` an error.
        weights (`Sequence[float]`, *optional*): One per function. Defaults to 1 for one function.
        columns (`Sequence[str]`, *optional*): Columns that a call needs beside the places.
    """
    check_on_error(on_error)
    limits = None if timeout is None else Limits(timeout=timeout)
    if read_batch is None:
        settings = {"limits": limits, "on_error": on_error, "weights": list(weights)}
        reward: Any = composed(name, functions, _each, columns, convention=convention, **settings)
    else:
        reward = composed(name, functions, _batch, columns, convention=convention, read=read_batch)
    # Of a sum of several functions the lowest value is not known.
    reward.lowest_reward = declared(functions[0], "lowest_reward") if len(functions) == 1 else None
    reward.check_columns = functools.partial(convention.check_columns, reward=name)
    return reward


async def _batch(reward: Composed, kwargs: Keywords, convention: Convention, read: Callable) -> Sequence[Any]:
    # One call scores all completions, so its failure is the call's: the trainer's `on_reward_error` decides.
    rows = convention.rows(kwargs, reward.__name__)
    if not rows:
        return []
    [function] = reward.reward_funcs
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    args, keywords = convention.call(function, columns)
    result = await reward.called(function, *args, **keywords)
    return read(result, functools.partial(reward.log, kwargs))


async def _each(
    reward: Composed,
    kwargs: Keywords,
    convention: Convention,
    limits: Limits | None,
    on_error: OnError,
    weights: list[float],
) -> Rewards:
    functions = reward.reward_funcs
    log_metric = kwargs.get("log_metric")
    # Functions within rows: with two of them the calls are (row 0, f), (row 0, g), (row 1, f) and so on.
    calls = []
    for row in convention.rows(kwargs, reward.__name__):
        for part, function in enumerate(functions):
            calls.append((part, *convention.call(function, row)))
    # Calls of asynchronous functions run at once and here, with `wait_for` as their limit. Other calls with limits run
    # in workers.
    if isinstance(reward, AsyncComposed):
        coroutines = [_outcome(reward, convention.read, limits, *call) for call in calls]
        outcomes = await reward.together(coroutines)
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
    # Every n-th score is of the same function.
    scores_per_function = [scores[part :: len(functions)] for part in range(len(functions))]
    for function, function_scores in zip(functions, scores_per_function, strict=True):
        reward.log(kwargs, reward_name(function), function_scores)
    return [_weighted(row, weights) for row in zip(*scores_per_function, strict=True)]


def _score(
    functions: Sequence[Callable], read: Callable[[Any], Any], part: int, args: tuple[Any, ...], kwargs: Keywords
) -> Any:
    """Return the score of one completion by one of the functions; runs in a worker if there is a time limit."""
    return read(functions[part](*args, **kwargs))


async def _outcome(
    reward: Composed, read: Callable, limits: Limits | None, part: int, args: tuple[Any, ...], kwargs: Keywords
) -> float | Failure | None:
    try:
        result = reward.reward_funcs[part](*args, **kwargs)
        if inspect.isawaitable(result):  # some functions of a rubric may be synchronous
            result = await asyncio.wait_for(result, limits and limits.timeout)
        return reward_number(read(result), f"reward function '{reward.__name__}'")
    except (Exception, SystemExit) as error:  # one completion's; SystemExit would end the event loop
        return failure_of(error)


def _weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    weighted = []
    for weight, score in zip(weights, row, strict=True):
        if not weight:  # only logged: it cannot make a row unscorable
            continue
        if score is None:
            return None
        weighted.append(weight * score)
    return sum(weighted, 0.0)


def loaded(function: object, option: str, what: str = "a function, or the path of one") -> Any:
    """Return the object of an adapter's first argument: itself, or the object at its path `package.module.name` or
    `path/to/file.py:name`. Refuses a path that leads nowhere. `option` and `what` are for the message."""
    if isinstance(function, str):
        function = resolve_object(function, option)
    if not callable(function):
        remedy = "Paths are written `package.module.function` or `path/to/file.py:function`."
        raise InputError(option, f"{type(function).__name__} {function!r}"[:100], what, remedy)
    return function


def taking(function: object, option: str, form: str, count: int, keyword: str = "") -> Any:
    """
    Return the object of an adapter's first argument ([`loaded`]). Refuses a function that its stack could not call,
    before a run rather than on every completion of it: it must take `count` positional arguments, and gets a `keyword`
    that it names. `form` is for the message. A signature that Python cannot read passes.
    """
    reward_func = loaded(function, option)
    function_parameters = parameters(reward_func)
    if function_parameters is None:
        return reward_func
    signature = inspect.Signature(function_parameters)
    keywords = {keyword: None} if keyword in signature.parameters else {}
    try:  # a call with nothing in it, to see whether its form fits
        signature.bind(*[None] * count, **keywords)
    except TypeError as error:
        got = f"{reward_name(reward_func)}{signature} ({error})"
        remedy = "Use the adapter that matches its signature."
        raise InputError(option, got, f"a function of the form {form}", remedy) from error
    return reward_func
