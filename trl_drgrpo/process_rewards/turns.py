"""Turns of an environment: what they earn and the states they begin in. A turn is a step; knows nothing of TRL.

Beside `reset`, its tools and `get_reward`, an environment may define, each of them without arguments:

- `get_turn_rewards() -> list[float]`: once per finished rollout, one number (or `None`) per turn. A step reward
  function of its own, called by the class's name; may be asynchronous;
- `state_key() -> Hashable`: when a turn begins. Turns that begin in equal states are compared with each other;
- `on_turn_begin()`: when a turn begins, before `state_key`. An environment sees nothing of the model but the calls of
  its tools, so it cannot count the turns otherwise: one may call two tools, another none, or one that does not exist.

The model never sees these methods.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError, shortened

TURN_METHODS = ("on_turn_begin", "state_key", "get_turn_rewards")


def check_turn_methods(environment_class: type) -> None:
    """Refuse an environment whose methods for turns cannot be called.

    Raises:
        `InputError`: Names the method.
    """
    for name in TURN_METHODS:
        method = getattr(environment_class, name, None)
        field = f"{environment_class.__name__}.{name}"
        if method is not None and not callable(method):
            raise InputError(field, type(method).__name__, "a method", "Define it with `def`, without arguments.")
        if name != "get_turn_rewards" and inspect.iscoroutinefunction(method):
            remedy = "It is called between a tool and the model: use `def`. get_turn_rewards may be asynchronous."
            raise InputError(field, "an asynchronous method", "a plain one", remedy)


class TurnRecord:
    """The turns of a generation batch, as its environments go through them.

    Args:
        environments (`list`): One per row.
        reads_states (`bool`): Whether `state_key` is asked.

    Attributes:
        state_keys (`list[list[Hashable | None]]`): For each row the state that each turn began in; `None` = unknown.
    """

    def __init__(self, environments: Sequence[Any], reads_states: bool):
        self.environments = environments
        self.reads_states = reads_states
        self.state_keys: list[list[Hashable | None]] = [[] for _ in environments]

    def begin(self, rows: Sequence[int]) -> None:
        """A turn of some rows begins: their environments are told, and asked for their state.

        Raises:
            `RewardError`: A method that fails, or a state that cannot be hashed; names the row and the turn.
        """
        for row in rows:
            self._ask(row, "on_turn_begin")
            key = self._ask(row, "state_key") if self.reads_states else None
            try:
                hash(key)
            except TypeError:
                raise self._error(
                    row,
                    "state_key",
                    f"{type(key).__name__} {shortened(key)}",
                    "something hashable",
                    "Return a text, a number or a tuple of these.",
                ) from None
            self.state_keys[row].append(key)

    def states(self, turns: Sequence[int]) -> list[list[Hashable | None]]:
        """The states of the turns that each row has.

        Args:
            turns (`B` ints): How many there are: an empty last turn, which begins and is cut off, is none.
        """
        return [[*keys[:n], *[None] * (n - len(keys))] for keys, n in zip(self.state_keys, turns, strict=True)]

    def _ask(self, row: int, name: str) -> Any:
        environment = self.environments[row]
        if not hasattr(type(environment), name):
            return None
        try:
            return getattr(environment, name)()
        except Exception as error:  # a user's method: what was computed up to here is saved before the run ends
            got = f"{type(error).__name__}: {error}"
            raise self._error(row, name, got, "no error", "Fix the method (traceback above).") from error

    def _error(self, row: int, name: str, got: str, expected: str, remedy: str) -> RewardError:
        where = f"for row {row}, turn {len(self.state_keys[row])}"
        return RewardError(f"{type(self.environments[row]).__name__}.{name}", f"{got} {where}", expected, remedy)


class TurnRewards:
    """Step reward function from the turn rewards of one environment class.

    Args:
        environment_class (`type`): Has `get_turn_rewards`. Rows of other environments get `None`.
        begun (`Callable[[], list[int]]`): Number of turns begun per row of the newest batch.
        run_async (`Callable`): Runs a coroutine where the environment's own run.
    """

    def __init__(
        self,
        environment_class: type,
        begun: Callable[[], list[int]],
        run_async: Callable[[Coroutine[Any, Any, Any]], Any],
    ):
        self.environment_class, self.begun, self.run_async = environment_class, begun, run_async
        self.__name__ = environment_class.__name__
        self.is_causal: bool | None = getattr(environment_class, "is_causal", None)

    def __call__(
        self, environments: Sequence[Any], steps: Sequence[Sequence[str]], **kwargs: Any
    ) -> list[list[float | None]]:
        """One number per turn.

        Args:
            environments (`list`): One per row, each at the end of its rollout.
            steps (`B` lists of `K_i` texts): The turns.

        Raises:
            `RewardError`: Not a list, or another number of rewards than of turns; names the row and both counts.
        """
        rewards: list[list[float | None]] = [[None] * len(turns) for turns in steps]
        rows = [i for i, each in enumerate(environments) if type(each) is self.environment_class]
        outputs = [environments[i].get_turn_rewards() for i in rows]
        if outputs and inspect.isawaitable(outputs[0]):
            outputs = self.run_async(_all(outputs))
        for i, output in zip(rows, outputs, strict=True):
            rewards[i] = self._per_turn(output, i, len(steps[i]))
        return rewards

    def _per_turn(self, output: Any, row: int, turns: int) -> list[float | None]:
        output = output.tolist() if hasattr(output, "tolist") else output
        field, expected = f"{self.__name__}.get_turn_rewards", f"{turns}, one per turn of the model"
        if not isinstance(output, (list, tuple)):
            raise RewardError(field, f"{type(output).__name__} for row {row}", f"a list of {expected}", "Return one.")
        if len(output) == turns + 1 == self.begun()[row] and turns:
            # The model had no room left for the turn that the last tool result began: what is paid there was earned
            # before.
            return [*output[: turns - 1], _sum(output[turns - 1 :])]
        if len(output) != turns:
            remedy = (
                "Append a 0 to them in `on_turn_begin`, which is called once per turn, with or without tool calls."
            )
            raise RewardError(field, f"{len(output)} rewards for row {row}", expected, remedy)
        return list(output)


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*coroutines)


def _sum(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) if known else None
