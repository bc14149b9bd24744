"""Parts of a run that only some settings ask for. A plain run loads none of their modules.

One row of `OPTIONS` for each: what asks for it, and where it lives. What is not built is what a user of the trainer
reads in its place. Adapters for vLLM, the card's text, isolated rewards and names of recipes are imported where they
are first used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.process_rewards.scoring import StepRewardFunction, StepScores
    from trl_drgrpo.process_rewards.steps import StepSegmenter
    from trl_drgrpo.upstream.argument_types import EnvironmentFactory


@dataclass(frozen=True)
class Given:
    """Arguments of a trainer that may ask for an option.

    Args:
        args ([`DrGRPOConfig`]): The configuration.
        environment_factory (*optional*): As given to the trainer.
        steps (`Sequence`): All step reward functions, those of environments too.
    """

    args: "DrGRPOConfig"
    environment_factory: "EnvironmentFactory | None" = None
    steps: Sequence["StepRewardFunction"] = ()


class NoForks:
    """Stands for `trainer.forks` where no group forks."""

    of_all_ranks = None


class NoTurns:
    """Stands for `trainer.turns` where there are no environments."""

    factory = state_keys_of = None
    step_reward_funcs: Sequence["StepRewardFunction"] = ()
    has_outcome = False
    lost_rows: Sequence[int] = ()

    def choose(self, segmenter: "StepSegmenter | None", args: "DrGRPOConfig") -> None:
        """Chooses nothing."""

    def failed_rows(self) -> list[int]:
        """No rows."""
        return []

    def state_keys(self, steps: "StepScores") -> None:
        """No states."""


@dataclass(frozen=True)
class Option:
    """A part of a run that a setting asks for.

    Args:
        home (`str`): `"module:Class"`.
        is_asked_for (`Callable[[Given], bool]`): Says whether a run needs it.
        absent (*optional*): Stands in its place where it is not built.
        takes (`tuple[str, ...]`): Arguments read once, when the trainer is built: assigned later they come too late.
    """

    home: str
    is_asked_for: Callable[[Given], bool]
    absent: Any = None
    takes: tuple[str, ...] = ()

    def load(self) -> Any:
        """Its class."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"trl_drgrpo.{module}"), name)


OPTIONS = {
    "sampling": Option(
        "features.sampling.prompt_sampling:PromptSampling",
        lambda given: bool(given.args.dynamic_sampling) or given.args.curriculum,
        takes=("dynamic_sampling", "max_sampling_rounds", "curriculum", "curriculum_q_min", "prior_pass_rates"),
    ),
    "forks": Option(
        "features.forks:ForkedRollouts",
        lambda given: given.args.forks > 1,
        absent=NoForks(),
        takes=("forks", "fork_depth", "fork_at", "fork_threshold"),
    ),
    "turns": Option(
        "upstream.environments:EnvironmentTurns",
        lambda given: given.environment_factory is not None,
        absent=NoTurns(),
    ),
    "segmenter": Option(
        "process_rewards.steps.segmenter:configured_segmenter",
        lambda given: bool(given.steps) or given.args.forks > 1,
    ),
    "step_scorer": Option("process_rewards.scoring:StepScorer", lambda given: bool(given.steps)),
    "memory_watch": Option(
        "single_gpu.memory.warning:MemoryWatch",
        lambda given: given.args.device.type == "cuda",  # other allocators are not planned
    ),
}


def built(name: str, given: Given, *arguments: Any) -> Any:
    """An option made of its arguments; what stands in its place where the run does not ask for it."""
    option = OPTIONS[name]
    return option.load()(*arguments) if option.is_asked_for(given) else option.absent
