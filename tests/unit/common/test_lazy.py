"""Lazy packages: an import under `TYPE_CHECKING` is the whole declaration of a public name."""

import ast
import importlib
from pathlib import Path

import pytest

import trl_drgrpo

ROOT = Path(trl_drgrpo.__file__).parent
LAZY = sorted(path for path in ROOT.rglob("__init__.py") if "\nattach(__name__)\n" in path.read_text())


@pytest.mark.parametrize("path", LAZY, ids=lambda path: str(path.parent.relative_to(ROOT.parent)))
def test_what_a_type_checker_sees_is_public(path):
    package = importlib.import_module(".".join(path.parent.relative_to(ROOT.parent).parts))
    block = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    imported = [(node.module, alias) for node in block.body for alias in node.names]
    assert package.__all__ == sorted(alias.asname for _, alias in imported)
    assert [n for n in dir(package) if n[:2] != "__"] == [n for n in package.__all__ if n[:2] != "__"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_a_name_is_the_one_of_its_module():
    from trl_drgrpo.rewards import contract

    assert len(LAZY) >= 8
    assert importlib.import_module("trl_drgrpo.rewards.isolation").Limits is contract.Limits
