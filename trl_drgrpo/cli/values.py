"""From what a recipe or a flag says to the value a field wants, by the field's annotation.

Deltas from TRL's parser: an invalid type fails whether it comes from YAML or from a flag (TRL checks YAML strings
only, so `use_peft: 3` passes; `parse_dict` checks nothing), a single value for a list becomes a list of one (TRL takes
`reward_funcs: accuracy_reward` letter by letter), a text field gets the text as written (`eval_strategy: no` is not
`False`), and an error names file and line before TRL is imported, which takes seconds.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from trl_drgrpo.cli import flags
from trl_drgrpo.cli.flags import Flag
from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.rewards.recipe_rewards import check_spec, resolve_reward


class Loader(yaml.SafeLoader):
    """`SafeLoader` that refuses a key given twice and knows the floats of YAML 1.2 (`1e-6`)."""

    def construct_mapping(self, node, deep=False):
        refuse_duplicates(node)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def refuse_duplicates(node: yaml.MappingNode) -> None:
    """Refuses a mapping with a key twice; names the key and both lines."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise InputError(
                    key.value,
                    f"the same key twice, in lines {seen[key.value]} and {line_of(key)} of the recipe",
                    "every key once",
                    "Remove one of them: YAML would silently take the last.",
                )
            seen[key.value] = line_of(key)


def line_of(node: yaml.Node) -> int:
    """Line of a node, counted from 1."""
    return node.start_mark.line + 1


# Text fields of TRL and transformers that are documented to take a boolean too.
_TEXT_OR_BOOLEAN = ("scale_rewards", "resume_from_checkpoint")
_BOOLEANS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}


class _NoFit(Exception):
    """This member of the annotation does not take the value; the next one may."""


def coerce(flag: Flag, value: Any, text: str | None = None, where: str = "") -> Any:
    """
    Turns a value from YAML or from the command line into the type that a field declares.

    Args:
        flag (`Flag`): The field.
        value (`Any`): A YAML value, or the text (list of texts, for a list field) that followed the flag.
        text (`str`, *optional*): The text of a YAML scalar as written, for fields that want text.
        where (`str`, *optional*): Place of the value, for the message: `" in recipe.yaml, line 3"`.
    """
    try:
        result = _fit(flag.annotation, value, text, flag)
    except _NoFit as reason:
        raise InputError(
            flag.name,
            f"{value!r}{where}",
            _spell(flag.annotation),
            str(reason) or f"Its default is {flag.default!r}.",
        ) from None
    if flag.choices is not None and result is not None and result not in flag.choices:
        names = [str(choice) for choice in flag.choices]
        remedy = did_you_mean(result, names, "Pick one of them.")
        raise InputError(flag.name, f"{value!r}{where}", f"one of {', '.join(names)}", remedy)
    return result


def _kinds(annotation: str) -> dict[str, str]:
    """The alternatives of `A | B[C] | None`, and what stands in their brackets."""
    parts = [each.partition("[") for each in re.split(r" \| (?![^\[]*\])", annotation)]
    return {name.rpartition(".")[2]: inner.removesuffix("]") for name, _, inner in parts}


_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_WORDS |= {"dict": "a mapping", "None": "null"}


def _spell(annotation: str) -> str:
    named = {name: f"{name}[{inner}]" if inner else name for name, inner in _kinds(annotation).items()}
    return " or ".join(_WORDS.get(name, whole) for name, whole in named.items())


# Tried in this order, so that text is what is left when nothing else fits.
_KINDS = ("bool", "int", "float", "Literal", "list", "dict", "str", "Any")


def _fit(annotation: str, value: Any, text: str | None, flag: Flag) -> Any:
    kinds = _kinds(annotation)
    if value is None:
        if "None" in kinds or flag.default is None:
            return None
        raise _NoFit("Leave the key out for the default.")
    if isinstance(value, str) and value.lower() in ("none", "null") and "None" in kinds and "str" not in kinds:
        return None
    reason = ""
    for name in sorted(kinds, key=lambda name: (*_KINDS, name).index(name)):
        try:
            return _convert(name, kinds[name], value, text, flag, takes_text="str" in kinds)
        except _NoFit as error:
            reason = str(error) or reason
    if unknown := [name for name in kinds if name not in (*_KINDS, "None")]:
        return _fit_class(unknown[0], value, flag)
    raise _NoFit(reason)


