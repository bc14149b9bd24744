"""From the name of a reward function to the function.

Why: TRL's script finds four names and dotted paths. Here a name that does not resolve says which names come nearest,
and a file path is accepted too (`my_rewards.py:score`).

Names with options, and what other stacks call their rewards, are mappings: see [`resolve_mapping`].
Nothing heavy is imported at module level; TRL's own rewards are imported when one of their names is asked for.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.contract import RewardFunction
from trl_drgrpo.rewards.foreign import adapter_hint
from trl_drgrpo.rewards.paths import at_path, import_failed, public_names, write_path
from trl_drgrpo.rewards.spec import REWARDS, default_reward, resolve_mapping


def _soft_overlong_punishment() -> Callable:
    # The two values are those of TRL's own script.
    punishment = importlib.import_module("trl.rewards").get_soft_overlong_punishment
    return punishment(max_completion_len=1280, soft_punish_cache=256)


# Names that stand for a reward on their own.
REGISTRY: dict[str, Callable[[], Callable]] = {
    name: functools.partial(default_reward, name) for name, entry in REWARDS.items() if entry.default
}
REGISTRY["get_soft_overlong_punishment"] = _soft_overlong_punishment


def resolve_reward(spec: str | Mapping[str, Any], field: str = "reward_funcs") -> RewardFunction:
    """
    Finds the reward function that a name stands for, or builds the one that a mapping describes.

    Args:
        spec (`str` or `Mapping[str, Any]`):
            One of

            - a registered name: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`,
              `get_soft_overlong_punishment` (TRL's, the last with `max_completion_len=1280, soft_punish_cache=256`),
              `reasoning_gym` (the task's own `score_answer`), `list_sum_reward` (the demo's), `list_sum_line_reward`
              (the demo's step reward), `math_reward`, `code_reward`, `format_reward`, `exact_match_reward`,
              `numeric_reward`, `choice_reward`, `json_schema_reward`;
            - a dotted path: `my_package.rewards.score` (the current directory is searched too);
            - a file and a function in it: `rewards/mine.py:score`;
            - a mapping with one key, a name of [`REWARDS`] and its options, for example
              `{"verl": {"function": "mine.py:compute_score"}}`, see [`resolve_mapping`]: most
              of the above, `judge_reward`, `regex_reward`, `repetition_penalty`, `overlong_penalty` and
              `length_penalty`, what is put around others (`isolate`, `weighted_sum`, `gated`, `clipped`, `cached`,
              `noted_if_not_binary`) and adapters (`trl`, `verl`, `openrlhf`, `swift`, `verifiers`, `r1_zero`).
        field (`str`, *optional*, defaults to `"reward_funcs"`): Name of the setting in error messages.

    Returns:
        `Callable`: The reward function, called by TRL as `f(prompts=..., completions=..., <columns>, ...)`.

    Raises:
        [`InputError`]: If there is no such name, module, file or function, if the module fails to
            import (its own error is the cause), if what was found cannot be called, or if an option does not fit.
    """
    if isinstance(spec, Mapping):
        return resolve_mapping(spec, field, resolve_reward)
    try:
        if not isinstance(spec, str):
            raise InputError(
                "", f"{type(spec).__name__} {spec!r}", "a name, a path, or a mapping", "Write one of them."
            )
        return _resolve(spec)
    except InputError as error:
        raise error.under(field) from error.__cause__


def _resolve(spec: str) -> Callable:
    if spec in REWARDS:
        try:
            return REGISTRY.get(spec, functools.partial(default_reward, spec))()
        except ImportError as error:
            raise import_failed(spec, "its module", error) from error
    if (found := at_path(spec)) is not None:
        return _callable(*found, spec)
    remedy = write_path(spec)
    if near := [] if spec.endswith(".py") else get_close_matches(spec, REGISTRY, n=2, cutoff=0.5):
        remedy = f"Did you mean {' or '.join(near)}? {remedy}"
    raise InputError("reward_funcs", repr(spec), f"one of {', '.join(sorted(REGISTRY))} or a path", remedy)


def _callable(module: ModuleType, found: Any, spec: str) -> Callable:
    """The object, if it can be a reward function."""
    if not callable(found):
        raise InputError(
            "reward_funcs",
            f"{spec!r}, which is a {type(found).__name__}",
            "a function `f(completions, **kwargs) -> list[float]`",
            adapter_hint(found) or f"Its functions: {', '.join(public_names(module)) or 'none'}.",
        )
    if inspect.isclass(found):
        raise InputError(
            "reward_funcs",
            f"{spec!r}, which is a class",
            "a function or an instance with `__call__`",
            adapter_hint(found)
            or f"Create an instance in the module (`my_reward = {found.__name__}(...)`) and name that.",
        )
    return found
