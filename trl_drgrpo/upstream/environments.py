"""The environments of a run: checked before a model loads, then followed from turn to turn.

TRL calls `environment_factory`, makes tools of the methods and runs the loop of model and tools. Methods that an
environment may define in addition are in `process_rewards/turns.py`.

A method that fails costs one row, so each call is guarded. No guard is ever put on a user's class or instance: two
trainers may share the class, and an environment may be frozen, have slots, or copy and pickle itself. TRL's loop of
resets gets stand-ins instead (`_BeforeReset`), and TRL's reward functions are replaced (`outcome_reward`).
"""

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.step_scorer import StepScores
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.segmenter import Turns
from trl_drgrpo.process_rewards.turns import (
    TURN_METHODS,
    Failures,
    TurnRecord,
    TurnRewards,
    check_turn_methods,
    matched_frac,
)
from trl_drgrpo.rewards.contract import OnError, at_once, reward_number
from trl_drgrpo.upstream.argument_types import EnvironmentFactory
from trl_drgrpo.upstream.hooks import Feature

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.trl_overrides import HostTrainer

logger = logging.getLogger(__name__)


class EnvironmentTurns(Feature):
    """The turns of a run's environments: their rewards, and the states they begin in.

    Args:
        environment_factory (`Callable` or `dict`, *optional*): As the trainer was given it. Each factory is called
            twice; TRL, which calls it next, gets these instances.
        on_error (`str`): `"unscorable"`: an environment that fails costs its row, not the run.

    Attributes:
        factory: What TRL is to be given in its place.
        step_reward_funcs (`list[TurnRewards]`): One per class of environment that rewards its turns.
        outcome_rewards (`list[Callable]`): One per class with a `get_reward`, in TRL's order.
        state_keys_of (`list[str]`, *optional*): Classes whose `state_key` is used.
        failures ([`Failures`]): This rank's rows whose environment failed.

    Raises:
        `InputError`: A factory that cannot be called, or shares its environments; a method that cannot be called.
    """

    def __init__(self, environment_factory: EnvironmentFactory | None = None, on_error: OnError = "raise"):
        super().__init__()
        self.failures = Failures(raises=on_error == "raise")
        self.factory, probes = _probed(environment_factory)
        self.classes = list(dict.fromkeys(type(probe) for probe in probes))
        for environment_class in self.classes:
            _check_class(environment_class)
        self.step_reward_funcs: list[TurnRewards] = []
        for environment_class in self._classes_with("get_turn_rewards"):
            turn_rewards = TurnRewards(environment_class, self._turns_begun, self._run_async, self.failures)
            self.step_reward_funcs.append(turn_rewards)
        # TRL makes a reward function of a plain method only, for one class after the other.
        self.outcome_rewards: list[Callable[..., Any]] = []
        for environment_class in self._classes_with("get_reward"):
            if inspect.isfunction(environment_class.get_reward):
                self.outcome_rewards.append(outcome_reward(environment_class, self.failures))
        self.state_keys_of: list[str] | None = None
        self._record: TurnRecord | None = None

    def _classes_with(self, method: str) -> list[Any]:
        return [environment_class for environment_class in self.classes if hasattr(environment_class, method)]

    def _turns_begun(self) -> list[int]:
        return [] if self._record is None else list(map(len, self._record.state_keys))

    def _run_async(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.trainer.run_async(coroutine)  # the trainer does not exist yet when the rewards are built

    def on_trainer_built(self) -> None:
        self.trainer.begin_environments_with(partial(_BeforeReset, self.failures))

    def choose(self, segmenter: StepSegmenter | None, args: "DrGRPOConfig") -> None:
        """Decide what is used, once it is known how completions are cut.

        Args:
            segmenter ([`StepSegmenter`], *optional*): Of the run; `None`: it has no step rewards.
            args ([`DrGRPOConfig`]): With the baseline.

        Raises:
            `InputError`: Rewards of turns where a step is something else.
        """
        by_turn = segmenter is not None and isinstance(segmenter.rule, Turns)
        if self.step_reward_funcs and not by_turn:
            method = f"{self.step_reward_funcs[0].__name__}.get_turn_rewards()"
            remedy = "It gives one number per turn: leave step_separator out."
            raise InputError("step_separator", f"{segmenter!r} with {method}", "'turn'", remedy)
        names = [environment_class.__name__ for environment_class in self._classes_with("state_key")]
        if by_turn and args.step_baseline == "to_go" and args.process_role == "reward":
            self.state_keys_of = names or None
        elif names:
            logger.warning(
                "%s.state_key() is not used: it needs step rewards, turns as steps, step_baseline='to_go' and "
                "process_role='reward'.",
                names[0],
            )

    def rolling_out(self) -> AbstractContextManager[Any]:
        """Begin a batch, right after its environments were reset."""
        if self.trainer.environments is not None:
            # TRL has reset them by now. A slice is a plain list: from here on everybody gets the environments
            # themselves.
            self.trainer.environments = environments = self.trainer.environments[:]
            self._record = TurnRecord(environments, self.state_keys_of is not None, self.failures)
        return nullcontext()

    def on_turns_begin(self, rows: Sequence[int]) -> None:
        if self._record is not None:
            self._record.begin(rows)

    def state_keys(self, steps: StepScores) -> list[list[Any]] | None:
        """Return the states in which the turns of the newest batch begin, for all ranks' rows; `None` if unused."""
        if self._record is None or self.state_keys_of is None:
            return None
        keys = self.trainer.gathered(self._record.states([len(row) for row in steps.rewards]))
        matched = matched_frac(keys, self.trainer.group_size)
        metrics = {} if matched is None else {"process/state_matched_frac": [matched]}
        self.trainer.log_batch(metrics, {})
        return keys

    def failed_rows(self) -> list[int]:
        """Return the rows of all ranks' newest batch that an environment lost, and log their share by class."""
        if self.failures.raises or not self.classes:
            return []
        rows = []
        for row, environment in enumerate(self.trainer.environments or ()):
            rows.append((type(environment).__name__, row in self.failures.rows))
        # Over all ranks before they are counted: each rank must log the same classes, also those it has no row of.
        lost_rows = []
        losses_by_class: dict[str, list[bool]] = {}
        for row, (name, is_lost) in enumerate(self.trainer.gathered(rows)):
            losses_by_class.setdefault(name, []).append(is_lost)
            if is_lost:
                lost_rows.append(row)
        for name, losses in losses_by_class.items():
            self.trainer.log_batch({f"rewards/{name}/failed_frac": [sum(losses) / len(losses)]}, {})
        return lost_rows

    @property
    def lost_rows(self) -> Iterable[int]:
        """This rank's rows whose environment failed."""
        return self.failures.rows


@dataclass
class _GuardedReset:
    """Stands for an environment while TRL resets it."""

    environment: Any
    row: int
    failures: Failures

    def reset(self, /, **columns: Any) -> Any:
        with self.failures.guarding(self.environment, "reset", self.row):
            return self.environment.reset(**columns)


class _BeforeReset(list[Any]):
    """The environments of a batch until they are reset; TRL fills the list.

    TRL looks environments up by their index, to find their tools, and walks through the list once, to reset them. So
    an index gives the environment itself, and only the walk gives stand-ins.
    """

    def __init__(self, failures: Failures):
        super().__init__()
        self._failures = failures

    def __iter__(self) -> Iterator[_GuardedReset]:
        self._failures.rows.clear()  # a batch begins
        for row, environment in enumerate(self[:]):
            yield _GuardedReset(environment, row, self._failures)


class Rewarding(Protocol):
    """An environment with an outcome reward."""

    def get_reward(self) -> Any: ...


def outcome_reward(environment_class: type[Rewarding], failures: Failures) -> Callable[..., Any]:
    """Return a reward function of a class's `get_reward`: TRL's, but an environment that fails costs its row."""
    is_async = inspect.iscoroutinefunction(environment_class.get_reward)
    field = f"{environment_class.__name__}.get_reward"

    async def rewards_async(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        # `None` also where a method fails inside the guard: the row counts as unscorable.
        rewards: list[float | None] = [None] * len(environments)
        for row, environment in enumerate(environments):
            if type(environment) is environment_class:  # as TRL has it: a subclass has a function of its own
                with failures.guarding(environment, "get_reward", row):
                    reward = environment.get_reward()
                    if is_async:
                        reward = await reward
                    rewards[row] = reward_number(reward, field, f"for row {row}")
        return rewards

    # TRL runs functions that are coroutines on its event loop, and calls others. Without an `await`, a coroutine
    # runs to its end at once.
    def rewards_now(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        return at_once(rewards_async(environments, **columns))

    return rewards_async if is_async else rewards_now


def withhold_turn_methods(host: "HostTrainer") -> None:
    """Take methods of turns out of the tools that TRL has made of environments: it spares `reset` and `get_reward`.
    Another tool of the same name stays."""
    if not host.tools:
        return

    def hidden_methods(environment: object) -> list[object]:
        return [getattr(environment, name) for name in TURN_METHODS if hasattr(type(environment), name)]

    # TRL describes the methods of the first environment of each pool to the model, and calls those of each row's.
    # Bound methods are equal where object and function are: `tool in of_pools` spares other tools of the same name.
    of_pools: list[object] = []
    for pool in host._environment_pool.values():
        of_pools += hidden_methods(pool[0])
    for tools in (host.tools, *host._env_tools.values()):
        tools[:] = [tool for tool in tools if tool not in of_pools]
    for row, environment in enumerate(host.environments or ()):
        of_row = hidden_methods(environment)
        for callable_tools in (host._sync_tool_dicts[row], host._async_tool_dicts[row]):
            for name, tool in list(callable_tools.items()):
                if tool in of_row:
                    del callable_tools[name]


class ToolLoop:
    """Tracks which rows of a batch go on in TRL's loop of tools and model; TRL does not report it.

    Args:
        conversations (`list[list[dict]]`): The messages of each row, to which TRL adds; the model has spoken once.
    """

    def __init__(self, conversations: list[list[dict[str, Any]]]):
        self._conversations = conversations
        self._lengths = [len(messages) for messages in conversations]

    def rows_that_go_on(self) -> list[int]:
        """Return the rows that got a tool's result since the last call, and did not lose it to the length limit."""
        rows = []
        for row, messages in enumerate(self._conversations):
            # TRL appends results, takes those back that leave no room, and appends the model's answer in the end. So
            # a row that has answered without a call ends with the assistant, and one without room is not longer.
            if len(messages) > self._lengths[row] and messages[-1]["role"] == "tool":
                rows.append(row)
            self._lengths[row] = len(messages)
        return rows


_NO_TOOLS = ("reset", "get_reward", *TURN_METHODS)


def _check_class(environment_class: type) -> None:
    if not callable(getattr(environment_class, "reset", None)):
        got = f"{environment_class.__name__} without `reset`"
        remedy = "TRL calls it with the columns of a row before each rollout: def reset(self, **kwargs)."
        raise InputError("environment_factory", got, "an environment", remedy)
    check_turn_methods(environment_class)
    tools = []
    for name, method in inspect.getmembers(environment_class, inspect.isfunction):
        if not name.startswith("_") and name not in _NO_TOOLS:
            tools.append(method)
    check_tools("environment_factory", tools)


def check_tools(field: str, tools: Iterable[Any]) -> None:
    """Refuse a tool that no chat template can describe: no function, or without type hints or an `Args:` docstring.

    TRL would find out when it renders the first prompt.
    """
    for tool in tools:
        if not callable(tool):
            raise InputError(field, type(tool).__name__, "functions", "Pass the functions themselves.")
        try:
            get_json_schema(tool)
        except (TypeHintParsingException, DocstringParsingException, ValueError) as error:
            name = getattr(tool, "__qualname__", repr(tool))
            remedy = "Describe each argument under `Args:`; start the name of a method that is no tool with `_`."
            expected = "tools with type hints and a docstring"
            raise InputError(field, f"{name}: {error}", expected, remedy) from error


Factory = Callable[[], Any]


def _probed(environment_factory: EnvironmentFactory | None) -> tuple[Factory | dict[str, Factory] | None, list[Any]]:
    """Return the factory, or the dict of them, and one environment of each. TRL gets the same environments."""
    if environment_factory is None:
        return None, []
    if not isinstance(environment_factory, dict):
        factory, probe = _probed_factory(environment_factory, "")
        return factory, [probe]
    factories = {}
    probes = []
    for name, factory in environment_factory.items():
        factories[name], probe = _probed_factory(factory, f" for {name!r}")
        probes.append(probe)
    return factories, probes


def _probed_factory(factory: Callable[[], object], where: str) -> tuple[Factory, object]:
    """Return a factory that first hands out the two environments made here, and the first of these.

    Two show what one cannot: a factory that gives the same object again, or objects of several classes.
    """
    if not callable(factory):
        remedy = "Pass the class, or a function that makes one environment per rollout."
        raise InputError("environment_factory", type(factory).__name__ + where, "a class or a function", remedy)
    environments: list[object] = []

    def make() -> object:
        environment = factory()
        name = type(environment).__name__
        if any(environment is earlier for earlier in environments):
            remedy = "Make one in each call: rows that share one would play each other's game."
            raise InputError("environment_factory", f"the same {name} twice", "a new environment per call", remedy)
        if environments and type(environment) is not type(environments[0]):
            got = f"{type(environments[0]).__name__}, then {name}"
            remedy = "Pass a dict of factories: {name: factory}."
            raise InputError("environment_factory", got, "environments of one class", remedy)
        environments.append(environment)
        return environment

    waiting = [make(), make()]

    # TRL's constructor takes the first, whose methods it reads; batches take the others.
    def hand_out() -> object:
        return waiting.pop(0) if waiting else make()

    return hand_out, environments[0]
