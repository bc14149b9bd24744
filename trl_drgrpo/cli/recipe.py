"""Recipes: read strictly (every key known, none twice, every value of its field's type), flags over them, and written.

Why not `yaml.safe_load`: it lets the last of two equal keys win in silence, reads `1e-6` as text, and drops the line
numbers. TRL's script mode also ignores unknown keys, so `scale_reward: false` trains with the standard deviation.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_drgrpo.cli import values
from trl_drgrpo.cli.flags import Flag, read_flags
from trl_drgrpo.cli.values import Loader, line_of, refuse_duplicates
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream.versions import remedy_for_name


@dataclass(frozen=True)
class Recipe:
    """
    A recipe that was read.

    Args:
        values (`dict[str, Any]`): Field name to typed value, in the order of the file.
        env (`dict[str, str]`): The `env:` mapping: environment variables to set before anything is imported.
    """

    values: dict[str, Any]
    env: dict[str, str]


def read_given(args: argparse.Namespace) -> dict[str, Any]:
    """The values given by recipe and flags, typed; flags win. Sets the recipe's `env:` variables."""
    return {**recipe_values(args.config), **flag_values(args)}


def recipe_values(path: str | None) -> dict[str, Any]:
    """The values of a recipe, typed. Sets its `env:` variables."""
    if path is None:
        return {}
    read = read_recipe(path, read_flags())
    os.environ.update(read.env)
    return read.values


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of those keys of `train` that were given as flags, typed."""
    known = read_flags()
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    return {name: values.coerce(known[name], value) for name, value in given.items()}


def read_recipe(path: str, known: dict[str, Flag]) -> Recipe:
    """Reads a recipe. `known`: the keys there are. Checks the keys before the values."""
    text = _read(path)
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _no_mapping(path, node)
        refuse_duplicates(node)
        loader.flatten_mapping(node)
        entries = [(str(loader.construct_object(key)), line_of(key), value) for key, value in node.value]
        unknown = [(key, line) for key, line, _ in entries if key not in known and key != "env"]
        if unknown:
            raise _unknown_keys(unknown, known, path)
        constructed = {key: loader.construct_object(value_node, deep=True) for key, _, value_node in entries}
    except yaml.YAMLError as error:
        raise _no_yaml(path, error) from error
    env = constructed.pop("env", None) or {}
    if not isinstance(env, dict) or any(isinstance(value, dict | list) for value in env.values()):
        raise InputError(
            "env", repr(env), "a mapping of variable names to values", "Write `env:` and `  NAME: value`."
        )
    typed = {
        key: values.coerce(known[key], constructed[key], _text(value_node), f" in {path}, line {line}")
        for key, line, value_node in entries
        if key in constructed
    }
    return Recipe(values=typed, env={str(name): str(value) for name, value in env.items()})


def _unknown_keys(unknown: list[tuple[str, int]], known: dict[str, Flag], path: str) -> InputError:
    """The error for keys that do not exist, with the nearest one that does for each. `unknown`: keys and lines."""
    expected = f"one of the {len(known)} keys that `trl-drgrpo train --help_all` lists"
    (key, line), *others = unknown
    also = [f"Line {number}, {other}, too: {remedy_for_name(other, known)}" for other, number in others]
    return InputError(
        key, f"an unknown key in {path}, line {line}", expected, " ".join([remedy_for_name(key, known), *also])
    )


def _read(path: str) -> str:
    file = Path(path).expanduser()
    if not os.path.isfile(file):
        got = f"{path}, a directory" if os.path.isdir(file) else f"{path}, which does not exist"
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError("--config", got, "the path of a YAML recipe", remedy)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "--config", f"{path}, which is not text ({error.reason})", "UTF-8 text", "Save it as UTF-8."
        ) from error


def _text(node: yaml.Node) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _no_mapping(path: str, node: yaml.Node | None) -> InputError:
    kinds = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value", type(None): "nothing"}
    got = f"{kinds.get(type(node), 'something else')} in {path}"
    return InputError("--config", got, "a YAML mapping of keys to values", "Write one `key: value` per line.")


def _no_yaml(path: str, error: yaml.YAMLError) -> InputError:
    line = ""
    problem = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = error.problem or problem
    remedy = f"YAML error: {problem}. Check colons, quotes and indentation."
    return InputError("--config", f"{path}, which is not valid YAML{line}", "a YAML mapping", remedy)


def dump(values: dict[str, Any]) -> str:
    """YAML in the order given, ending in a line break; nothing for an empty mapping."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000) if values else ""
