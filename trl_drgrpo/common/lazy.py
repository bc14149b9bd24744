"""Names of a package that are imported on first use, so that importing the package loads nothing heavy (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """
    The `__getattr__` and `__dir__` of a package whose names live in its modules.

    Args:
        package (`str`): The package's `__name__`.
        homes (`Mapping[str, str]`): Per name, the module that defines it, relative to the package: `"room"`, or
            `".room"` for one beside the package.

    Returns:
        `tuple[Callable, Callable]`: To be assigned to `__getattr__` and `__dir__` at the package's top level.
    """

    def resolve(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f".{homes[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return resolve, listed
