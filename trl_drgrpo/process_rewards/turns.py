"""Turns of an environment: what they earn and the states they begin in. A turn is a step; knows nothing of TRL.

Beside `reset`, its tools and `get_reward`, an environment may define, each of them without arguments:

- `get_turn_rewards() -> list[float]`: once per finished rollout, one number (or `None`) per turn. A step reward
  function of its own, called by the class's name; may be asynchronous;
- `state_key() -> Hashable`: when a turn begins. Turns that begin in equal states are compared with each other;
- `on_turn_begin()`: when a turn begins, before `state_key`. An environment sees nothing of the model but the calls of
  its tools, so it cannot count the turns otherwise: one may call two tools, another none, or one that does not exist.

The model never sees these methods.
"""

import copy
import inspect
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError, shortened
from trl_drgrpo.process_rewards.step_scorer import RaggedRewards, gathered
from trl_drgrpo.rewards.columns import parameters
from trl_drgrpo.rewards.contract import listed, reward_number, to_fix

logger = logging.getLogger(__name__)

TURN_METHODS = ("on_turn_begin", "state_key", "get_turn_rewards")


def check_turn_methods(environment_class: type) -> None:
    """Refuse an environment whose methods for turns cannot be called.

    Raises:
        `InputError`: Names the method.
    """
    for name in TURN_METHODS:
        method = getattr(environment_class, name, None)
        field = f"{environment_class.__name__}.{name}"
        if method is None:
            continue
        if not callable(method):
            raise InputError(field, type(method).__name__, "a method", "Define it with `def`, without arguments.")
        # Options count as arguments, since a tool has them; `*args` and `**kwargs` do not.
        passes_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        arguments = sum(parameter.kind not in passes_on for parameter in parameters(method) or ())
        # The wrapper of a static or class method, which `getattr` takes off.
        is_bound = isinstance(inspect.getattr_static(environment_class, name), (staticmethod, classmethod))
        if arguments > (not is_bound):  # `self` is one
            expected = f"a method without arguments: the name is one of {', '.join(TURN_METHODS)}"
            remedy = "The trainer calls these and the model does not see them: give a tool another name."
            raise InputError(field, f"{name}{inspect.signature(method)}", expected, remedy)
        if name != "get_turn_rewards" and inspect.iscoroutinefunction(method):
            remedy = "It is called between a tool and the model: use `def`. get_turn_rewards may be asynchronous."
            raise InputError(field, "an asynchronous method", "a plain one", remedy)


class Failures:
    """Counts environments that fail, or ends the run.

    Args:
        raises (`bool`): `True`: a failure is a [`RewardError`]. `False`: its row is left out of its group, and the
            first traceback is logged.

    Attributes:
        rows (`set[int]`): Rows of the newest batch whose environment failed.
    """

    def __init__(self, raises: bool = True):
        self.raises = raises
        self.rows: set[int] = set()
        self._has_logged = False

    @contextmanager
    def guarding(self, environment: object, method: str, row: int, turn: int | None = None) -> Iterator[None]:
        """Guard a call of a method. Where rows may be lost, the block just ends at its failure.

        Raises:
            `RewardError`: Names class, method, row and turn.
        """
        try:
            yield
        except RewardError as error:  # names the method already
            self._settle(error, error.__cause__, row)
        except (Exception, SystemExit) as error:  # a user's method: the run ends with a checkpoint, or goes on
            place = f"row {row}"
            if turn is not None:
                place += f", turn {turn}"
            remedy = "Fix the method; its traceback is with this message."
            if self.raises:
                remedy = to_fix(error, what="method")
            field = f"{type(environment).__name__}.{method}"
            failure = RewardError(field, f"{type(error).__name__}: {error} for {place}", "no error", remedy)
            self._settle(failure, error, row)

    def _settle(self, failure: RewardError, cause: BaseException | None, row: int) -> None:
        if self.raises:
            raise failure from cause
        self.rows.add(row)
        if not self._has_logged:
            self._has_logged = True
            logger.error(
                "An environment failed; its row is left out of its group. Further failures are only counted in "
                "rewards/%s/failed_frac. Where the model's calls can cause them, catch them and pay the lowest "
                "reward: a failure that costs nothing is learned. %s",
                failure.field.partition(".")[0],
                failure,
                exc_info=cause,
            )


def matched_frac(state_keys: Sequence[Sequence[Hashable | None]], num_generations: int) -> float | None:
    """Return the share of later turns (a row's second and on) whose state another row of the group passed as well.

    Args:
        state_keys (`B` lists of hashables): The state of each turn; `None` = unknown.
        num_generations (`int`): Rows per group.

    Returns:
        `float`, or `None` where all rows have one turn.
    """
    matched = 0
    turns = 0
    for start in range(0, len(state_keys), num_generations):
        group = state_keys[start : start + num_generations]
        rows_at = Counter(chain(*map(set, group)))  # a row counts once, however often it passed the state
        for keys in group:
            # All rows of a group share their first state, so it says nothing.
            for key in keys[1:]:
                matched += key is not None and rows_at[key] > 1
                turns += 1
    if turns == 0:
        return None
    return matched / turns


def _has_value(key: object) -> bool:
    """Tell whether a key can be hashed and equals its copy, as NaN, `object()` and tensors do not."""
    with suppress(Exception):
        # Keys of other ranks arrive pickled.
        return pickle.loads(pickle.dumps(key)) in {key}
    # An object of a class inside a function cannot be pickled. One that is its own deep copy may equal nothing else.
    with suppress(Exception):
        copied = copy.deepcopy(key)
        return copied is not key and copied in {key}
    return False