def _convert(name: str, inner: str, value: Any, text: str | None, flag: Flag, takes_text: bool) -> Any:
    """The value as one type of the annotation; where the field takes text as well, text is not forced into it."""
    reason = ""
    match name:
        case "bool":
            words = {"true": True, "false": False} if takes_text else _BOOLEANS
            if isinstance(value, bool | str | int) and str(value).lower() in words:
                return words[str(value).lower()]
        case "int" | "float" as kind:
            if isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool):
                return value
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    return int(value) if kind == "int" else float(value)
        case "Literal" if flag.choices is not None and isinstance(value, str):
            return value  # judged with all choices
        case "Literal":
            if any(type(choice) is type(value) and choice == value for choice in ast.literal_eval(f"({inner},)")):
                return value
        case "list" if not (takes_text and isinstance(value, str)):
            items = value if isinstance(value, list) else [value]
            return [_fit(inner or "Any", item, None, flag) for item in items]
        case "dict":
            if isinstance(value, dict):
                return value
            if isinstance(value, str) and value.lstrip().startswith("{"):
                return _read_json(value, flag)
            reason = "Write a mapping in the recipe, or JSON after the flag."
        case "str":
            if isinstance(value, bool) and flag.name in _TEXT_OR_BOOLEAN:
                return value
            if not isinstance(value, dict | list):
                return value if isinstance(value, str) else text if text is not None else str(value)
            reason = "Write a single value."
        case "Any":
            return value
    raise _NoFit(reason)


def _read_json(text: str, flag: Flag) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(flag.name, repr(text), "a JSON mapping", f"It is not valid JSON: {error}.") from None


def _fit_class(name: str, value: Any, flag: Flag) -> Any:
    """A field whose type is a class: a dataset of the mixture (`datasets: [{path: ..}]`) or a reward with options."""
    if name == "RewardSpec":
        return reward_spec(value, flag.name)
    if name != "DatasetConfig":
        raise _NoFit(f"A {name} cannot be written in a recipe or after a flag; `accelerate` configures it.")
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, dict):
        raise _NoFit("Write `datasets:` as a list of mappings, each with a `path`.")
    known = flags.dataclass_flags(name)
    for key in value:
        if key not in known:
            remedy = did_you_mean(key, known, "Remove it.")
            raise InputError(f"{flag.name}: {key}", "an unknown key", f"one of {', '.join(known)}", remedy)
    if "path" not in value:
        raise InputError(flag.name, f"{value!r}", "a mapping with a `path`", "Add the Hub id or the builder's name.")
    return value


def reward_spec(value: Any, name: str) -> Any:
    """A reward as it was written, checked: a name or a path, or a mapping; after a flag that is inline YAML or JSON.
    `name` is what error messages call the setting."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = yaml.load(value, Loader)
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            remedy = f"YAML error: {problem}. Put the mapping in quotes for the shell."
            expected = "a name, a path, or a mapping `{name: {option: value}}`"
            raise InputError(name, repr(value), expected, remedy) from None
    check_spec(value, name)
    return value


def named_reward(text: str, name: str) -> Callable:
    """The reward function that a flag names, or describes as inline YAML or JSON."""
    return resolve_reward(reward_spec(text, name), name)


# A key as a flag -----------------------------------------------------------------------------------------------------


def add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Adds one key as a flag, spelled with underscores or dashes."""
    nargs = "+" if _takes_list(flag) else "?" if _is_boolean(flag) else None
    options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "nargs": nargs}
    if nargs == "?":
        options["const"] = "true"
    group.add_argument(f"--{flag.name}", metavar=_metavar(flag), help=help_text(flag), **options)
    if "_" in flag.name:
        group.add_argument(f"--{flag.name.replace('_', '-')}", help=argparse.SUPPRESS, **options)
    if flag.default is True and nargs == "?":  # as TRL's parser: the way to switch a default off
        off: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "const": "false"}
        spellings = [f"--no_{flag.name}", f"--no-{flag.name.replace('_', '-')}"]
        group.add_argument(*spellings, action="store_const", help=argparse.SUPPRESS, **off)


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "STR"
    return flag.annotation.replace("None | ", "").split(" | ")[0].split("[")[0].upper()


def help_text(flag: Flag, brief: bool = False) -> str:
    """What a flag is for, with its choices and its default; `brief`: the first sentence alone."""
    told = re.split(r"(?<=\.)\s+(?=[A-Z`'])", flag.help)[0] if brief else flag.help
    default = "" if flag.default in (None, dataclasses.MISSING) else f" (default: {flag.default})"
    unnamed = [choice for choice in flag.choices or () if str(choice) not in told]
    choices = f" One of {', '.join(map(str, flag.choices or ()))}." if unnamed else ""
    return f"{told}{choices}{default}".replace("%", "%%")


def _takes_list(flag: Flag) -> bool:
    """Whether the flag is followed by several values: a list, and not text as well (as in TRL's parser)."""
    kinds = _kinds(flag.annotation)
    return "list" in kinds and "str" not in kinds


def _is_boolean(flag: Flag) -> bool:
    """Whether the flag may stand alone: `--use_peft`, also where a mapping may follow it."""
    return flag.annotation in ("bool", "bool | None") or {"bool", "dict"} <= _kinds(flag.annotation).keys()
