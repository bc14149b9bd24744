"""From a recipe and flags to typed values: every key known, none twice, every value of its field's type.

The YAML is that of [`~trl_drgrpo.cli.strict_yaml`]. TRL's script mode also ignores unknown keys, so `scale_reward:
false` trains with the standard deviation.

Deltas from TRL's parser: an invalid type fails whether it comes from YAML or from a flag (TRL checks YAML strings
only, so `use_peft: 3` passes; `parse_dict` checks nothing), a single value for a list becomes a list of one (TRL takes
`reward_funcs: accuracy_reward` letter by letter), a text field gets the text as written (`eval_strategy: no` is not
`False`), a mapping may be inline YAML, and whatever is wrong with a key, now or later, is said with its file and line:
`places` has them, and `console.report_error` says them.
"""

import argparse
import ast
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from trl_drgrpo.cli import strict_yaml
from trl_drgrpo.cli.flags import Flag, dataclass_flags, kinds, read_flags
from trl_drgrpo.cli.strict_yaml import OldNumber, line_of
from trl_drgrpo.common.errors import InputError, did_you_mean, is_unicode, shortened
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.rewards.recipe_rewards import check_spec
from trl_drgrpo.upstream.former_names import remedy_for_name

# By key: the file and the line that a recipe has it in.
Places = dict[str, str]


class Recipe(NamedTuple):
    """
    A recipe that was read.

    Args:
        values (`dict[str, Any]`): Field name to typed value, in the order of the file.
        env (`dict[str, str]`): The `env:` mapping: environment variables to set before anything is imported.
    """

    values: dict[str, Any]
    env: dict[str, str]


def read_given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the typed values of recipe and flags; flags win. Sets the recipe's `env:` variables."""
    return {**recipe_values(args.config, args), **flag_values(args)}


