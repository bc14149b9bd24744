"""Common base of rewards made of other rewards: calls parts, on some of the rows, now or later.

A rule says what to call and what to make of it, as a generator: it yields the calls it needs next and is sent their
rewards. `Composed` drives it; `AsyncComposed` does so where a part is asynchronous, with all calls of a round at the
same time, so that a judge's requests are under way while a grader computes.

Parts keep the contract of TRL's reward functions, and what they return is validated as the trainer's own call would.
"""

import asyncio
import inspect
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.rows import ColumnValues
from trl_drgrpo.rewards.columns import PER_CALL, check_own_columns, check_ready, check_values
from trl_drgrpo.rewards.contract import check_name, innermost, reward_name, validate_rewards
from trl_drgrpo.rewards.registry import resolve_reward
from trl_drgrpo.rewards.signatures import required, select, signature_of

Rewards = list[float | None]


class Part:
    """A reward function as part of another.

    Args:
        reward_func (`Callable`, `str` or `Mapping`): The function, or what `resolve_reward` takes.
        field (`str`): Name of the setting in error messages.

    Raises:
        [`InputError`]: Something that is no reward function; a model cannot be a part.
    """

    def __init__(self, reward_func: Any, field: str):
        if isinstance(reward_func, (str, Mapping)):
            reward_func = resolve_reward(reward_func, field)
        if not callable(reward_func) or inspect.isclass(reward_func) or hasattr(reward_func, "state_dict"):
            got = repr(reward_func) if not callable(reward_func) else f"the class or model {reward_name(reward_func)}"
            remedy = "List a reward model in reward_funcs itself instead."
            raise InputError(field, got, "a reward function, an instance of one, or its name", remedy)
        self.reward_func = reward_func
        self.name = reward_name(reward_func)
        self.is_async = inspect.iscoroutinefunction(innermost(reward_func))

    def call(self, kwargs: dict[str, Any]) -> Any:
        """Calls the function with the keywords that it takes; returns its rewards, or a coroutine of them."""
        return self.reward_func(**select(self.reward_func, kwargs))


@dataclass
class PartCall:
    """One call of a part: with which keywords, and how many rewards are due."""

    part: Part
    kwargs: dict[str, Any]

    def validated(self, output: Any) -> Rewards:
        """The rewards, or a `RewardError` that names the part."""
        return validate_rewards(output, len(self.kwargs["completions"]), self.part.name)


# Yields rounds of calls, is sent the rewards of each, returns its own rewards.
Steps = Generator[list[PartCall], list[Rewards], Rewards]


class Rule:
    """A reward composed of parts.

    Args:
        parts (`Sequence[Part]`): Every reward that it may call.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = list(parts)

    def steps(self, name: str, kwargs: dict[str, Any]) -> Steps:
        """The rounds of one call. `name`: of the composed reward, for its metrics; `kwargs`: as TRL passes them."""
        raise NotImplementedError


class Composed:
    """A reward function of TRL's form that follows a rule. Its signature asks for every column that a part needs.

    Args:
        name (`str`): Name in logs.
        rule ([`Rule`]): Function to call and use of its result.
    """

    def __init__(self, name: str, rule: Rule):
        self.__name__ = name
        self.rule = rule
        self.__signature__ = signature_of([column for part in rule.parts for column in required(part.reward_func)])

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Rewards:
        steps = self.rule.steps(self.__name__, {"completions": completions, **kwargs})
        try:
            calls = next(steps)
            while True:
                calls = steps.send([call.validated(call.part.call(call.kwargs)) for call in calls])
        except StopIteration as done:
            return done.value

    def check(self) -> None:
        """Every part's own check."""
        for part in self.rule.parts:
            check_ready(part.reward_func)

    def check_columns(self, columns: Sequence[str]) -> None:
        """The parts' own checks of the columns."""
        for part in self.rule.parts:
            check_own_columns(part.reward_func, columns)

    def check_values(self, values: Mapping[str, ColumnValues]) -> None:
        """Runs the parts' own checks on the values of their columns."""
        for part in self.rule.parts:
            check_values(part.reward_func, values)


class AsyncComposed(Composed):
    """The same where a part is asynchronous. The others run in threads meanwhile, off the main thread."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Rewards:  # type: ignore[override]
        steps = self.rule.steps(self.__name__, {"completions": completions, **kwargs})
        try:
            calls = next(steps)
            while True:
                calls = steps.send(await _together(calls))
        except StopIteration as done:
            return done.value


def composed(rule: Rule, name: str) -> Composed:
    """A reward function that follows a rule; asynchronous where one of the parts is."""
    check_name(name)
    kind = AsyncComposed if any(part.is_async for part in rule.parts) else Composed
    return kind(name, rule)


def rows_of(kwargs: dict[str, Any], rows: Sequence[int], logged: set[str]) -> dict[str, Any]:
    """
    The keywords of a call with `B` completions for some of its rows: every list of `B` values is cut down to them.

    Columns given to `log_extra` are filled up with `None` for the other rows: TRL wants one value per completion.
    `logged` gets the names of these columns, for [`log_nothing`].
    """
    total = len(kwargs["completions"])
    chosen = {
        key: [value[row] for row in rows] if key not in PER_CALL and _is_column(value, total) else value
        for key, value in kwargs.items()
    }
    if (log_extra := kwargs.get("log_extra")) is not None:

        def log_all(column: str, values: Sequence[Any]) -> None:
            logged.add(column)
            found = dict(zip(rows, values, strict=True))
            log_extra(column, [found.get(row) for row in range(total)])

        chosen["log_extra"] = log_all
    return chosen


def log_nothing(kwargs: dict[str, Any], logged: set[str]) -> None:
    """Logs `None` for every completion in the columns that a part logged before, in a call that leaves it out.

    Without this TRL's table would show the values of the last call that had some beside the completions of this one.
    """
    if (log_extra := kwargs.get("log_extra")) is not None:
        for column in sorted(logged):
            log_extra(column, [None] * len(kwargs["completions"]))


def _is_column(value: Any, total: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == total


async def _together(calls: Sequence[PartCall]) -> list[Rewards]:
    """The rewards of a round; the first error ends the other calls and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_later(call)) for call in calls]
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
    return [task.result() for task in tasks]


async def _later(call: PartCall) -> Rewards:
    try:
        if call.part.is_async:
            return call.validated(await call.part.call(call.kwargs))
        return call.validated(await asyncio.to_thread(call.part.call, call.kwargs))
    except SystemExit as error:  # as it is, it would end the event loop and not just this reward
        got = f"SystemExit: {error}"
        remedy = "Raise an exception, or return None for a completion it cannot score."
        raise RewardError(f"reward function '{call.part.name}'", got, "a list of rewards", remedy) from error
