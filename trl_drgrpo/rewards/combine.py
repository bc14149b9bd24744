"""Rewards made of rewards: sums with weights, gates, bounds.

TRL adds up `reward_funcs` with weights by itself. It cannot call one only if another passed, keep a part within
bounds, or leave a row out because one part could not score it. Each function here takes reward functions (or
registered names) and returns one, with a name, the columns of all parts, and its parts' means in the log. So the
result can stand in `reward_funcs`, in another composition, and under `checked_reward`.

`None` means unscorable throughout: a sum with a `None` part is `None` unless `none="skip"`, because a sum without one
of its parts is on another scale, and one row off the scale moves the baseline of its whole group.

A rule is a coroutine that asks for the rewards of its parts and returns its own. [`Composed`] runs it. If a part is
asynchronous, [`AsyncComposed`] runs all calls of a round at the same time, so that a judge's requests are under way
while a grader computes.
"""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import Choice, finite_number, refuse_outside
from trl_drgrpo.rewards.columns import Keywords, is_async, only_rows, required, select, signature_of
from trl_drgrpo.rewards.contract import Rewards, at_once, check_name, reward_name, validate_rewards
from trl_drgrpo.rewards.functions.strings.formats import format_reward
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


class Composed:
    """A reward function of TRL's form that follows a rule. Its signature asks for every column that a part needs.

    Args:
        name (`str`): Name in logs.
        reward_funcs (`Sequence[Callable]`): Every function that the rule may call, its parts.
        rule (`Callable[[Composed, dict], Awaitable]`): The rewards of one call, given this reward and the keywords
            that TRL passes.
        columns (`Sequence[str]`, *optional*): Columns that a call needs. Defaults to those that the parts require.
        **settings: Further arguments of the rule.
    """

    lowest_reward: float | None = None

    def __init__(
        self,
        name: str,
        reward_funcs: Sequence[Callable],
        rule: Callable[..., Awaitable[Any]],
        columns: Sequence[str] | None = None,
        **settings: Any,
    ):
        check_name(name)
        self.__name__ = name
        self.reward_funcs = tuple(reward_funcs)
        self.rule = functools.partial(rule, **settings)
        self.logged: set[str] = set()  # columns that a part gave to `log_extra`
        if columns is None:
            columns = list(chain.from_iterable(map(required, reward_funcs)))
        self.__signature__ = signature_of(columns)  # from which `check_columns` reads what a call needs

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        return at_once(self.rule(self, {"completions": completions, **kwargs}))  # pyright: ignore[reportArgumentType]

    # `called` and `together` wait for nothing here, so that the same rules serve synchronous rewards: `at_once`.

    async def called(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one of the functions."""
        return function(*args, **kwargs)

    async def together(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """Return the results of several calls."""
        return [await call for call in calls]

    async def scored(self, kwargs: Keywords, *reward_funcs: Callable) -> list[Rewards]:
        """Return the rewards of the parts, each called with those of TRL's keywords that it takes. A `RewardError`
        names a part whose result is invalid."""

        # `select`: a part need not have `**kwargs`, as a function in `reward_funcs` must.
        async def rewards_of(part: Callable) -> Rewards:
            output = await self.called(part, **select(part, kwargs))
            return validate_rewards(output, len(kwargs["completions"]), reward_name(part))

        return await self.together(map(rewards_of, reward_funcs))

    def log(self, kwargs: Keywords, key: str, values: Iterable[float | None]) -> None:
        """Log the mean of the values that are not `None`, if there is one, as a metric of this reward."""
        present = [value for value in values if value is not None]
        log_metric = kwargs.get("log_metric")
        if present and log_metric is not None:
            log_metric(f"rewards/{self.__name__}/{key}", sum(present) / len(present))

    async def some(self, part: Callable, kwargs: Keywords, rows: Sequence[int]) -> Rewards:
        """Return the rewards of a part for some of the rows: each list of one value per row is cut down to them.

        Columns for `log_extra` are filled up with `None` for the other rows: TRL wants one value per completion.
        Without rows the part is not called, and the columns that it logged before are logged as `None`: TRL's table
        would show their last values beside the completions of this call.
        """
        total = len(kwargs["completions"])
        log_extra = kwargs.get("log_extra")
        if not rows:
            if log_extra is not None:
                for column in sorted(self.logged):
                    log_extra(column, [None] * total)
            return []
        chosen = only_rows(kwargs, rows)
        if log_extra is not None:  # stands in for TRL's, with the rows' values in their places

            def log_all(column: str, values: Sequence[Any]) -> None:
                self.logged.add(column)
                values_of_rows: list[Any] = [None] * total
                for row, value in zip(rows, values, strict=True):
                    values_of_rows[row] = value
                log_extra(column, values_of_rows)

            chosen["log_extra"] = log_all
        [rewards] = await self.scored(chosen, part)
        return rewards


class AsyncComposed(Composed):
    """A [`Composed`] reward with an asynchronous part. The other parts run in threads at the same time."""

    async def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Any:
        return await self.rule(self, {"completions": completions, **kwargs})

    async def called(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if is_async(function):
                return await function(*args, **kwargs)
            # A grader that computes in the event loop would keep a judge's requests waiting.
            return await asyncio.to_thread(function, *args, **kwargs)
        except SystemExit as error:  # it would end the event loop and not just this reward
            field = f"reward function '{reward_name(function)}'"
            remedy = "Raise an exception, or return None for a completion it cannot score."
            raise RewardError(field, f"SystemExit: {error}", "a list of rewards", remedy) from error

    async def together(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """Return the results of calls that run at the same time. The first error ends the others and is raised."""
        tasks = list(map(asyncio.ensure_future, calls))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # gather leaves them running behind an error
                task.cancel()


def composed(name: str, reward_funcs: Sequence[Callable], *args: Any, **settings: Any) -> Composed:
    """Return a [`Composed`] reward function; it is asynchronous if one of the functions is."""
    # TRL tells by the function whether to await it, so a class of its own: `__call__` is asynchronous or it is not.
    kind = AsyncComposed if any(map(is_async, reward_funcs)) else Composed
    return kind(name, reward_funcs, *args, **settings)


def _part(reward: object, field: str) -> Callable:
    """Return the reward that an option `field` stands for. Refuses a model, and anything that is no reward."""
    if isinstance(reward, (str, Mapping)):
        reward = resolve_reward(reward, field)
    # `state_dict`: a model. TRL gives it tokens of its own tokenizer, which no rule here has.
    if not callable(reward) or inspect.isclass(reward) or hasattr(reward, "state_dict"):
        got = f"the class or model {reward_name(reward)}" if callable(reward) else repr(reward)
        remedy = "List a reward model in reward_funcs itself instead."
        raise InputError(field, got, "a reward function, an instance of one, or its name", remedy)
    return reward


def weighted_sum(
    parts: object, none: Literal["propagate", "skip"] = "propagate", name: str = "weighted_sum"
) -> Composed:
    """Return the sum of rewards times weights, as a reward.

    Logs each part's mean, without its weight, as `rewards/<name>/<part>`. A sum beyond the range of floats is an error
    of that call, as an infinite reward of any function is.

    Args:
        parts (`Sequence[tuple]` or `Mapping[str, tuple]`): Pairs of a reward function (or its name) and a weight; a
            mapping gives the parts other names in the log than their own.
        none (`str`, *optional*, defaults to `"propagate"`): A part that is `None` makes the sum `None`; `"skip"`: it
            is left out of the sum, which is `None` only if all parts are.
        name (`str`, *optional*, defaults to `"weighted_sum"`): Name in logs.

    Returns:
        `Callable`: A reward function; asynchronous if a part is.

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
    remedy = "'propagate' skips rows with None, 'skip' sums the other parts."
    refuse_outside("none", none, Choice(("propagate", "skip"), remedy))
    names, reward_funcs, weights = zip(*_named_parts(parts), strict=True)
    return composed(name, reward_funcs, _weighted_sum, names=names, weights=weights, skips_none=none == "skip")


def gated(
    reward: object, gate: object = format_reward, else_value: float | None = 0.0, at_least: float = 1.0, name: str = ""
) -> Composed:
    """Return a reward that counts only in rows that another one passes, and is not called for the other rows.

    Logs the share of rows that passed as `rewards/<name>/passed_frac`. A row whose gate is `None` is `None`.

    Args:
        reward (`Callable` or `str`): The reward behind the gate.
        gate (`Callable` or `str`, *optional*): The reward that opens it. Defaults to `format_reward`.
        else_value (`float`, *optional*, defaults to 0.0): Reward of a row that did not pass; `None` leaves it out
            of its group, so that not passing costs nothing.
        at_least (`float`, *optional*, defaults to 1.0): A gate's reward from which on a row passes.
        name (`str`, *optional*): Name in logs. Defaults to `gated_<name of the reward>`.

    Returns:
        `Callable`: A reward function; asynchronous if a part is.

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
    parts = [_part(reward, "reward"), _part(gate, "gate")]
    at_least = finite_number("at_least", at_least)
    name = name or f"gated_{reward_name(parts[0])}"
    return composed(name, parts, _gated, else_value=else_value, at_least=at_least)


def clipped(reward: object, low: float = 0.0, high: float = 1.0, name: str = "") -> Composed:
    """Return a reward within bounds. Logs the share of rows that were beyond as `rewards/<name>/clipped_frac`.

    Args:
        reward (`Callable` or `str`): The reward.
        low (`float`, *optional*, defaults to 0.0): Smallest reward.
        high (`float`, *optional*, defaults to 1.0): Largest reward, above `low`.
        name (`str`, *optional*): Name in logs. Defaults to `clipped_<name of the reward>`.

    Returns:
        `Callable`: A reward function; asynchronous if the reward is.

    Raises:
        [`InputError`]: Bounds out of order, or something that is no reward function.
    """
    lowest = finite_number("low", low)
    highest = finite_number("high", high)
    if not lowest < highest:
        raise InputError("high", repr(high), f"more than low={low!r}", "Swap the bounds.")
    part = _part(reward, "reward")
    return composed(name or f"clipped_{reward_name(part)}", [part], _clipped, low=lowest, high=highest)


async def _weighted_sum(
    reward: Composed, kwargs: Keywords, names: Sequence[str], weights: Sequence[float], skips_none: bool
) -> Rewards:
    rewards_per_part = await reward.scored(kwargs, *reward.reward_funcs)
    for part_name, rewards in zip(names, rewards_per_part, strict=True):
        reward.log(kwargs, part_name, rewards)
    # From one list per part to one sum per row.
    sums: Rewards = []
    for row in zip(*rewards_per_part, strict=True):
        terms = []
        for weight, part in zip(weights, row, strict=True):
            if part is not None:
                terms.append(weight * part)
        total = None
        if terms and (skips_none or len(terms) == len(row)):
            try:
                total = math.fsum(terms)  # exact: the order of the parts does not matter
            except (OverflowError, ValueError):  # beyond the range of floats, or inf - inf
                total = math.inf
        sums.append(total)
    return validate_rewards(sums, len(sums), reward.__name__)  # refuses infinity, as of any reward


async def _gated(reward: Composed, kwargs: Keywords, else_value: float | None, at_least: float) -> Rewards:
    # The gate first and alone: the reward behind it may be expensive, and is asked for the rows that passed.
    inner, gate = reward.reward_funcs
    [gates] = await reward.scored(kwargs, gate)
    rewards: Rewards = [None] * len(gates)
    passes = []
    passed_rows = []
    for row, value in enumerate(gates):
        has_passed = value is not None and value >= at_least
        passes.append(float(has_passed))
        if has_passed:
            passed_rows.append(row)
        elif value is not None:
            rewards[row] = else_value
    reward.log(kwargs, "passed_frac", passes)
    inner_rewards = await reward.some(inner, kwargs, passed_rows)
    for row, value in zip(passed_rows, inner_rewards, strict=True):
        rewards[row] = value
    return rewards


async def _clipped(reward: Composed, kwargs: Keywords, low: float, high: float) -> Rewards:
    [rewards] = await reward.scored(kwargs, *reward.reward_funcs)
    within: Rewards = []
    is_beyond: list[float | None] = []
    for value in rewards:
        bounded = None if value is None else min(max(value, low), high)
        within.append(bounded)
        is_beyond.append(None if value is None else float(value != bounded))
    reward.log(kwargs, "clipped_frac", is_beyond)
    return within


def _named_parts(parts: object) -> list[tuple[str, Callable, float]]:
    """Return name, reward and weight of each part. Refuses parts of one name."""
    values = parts.values() if isinstance(parts, Mapping) else parts
    weighted_rewards = []
    if isinstance(values, Iterable) and not isinstance(values, str):
        weighted_rewards = list(values)
    is_pair = [isinstance(part, (tuple, list)) and len(part) == 2 for part in weighted_rewards]
    if not is_pair or not all(is_pair):
        remedy = "For example `[(math_reward, 1.0), (format_reward, 0.1)]`."
        raise InputError("parts", repr(parts), "pairs of a reward function and a weight", remedy)
    rewards = [_part(reward, f"parts[{index}]") for index, (reward, _) in enumerate(weighted_rewards)]
    names = list(parts) if isinstance(parts, Mapping) else list(map(reward_name, rewards))
    # Each part logs its mean under its name, so names must differ.
    repeated = sorted(name for name in names if names.count(name) > 1)
    if repeated:
        remedy = "Give the parts names: `{'strict': (reward, 1.0), 'lenient': (other, 1.0)}`."
        raise InputError("parts", f"two parts called {repeated[0]}", "parts of different names", remedy)
    weights = [finite_number(f"parts[{index}]", weight) for index, (_, weight) in enumerate(weighted_rewards)]
    return list(zip(names, rewards, weights, strict=True))


register_reward(
    "weighted_sum", help="The weighted sum of several rewards.", factory=weighted_sum, role="wrapper", is_harmless=True
)
register_reward(
    "gated", help="A reward where another one, the gate, is positive.", factory=gated, role="wrapper", is_harmless=True
)
register_reward("clipped", help="A reward, clipped to a range.", factory=clipped, role="wrapper", is_harmless=True)
