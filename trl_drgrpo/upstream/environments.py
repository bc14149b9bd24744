"""The environments of a run: looked at before a model loads, then followed from turn to turn.

TRL calls `environment_factory`, makes tools of the methods and runs the loop of model and tools. What an environment
may define on top is in `process_rewards/turns.py`.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.scoring import StepScores
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
from trl_drgrpo.upstream.private_state import swapped

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
        has_outcome (`bool`): Whether one of them has a `get_reward`.
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
        for each in self.classes:
            if not callable(getattr(each, "reset", None)):
                remedy = "TRL calls it with the columns of a row before each rollout: def reset(self, **kwargs)."
                raise InputError("environment_factory", f"{each.__name__} without `reset`", "an environment", remedy)
            check_turn_methods(each)
            methods = inspect.getmembers(each, inspect.isfunction)
            own = [method for name, method in methods if name[0] != "_" and name not in _NO_TOOLS]
            check_tools("environment_factory", own)
        self.step_reward_funcs = [
            TurnRewards(each, self._begun, lambda coroutine: self.trainer.run_async(coroutine), self.failures)
            for each in self._that_define("get_turn_rewards")
        ]
        self.has_outcome = bool(self._that_define("get_reward"))
        self.state_keys_of: list[str] | None = None
        self._record: TurnRecord | None = None

    def _that_define(self, name: str) -> list[type]:
        return [each for each in self.classes if hasattr(each, name)]

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
            got, remedy = f"{segmenter!r} with {method}", "It gives one number per turn: leave step_separator out."
            raise InputError("step_separator", got, "'turn'", remedy)
        names = [each.__name__ for each in self._that_define("state_key")]
        if by_turn and args.step_baseline == "to_go" and args.process_role == "reward":
            self.state_keys_of = names or None
        elif names:
            logger.warning(
                "%s.state_key() is not used: it needs step rewards, turns as steps, step_baseline='to_go' and "
                "process_role='reward'.",
                names[0],
            )

    def rolling_out(self) -> AbstractContextManager[Any]:
        """A batch begins, right after its environments were reset."""
        environments = self.trainer.environments
        if environments is not None:
            self._record = TurnRecord(environments, self.state_keys_of is not None, self.failures)
        return nullcontext()

    def on_turns_begin(self, rows: Sequence[int]) -> None:
        if self._record is not None:
            self._record.begin(rows)

    def state_keys(self, steps: StepScores) -> list[list[Any]] | None:
        """The states of the newest batch (all ranks' rows) that its turns begin in; `None` where none are used."""
        if self._record is None or self.state_keys_of is None:
            return None
        keys = self.trainer.gathered(self._record.states([len(row) for row in steps.rewards]))
        matched = matched_frac(keys, self.trainer.group_size)
        self.trainer.log_batch({} if matched is None else {"process/state_matched_frac": [matched]}, {})
        return keys

    @contextmanager
    def making_batch(self) -> Iterator[None]:
        """Inside, a `reset` or `get_reward` that fails costs what it shall. TRL calls them: they are swapped on the
        class for the time of a batch."""
        with ExitStack() as stack:
            for each in self.classes:
                names = [name for name in ("reset", "get_reward") if hasattr(each, name)]
                stack.enter_context(swapped(each, **{name: self._guarded(each, name) for name in names}))
            yield

    def _guarded(self, environment_class: type, name: str) -> Callable[..., Any]:
        original = inspect.getattr_static(environment_class, name)
        is_async = inspect.iscoroutinefunction(original)

        async def later(environment: object, /, *args: Any, **columns: Any) -> Any:
            row = next((i for i, other in enumerate(self.trainer.environments or ()) if other is environment), None)
            if name == "reset" and row == 0:
                self.failures.rows.clear()  # a batch begins
            with self.failures.guarding(environment, name, row):
                value = original.__get__(environment)(*args, **columns)
                value = await value if is_async else value
                if name == "reset" or row is None:
                    return value
                return reward_number(value, f"{environment_class.__name__}.{name}", f"for row {row}")

        def now(environment: object, /, *args: Any, **columns: Any) -> Any:
            return at_once(later(environment, *args, **columns))

        return later if is_async else now

    def failed_rows(self) -> list[int]:
        """Rows of all ranks' newest batch that an environment lost; their share is logged by class."""
        if self.failures.raises or not self.classes:
            return []
        names = [type(environment).__name__ for environment in self.trainer.environments or ()]
        everywhere = self.trainer.gathered([(name, row in self.failures.rows) for row, name in enumerate(names)])
        failed = {name: [is_lost for each, is_lost in everywhere if each == name] for name, _ in everywhere}
        shares = {f"rewards/{name}/failed_frac": [sum(rows) / len(rows)] for name, rows in failed.items()}
        self.trainer.log_batch(shares, {})
        return [row for row, (_, is_lost) in enumerate(everywhere) if is_lost]

    @property
    def lost_rows(self) -> Iterable[int]:
        """This rank's rows whose environment failed."""
        return self.failures.rows

    def _begun(self) -> list[int]:
        return [len(keys) for keys in self._record.state_keys] if self._record else []


def withhold_turn_methods(host: "HostTrainer") -> None:
    """Take methods of turns out of the tools that TRL has made of environments: it spares `reset` and `get_reward`.
    Another tool of the same name stays."""
    if not host.tools:
        return

    def hidden_methods(environment: object) -> list[object]:
        return [getattr(environment, name) for name in TURN_METHODS if hasattr(type(environment), name)]

    # TRL describes the methods of the first environment of each pool to the model, and calls those of each row's.
    of_pools: list[object] = []
    for pool in host._environment_pool.values():
        of_pools += hidden_methods(pool[0])
    for tools in (host.tools, *host._env_tools.values()):
        tools[:] = [tool for tool in tools if tool not in of_pools]
    for row, environment in enumerate(host.environments or ()):
        of_row = hidden_methods(environment)
        for callable_tools in (host._sync_tool_dicts[row], host._async_tool_dicts[row]):
            for name in [name for name, tool in callable_tools.items() if tool in of_row]:
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
        """Rows that got a tool's result since the last call. TRL takes back one that exceeds the length limit."""
        lengths, self._lengths = self._lengths, [len(messages) for messages in self._conversations]
        return [
            row
            for row, (before, messages) in enumerate(zip(lengths, self._conversations, strict=True))
            if len(messages) > before and messages[-1]["role"] == "tool"
        ]


_NO_TOOLS = ("reset", "get_reward", *TURN_METHODS)


def check_tools(field: str, tools: Iterable[Any]) -> None:
    """Refuses a tool that no chat template can describe: one that is no function, or lacks type hints or a docstring
    of its arguments. TRL would find out when it renders the first prompt."""
    for tool in tools:
        if not callable(tool):
            remedy = "Pass the functions themselves."
            raise InputError(field, type(tool).__name__, "functions", remedy)
        try:
            get_json_schema(tool)
        except (TypeHintParsingException, DocstringParsingException, ValueError) as error:
            name, expected = getattr(tool, "__qualname__", repr(tool)), "tools with type hints and a docstring"
            remedy = "Describe each argument under `Args:`; start the name of a method that is no tool with `_`."
            raise InputError(field, f"{name}: {error}", expected, remedy) from error


def _probed(environment_factory: EnvironmentFactory | None) -> tuple[EnvironmentFactory | None, list[object]]:
    """The factory, or the dict of them, that hands out what was made here first; and what was made."""
    if environment_factory is None:
        return None, []
    if not isinstance(environment_factory, dict):
        factory, probe = _handing_out(environment_factory)
        return factory, [probe]
    factories = {}
    probes = []
    for name, factory in environment_factory.items():
        factories[name], probe = _handing_out(factory, f" for {name!r}")
        probes.append(probe)
    return factories, probes


def _handing_out(factory: Callable[[], object], place: str = "") -> tuple[Callable[[], object], object]:
    """A factory whose first two products are there already, and the first: all are new ones of one class."""
    if not callable(factory):
        remedy = "Pass the class, or a function that makes one environment per rollout."
        raise InputError("environment_factory", type(factory).__name__ + place, "a class or a function", remedy)
    made: list[object] = []

    def make() -> object:
        new = factory()
        name = type(new).__name__
        if any(new is environment for environment in made):
            remedy = "Make one in each call: rows that share one would play each other's game."
            raise InputError("environment_factory", f"the same {name} twice", "a new environment per call", remedy)
        if made and type(new) is not type(made[0]):
            got, remedy = f"{type(made[0]).__name__}, then {name}", "Pass a dict of factories: {name: factory}."
            raise InputError("environment_factory", got, "environments of one class", remedy)
        made.append(new)
        return new

    waiting = [make(), make()]
    return (lambda: waiting.pop(0) if waiting else make()), made[0]
