"""From what a recipe says about a reward to the reward: a name, a path, or a mapping with options.

    reward_funcs:
      - accuracy_reward                                      # a name
      - my_rewards.py:score                                  # a path
      - verl: my_rewards.py:compute_score                    # an adapter and its first argument
      - isolate: {reward: my_rewards.py:slow, timeout: 5}    # a name and its options

One table says where each name lives; a new reward is one row, and rooms above add theirs by [`register`]. Nothing is
imported before its name is asked for, so that a misspelled one fails at once.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.rewards.limits import Limits


class RewardSpec:
    """A reward as a recipe writes it: text, or a mapping with one key."""


class Entry(NamedTuple):
    """
    Where a reward lives.

    Args:
        module (`str`): The module.
        default (`str`, *optional*): Its attribute that the bare name stands for; `None` where options are needed.
        factory (`str`, *optional*): Its class or function that takes options; `None` where there are none.
    """

    module: str
    default: str | None = None
    factory: str | None = None


REWARDS: dict[str, Entry] = {
    # TRL's
    "accuracy_reward": Entry("trl.rewards", "accuracy_reward"),
    "reasoning_accuracy_reward": Entry("trl.rewards", "reasoning_accuracy_reward"),
    "think_format_reward": Entry("trl.rewards", "think_format_reward"),
    "get_soft_overlong_punishment": Entry("trl.rewards", None, "get_soft_overlong_punishment"),
    "get_repetition_penalty_reward": Entry("trl.rewards", None, "get_repetition_penalty_reward"),
    "get_cosine_scaled_reward": Entry("trl.rewards", None, "get_cosine_scaled_reward"),
    # Ours
    "math_reward": Entry("trl_drgrpo.rewards.functions.mathematics", "math_reward", "MathReward"),
    "code_reward": Entry("trl_drgrpo.rewards.functions.code", "code_reward", "CodeReward"),
    "format_reward": Entry("trl_drgrpo.rewards.functions.strings", "format_reward", "FormatReward"),
    "exact_match_reward": Entry("trl_drgrpo.rewards.functions.strings", "exact_match_reward", "ExactMatchReward"),
    "numeric_reward": Entry("trl_drgrpo.rewards.functions.strings", "numeric_reward", "NumericReward"),
    "choice_reward": Entry("trl_drgrpo.rewards.functions.strings", "choice_reward", "ChoiceReward"),
    "regex_reward": Entry("trl_drgrpo.rewards.functions.strings", None, "RegexReward"),
    "json_schema_reward": Entry("trl_drgrpo.rewards.functions.strings", "json_schema_reward", "JsonSchemaReward"),
    "judge_reward": Entry("trl_drgrpo.rewards.functions.judge", None, "JudgeReward"),
    "repetition_penalty": Entry("trl_drgrpo.rewards.functions.strings", None, "repetition_penalty"),
    "overlong_penalty": Entry("trl_drgrpo.rewards.functions.strings", None, "overlong_penalty"),
    "length_penalty": Entry("trl_drgrpo.rewards.functions.strings", None, "length_penalty"),
    # Around other rewards
    "isolate": Entry("trl_drgrpo.rewards.isolation", None, "isolate"),
    "weighted_sum": Entry("trl_drgrpo.rewards.composition", None, "weighted_sum"),
    "gated": Entry("trl_drgrpo.rewards.composition", None, "gated"),
    "clipped": Entry("trl_drgrpo.rewards.composition", None, "clipped"),
    "cached": Entry("trl_drgrpo.rewards.composition", None, "cached"),
    "noted_if_not_binary": Entry("trl_drgrpo.rewards.composition", None, "noted_if_not_binary"),
    # Of other stacks
    "trl": Entry("trl_drgrpo.rewards.adapters", None, "from_trl"),
    "verl": Entry("trl_drgrpo.rewards.adapters", None, "from_verl"),
    "openrlhf": Entry("trl_drgrpo.rewards.adapters", None, "from_openrlhf"),
    "swift": Entry("trl_drgrpo.rewards.adapters", None, "from_swift"),
    "verifiers": Entry("trl_drgrpo.rewards.adapters", None, "from_verifiers"),
    "reasoning_gym": Entry("trl_drgrpo.rewards", "reasoning_gym_reward", "from_reasoning_gym"),
    "r1_zero": Entry("trl_drgrpo.rewards.adapters", None, "from_r1_zero"),
}


def register(names: Mapping[str, Entry]) -> None:
    """Add names of the rooms above this one: nothing down here names them."""
    REWARDS.update(names)


# Options that are a reward, and options that hold several, whichever name they belong to.
_ONE, _SEVERAL = ("reward", "gate"), ("rewards", "parts")


def check_spec(spec: Any, field: str = "reward_funcs") -> None:
    """Checks what needs no import: that a spec is text or a mapping with one known name, and its options. `field` is
    for the message."""
    if isinstance(spec, str) and spec.strip():
        return
    name, options = _split(spec, field)
    entry = REWARDS[name]
    if entry.factory is None:
        raise InputError(field, f"options for {name}", f"`{name}` alone: it takes none", "Write the name only.")
    for option, value in options.items() if isinstance(options, Mapping) else ():
        _map_specs(option, value, partial(check_spec, field=f"{field}: {name}.{option}"))


def resolve_mapping(spec: Mapping[str, Any], field: str, resolve: Callable[..., Callable]) -> Callable:
    """
    Builds the reward that a mapping describes.

    Args:
        spec (`Mapping[str, Any]`):
            One name and its options: a mapping of them, or the first option alone (`verl: my_rewards.py:f`). The
            options `reward` and `gate` are rewards themselves, written in any of these ways; `rewards` and `parts`
            hold several, as a list of rewards or of pairs `[reward, weight]`, or as a mapping `{name: weight}` or
            `{name: [reward, weight]}`. A mapping under `limits` becomes [`Limits`].
        field (`str`): Name of the setting in error messages.
        resolve (`Callable`): From a reward inside an option to the reward: [`resolve_reward`].

    Returns:
        `Callable`: The reward function.

    Raises:
        [`InputError`]: For an unknown name or option, a missing one, or a value that the reward
            refuses.
    """
    check_spec(spec, field)
    name, options = _split(spec, field)
    entry = REWARDS[name]
    factory = _attribute(name, entry, entry.factory or "", field)
    parameters = inspect.signature(factory).parameters
    given = _as_options(name, options, parameters, field)
    _check_options(given, parameters, f"{field}: {name}")
    try:
        arguments = {
            option: _map_specs(option, value, partial(resolve, field=f"{field}: {name}.{option}"))
            for option, value in given.items()
        }
        if isinstance(given.get("limits"), Mapping):
            arguments["limits"] = _limits(given["limits"], f"{field}: {name}.limits")
        return factory(**arguments)
    except InputError as error:
        if error.field.startswith(f"{field}: {name}"):
            raise  # already said of a nested option
        raise error.under(f"{field}: {name}.{error.field}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # TRL's factories do not check what they are given, and no constructor checks everything.
        got = f"options that it does not accept ({type(error).__name__}: {error})"
        expected = f"options {', '.join(parameters)} of the documented types"
        raise InputError(f"{field}: {name}", got, expected, f"See the docstring of `{name}`.") from error


def _limits(options: Mapping[str, Any], field: str) -> Any:
    given = dict(options)
    _check_options(given, inspect.signature(Limits).parameters, field)
    try:
        return Limits(**given)
    except InputError as error:
        raise error.under(f"{field}.{error.field}") from error


def default_reward(name: str) -> Callable:
    """The reward that a name of the table stands for on its own. `ImportError`: its module does not import;
    [`InputError`]: it needs options."""
    entry = REWARDS[name]
    if entry.default is None:
        factory = _attribute(name, entry, entry.factory or "", "reward_funcs")
        needed = next(iter(inspect.signature(factory).parameters), "option")
        expected = f"a mapping with its options: `{name}: {{{needed}: ...}}`"
        raise InputError("reward_funcs", f"{name!r} without options", expected, "Write it as a mapping.")
    return getattr(importlib.import_module(entry.module), entry.default)


def unknown_name(name: str, field: str) -> InputError:
    """The error for a mapping's key that is no name of the table."""
    remedy = did_you_mean(name, REWARDS, "A path takes no options: write it as a string.", most=2)
    with_options = sorted(known for known, entry in REWARDS.items() if entry.factory)
    return InputError(field, f"the unknown name {name!r}", f"one of {', '.join(with_options)}", remedy)


