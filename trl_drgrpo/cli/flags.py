"""Every key of `trl-drgrpo train`, read from the source files of its dataclasses without importing them, and as flags.

Importing TRL's configuration classes takes 7 to 9 seconds, parsing the eight files that define them 0.1. So `--help`
is quick, and a misspelled key fails before anything heavy is imported. The keys are those of `trl grpo`: script
arguments, the training configuration (ours in place of TRL's), model and dataset mixture.

Only what a dataclass declares plainly can be read this way (`name: type = field(...)`); the help of this package's
fields is what the docstring of their class says of them. A class that the installed TRL has moved is searched for in
its package. A test compares the keys with the fields of the imported classes, so drift is seen.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.config.field_kinds import descriptions

# The four dataclasses of the command, in the order in which they are built.
DATACLASSES = ("DrGRPOScriptArguments", "DrGRPOConfig", "ModelConfig", "DatasetMixtureConfig")

# Where each class, bases included, is written: top-level package and file below it.
_HOMES = {
    "DrGRPOScriptArguments": ("trl_drgrpo", "cli/script_arguments.py"),
    "GRPOScriptArguments": ("trl", "scripts/grpo.py"),
    "ScriptArguments": ("trl", "scripts/utils.py"),
    "DrGRPOConfig": ("trl_drgrpo", "config/config.py"),
    "GRPOConfig": ("trl", "trainer/grpo_config.py"),
    "_BaseConfig": ("trl", "trainer/base_config.py"),
    "TrainingArguments": ("transformers", "training_args.py"),
    "ModelConfig": ("trl", "trainer/model_config.py"),
    "DatasetMixtureConfig": ("trl", "scripts/utils.py"),
    "DatasetConfig": ("trl", "scripts/utils.py"),
}


@dataclass(frozen=True)
class Flag:
    """
    One key: a field of one of the four dataclasses.

    Args:
        name (`str`): The key, which is also the flag without its dashes.
        annotation (`str`): Its type as written, e.g. `int | None`.
        default (`Any`): The default; [`Unread`] where only running the code would tell, `dataclasses.MISSING` where
            there is none.
        help (`str`): One or more sentences.
        choices (`tuple`, *optional*): The only values allowed, where the field lists them.
        owner (`str`): The class that declares it, one of the four or a base of it.
    """

    name: str
    annotation: str
    default: Any
    help: str
    choices: tuple | None
    owner: str


@dataclass(frozen=True)
class Unread:
    """A default that is an expression; shown as its source text."""

    source: str

    def __repr__(self) -> str:
        return self.source


@functools.cache
def read_flags() -> dict[str, Flag]:
    """Return all keys of `trl-drgrpo train`, in the order of the dataclasses and of their fields. As in TRL's parser,
    no two dataclasses may declare the same key."""
    flags = {}
    for name in DATACLASSES:
        for key, flag in dataclass_flags(name).items():
            if key in flags:
                raise UpstreamError(f"{key}: declared by {flags[key].owner} and by {name}.")
            flags[key] = flag
    return flags


@functools.cache
def dataclass_flags(name: str) -> dict[str, Flag]:
    """Return the keys of one dataclass, by name, from the source files of it and its bases. Bases come first, an
    overridden field keeps its place."""
    classes = {node.name: node for node in _parsed(_home(name)).body if isinstance(node, ast.ClassDef)}
    node = classes[name]
    flags = {}
    # Dataclasses collect fields in reverse method resolution order; with single bases that is base first.
    for base in reversed(node.bases):
        flags |= dataclass_flags(ast.unparse(base).rpartition(".")[2])
    # The help of a field: in our docstrings, in TRL's metadata.
    texts = {}
    if _HOMES[name][0] == "trl_drgrpo":
        texts = descriptions(ast.get_docstring(node) or "")
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        key = statement.target.id
        annotation = ast.unparse(statement.annotation)
        arguments = _arguments(statement)
        # Neither is an argument of the constructor, also where the base has a field of that name.
        if "ClassVar" in annotation or arguments.get("init") is False:
            flags.pop(key, None)
            continue
        metadata = arguments.get("metadata", {})
        # Help in metadata is written for argparse, with `%` doubled.
        text = texts.get(key) or str(metadata.get("help", "")).replace("%%", "%")
        # Choices may be an expression, of which only running the code would tell the values.
        choices = metadata.get("choices")
        if isinstance(choices, list | tuple):
            choices = tuple(choices)
        else:
            choices = literal_choices(annotation)
        default = arguments.get("default", dataclasses.MISSING)
        flags[key] = Flag(key, annotation, default, text, choices, owner=name)
    return flags


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _home(name: str) -> Path:
    """Return the file with a class: where it used to be, or wherever its package has it now."""
    homes = [("trl", ""), ("transformers", "")]
    if name in _HOMES:
        homes = [_HOMES[name]]
    for package, file in homes:
        # Finding a top-level package does not run it.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(spec.submodule_search_locations[0])
        for path in [folder / file, *folder.rglob("*.py")]:
            if path.is_file() and re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
                return path
    raise UpstreamError(f"{name}: no installed package has this class.")


def _arguments(field: ast.AnnAssign) -> dict[str, Any]:
    """Return the arguments of `field(...)` as values, the default made by its factory; a plain default counts."""
    value = field.value
    if value is None:
        return {}
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field"):
        return {"default": _literal(value)}
    values = {keyword.arg: _literal(keyword.value) for keyword in value.keywords if keyword.arg}
    for keyword in value.keywords:
        if keyword.arg != "default_factory":
            continue
        factory = keyword.value
        if isinstance(factory, ast.Lambda):
            values["default"] = _literal(factory.body)
        else:
            source = ast.unparse(factory)
            values["default"] = {"list": [], "dict": {}}.get(source, Unread(f"{source}()"))
    return values


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression, of an f-string its fixed part; [`Unread`] where only running would tell."""
    if isinstance(node, ast.Dict):
        # `**options` in a mapping has no key.
        items = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(value) for key, value in items if key}
    if isinstance(node, ast.JoinedStr):
        return "".join(str(piece.value) for piece in node.values if isinstance(piece, ast.Constant))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unread(ast.unparse(node))


