"""From what a recipe or a flag says to the value a field wants, by the field's annotation.

Deltas from TRL's parser: a wrong type is an error whether it comes from YAML or from a flag (TRL checks YAML strings
only, so `num_generations: 8.5` passes), a single value for a list becomes a list of one (TRL takes
`reward_funcs: accuracy_reward` letter by letter), and a text field gets the text as written (`eval_strategy: no` is
not `False`).
"""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from trl_drgrpo.cli import flags
from trl_drgrpo.cli.flags import Flag
from trl_drgrpo.cli.strict_yaml import Loader
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.spec import check_spec

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
        flag (`Flag`):
            The field.
        value (`Any`):
            A YAML value, or the text (list of texts, for a list field) that followed the flag.
        text (`str`, *optional*):
            The text of a YAML scalar as written, for fields that want text.
        where (`str`, *optional*):
            Where the value stands, for the message: `", recipe.yaml line 3"`.

    Returns:
        `Any`: The value, typed.

    Raises:
        [`InputError`]: If no type of the annotation takes it, or if it is not among the field's choices.
    """
    members = _members(ast.parse(flag.annotation, mode="eval").body)
    try:
        result = _fit(members, value, text, flag)
    except _NoFit as reason:
        raise InputError(
            flag.name,
            f"{value!r}{where}",
            _spell(members),
            str(reason) or f"Its default is {flag.default!r}.",
        ) from None
    if flag.choices is not None and result is not None and result not in flag.choices:
        names = [str(choice) for choice in flag.choices]
        near = get_close_matches(str(result), names, n=1, cutoff=0.5)
        remedy = f"Did you mean {near[0]}?" if near else "Pick one of them."
        raise InputError(flag.name, f"{value!r}{where}", f"one of {', '.join(names)}", remedy)
    return result


def takes_list(flag: Flag) -> bool:
    """Whether the flag is followed by several values: a list, and not text as well (as in TRL's parser)."""
    names = [_name(member) for member in _members(ast.parse(flag.annotation, mode="eval").body)]
    return "list" in names and "str" not in names


def is_boolean(flag: Flag) -> bool:
    """Whether the flag may stand alone: `--use_peft`, also where a mapping may follow it."""
    names = {_name(member) for member in _members(ast.parse(flag.annotation, mode="eval").body)}
    return flag.annotation in ("bool", "bool | None") or {"bool", "dict"} <= names


def _members(node: ast.expr) -> list[ast.expr]:
    """The alternatives of `A | B | None`, in the order written."""
    if isinstance(node, ast.BinOp):
        return [*_members(node.left), *_members(node.right)]
    return [node]


def _name(member: ast.expr) -> str:
    head = member.value if isinstance(member, ast.Subscript) else member
    return ast.unparse(head).rpartition(".")[2]


def _spell(members: list[ast.expr]) -> str:
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "dict": "a mapping",
        "None": "null",
    }
    return " or ".join(words.get(_name(member), ast.unparse(member)) for member in members)


def _fit(members: list[ast.expr], value: Any, text: str | None, flag: Flag) -> Any:
    names = [_name(member) for member in members]
    if value is None:
        if "None" in names or flag.default is None:
            return None
        raise _NoFit("Leave the key out for the default.")
    if isinstance(value, str) and value.lower() in ("none", "null") and "None" in names and "str" not in names:
        return None
    given = _Given(value, text, flag, text_fits="str" in names)
    reason = ""
    for kind, convert in _CONVERSIONS.items():
        for member in members:
            if _name(member) == kind:
                try:
                    return convert(given, member)
                except _NoFit as error:
                    reason = str(error) or reason
    if unknown := [name for name in names if name not in (*_CONVERSIONS, "None")]:
        return _fit_class(unknown[0], value, flag)
    raise _NoFit(reason)


@dataclass(frozen=True)
class _Given:
    """A value on its way into a field; `text_fits`: text is among the field's types, so nothing needs to be forced."""

    value: Any
    text: str | None
    flag: Flag
    text_fits: bool


def _to_bool(given: _Given, _member: ast.expr) -> bool:
    if isinstance(given.value, bool):
        return given.value
    words = {"true": True, "false": False} if given.text_fits else _BOOLEANS
    if isinstance(given.value, str | int) and str(given.value).lower() in words:
        return words[str(given.value).lower()]
    raise _NoFit


def _to_int(given: _Given, _member: ast.expr) -> int:
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        return given.value
    return _parse(int, given.value)


def _to_float(given: _Given, _member: ast.expr) -> float:
    if isinstance(given.value, int | float) and not isinstance(given.value, bool):
        return given.value
    return _parse(float, given.value)


def _parse(number: Callable[[str], Any], value: Any) -> Any:
    if not isinstance(value, str):
        raise _NoFit
    try:
        return number(value)
    except ValueError:
        raise _NoFit from None


def _to_literal(given: _Given, member: ast.expr) -> Any:
    choices = ast.literal_eval(member.slice) if isinstance(member, ast.Subscript) else ()
    for choice in choices if isinstance(choices, tuple) else (choices,):
        if type(choice) is type(given.value) and choice == given.value:
            return choice
    raise _NoFit


def _to_list(given: _Given, member: ast.expr) -> list:
    if isinstance(given.value, str) and given.text_fits:
        raise _NoFit  # the reading as text comes later
    inner = _members(member.slice if isinstance(member, ast.Subscript) else ast.Name("Any"))
    items = given.value if isinstance(given.value, list) else [given.value]
    return [_fit(inner, item, None, given.flag) for item in items]


def _to_dict(given: _Given, _member: ast.expr) -> dict:
    if isinstance(given.value, dict):
        return given.value
    if not isinstance(given.value, str) or not given.value.lstrip().startswith("{"):
        raise _NoFit("Write a mapping in the recipe, or JSON after the flag.")
    try:
        mapping = json.loads(given.value)
    except json.JSONDecodeError as error:
        remedy = f"It is not valid JSON: {error}."
        raise InputError(given.flag.name, repr(given.value), "a JSON mapping", remedy) from None
    if given.text_fits:
        raise _NoFit  # TRL and transformers read the text themselves
    return mapping


def _to_text(given: _Given, _member: ast.expr) -> str | bool:
    if isinstance(given.value, bool) and given.flag.name in _TEXT_OR_BOOLEAN:
        return given.value
    if isinstance(given.value, dict | list):
        raise _NoFit("Write a single value.")
    if isinstance(given.value, str):
        return given.value
    return given.text if given.text is not None else str(given.value)


def _to_any(given: _Given, _member: ast.expr) -> Any:
    return given.value


# Tried in this order, so that text is what is left when nothing else fits.
_CONVERSIONS: dict[str, Callable[[_Given, ast.expr], Any]] = {
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "Literal": _to_literal,
    "list": _to_list,
    "dict": _to_dict,
    "str": _to_text,
    "Any": _to_any,
}


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
            near = get_close_matches(str(key), known, n=1, cutoff=0.5)
            remedy = f"Did you mean {near[0]}?" if near else "Remove it."
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
            remedy = f"The YAML reader says: {problem}. Put the mapping in quotes for the shell."
            expected = "a name, a path, or a mapping `{name: {option: value}}`"
            raise InputError(name, repr(value), expected, remedy) from None
    check_spec(value, name)
    return value
