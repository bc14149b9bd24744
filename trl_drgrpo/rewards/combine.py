"""Rewards made of rewards: sums with weights, gates, bounds.

TRL adds up `reward_funcs` with weights by itself; what it cannot do is to call one only where another passed, to keep
a part within bounds, or to leave a row out because one part could not score it. Each function here takes reward
functions (or registered names) and returns one, with a name, the columns of all parts, and its parts' means in the
log, so that it can stand in `reward_funcs`, in another composition, and under `checked_reward`.

`None` means unscorable throughout: a sum with a `None` part is `None` unless told otherwise, because a sum without one
of its parts is on another scale, and one row off the scale moves the baseline of its whole group.

How: a rule is a generator that yields the calls it needs next and is sent their rewards. [`Composed`] drives it;
[`AsyncComposed`] does so where a part is asynchronous, with all calls of a round at the same time, so that a judge's
requests are under way while a grader computes.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import finite_number
from trl_drgrpo.rewards.columns import PER_CALL, pass_on_checks
from trl_drgrpo.rewards.contract import Rewards, check_name, innermost, log_mean, reward_name, validate_rewards
from trl_drgrpo.rewards.functions.strings.formats import format_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.signatures import required, select, signature_of


@dataclass
class Part:
    """A reward function that another one calls, with its name and whether it is asynchronous."""

    reward_func: Callable

    def __post_init__(self):
        self.name = reward_name(self.reward_func)
        self.is_async = inspect.iscoroutinefunction(innermost(self.reward_func))

    def called(self, kwargs: dict[str, Any]) -> "PartCall":
        """The call with those of TRL's keywords that the function takes."""
        return PartCall(self, (), select(self.reward_func, kwargs), len(kwargs["completions"]))


@dataclass
class PartCall:
    """One call of a part, and how many rewards are due; `None`: the rule reads the result itself."""

    part: Part
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int | None = None

    def run(self) -> Any:
        """What the function returns: its result, or a coroutine of it."""
        return self.part.reward_func(*self.args, **self.kwargs)

    def read(self, output: Any) -> Any:
        """The rewards, or a `RewardError` that names the part."""
        return output if self.count is None else validate_rewards(output, self.count, self.part.name)


# Yields rounds of calls, is sent the rewards of each, returns its own rewards.
Steps = Generator[list[PartCall], list[Any], Any]


class Composed:
    """A reward function of TRL's form that follows a rule. Its signature asks for every column that a part needs.

    Args:
        name (`str`): Name in logs.
        parts (`Sequence[Part]`): Every reward that the rule may call.
        rule (`Callable[[Composed, dict], Steps]`): The rounds of one call, given this reward and the keywords that TRL
            passes.
        columns (`Sequence[str]`, *optional*): Columns that a call needs. Defaults to those that the parts require.
    """

    def __init__(
        self, name: str, parts: Sequence[Part], rule: Callable[..., Steps], columns: Sequence[str] | None = None
    ):
        self.__name__, self.parts, self.rule = name, list(parts), rule
        self.logged: set[str] = set()  # columns that a part gave to `log_extra`
        functions = [part.reward_func for part in parts]
        needed = [column for function in functions for column in required(function)] if columns is None else columns
        self.__signature__ = signature_of(needed)
        pass_on_checks(self, *functions)

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        steps = self.rule(self, {"completions": completions, **kwargs})
        try:
            calls = next(steps)
            while True:
                calls = steps.send([call.read(call.run()) for call in calls])
        except StopIteration as done:
            return done.value

    def log(self, kwargs: dict[str, Any], key: str, values: Iterable[float | None]) -> None:
        """Logs the mean of values, as a metric of this reward."""
        log_mean(kwargs.get("log_metric"), f"rewards/{self.__name__}/{key}", values)

    def some(self, part: Part, kwargs: dict[str, Any], rows: Sequence[int]) -> list[PartCall]:
        """The round that calls a part for some of the rows: every list of one value per row is cut down to them.

        Columns given to `log_extra` are filled up with `None` for the other rows: TRL wants one value per completion.
        No rows are no call, and the columns that the part logged before are logged as `None`: TRL's table would show
        their last values beside the completions of this call.
        """
        total, log_extra = len(kwargs["completions"]), kwargs.get("log_extra")
        if not rows and log_extra is not None:
            for column in sorted(self.logged):
                log_extra(column, [None] * total)
        if not rows:
            return []
        chosen = {
            key: [value[row] for row in rows] if key not in PER_CALL and _is_column(value, total) else value
            for key, value in kwargs.items()
        }
        if log_extra is not None:

            def log_all(column: str, values: Sequence[Any]) -> None:
                self.logged.add(column)
                found = dict(zip(rows, values, strict=True))
                log_extra(column, [found.get(row) for row in range(total)])

            chosen["log_extra"] = log_all
        return [part.called(chosen)]


