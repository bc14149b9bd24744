"""Names of a package that are imported on first use, so that importing the package loads nothing heavy (PEP 562).

Why not `lazy_loader`: 0.6 wants a `.pyi` file beside each package as a second list of its names, and refuses a name
whose home is in another package (`attach_stub`: "Only within-module imports are supported").
"""

import sys
from importlib import import_module
from typing import Any


def attach(package: str) -> None:
    """
    Make the names that a package imports under `if TYPE_CHECKING:` its lazy public names.

    That block is the only list of them: type checkers read it, and so does this function, from the source file. It
    sets `__all__`, `__dir__` (these names and Python's own) and `__getattr__`. Each name has its line, `from <module>
    import <name> as <name>`.
    """
    namespace = vars(sys.modules[package])
    # Line by line, without a parser: each name has its line, four spaces deep.
    homes = {}
    with open(namespace["__file__"], encoding="utf-8") as source:
        for line in source:
            if line.startswith("    from "):
                words = line.split()
                homes[words[-1]] = words[1]

    def resolve(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*homes, *(name for name in namespace if name.startswith("__"))})

    namespace |= {"__all__": sorted(homes), "__dir__": listed, "__getattr__": resolve}
