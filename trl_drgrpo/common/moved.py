"""Import paths of release 0.1.0 keep working for one minor, with a `DeprecationWarning` that names the new place."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Modules that README, recipes and notebooks of 0.1.0 import from, and those with public functions at its top.
MOVED = {
    "advantages": "objective.advantages",
    "check": "labs.check",
    "data": "cli.data",
    "demo": "labs.demo",
    "diagnostics": "features.diagnostics",
    "errors": "common.errors",
    "loss": "objective.loss",
    "prompts": "cli.prompts",
    "rewards.code": "rewards.functions.code",
    "rewards.judge": "rewards.functions.judge",
    "rewards.mathematics": "rewards.functions.mathematics",
    "rewards.reasoning_gym": "rewards.functions.reasoning_gym",
    "rewards.strings": "rewards.functions.strings",
    "seams": "upstream.seams",
    "step_credit": "objective.step_advantages",
    "steps": "process_rewards.steps",
}
_PACKAGE = __name__.partition(".")[0]


class MovedModules:
    """Finds a module of 0.1.0 at its new place. Asked last, so that it costs nothing where a module exists."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        place = _new_place(name)
        loader: Any = self  # finder and loader need no base class
        return ModuleSpec(name, loader, origin=place, is_package=True) if place else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, str(spec.origin))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run: the module was, at its new place."""


class _Alias(ModuleType):
    """A module under an old name, with the attributes of the one at the new place."""

    def __init__(self, name: str, place: str):
        super().__init__(name)
        self.__dict__["_moved"] = import_module(place)
        self.__path__ = []  # modules below it are looked for here, too, not loaded a second time
        message = f"{name} has moved to {place}; the old path will be removed in 0.3."
        warnings.warn(message, DeprecationWarning, stacklevel=3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_moved"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_moved"])


def _new_place(name: str) -> str | None:
    package, _, rest = name.partition(".")
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        place = MOVED.get(".".join(parts[:count]))
        if package == _PACKAGE and place:
            return ".".join([_PACKAGE, place, *parts[count:]])
    return None


def find_moved_modules() -> None:
    """Let imports find them; once per process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        finder: Any = MovedModules()
        sys.meta_path.append(finder)
