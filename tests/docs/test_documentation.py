"""Every public name, argument and flag says what it is, and the page of public names has them all."""

import argparse
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version
from reference_page import first_sentence, flags, own_fields, page, public_names, public_packages

from trl_drgrpo import DrGRPOConfig, __version__
from trl_drgrpo.cli.main import SUBCOMMANDS

ROOT = Path(__file__).parents[2]
NAMES = [(package, name) for package in public_packages() for name in public_names(package)]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def undescribed(value) -> list[str]:
    """Parameters of a function, or of a class's constructor, that no `Args:` names: its own, or that of a base class
    to which its docstring sends the reader."""
    docstring = inspect.getdoc(value) or ""
    texts = [docstring]
    for base in getattr(value, "__mro__", ())[1:]:
        if f"**options: See [`{base.__name__}`]" in docstring:
            texts.append(inspect.getdoc(base) or "")
    described = ""
    for text in texts:
        sections = re.split(r"^\s*(?:Args|Parameters|Attributes):\s*$", text, flags=re.MULTILINE)
        described += " ".join(sections[1:])
    parameters = inspect.signature(value).parameters.values()
    return [p.name for p in parameters if p.kind not in VARIADIC and not re.search(rf"\b{p.name}\b", described)]


def test_there_are_packages_with_public_names():
    assert {"trl_drgrpo", "trl_drgrpo.rewards", "trl_drgrpo.process_rewards", "trl_drgrpo.process_rewards.steps"} < {
        p for p, _ in NAMES
    }
    assert len(NAMES) > 80


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_describes_every_parameter(package, name):
    value = getattr(importlib.import_module(package), name)
    if isinstance(value, str):
        return  # a constant, told of where it is used
    if not inspect.isclass(value) and not inspect.isroutine(value):
        value = type(value)  # a ready-made reward: its options are its class's
    assert len(first_sentence(value)) > 10
    if name != "DrGRPOConfig":  # its 200 inherited fields are TRL's to describe; its own: next test
        assert undescribed(value) == []
    if getattr(value, "_is_protocol", False):
        return  # its methods are described where they are implemented
    for method, function in vars(value).items() if inspect.isclass(value) else ():
        if not method.startswith("_") and callable(getattr(value, method)):
            assert inspect.getdoc(getattr(value, method)) or not inspect.isfunction(function), f"{name}.{method}"


def test_every_own_field_of_the_configuration_is_described_and_has_a_help():
    assert len(own_fields()) > 15
    for field in own_fields():
        assert re.search(rf"^\s+(\w+, )*{field.name}(, \w+)* \(`", DrGRPOConfig.__doc__, re.MULTILINE), field.name
        assert field.metadata["help"].endswith("."), field.name


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_every_flag_has_a_help(command):
    actions = flags(command)
    shown = {action.dest for action in actions if action.help not in (None, "", argparse.SUPPRESS)}
    # A second spelling of a flag may be hidden, the flag itself may not.
    assert [action.dest for action in actions if action.dest not in shown] == []
    assert not [action.dest for action in actions if action.help is None or not action.help.strip()]


def test_the_page_of_public_names_lists_them_all():
    names, commands = page().split("## Commands")
    assert {name for _, name in NAMES} == set(re.findall(r"^\| `(\w+)` \|", names, re.MULTILINE))
    assert all(f"| `{name}` |" in commands for name in SUBCOMMANDS)


def test_the_citation_file_is_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # The keys that the schema of CFF 1.2.0 requires, and those of this package.
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], str(citation["version"])) == ("1.2.0", __version__)
    assert all({"family-names", "name"} & author.keys() for author in citation["authors"])
    (reference,) = citation["references"]
    assert {"type", "title", "authors"} <= reference.keys()
    assert reference["identifiers"][0]["value"] == "arXiv:2503.20783"
    base = Version(__version__).base_version
    section = re.search(rf"^## \[{re.escape(base)}\] - (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert section
    assert str(citation.get("date-released", "unreleased")) == section[1]
