"""Registries: names that recipes may use, each with everything that belongs to it, registered where it is defined.

A registry fills itself when it is first read. It imports the modules that `REGISTRATIONS` of this package lists for
it, and what installed packages name as entry points of the group `trl_drgrpo`. So no import fills a registry, and a
run that uses no names loads none of these modules. The list is at the top of the package because a room names only
rooms below it.
"""

import importlib
import logging
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any, TypeVar

from trl_drgrpo.common.errors import InputError, shortened, told

logger = logging.getLogger(__name__)

# The group of entry points: modules of other packages that register names.
ENTRY_POINTS = "trl_drgrpo"
_PACKAGE = __name__.partition(".")[0]
# Dots, colons and slashes make a path, and a recipe reads `1`, `-1`, `null` and `on` as values.
_NAME = re.compile(r"(?!(?i:null|true|false|yes|no|on|off)\Z)[^\W\d][\w-]*")
_HOME = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Entry:
    """A name, and one sentence about it for help."""

    name: str
    help: str


EntryClass = TypeVar("EntryClass", bound=Entry)


class RegistrationError(InputError):
    """A name that was registered wrongly: an error of the package that registered it, not of the user's settings."""


class Registry(Mapping[str, EntryClass]):
    """Entries by name, in the order of their registration.

    Args:
        kind (`str`): Kind of the entries: the key of `REGISTRATIONS`, and the word for one of them in errors.

    Attributes:
        registered_by (`dict[str, str]`): By name, the module that registered it.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, EntryClass] = {}
        self.registered_by: dict[str, str] = {}
        self._is_filled = False

    def error(self, name: object, got: str, expected: str, remedy: str) -> RegistrationError:
        """Return the error for a registration under this name."""
        return RegistrationError(f"registration of the {self.kind} {name!r}", got, expected, remedy)

    def add(self, entry: EntryClass) -> None:
        """Add an entry. Refuses a name that is taken or that no recipe can hold, and an entry without help."""
        module = _registering_module()
        # So that a name of this package is refused here, and not when the registry is first read.
        if module.partition(".")[0] != _PACKAGE:
            self._filled()
        if not (isinstance(entry.name, str) and _NAME.fullmatch(entry.name)):
            expected = "letters, digits, _ and -, no digit first, no word of YAML"
            raise self.error(entry.name, "this name", expected, "Register it under another name.")
        if not (isinstance(entry.help, str) and entry.help.strip()):
            raise self.error(entry.name, "no help", "one sentence about it", "Add the sentence, which help shows.")
        self.check_options(entry)
        if entry.name in self._entries:
            got = f"a name that {self.registered_by[entry.name]} has registered already"
            raise self.error(entry.name, got, "a new name", f"Register it in {module} under another name.")
        self._entries[entry.name] = entry
        self.registered_by[entry.name] = module

    def check_options(self, entry: EntryClass) -> None:
        """Refuse an entry whose booleans or counts are none: a text such as `"no"` would count as true."""
        for field in fields(entry):
            value = getattr(entry, field.name)
            got = f"{field.name}={shortened(value)}"
            # By the annotations of the dataclass, so entries of other packages are checked as well.
            if field.type in (bool, bool | None) and not isinstance(value, field.type):  # type: ignore[arg-type]
                raise self.error(entry.name, got, "True or False", "Pass a boolean.")
            is_count = type(value) is int and value > 0  # True is an int, too
            is_absent = value is None and field.type == (int | None)
            if field.type in (int, int | None) and not (is_count or is_absent):
                raise self.error(entry.name, got, "a positive integer", "Pass a whole number of 1 or more.")

    def load(self, name: str, home: object) -> Any:
        """Return the object that an entry names as `"module:attribute"`; an object is returned as it is.

        An error of the import is passed on.
        """
        if not isinstance(home, str):
            return home
        module_name, _, path = home.partition(":")
        got = f"{home}, which does not exist here"
        remedy = (
            f"Your settings are not the cause: {self.registered_by[name]} registered it. Correct it there, or tell "
            "its authors."
        )
        missing = self.error(name, got, "an existing object", remedy)
        try:
            value: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                # The home exists, and a module that it imports does not.
                raise
            raise missing from error
        for attribute in path.split("."):
            if not hasattr(value, attribute):
                raise missing
            value = getattr(value, attribute)
        if not callable(value):
            raise self.error(name, f"{home}, which is {shortened(value)}", "a function or class", remedy)
        return value

    def check_home(self, name: str, home: object) -> None:
        """Refuse what is neither callable nor a text `"module:attribute"`."""
        if callable(home) or (isinstance(home, str) and _HOME.fullmatch(home)):
            return
        remedy = "Register the object itself, or say where it is."
        raise self.error(name, repr(home), "a callable, or 'module:attribute'", remedy)

    def __getitem__(self, name: str) -> EntryClass:
        return self._filled()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def _filled(self) -> dict[str, EntryClass]:
        if self._is_filled:
            return self._entries
        # First, because the modules below may read the registry.
        self._is_filled = True
        for name in sys.modules[_PACKAGE].REGISTRATIONS[self.kind]:
            # A room's modules register their names themselves, so each of them is imported.
            module = importlib.import_module(f"{_PACKAGE}.{name}")
            for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
                importlib.import_module(f"{module.__name__}.{child.name}")
        for entry_point in entry_points(group=ENTRY_POINTS):
            try:
                entry_point.load()
            except Exception as error:  # a package that the run may not need
                logger.warning("Names of %s are missing: %s", entry_point.value, told(error))
        return self._entries


def _registering_module() -> str:
    """Return the name of the module that called `register_...`."""
    # Behind `register_reward` and the like, which other packages call, or wrap in functions of such a name.
    frame = sys._getframe(2)  # the caller of `Registry.add`
    while frame.f_code.co_name.startswith("register") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "unknown")
