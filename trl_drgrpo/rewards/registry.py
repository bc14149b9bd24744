"""From the name of a reward function to the function.

Why: TRL's script finds four names and dotted paths. Here a name that does not resolve says which names come nearest,
and a file path is accepted too (`my_rewards.py:score`).

Names with options, and what other stacks call their rewards, are mappings: see [`trl_drgrpo.rewards.spec`].
Nothing heavy is imported at module level; TRL's own rewards are imported when one of their names is asked for.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.foreign import adapter_hint
from trl_drgrpo.rewards.spec import REWARDS, default_reward, resolve_mapping

# What running the top level of a user's module may raise: anything, and `sys.exit()` must not end the caller silently.
_IMPORT_ERRORS = (Exception, SystemExit)


def _soft_overlong_punishment() -> Callable:
    # The two values are those of TRL's own script.
    punishment = importlib.import_module("trl.rewards").get_soft_overlong_punishment
    return punishment(max_completion_len=1280, soft_punish_cache=256)


FILE_PREFIX = "trl_drgrpo_user_reward_"  # modules that were named by their file

# Names that stand for a reward on their own.
REGISTRY: dict[str, Callable[[], Callable]] = {
    name: functools.partial(default_reward, name) for name, entry in REWARDS.items() if entry.default
}
REGISTRY["get_soft_overlong_punishment"] = _soft_overlong_punishment


def resolve_reward(spec: str | Mapping[str, Any], field: str = "reward_funcs") -> Callable:
    """
    Finds the reward function that a name stands for, or builds the one that a mapping describes.

    Args:
        spec (`str` or `Mapping[str, Any]`):
            One of

            - a registered name: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`,
              `get_soft_overlong_punishment` (TRL's, the last with `max_completion_len=1280, soft_punish_cache=256`),
              `reasoning_gym` (the task's own `score_answer`), `list_sum_reward` (the demo's), `list_sum_line_reward`
              (the demo's step reward), `math_reward`, `code_reward`, `format_reward`, `exact_match_reward`,
              `numeric_reward`, `choice_reward`, `json_schema_reward`;
            - a dotted path: `my_package.rewards.score` (the current directory is searched too);
            - a file and a function in it: `rewards/mine.py:score`;
            - a mapping with one key, a name of [`trl_drgrpo.rewards.spec.REWARDS`] and its options, for example
              `{"verl": {"function": "mine.py:compute_score"}}`, see [`trl_drgrpo.rewards.spec.resolve_mapping`]: most
              of the above, `judge_reward`, `regex_reward`, `repetition_penalty`, `overlong_penalty` and
              `length_penalty`, what is put around others (`isolate`, `weighted_sum`, `gated`, `clipped`, `cached`,
              `noted_if_not_binary`) and adapters (`trl`, `verl`, `openrlhf`, `swift`, `verifiers`, `r1_zero`).
        field (`str`, *optional*, defaults to `"reward_funcs"`): What error messages call the setting.

    Returns:
        `Callable`: The reward function, called by TRL as `f(prompts=..., completions=..., <columns>, ...)`.

    Raises:
        [`InputError`]: If there is no such name, module, file or function, if the module fails to
            import (its own error is the cause), if what was found cannot be called, or if an option does not fit.
    """
    if isinstance(spec, Mapping):
        return resolve_mapping(spec, field)
    try:
        if not isinstance(spec, str):
            raise InputError(
                "", f"{type(spec).__name__} {spec!r}", "a name, a path, or a mapping", "Write one of them."
            )
        return _resolve(spec)
    except InputError as error:
        raise error.under(field) from error.__cause__


def resolve_object(path: str, field: str) -> Any:
    """
    Finds whatever a path stands for: also a class or an object that is no function.

    Args:
        path (`str`): `package.module.name` or `path/to/file.py:name`.
        field (`str`): What error messages call the setting.

    Returns:
        `Any`: The object.

    Raises:
        [`InputError`]: If there is no such module, file or name, or if the module fails to import.
    """
    try:
        found = _at_path(path)
    except InputError as error:
        raise error.under(field) from error.__cause__
    if found is None:
        raise InputError(field, repr(path), "a path", _write_path(path))
    return found[1]


def _resolve(spec: str) -> Callable:
    if spec in REWARDS:
        try:
            return REGISTRY.get(spec, functools.partial(default_reward, spec))()
        except ImportError as error:
            raise _import_failed(spec, "its module", error) from error
    if (found := _at_path(spec)) is not None:
        return _callable(*found, spec)
    remedy = _write_path(spec)
    if near := [] if spec.endswith(".py") else get_close_matches(spec, REGISTRY, n=2, cutoff=0.5):
        remedy = f"Did you mean {' or '.join(near)}? {remedy}"
    raise InputError("reward_funcs", repr(spec), f"one of {', '.join(sorted(REGISTRY))} or a path", remedy)


def _write_path(text: str) -> str:
    """How what is meant as a path would have been one."""
    if text.endswith(".py"):
        return f"A file needs the function's name too: `{text}:my_reward`."
    return "Name a function as `package.module.function` or `path/to/file.py:function`."


def _at_path(spec: str) -> tuple[ModuleType, Any] | None:
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
        raise _import_failed(spec, module, error) from error
    except _IMPORT_ERRORS as error:
        raise _import_failed(spec, module, error) from error


def module_from_file(spec: str, path: str) -> ModuleType:
    """
    Runs a file as a module of its own name; its directory is not put on the search path.

    Args:
        spec (`str`): What the user wrote, for the message.
        path (`str`): The file.

    Returns:
        `ModuleType`: The module, which is run once per process.

    Raises:
        [`InputError`]: If there is no such file, or if it fails to run (the cause is its error).
    """
    file = Path(path).expanduser()
    if not file.is_file():
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
        raise _import_failed(spec, path, error) from error
    return module


def origin(found: Any) -> str:
    """Where a function comes from: its module, or the file that the user named."""
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", "")
    return str(getattr(sys.modules.get(name), "__file__", name)) if name.startswith(FILE_PREFIX) else name


def _cwd() -> str:
    return f"Relative paths start at the current directory, {os.getcwd()}."


def _import_failed(spec: str, module: str, error: BaseException) -> InputError:
    return InputError(
        "reward_funcs",
        f"{spec!r}, but importing {module} failed with {type(error).__name__}: {error}",
        "a module that imports",
        "Correct it, or install what it needs; TRL_DRGRPO_DEBUG=1 shows where it happened.",
    )


def _member(module: ModuleType, attribute: str, spec: str) -> tuple[ModuleType, Any]:
    if not hasattr(module, attribute):
        public = _public(module)
        near = get_close_matches(attribute, public, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Its functions: {', '.join(public) or 'none'}."
        raise InputError("reward_funcs", f"{spec!r}", f"a function of {origin(module)}", hint)
    return module, getattr(module, attribute)


def _public(module: ModuleType) -> list[str]:
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


def _callable(module: ModuleType, found: Any, spec: str) -> Callable:
    """What was found, if it can be a reward function."""
    if not callable(found):
        raise InputError(
            "reward_funcs",
            f"{spec!r}, which is a {type(found).__name__}",
            "a function `f(completions, **kwargs) -> list[float]`",
            adapter_hint(found) or f"Its functions: {', '.join(_public(module)) or 'none'}.",
        )
    if inspect.isclass(found):
        raise InputError(
            "reward_funcs",
            f"{spec!r}, which is a class",
            "a function or an instance with `__call__`",
            adapter_hint(found)
            or f"Make an instance in the module (`my_reward = {found.__name__}(...)`) and name that.",
        )
    return found