def recipe_values(path: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return the typed values of a recipe. Sets its `env:` variables, and notes the places of its keys in
    `args.places`."""
    if path is None:
        return {}
    recipe = read_recipe(path, vars(args).setdefault("places", {}))
    os.environ.update(recipe.env)
    return recipe.values


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the typed values of those keys of `train` that were given as flags."""
    flags = read_flags()
    values = {}
    for name, text in vars(args).items():
        if name in flags and text is not None:
            values[name] = coerce(flags[name], text)
    return values


# Read ----------------------------------------------------------------------------------------------------------------


def read_recipe(path: str, places: Places | None = None) -> Recipe:
    """Read a recipe; check the keys before the values. `places`: to note there where each key is."""
    flags = read_flags()
    text = _text_of(path)
    try:
        loader, document = strict_yaml.compose(text)
        if not isinstance(document, yaml.MappingNode):
            kinds_of_node = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value", type(None): "nothing"}
            kind = kinds_of_node.get(type(document), "something else")
            got = f"{kind} in {path}"
            raise InputError("--config", got, "a YAML mapping of keys to values", "Write one `key: value` per line.")
        # Duplicates are looked for before merges (`<<: *base`) are written out: a key may win over a merged one.
        strict_yaml.refuse_duplicates(document)
        loader.flatten_mapping(document)
        nodes = {}
        lines = {}
        for key_node, node in document.value:
            key = str(loader.construct_object(key_node))
            nodes[key] = node
            lines[key] = line_of(key_node)
        unknown = [(key, line) for key, line in lines.items() if key not in flags and key != "env"]
        if unknown:
            raise _unknown_keys(unknown, path)
        if places is not None:
            places |= {key: f"{path}, line {line}" for key, line in lines.items()}
        env = {}
        if "env" in nodes:
            env = _environment(loader, nodes.pop("env"))
        # Of a number the text as it was written is kept as well: a text field may hold it.
        texts = {key: node.value for key, node in nodes.items() if isinstance(node, yaml.ScalarNode)}
        values = {key: loader.construct_object(node, deep=True) for key, node in nodes.items()}
    except yaml.YAMLError as error:
        got = f"{path}, which is not valid YAML"
        mark = isinstance(error, yaml.MarkedYAMLError) and (error.problem_mark or error.context_mark)
        if mark:
            got += f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or error
        remedy = f"YAML error: {problem}. Check colons, quotes and indentation."
        raise InputError("--config", got, "a YAML mapping", remedy) from error
    typed = {key: coerce(flags[key], value, texts.get(key)) for key, value in values.items()}
    return Recipe(typed, env)


def _environment(loader: strict_yaml.StrictLoader, node: yaml.Node) -> dict[str, str]:
    """Return the variables of `env:`, each text as it was written. Refuses what no environment can hold."""
    # Writes merges into the node, and makes every check of a mapping.
    value = loader.construct_object(node, deep=True)
    if value is None:
        return {}
    remedy = "Write `env:` and `  NAME: value`."
    if not isinstance(node, yaml.MappingNode):
        raise InputError("env", shortened(value), "a mapping of variable names to values", remedy)
    variables = {}
    for key, value in node.value:
        if not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
            got = f"a list or mapping in line {line_of(key)}"
            raise InputError("env", got, "a mapping of variable names to values", remedy)
        # The texts of the nodes: `NAME: 1.0` sets "1.0", and `NAME: yes` sets "yes".
        name = key.value
        text = value.value
        entry = name + text
        if not name or "=" in name or "\0" in entry or not is_unicode(entry):
            got = shortened({name: text})
            raise InputError("env", got, "names without `=`, and texts without a NUL character", remedy)
        variables[name] = text
    return variables


def _text_of(path: str) -> str:
    file = user_path(path)
    # Unlike those of `Path`, these functions raise nothing for a name that is too long.
    if not os.path.isfile(file):
        got = f"{path}, a directory" if os.path.isdir(file) else f"{path}, which does not exist"
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError("--config", got, "the path of a YAML recipe", remedy)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        got = f"{path}, which is not text ({error.reason})"
        raise InputError("--config", got, "UTF-8 text", "Save it as UTF-8.") from error


def _unknown_keys(unknown: list[tuple[str, int]], path: str) -> InputError:
    """Return the error for keys (with their lines) that do not exist, with the nearest key for each."""
    flags = read_flags()
    key, line = unknown[0]
    remedy = remedy_for_name(key, flags)
    for next_key, next_line in unknown[1:]:
        remedy += f" Line {next_line}, {next_key}, too: {remedy_for_name(next_key, flags)}"
    expected = f"one of the {len(flags)} keys that `trl-drgrpo train --help_all` lists"
    return InputError(key, f"an unknown key in {path}, line {line}", expected, remedy)


def dump(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML in its order, ending in a line break; nothing for an empty mapping."""
    # YAML's empty mapping is `{}`, which cannot stand between other keys.
    if not values:
        return ""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000)


# Types ---------------------------------------------------------------------------------------------------------------

# Text fields of TRL and transformers that are documented to take a boolean too.
_TEXT_OR_BOOLEAN = ("scale_rewards", "resume_from_checkpoint")
# Words that transformers' parser of command lines takes for booleans.
_BOOLEANS: dict[str, bool] = dict.fromkeys(("true", "yes", "t", "y", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "f", "n", "0"), False)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "a mapping",
    "None": "null",
}
# Tried in this order, so that text is what is left when nothing else fits.
_KINDS = ("bool", "int", "float", "Literal", "list", "dict", "RewardSpec", "DatasetConfig", "str", "Any")


class _NoFit(Exception):
    """Says that this member of the annotation does not take the value; the next one may."""


def coerce(flag: Flag, value: Any, text: str | None = None) -> Any:
    """
    Turn a value from YAML or from the command line into the type that a field declares.

    Args:
        flag (`Flag`): The field.
        value (`Any`): A YAML value, or the text (list of texts, for a list field) that followed the flag.
        text (`str`, *optional*): The text of a YAML scalar as written, for fields that want text.
    """
    try:
        result = _fit(flag.annotation, value, text, flag)
    except _NoFit as reason:
        words = []
        for name, inner in kinds(flag.annotation).items():
            as_annotated = f"{name}[{inner}]" if inner else name
            words.append(_WORDS.get(name, as_annotated))
        remedy = str(reason) or f"Its default is {flag.default!r}."
        raise InputError(flag.name, repr(value), " or ".join(words), remedy) from None
    _refuse_old_numbers(result, flag.name)
    if flag.choices is not None and result is not None and result not in flag.choices:
        names = [str(choice) for choice in flag.choices]
        remedy = did_you_mean(result, names, "Pick one of them.")
        raise InputError(flag.name, repr(value), f"one of {', '.join(names)}", remedy)
    return result


def _fit(annotation: str, value: Any, text: str | None, flag: Flag) -> Any:
    members = kinds(annotation)
    # After a flag, null is a word. Where the field takes texts, that word is one.
    is_null = isinstance(value, str) and value.lower() in ("none", "null")
    if is_null and "None" in members and "str" not in members:
        return None
    if value is None:
        if "None" in members or flag.default is None:
            return None
        raise _NoFit("Leave the key out for the default.")
    # The first kind that takes the value; of the others' reasons the last one that says something.
    reason = ""
    for name in _KINDS:
        try:
            if name in members:
                return _convert(name, members[name], value, text, flag, takes_text="str" in members)
        except _NoFit as error:
            reason = str(error) or reason
    # Objects of other classes, for a value that no plain kind of the field takes.
    objects = members.keys() - {*_KINDS, "None"}
    if objects:
        reason = f"A {min(objects)} cannot be written in a recipe or after a flag; `accelerate` configures it."
    raise _NoFit(reason)


def _convert(name: str, inner: str, value: Any, text: str | None, flag: Flag, takes_text: bool) -> Any:
    """Return the value as one type of the annotation; where the field takes text as well, text is not forced into
    it."""
    reason = ""
    word = str(value).lower()
    match name:
        case "bool":
            # In `bool | str` the text "no" may be a text.
            words = ("true", "false") if takes_text else _BOOLEANS
            if word in words:
                return _BOOLEANS[word]
        case "int" | "float":
            kind = int if name == "int" else float
            # Python counts booleans among the whole numbers.
            if isinstance(value, int | kind) and not isinstance(value, bool):
                if name == "float" and isinstance(value, int) and abs(value) > sys.float_info.max:
                    raise _NoFit("It is larger than any floating-point number.")
                return value
            if isinstance(value, str):
                if strict_yaml.is_old_number(value):
                    raise _NoFit(strict_yaml.remedy_for_old_number(value))
                with contextlib.suppress(ValueError):
                    return kind(value)
        case "Literal" if flag.choices is not None and isinstance(value, str):
            # `coerce` judges it with all choices, and names the nearest one.
            return value
        case "Literal":
            choices = ast.literal_eval(f"({inner},)")
            # By type as well: True equals 1.
            if any(type(choice) is type(value) and choice == value for choice in choices):
                return value
        case "list" if not (takes_text and isinstance(value, str)):
            items = value if isinstance(value, list) else [value]
            return [_fit(inner or "Any", item, None, flag) for item in items]
        case "dict":
            mapping = inline(value, flag.name, "a mapping")
            if isinstance(mapping, dict):
                return mapping
            reason = "Write a mapping in the recipe, or JSON after the flag."
        case "RewardSpec":
            return reward_spec(value, flag.name)
        case "DatasetConfig":
            return _dataset(value, flag)
        case "str":
            if flag.name in _TEXT_OR_BOOLEAN and word in ("true", "false"):
                return _BOOLEANS[word]
            if not isinstance(value, dict | list):
                # `1e3` as it was written, not 1000.0.
                if text is not None and not isinstance(value, str):
                    value = text
                return _plain_text(str(value))
            reason = "Write a single value."
        case "Any":
            return value
    raise _NoFit(reason)


def inline(value: Any, name: str, expected: str) -> Any:
    """Return a mapping that was written as text, after a flag: YAML or JSON; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    # JSON is YAML, too, but YAML reads its escapes of UTF-16 as two letters.
    with contextlib.suppress(ValueError, RecursionError):
        mapping = json.loads(value)
        if not strict_yaml.is_deep(mapping):
            return mapping
    try:
        return strict_yaml.load(value)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        remedy = f"YAML error: {shortened(problem, 300)}. Put the mapping in quotes for the shell."
        raise InputError(name, shortened(value), expected, remedy) from None


def _refuse_old_numbers(value: object, name: str) -> None:
    """Refuse numbers that versions of YAML disagree on inside a mapping, where nothing says that a text is due."""
    if isinstance(value, OldNumber):
        raise InputError(name, value, "a decimal number", strict_yaml.remedy_for_old_number(value))
    parts = []
    if isinstance(value, list):
        parts = value
    elif isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    for part in parts:
        _refuse_old_numbers(part, name)


def _plain_text(text: str) -> str:
    """Return a text field's value; no path, name or prompt holds a NUL character."""
    if "\0" in text:
        raise _NoFit("It holds a NUL character: remove it.")
    return text


def _dataset(value: Any, flag: Flag) -> dict[str, Any]:
    """Return a dataset of the mixture: `datasets: [{path: ..}]`, or its path alone."""
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, dict):
        raise _NoFit("Write `datasets:` as a list of mappings, each with a `path`.")
    keys = dataclass_flags("DatasetConfig")
    for key in value:
        if key not in keys:
            remedy = did_you_mean(key, keys, "Remove it.")
            raise InputError(f"{flag.name}: {key}", "an unknown key", f"one of {', '.join(keys)}", remedy)
    if "path" not in value:
        raise InputError(flag.name, f"{value!r}", "a mapping with a `path`", "Add the Hub id or the builder's name.")
    return value


def reward_spec(value: Any, name: str) -> Any:
    """Return a reward as it was written, checked: a name or a path, or a mapping; after a flag that is inline YAML or
    JSON. `name` is what error messages call the setting."""
    value = inline(value, name, "a name, a path, or a mapping `{name: {option: value}}`")
    check_spec(value, name)
    return value