def _split(spec: Any, field: str) -> tuple[str, Any]:
    """Name and options of a mapping."""
    if not isinstance(spec, Mapping):
        remedy = "Write `accuracy_reward`, `path/to/file.py:function` or `{name: {option: value}}`."
        raise InputError(field, f"{type(spec).__name__} {spec!r}"[:100], "a name, a path, or a mapping", remedy)
    if len(spec) != 1:
        keys = ", ".join(map(str, spec)) or "no keys"
        remedy = "Indent the options below the reward's name, and start each reward with a dash."
        raise InputError(field, f"a mapping with {keys}", "a mapping with one key, the reward's name", remedy)
    name, options = next(iter(spec.items()))
    if name not in REWARDS:
        raise unknown_name(str(name), field)
    return name, options


def _attribute(name: str, entry: Entry, attribute: str, field: str) -> Any:
    try:
        return getattr(importlib.import_module(entry.module), attribute)
    except ImportError as error:
        got = f"{name!r}, but importing {entry.module} failed with {type(error).__name__}: {error}"
        raise InputError(field, got, "a module that imports", "Install what it needs.") from error


def _as_options(name: str, options: Any, parameters: Mapping[str, inspect.Parameter], field: str) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):  # the first option, written without its name
        return {next(iter(parameters)): options}
    if odd := [option for option in options if not isinstance(option, str)]:
        raise InputError(f"{field}: {name}", f"the option {odd[0]!r}", "names of options", "Write them as strings.")
    return dict(options)


