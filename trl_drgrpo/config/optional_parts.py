"""Parts of a run that only some settings ask for. A plain run loads none of their modules.

Each has a row in `OPTIONS`, which says where it lives and which setting asks for it. Where an option is not built, an
object with nothing in it stands in its place. Adapters for vLLM, the card's text, isolated rewards and names of
recipes are imported where they are first used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction, StepScores
    from trl_drgrpo.process_rewards.steps import StepSegmenter
    from trl_drgrpo.upstream.argument_types import EnvironmentFactory


@dataclass(frozen=True)
class OptionArguments:
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
    step_reward_funcs: Sequence[Any] = ()
    outcome_rewards: Sequence[Any] = ()
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
        is_asked_for (`Callable[[OptionArguments], bool]`): Says whether a run needs it.
        absent (*optional*): Stands in its place where it is not built.
        takes (`tuple[str, ...]`): Arguments read once, when the trainer is built: assigned later they come too late.
    """

    home: str
    is_asked_for: Callable[[OptionArguments], bool]
    absent: Any = None
    takes: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import and return its class."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"trl_drgrpo.{module}"), name)


OPTIONS = {
    "sampling": Option(
        "features.sampling.prompt_sampling:PromptSampling",
        lambda arguments: bool(arguments.args.dynamic_sampling) or arguments.args.curriculum,
        takes=("dynamic_sampling", "max_sampling_rounds", "curriculum", "curriculum_q_min", "prior_pass_rates"),
    ),
    "forks": Option(
        "features.forks:ForkedRollouts",
        lambda arguments: arguments.args.forks > 1,
        absent=NoForks(),
        takes=("forks", "fork_depth", "fork_at", "fork_threshold"),
    ),
    "turns": Option(
        "upstream.environments:EnvironmentTurns",
        lambda arguments: arguments.environment_factory is not None,
        absent=NoTurns(),
    ),
    # Forks cut behind steps, too.
    "segmenter": Option(
        "process_rewards.steps.segmenter:configured_segmenter",
        lambda arguments: bool(arguments.steps) or arguments.args.forks > 1,
    ),
    "step_scorer": Option("process_rewards.step_scorer:StepScorer", lambda arguments: bool(arguments.steps)),
    "router_balance": Option(
        "features.fast_path.router_balance:RouterBalance",
        lambda arguments: arguments.args.router_aux_scope == "batch",
        takes=("router_aux_scope",),
    ),
    # Memory is planned for the allocator of CUDA alone.
    "memory_watch": Option(
        "single_gpu.memory.warning:MemoryWatch",
        lambda arguments: arguments.args.device.type == "cuda",
    ),
}


def built(name: str, arguments: OptionArguments, *of_class: Any) -> Any:
    """Return an option, built of the arguments of its class; the object in its place where the run does not ask for
    it."""
    option = OPTIONS[name]
    return option.load()(*of_class) if option.is_asked_for(arguments) else option.absent