def literal_choices(annotation: str) -> tuple | None:
    """Return the values of `Literal[...]`, alone or beside `None`; `None` for any other annotation."""
    annotation = annotation.removeprefix("typing.").removesuffix(" | None")
    match = re.fullmatch(r"Literal\[(.+)\]", annotation)
    # A comma behind the values makes a tuple of a single one, too.
    return match and ast.literal_eval(f"({match[1]},)")


def kinds(annotation: str) -> dict[str, str]:
    """Return the alternatives of `A | B[C] | None`, each with the text in its brackets."""
    alternatives = {}
    # `list[int | str] | None` has two members: a bar inside of brackets separates none.
    for member in re.split(r" \| (?![^\[]*\])", annotation):
        name, _, inner = member.partition("[")
        alternatives[name.rpartition(".")[2]] = inner.removesuffix("]")
    return alternatives


def import_dataclass(name: str) -> type:
    """Import one of the dataclasses named in this module's table (slow: this imports TRL)."""
    package = _HOMES[name][0]
    # From the last folder of the package's name on: a checkout may lie in a folder of that name, too.
    parts = _home(name).with_suffix("").parts
    start = len(parts) - 1 - parts[::-1].index(package)
    module = ".".join(parts[start:])
    return getattr(importlib.import_module(module), name)


def add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Add one key as a flag, spelled with underscores or dashes."""
    members = kinds(flag.annotation)
    # `--use_peft` may stand alone, also where a mapping may follow it.
    stands_alone = flag.annotation in ("bool", "bool | None") or {"bool", "dict"} <= members.keys()
    # A flag that is left out is no attribute, so that a recipe's value counts.
    common: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS}
    options = dict(common)
    # As in TRL's parser, a field that may be a text takes one.
    if "list" in members and "str" not in members:
        options["nargs"] = "+"
    elif stands_alone:
        options |= {"nargs": "?", "const": "true"}
    metavar = "STR"
    if not flag.choices:
        metavar = re.split(r" \| |\[", flag.annotation.replace("None | ", ""))[0].upper()
    group.add_argument(f"--{flag.name}", metavar=metavar, help=help_text(flag), **options)
    # Other spellings stay out of the help.
    dashed = flag.name.replace("_", "-")
    if dashed != flag.name:
        group.add_argument(f"--{dashed}", help=argparse.SUPPRESS, **options)
    # As in TRL's parser, the way to switch a default off.
    if flag.default is True and stands_alone:
        off = (f"--no_{flag.name}", f"--no-{dashed}")
        group.add_argument(*off, action="store_const", const="false", help=argparse.SUPPRESS, **common)


def help_text(flag: Flag, brief: bool = False) -> str:
    """Return the help of a flag with its choices and its default; `brief`: its first sentence alone."""
    text = flag.help
    # A sentence ends before a capital letter or code, not behind the full stop of `e.g.`.
    if brief:
        text = re.split(r"(?<=\.)\s+(?=[A-Z`'])", text)[0]
    choices = [str(choice) for choice in flag.choices or ()]
    if not all(choice in text for choice in choices):
        text += f" One of {', '.join(choices)}."
    if flag.default not in (None, dataclasses.MISSING):
        text += f" (default: {flag.default})"
    return text.replace("%", "%%")