def _check_options(given: dict[str, Any], parameters: Mapping[str, inspect.Parameter], field: str) -> None:
    by_name = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in by_name]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in given:
        if option not in known and not takes_any:
            remedy = did_you_mean(option, known, "Remove it.")
            if option in REWARDS and known[:1] == ["reward"]:
                remedy = f"A reward inside another one goes under `reward`: `reward: {{{option}: ...}}`."
            raise InputError(f"{field}.{option}", "an unknown option", f"one of {', '.join(known)}", remedy)
    if missing := [p.name for p in by_name if p.default is p.empty and p.name not in given]:
        got = f"no {', '.join(missing)}"
        raise InputError(field, got, f"the option {missing[0]}", "Add it; it has no default.")


def _map_specs(option: str, value: Any, apply: Callable[[Any], Any]) -> Any:
    """The value of an option with `apply` done to every reward in it; a value without rewards as it is."""
    if option in _ONE:
        return _apply(value, apply)
    if option not in _SEVERAL:
        return value
    if isinstance(value, Mapping):
        return {name: _pair(name, entry, apply) for name, entry in value.items()}
    return [_entry(entry, apply) for entry in value] if isinstance(value, list | tuple) else value


def _apply(value: Any, apply: Callable[[Any], Any]) -> Any:
    return apply(value) if isinstance(value, str | Mapping) else value


def _entry(entry: Any, apply: Callable[[Any], Any]) -> Any:
    """A reward, or a reward and its weight."""
    if isinstance(entry, list | tuple) and entry:
        return (_apply(entry[0], apply), *entry[1:])
    return _apply(entry, apply)


def _pair(name: Any, entry: Any, apply: Callable[[Any], Any]) -> Any:
    """`name: weight`, where the name is the reward, or `name: [reward, weight]`."""
    return _entry(entry, apply) if isinstance(entry, list | tuple) else (_apply(name, apply), entry)
