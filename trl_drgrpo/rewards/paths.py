"""From a path to the object it names: `package.module.name`, or `path/to/file.py:name`.

A file runs as a module of its own name, once per process; its directory is not put on the search path.
"""

import importlib
import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean

FILE_PREFIX = "trl_drgrpo_user_reward_"  # modules that were named by their file

# What running the top level of a user's module may raise: anything, and `sys.exit()` must not end the caller silently.
_IMPORT_ERRORS = (Exception, SystemExit)


def resolve_object(path: str, field: str) -> Any:
    """The object at `package.module.name` or `path/to/file.py:name`, of any kind. Refuses a path without a module,
    file or name, and a module that fails to import. `field` is for the message."""
    try:
        found = at_path(path)
    except InputError as error:
        raise error.under(field) from error.__cause__
    if found is None:
        raise InputError(field, repr(path), "a path", write_path(path))
    return found[1]


def write_path(text: str) -> str:
    """Advice for a text that was meant as a path."""
    if text.endswith(".py"):
        return f"A file needs the function's name too: `{text}:my_reward`."
    return "Name a function as `package.module.function` or `path/to/file.py:function`."


def at_path(spec: str) -> tuple[ModuleType, Any] | None:
    """Module and object of a path; `None` for text that is no path."""
    if ":" in spec and spec.rsplit(":", 1)[0].endswith(".py"):
        path, _, attribute = spec.rpartition(":")
        return _member(module_from_file(spec, path), attribute, spec)
    if "." in spec and not spec.endswith(".py"):
        module, _, attribute = spec.rpartition(".")
        return _member(_module_from_name(spec, module), attribute, spec)
    return None


def _module_from_name(spec: str, module: str) -> ModuleType:
    """Imports `module`, looking in the current directory too, as TRL's script does; last, so it shadows nothing."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(missing + "."):
            raise InputError(
                "reward_funcs",
                f"{spec!r}, whose module {missing!r} does not exist",
                "an importable `package.module.function`",
                f"Install it, run from the directory that holds it ({here} is searched), or name the file as "
                "`path/to/file.py:function`.",
            ) from error
        raise import_failed(spec, module, error) from error
    except _IMPORT_ERRORS as error:
        raise import_failed(spec, module, error) from error


def module_from_file(spec: str, path: str) -> ModuleType:
    """Runs a file as a module of its own name, once per process; its directory is not put on the search path. `spec`:
    what the user wrote, for the message. An error of the file is the cause of the `InputError`."""
    file = Path(path).expanduser()
    if not os.path.isfile(file):  # false for a name that is too long, too
        raise InputError("reward_funcs", f"{spec!r}, a file that does not exist", "`path/to/file.py:function`", _cwd())
    name = f"{FILE_PREFIX}{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise InputError("reward_funcs", repr(spec), "a Python source file", "Rename it so that it ends in `.py`.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except _IMPORT_ERRORS as error:
        del sys.modules[name]
        raise import_failed(spec, path, error) from error
    return module


def origin(found: Any) -> str:
    """Origin of a function: its module, or the file that the user named."""
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", "")
    return str(getattr(sys.modules.get(name), "__file__", name)) if name.startswith(FILE_PREFIX) else name


def _cwd() -> str:
    return f"Relative paths start at the current directory, {os.getcwd()}."


def import_failed(spec: str, module: str, error: BaseException) -> InputError:
    return InputError(
        "reward_funcs",
        f"{spec!r}, but importing {module} failed with {type(error).__name__}: {error}",
        "a module that imports",
        "Fix the error, or install what is missing; TRL_DRGRPO_DEBUG=1 shows the traceback.",
    )


def _member(module: ModuleType, attribute: str, spec: str) -> tuple[ModuleType, Any]:
    if not hasattr(module, attribute):
        public = public_names(module)
        hint = did_you_mean(attribute, public, f"Its functions: {', '.join(public) or 'none'}.", most=2)
        raise InputError("reward_funcs", f"{spec!r}", f"a function of {origin(module)}", hint)
    return module, getattr(module, attribute)


def public_names(module: ModuleType) -> list[str]:
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
