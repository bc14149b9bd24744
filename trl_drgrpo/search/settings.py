"""The settings of a search, checked before a model loads."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import RANGES, Range, positive, refuse_outside, whole
from trl_drgrpo.process_rewards.steps import StepSegmenter, step_segmenter
from trl_drgrpo.process_rewards.steps.rules import Turns
from trl_drgrpo.rewards.contract import OnError, check_on_error

Strategy = Literal["best_of_n", "beam", "puct"]
PathValue = Literal["min", "product", "last"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PATH_VALUES: tuple[str, ...] = get_args(PathValue)


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Args:
        strategy (`str`): `"best_of_n"`, `"beam"` or `"puct"`.
        budget_tokens (`int`): Tokens that may be sampled for a problem, at least `max_completion_length`. Every
            sampled token counts, in rollouts and in steps that are thrown away too; prompts do not.
        max_completion_length (`int`, *optional*, defaults to `512`): A completion is cut here.
        width (`int`, *optional*, defaults to `4`): Steps that beam search keeps.
        children (`int`, *optional*, defaults to `4`): Continuations that are sampled from a step: one step each with a
            process reward model, to the end without one. From the prompt beam search samples `width` times as many.
        step_separator (`str`, `list[str]`, ...): As in `DrGRPOConfig`; a line break by default. `"turn"` is refused.
        path_value (`str`, *optional*, defaults to `"min"`): Value of a path by its step scores: the smallest, their
            `"product"`, or the `"last"`.
        exploration (`float`, *optional*, defaults to `1.0`): `c` in PUCT's formula.
        accept_above (`float`, *optional*, defaults to `0.5`): A completion is correct if its reward is larger.
        temperature (`float`, *optional*, defaults to `1.0`): Of the sampling, more than 0.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus of the sampling.
        seed (`int`, *optional*, defaults to `0`): Of the sampling.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per forward pass, or requests under way at a
            server.
        problems_at_once (`int`, *optional*, defaults to `8`): Problems whose continuations share forward passes.
        on_reward_error (`str`, *optional*, defaults to `"raise"`): As in `DrGRPOConfig`.

    Raises:
        `InputError`: A setting out of its range.
    """

    strategy: Strategy
    budget_tokens: int
    max_completion_length: int = 512
    width: int = 4
    children: int = 4
    step_separator: Any = "\n"
    path_value: PathValue = "min"
    exploration: float = 1.0
    accept_above: float = 0.5
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32
    problems_at_once: int = 8
    on_reward_error: OnError = "raise"

    def __post_init__(self):
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("path_value", self.path_value, PATH_VALUES)
        check_on_error(self.on_reward_error)
        for name in ("max_completion_length", "width", "children", "batch_size", "problems_at_once"):
            refuse_outside(name, getattr(self, name), whole(1, remedy="Give a positive number."))
        remedy = "It must cover at least one completion: raise it, or lower max_completion_length."
        refuse_outside("budget_tokens", self.budget_tokens, whole(self.max_completion_length, remedy=remedy))
        refuse_outside(
            "temperature", self.temperature, positive(remedy="Greedy decoding gives a single answer: raise it.")
        )
        refuse_outside("exploration", self.exploration, Range(0, remedy="0 follows the values alone."))
        refuse_outside("accept_above", self.accept_above, Range())
        for name in ("top_p", "seed"):
            refuse_outside(name, getattr(self, name), RANGES[name])
        if isinstance(self.segmenter().rule, Turns):
            expected = "a separator, 're:<pattern>' or 'tokens:<n>'"
            raise InputError(
                "step_separator", "'turn'", expected, "A search has no environment, so no turns: set a separator."
            )

    def segmenter(self) -> StepSegmenter:
        """The segmenter that cuts completions into steps."""
        return step_segmenter(self.step_separator)


def check_values(verifier: Any, prm: Any) -> None:
    """Refuses a search with neither a verifier nor a process reward model."""
    if verifier is None and prm is None:
        expected = "a verifier (reward_funcs), a process reward model (prm), or both"
        raise InputError("reward_funcs", "none, and no prm", expected, "Add one: its values guide the search.")


def _check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        remedy = did_you_mean(value, choices, "Choose one of them.")
        raise InputError(field, repr(value), f"one of {', '.join(choices)}", remedy)