@dataclass(eq=False)
class TurnRecord:
    """The turns of a generation batch, as its environments go through them.

    Args:
        environments (`list`): One per row.
        reads_states (`bool`): Whether `state_key` is called.
        failures ([`Failures`], *optional*): Cost of a failing method; the run by default.

    Attributes:
        state_keys (`list[list[Hashable | None]]`): For each row the state that each turn began in; `None` = unknown.
    """

    environments: Sequence[Any]
    reads_states: bool
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self):
        self.state_keys: list[list[Hashable | None]] = [[] for _ in self.environments]

    def begin(self, rows: Sequence[int]) -> None:
        """Tell the environments of some rows that a turn begins, and read their states.

        Raises:
            `RewardError`: A method that fails, or a state that no other can equal; names the row and the turn.
        """
        for row in rows:
            self._ask(row, "on_turn_begin")
            key = None
            if self.reads_states:
                key = self._ask(row, "state_key")
            # Keys are compared over rows and ranks: one that equals nothing else would never match.
            if not _has_value(key):
                got = f"{type(key).__name__} {shortened(key)} for row {row}, turn {len(self.state_keys[row])}"
                field = f"{type(self.environments[row]).__name__}.state_key"
                remedy = "Return a text, a number or a tuple of these."
                raise RewardError(field, got, "a hashable that equals its copy", remedy)
            self.state_keys[row].append(key)

    def states(self, turns: Sequence[int]) -> list[list[Hashable | None]]:
        """Return the states of the turns that each row has; all are `None` where the environment failed.

        Args:
            turns (`B` ints): Turns per row. An empty last turn, which begins and is cut off, does not count.
        """
        states = []
        for row, count in enumerate(turns):
            keys = self.state_keys[row][:count]
            if row in self.failures.rows:
                keys = []
            unknown = [None] * (count - len(keys))
            states.append([*keys, *unknown])
        return states

    def _ask(self, row: int, name: str) -> Any:
        """Call a method of a row's environment, where it has one."""
        environment = self.environments[row]
        if hasattr(type(environment), name):
            with self.failures.guarding(environment, name, row, len(self.state_keys[row])):
                return getattr(environment, name)()
        return None


@dataclass(eq=False)
class TurnRewards:
    """Step reward function from the turn rewards of one environment class.

    Args:
        environment_class (`type`): Has `get_turn_rewards`. Rows of other environments get `None`.
        begun (`Callable[[], list[int]]`): Number of turns begun per row of the newest batch.
        run_async (`Callable`): Runs a coroutine in the event loop that runs the environment's own.
        failures ([`Failures`], *optional*): Cost of a failing environment; the run by default.
    """

    environment_class: type
    begun: Callable[[], list[int]]
    run_async: Callable[[Coroutine[Any, Any, Any]], Any]
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self):
        self.__name__ = self.environment_class.__name__
        self.is_causal: bool | None = getattr(self.environment_class, "is_causal", None)

    def __call__(self, environments: Sequence[Any], steps: Sequence[Sequence[str]], **kwargs: Any) -> RaggedRewards:
        """Return one number per turn; `None` for all turns of a row where the method failed.

        Args:
            environments (`list`): One per row, each at the end of its rollout.
            steps (`B` lists of `K_i` texts): The turns.

        Raises:
            `RewardError`: The method failed; or gave no list, another number of rewards than of turns, or an infinite
                one. Names the row.
        """
        rewards: RaggedRewards = [[None] * len(turns) for turns in steps]
        outputs = {}  # by row
        for i, environment in enumerate(environments):
            if type(environment) is self.environment_class:
                with self.failures.guarding(environment, "get_turn_rewards", i):
                    outputs[i] = environment.get_turn_rewards()
        # An asynchronous method gives coroutines for all rows: they wait together.
        if outputs and all(map(inspect.isawaitable, outputs.values())):
            results = self.run_async(gathered(outputs.values()))
            outputs = dict(zip(outputs, results, strict=True))
        for i, output in outputs.items():
            with self.failures.guarding(environments[i], "get_turn_rewards", i):
                rewards[i] = self._per_turn(output, i, len(steps[i]))
        return rewards

    def _per_turn(self, output: object, row: int, turns: int) -> list[float | None]:
        if isinstance(output, BaseException):  # `gathered` returns what a coroutine has raised
            raise output
        rewards = listed(output)
        field = f"{self.__name__}.get_turn_rewards"
        expected = f"{turns}, one per turn of the model"
        if not isinstance(rewards, list | tuple):
            raise RewardError(field, f"{type(rewards).__name__} for row {row}", f"a list of {expected}", "Return one.")
        numbers = []
        for turn, reward in enumerate(rewards):
            numbers.append(reward_number(reward, field, f"for turn {turn} of row {row}"))
        if len(numbers) == turns + 1 == self.begun()[row] and turns:
            # The model had no room left for the turn that the last tool result began, so the turn before it earned
            # what is paid there.
            extra = numbers.pop()
            if extra is not None:
                numbers[-1] = extra + (numbers[-1] or 0)
        if len(numbers) != turns:
            remedy = "Append a 0 in `on_turn_begin`, which is called once per turn, with or without tool calls."
            raise RewardError(field, f"{len(numbers)} rewards for row {row}", expected, remedy)
        return numbers
