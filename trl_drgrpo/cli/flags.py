"""Every key of `trl-drgrpo train`, read from the source files of its dataclasses without importing them.

Importing TRL's configuration classes takes 7 to 9 seconds, parsing the eight files that define them 0.1. So `--help`
is quick, and a misspelled key fails before anything heavy is imported. The keys are those of `trl grpo`: script
arguments, the training configuration (ours in place of TRL's), model and dataset mixture.

Only what a dataclass declares plainly can be read this way (`name: type = field(...)`); the help of this package's
fields is what the docstring of their class says of them. A class that the installed TRL has moved is searched for in
its package. A test compares the keys with the fields of the imported classes, so drift is seen.
"""

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
from trl_drgrpo.config.field_kinds import described

# The four dataclasses of the command, in the order in which they are built, and what --help calls each.
DATACLASSES = {
    "DrGRPOScriptArguments": "script",
    "DrGRPOConfig": "training",
    "ModelConfig": "model",
    "DatasetMixtureConfig": "dataset mixture",
}

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
        dataclass (`str`): The dataclass that is built from it.
        owner (`str`): The class that declares it, a base of `dataclass` or itself.
    """

    name: str
    annotation: str
    default: Any
    help: str
    choices: tuple | None
    dataclass: str
    owner: str


@dataclass(frozen=True)
class Unread:
    """A default that is an expression; shown as its source text."""

    source: str

    def __repr__(self) -> str:
        return self.source


@functools.cache
def read_flags() -> dict[str, Flag]:
    """All keys of `trl-drgrpo train`, in the order of the dataclasses and of their fields. As in TRL's parser, no two
    dataclasses may declare the same key."""
    flags: dict[str, Flag] = {}
    for name in DATACLASSES:
        for flag in dataclass_flags(name).values():
            if flag.name in flags:
                raise UpstreamError(f"{flag.name}: declared by {flags[flag.name].dataclass} and by {name}.")
            flags[flag.name] = flag
    return flags


@functools.cache
def dataclass_flags(name: str) -> dict[str, Flag]:
    """The keys of one dataclass, by name, from the source files of it and its bases. Bases come first, an overridden
    field keeps its place."""
    return {key: dataclasses.replace(flag, dataclass=name) for key, flag in _class_flags(name).items()}


def _class_flags(name: str) -> dict[str, Flag]:
    node = _class_node(name)
    flags: dict[str, Flag] = {}
    # Dataclasses collect fields in reverse method resolution order; with single bases that is base first.
    for base in reversed(node.bases):
        flags.update(_class_flags(ast.unparse(base).rpartition(".")[2]))
    texts = described(ast.get_docstring(node) or "") if _HOMES[name][0] == "trl_drgrpo" else {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            key = statement.target.id
            arguments = _field_arguments(statement.value)
            if "ClassVar" in ast.unparse(statement.annotation) or _literal(arguments.get("init")) is False:
                flags.pop(key, None)
                continue
            annotation = ast.unparse(statement.annotation)
            metadata = _metadata(arguments.get("metadata"))
            flags[key] = Flag(
                name=key,
                annotation=annotation,
                default=_default(arguments),
                help=texts.get(key) or metadata["help"],
                choices=metadata["choices"] or literal_choices(annotation),
                dataclass=name,
                owner=name,
            )
    return flags


def _class_node(name: str) -> ast.ClassDef:
    return next(node for node in _parsed(_home(name)).body if isinstance(node, ast.ClassDef) and node.name == name)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _home(name: str) -> Path:
    """The file with a class: where it used to be, or wherever its package has it now."""
    for package, file in [_HOMES[name]] if name in _HOMES else [("trl", ""), ("transformers", "")]:
        spec = importlib.util.find_spec(package)  # of a top-level package: locates it without running it
        folder = Path(next(iter((spec and spec.submodule_search_locations) or ["none"])))
        for path in [folder / file, *folder.rglob("*.py")]:
            if path.is_file() and re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
                return path
    raise UpstreamError(f"{name}: no installed package has this class.")


def _field_arguments(value: ast.expr | None) -> dict[str, ast.expr]:
    """The keyword arguments of `field(...)`; a plain default counts as `default=`."""
    if value is None:
        return {}
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
    return {"default": value}


def _default(arguments: dict[str, ast.expr]) -> Any:
    if "default" in arguments:
        return _literal(arguments["default"])
    if "default_factory" in arguments:
        factory = arguments["default_factory"]
        if isinstance(factory, ast.Lambda):
            return _literal(factory.body)
        source = ast.unparse(factory)
        return {"list": [], "dict": {}}.get(source, Unread(f"{source}()"))
    return dataclasses.MISSING


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unread(ast.unparse(node))


def _metadata(node: ast.expr | None) -> dict[str, Any]:
    entries: dict[Any, ast.expr] = {}
    if isinstance(node, ast.Dict):
        entries = {_literal(key): value for key, value in zip(node.keys, node.values, strict=True)}
    choices = _literal(entries.get("choices"))
    return {
        "help": _text(entries.get("help")).replace("%%", "%"),
        "choices": tuple(choices) if isinstance(choices, list | tuple) else None,
    }


def _text(node: ast.expr | None) -> str:
    """The string pieces of an expression; of f-strings the fixed part."""
    pieces = [] if node is None else ast.walk(node)
    return "".join(each.value for each in pieces if isinstance(each, ast.Constant) and isinstance(each.value, str))


def literal_choices(annotation: str) -> tuple | None:
    """The values of `Literal[...]`, alone or beside `None`; `None` for any other annotation."""
    head, bracket, values = annotation.removeprefix("typing.").removesuffix(" | None").partition("[")
    return ast.literal_eval(f"({values.removesuffix(']')},)") if head == "Literal" and bracket else None


def import_dataclass(name: str) -> type:
    """Imports one of the dataclasses named in this module's table (slow: this imports TRL)."""
    package = _HOMES[name][0]
    parts = _home(name).with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index(package) - 1 :])
    return getattr(importlib.import_module(module), name)
