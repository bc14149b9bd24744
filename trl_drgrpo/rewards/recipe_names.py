"""The names of rewards in recipes, and where each reward lives. Nothing is imported before its name is asked for."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """
    Where a reward lives.

    Args:
        module (`str`): The module.
        default (`str`, *optional*): Its attribute that the bare name stands for; `None` where options are needed.
        factory (`str`, *optional*): Its class or function that takes options; `None` where there are none.
        usual (`Mapping`, *optional*): Options of the factory that the bare name stands for.
    """

    module: str
    default: str | None = None
    factory: str | None = None
    usual: Mapping[str, Any] | None = None


_OURS = "trl_drgrpo.rewards"
REWARDS: dict[str, Entry] = {
    # TRL's
    "accuracy_reward": Entry("trl.rewards", "accuracy_reward"),
    "reasoning_accuracy_reward": Entry("trl.rewards", "reasoning_accuracy_reward"),
    "think_format_reward": Entry("trl.rewards", "think_format_reward"),
    "get_soft_overlong_punishment": Entry(  # as in TRL's own script
        "trl.rewards", None, "get_soft_overlong_punishment", {"max_completion_len": 1280, "soft_punish_cache": 256}
    ),
    "get_repetition_penalty_reward": Entry("trl.rewards", None, "get_repetition_penalty_reward"),
    "get_cosine_scaled_reward": Entry("trl.rewards", None, "get_cosine_scaled_reward"),
    # Ours
    "math_reward": Entry(_OURS, "math_reward", "MathReward"),
    "code_reward": Entry(_OURS, "code_reward", "CodeReward"),
    "format_reward": Entry(_OURS, "format_reward", "FormatReward"),
    "exact_match_reward": Entry(_OURS, "exact_match_reward", "ExactMatchReward"),
    "numeric_reward": Entry(_OURS, "numeric_reward", "NumericReward"),
    "choice_reward": Entry(_OURS, "choice_reward", "ChoiceReward"),
    "regex_reward": Entry(_OURS, None, "RegexReward"),
    "json_schema_reward": Entry(_OURS, "json_schema_reward", "JsonSchemaReward"),
    "judge_reward": Entry(_OURS, None, "JudgeReward"),
    "reasoning_gym": Entry(_OURS, "reasoning_gym_reward"),
}
_PENALTIES = ("repetition_penalty", "overlong_penalty")
AROUND_OTHERS = ("isolate", "weighted_sum", "gated", "clipped")
REWARDS |= {name: Entry(_OURS, None, name) for name in (*_PENALTIES, *AROUND_OTHERS)}
STACKS = ("trl", "verl", "openrlhf", "swift", "verifiers", "r1_zero")
REWARDS |= {stack: Entry(_OURS, None, f"from_{stack}") for stack in STACKS}

# Options of these name no code and no server, so that a recipe that nobody has read may set them. Not so of rewards
# that rooms above add: this set is closed before they do.
HARMLESS = frozenset(REWARDS) - {*STACKS, "code_reward", "judge_reward"}