class AsyncComposed(Composed):
    """The same where a part is asynchronous. The others run in threads meanwhile, off the main thread."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        steps = self.rule(self, {"completions": completions, **kwargs})
        try:
            calls = next(steps)
            while True:
                calls = steps.send(await _together(calls))
        except StopIteration as done:
            return done.value


def composed(
    name: str, parts: Sequence[Part], rule: Callable[..., Steps], columns: Sequence[str] | None = None, **settings: Any
) -> Composed:
    """A reward function that follows a rule with its settings; asynchronous where one of the parts is."""
    check_name(name)
    kind = AsyncComposed if any(part.is_async for part in parts) else Composed
    return kind(name, parts, functools.partial(rule, **settings), columns)


def _part_of(reward: Any, field: str) -> Part:
    """The reward that an option `field` stands for; refuses what is none, and a model."""
    if isinstance(reward, (str, Mapping)):
        reward = resolve_reward(reward, field)
    if not callable(reward) or inspect.isclass(reward) or hasattr(reward, "state_dict"):
        got = repr(reward) if not callable(reward) else f"the class or model {reward_name(reward)}"
        remedy = "List a reward model in reward_funcs itself instead."
        raise InputError(field, got, "a reward function, an instance of one, or its name", remedy)
    return Part(reward)


def _is_column(value: Any, total: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == total


async def _together(calls: Sequence[PartCall]) -> list[Any]:
    """The rewards of a round; the first error ends the other calls and is raised as it is."""
    tasks = [asyncio.ensure_future(_later(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _later(call: PartCall) -> Any:
    try:
        return call.read(await call.run() if call.part.is_async else await asyncio.to_thread(call.run))
    except SystemExit as error:  # as it is, it would end the event loop and not just this reward
        got = f"SystemExit: {error}"
        remedy = "Raise an exception, or return None for a completion it cannot score."
        raise RewardError(f"reward function '{call.part.name}'", got, "a list of rewards", remedy) from error


def weighted_sum(parts: Any, none: Literal["propagate", "skip"] = "propagate", name: str = "weighted_sum") -> Composed:
    """The sum of rewards times weights.

    Logs each part's mean, without its weight, as `rewards/<name>/<part>`. A sum beyond the range of floats is an error
    of that call, as an infinite reward of any function is.

    Args:
        parts (`Sequence[tuple]` or `Mapping[str, tuple]`): Pairs of a reward function (or its name) and a weight; a
            mapping gives the parts other names in the log than their own.
        none (`str`, *optional*, defaults to `"propagate"`): A part that is `None` makes the sum `None`; `"skip"`: it
            is left out of the sum, which is `None` only where all parts are.
        name (`str`, *optional*, defaults to `"weighted_sum"`): Name in logs.

    Returns:
        `Callable`: A reward function; asynchronous where a part is.

    Raises:
        [`InputError`]: No parts, a weight that is no finite number, two parts of one name, or
            something that is no reward function.

    Example:

    ```python
    >>> from trl_drgrpo.rewards import exact_match_reward
    >>> reward = weighted_sum([(exact_match_reward, 1.0), (format_reward, 0.5)])
    >>> reward(completions=["4", "<think>2+2</think><answer>4</answer>"], answer=["4", "4"], prompts=["2+2=", "2+2="])
    [1.0, 1.5]

    ```
    """
    if none not in ("propagate", "skip"):
        raise InputError(
            "none",
            repr(none),
            "'propagate' or 'skip'",
            "'propagate' skips rows with None, 'skip' sums the other parts.",
        )
    names, found, weights = zip(*_named_parts(parts), strict=True)
    return composed(name, found, _weighted_sum, names=names, weights=weights, skips_none=none == "skip")


def gated(
    reward: Any, gate: Any = format_reward, else_value: float | None = 0.0, at_least: float = 1.0, name: str = ""
) -> Composed:
    """A reward that counts only where another one passed, and is not called for the other rows.

    Logs the share of rows that passed as `rewards/<name>/passed_frac`. A row whose gate is `None` is `None`.

    Args:
        reward (`Callable` or `str`): The reward behind the gate.
        gate (`Callable` or `str`, *optional*): The reward that opens it. Defaults to `format_reward`.
        else_value (`float`, *optional*, defaults to 0.0): Reward of a row that did not pass; `None` leaves it out
            of its group, so that not passing costs nothing.
        at_least (`float`, *optional*, defaults to 1.0): A gate's reward from which on a row passes.
        name (`str`, *optional*): Name in logs. Defaults to `gated_<name of the reward>`.

    Returns:
        `Callable`: A reward function; asynchronous where a part is.

    Raises:
        [`InputError`]: Something that is no reward function, or a value that is not finite.

    Example:

    ```python
    >>> from trl_drgrpo.rewards import exact_match_reward
    >>> reward = gated(exact_match_reward, else_value=-0.5)
    >>> reward(completions=["4", "<think>2+2</think><answer>4</answer>"], answer=["4", "4"], prompts=["2+2=", "2+2="])
    [-0.5, 1.0]

    ```
    """
    if else_value is not None:
        else_value = finite_number("else_value", else_value)
    parts, least = [_part_of(reward, "reward"), _part_of(gate, "gate")], finite_number("at_least", at_least)
    return composed(name or f"gated_{parts[0].name}", parts, _gated, else_value=else_value, at_least=least)


def clipped(reward: Any, low: float = 0.0, high: float = 1.0, name: str = "") -> Composed:
    """A reward kept within bounds. Logs the share of rows that were beyond as `rewards/<name>/clipped_frac`.

    Args:
        reward (`Callable` or `str`): The reward.
        low (`float`, *optional*, defaults to 0.0): Smallest reward.
        high (`float`, *optional*, defaults to 1.0): Largest reward, above `low`.
        name (`str`, *optional*): Name in logs. Defaults to `clipped_<name of the reward>`.

    Returns:
        `Callable`: A reward function; asynchronous where the reward is.

    Raises:
        [`InputError`]: Bounds out of order, or something that is no reward function.
    """
    lowest, highest = finite_number("low", low), finite_number("high", high)
    if not lowest < highest:
        raise InputError("high", repr(high), f"more than low={low!r}", "Swap the bounds.")
    part = _part_of(reward, "reward")
    return composed(name or f"clipped_{part.name}", [part], _clipped, low=lowest, high=highest)


def _weighted_sum(
    reward: Composed, kwargs: dict[str, Any], names: Sequence[str], weights: Sequence[float], skips_none: bool
) -> Steps:
    rewards_per_part = yield [part.called(kwargs) for part in reward.parts]
    for part_name, rewards in zip(names, rewards_per_part, strict=True):
        reward.log(kwargs, part_name, rewards)
    sums = [_sum(row, weights, skips_none) for row in zip(*rewards_per_part, strict=True)]
    return validate_rewards(sums, len(sums), reward.__name__)


def _sum(row: Sequence[float | None], weights: Sequence[float], skips_none: bool) -> float | None:
    present = [weight * reward for weight, reward in zip(weights, row, strict=True) if reward is not None]
    if not present or (len(present) < len(row) and not skips_none):
        return None
    try:
        return math.fsum(present)
    except (OverflowError, ValueError):  # beyond the range of floats, or inf - inf
        return math.inf


def _gated(reward: Composed, kwargs: dict[str, Any], else_value: float | None, at_least: float) -> Steps:
    inner, gate = reward.parts
    [gates] = yield [gate.called(kwargs)]
    passed = [row for row, value in enumerate(gates) if value is not None and value >= at_least]
    open_rows = set(passed)
    reward.log(kwargs, "passed_frac", [float(row in open_rows) for row in range(len(gates))])
    rewards: Rewards = [None if value is None else else_value for value in gates]
    for values in (yield reward.some(inner, kwargs, passed)):
        for row, value in zip(passed, values, strict=True):
            rewards[row] = value
    return rewards


def _clipped(reward: Composed, kwargs: dict[str, Any], low: float, high: float) -> Steps:
    [rewards] = yield [reward.parts[0].called(kwargs)]
    kept = [None if value is None else min(max(value, low), high) for value in rewards]
    reward.log(
        kwargs, "clipped_frac", [None if a is None else float(a != b) for a, b in zip(rewards, kept, strict=True)]
    )
    return kept


def _named_parts(parts: Any) -> list[tuple[str, Part, float]]:
    listed: Any = parts.values() if isinstance(parts, Mapping) else parts
    pairs = [] if isinstance(listed, str) or not isinstance(listed, Iterable) else list(listed)
    expected = "pairs of a reward function and a weight"
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise InputError("parts", repr(parts), expected, "For example `[(math_reward, 1.0), (format_reward, 0.1)]`.")
    found = [_part_of(reward, f"parts[{index}]") for index, (reward, _) in enumerate(pairs)]
    names = list(parts) if isinstance(parts, Mapping) else [part.name for part in found]
    if twice := {name for name in names if names.count(name) > 1}:
        remedy = "Give the parts names: `{'strict': (reward, 1.0), 'lenient': (other, 1.0)}`."
        raise InputError("parts", f"two parts called {min(twice)}", "parts of different names", remedy)
    weights = [finite_number(f"parts[{index}]", weight) for index, (_, weight) in enumerate(pairs)]
    return list(zip(names, found, weights, strict=True))
