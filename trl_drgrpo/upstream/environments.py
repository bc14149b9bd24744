"""The environments of a run: looked at before a model loads, then followed from turn to turn.

TRL calls `environment_factory`, makes tools of the methods and runs the loop of model and tools. What an environment
may define on top is in `process_rewards/turns.py`.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.calling import StepScores
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.rules import Turns
from trl_drgrpo.process_rewards.turns import TurnRecord, TurnRewards, check_turn_methods
from trl_drgrpo.upstream.hooks import Feature

logger = logging.getLogger(__name__)


class EnvironmentTurns(Feature):
    """The turns of a run's environments: their rewards, and the states they begin in.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        environment_factory (`Callable` or `dict`, *optional*): As the trainer was given it. Each factory is called
            once; TRL's constructor, which calls it next, gets that instance.

    Attributes:
        factory: What TRL is to be given in its place.
        step_reward_funcs (`list[TurnRewards]`): One per class of environment that rewards its turns.
        has_outcome (`bool`): Whether one of them has a `get_reward`.
        state_keys_of (`list[str]`, *optional*): Classes whose `state_key` is used.

    Raises:
        `InputError`: A factory that cannot be called, or a method that cannot be.
    """

    def __init__(self, trainer: Any, environment_factory: Any = None):
        super().__init__(trainer)
        self.factory, probes = _probed(environment_factory)
        self.classes = list(dict.fromkeys(type(probe) for probe in probes))
        for each in self.classes:
            check_turn_methods(each)
        self.step_reward_funcs = [
            TurnRewards(each, self._begun, trainer.run_async) for each in self._that_define("get_turn_rewards")
        ]
        self.has_outcome = bool(self._that_define("get_reward"))
        self.state_keys_of: list[str] | None = None
        self._record: TurnRecord | None = None

    def _that_define(self, name: str) -> list[type]:
        return [each for each in self.classes if hasattr(each, name)]

    def choose(self, segmenter: StepSegmenter | None, args: Any) -> None:
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
        self._record = None if environments is None else TurnRecord(environments, self.state_keys_of is not None)
        return nullcontext()

    def on_turns_begin(self, rows: Sequence[int]) -> None:
        if self._record is not None:
            self._record.begin(rows)

    def state_keys(self, steps: StepScores) -> list[list[Any]] | None:
        """The states of the newest batch (this rank's rows) that its turns begin in; `None` where none are used."""
        if self._record is None or self.state_keys_of is None:
            return None
        return self._record.states([len(row) for row in steps.rewards])

    def _begun(self) -> list[int]:
        return [len(keys) for keys in self._record.state_keys] if self._record else []


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


def _probed(environment_factory: Any) -> tuple[Any, list[Any]]:
    """The factory, or the dict of them, that hands out what was made here first; and what was made."""
    if environment_factory is None:
        return None, []
    is_dict = isinstance(environment_factory, dict)
    factories = environment_factory if is_dict else {None: environment_factory}
    probes = {}
    for name, factory in factories.items():
        if not callable(factory):
            got = type(factory).__name__ + (f" for {name!r}" if is_dict else "")
            remedy = "Pass the class, or a function that makes one environment per rollout."
            raise InputError("environment_factory", got, "a class or a function", remedy)
        probes[name] = factory()
    handing = {name: _handing_out(probes[name], factory) for name, factory in factories.items()}
    return (handing if is_dict else handing[None]), list(probes.values())


def _handing_out(probe: Any, factory: Callable[[], Any]) -> Callable[[], Any]:
    """A factory whose first product is there already."""
    waiting = [probe]
    return lambda: waiting.pop() if waiting else factory()
