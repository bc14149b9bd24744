"""The site's page of public names, made from the packages and their docstrings.

A name is public if a package lists it in `__all__`; what it does is the first sentence of its docstring.
"""

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import Any

import trl_drgrpo
from trl_drgrpo.cli.main import SUBCOMMANDS
from trl_drgrpo.cli.main import command as find

HEAD = """\
# Public names

What a package lists in `__all__`; everything else may change without notice. Arguments, shapes, units and errors are
in the docstrings: `python -m pydoc trl_drgrpo.group_advantages`. Every flag of a command is in its `--help`, those of
`train` and `bias` in `--help_all`. The fields of `DrGRPOConfig`: [configuration.md](configuration.md).
"""


def public_packages() -> list[str]:
    """Packages with public names, the top one first."""
    found = pkgutil.walk_packages(trl_drgrpo.__path__, "trl_drgrpo.")
    names = ["trl_drgrpo", *sorted(info.name for info in found if info.ispkg)]
    return [name for name in names if getattr(importlib.import_module(name), "__all__", None)]


def public_names(package: str) -> dict[str, Any]:
    """The public names of a package, sorted, with what they are."""
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in sorted(module.__all__, key=str.lower) if not name.startswith("__")}


def first_sentence(value: Any) -> str:
    """What a docstring begins with, on one line and fit for a cell of a table."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)(?<!Dr\.)\s+(?=[A-Z`(])", paragraph, maxsplit=1)[0]
    sentence = re.sub(
        r"\[`~?(?:[\w.]+\.)?(\w+)`\](?!\()", r"`\1`", sentence
    )  # [`~a.b`]: a reference within docstrings
    return sentence.replace("|", "\\|").rstrip(":")


def what_it_is(value: Any) -> str:
    """Class, function, ready-made instance or constant; with the sentence that says what for."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return first_sentence(value)
    if isinstance(value, str | int | tuple):
        return f"A constant, {type(value).__name__}."
    return f"`{type(value).__name__}()`, ready to use."


def own_fields() -> list[dataclasses.Field]:
    """The fields of `DrGRPOConfig` that TRL's configuration has not."""
    from trl import GRPOConfig

    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    return [field for field in dataclasses.fields(trl_drgrpo.DrGRPOConfig) if field.name not in inherited]


def flags(command: str) -> list[argparse.Action]:
    """The arguments of a subcommand, nested ones too, spellings that are hidden on purpose included."""
    parser = argparse.ArgumentParser(prog=command)
    find(command)[0](parser)
    actions, parsers = [], [parser]
    while parsers:
        for action in parsers.pop()._actions:
            actions.append(action)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return actions


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    seen: set[int] = set()
    for package in public_packages():
        # A room of the rewards offers to a reader of its own what the package above it names already.
        rows = {name: value for name, value in public_names(package).items() if id(value) not in seen}
        if not rows:
            continue
        seen |= {id(value) for value in rows.values()}
        parts.append(f"\n## `{package}`\n\n| name | |\n|---|---|\n")
        parts += [f"| `{name}` | {what_it_is(value)} |\n" for name, value in rows.items()]
    parts.append("\n## Commands\n\n| `trl-drgrpo ...` | |\n|---|---|\n")
    parts += [f"| `{name}` | {text} |\n" for name, text in SUBCOMMANDS.items()]
    return "".join(parts)
