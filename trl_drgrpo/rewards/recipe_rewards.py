"""From what a recipe says about a reward to the reward: a name, a path, or a mapping with options.

    reward_funcs:
      - accuracy_reward                                      # a name
      - my_rewards.py:score                                  # a path
      - verl: my_rewards.py:compute_score                    # an adapter and its first argument
      - isolate: {reward: my_rewards.py:slow, timeout: 5}    # a name and its options

Why: TRL's script finds four names and dotted paths. Here one table, `REWARDS` in `recipe_names.py`, says where each
name lives; a new reward is one row, and rooms above add theirs. A name that does not resolve says which come nearest.
Nothing is imported before its name is asked for. A file runs as a module of its own name, once per process; its
directory is not put on the search path.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.rewards.columns import adapter_hint
from trl_drgrpo.rewards.contract import Limits, RewardFunction
from trl_drgrpo.rewards.recipe_names import AROUND_OTHERS, HARMLESS, REWARDS

FILE_PREFIX = "trl_drgrpo_user_reward_"  # modules that were named by their file


def resolve_object(path: str, field: str) -> Any:
    """The object at `package.module.name` or `path/to/file.py:name`, of any kind. Refuses a path without a module,
    file or name, and a module that fails to import. `field` is for the message."""
    found = _at_path(path, field)
    if found is None:
        raise InputError(field, repr(path), "a path", _write_path(path))
    return found[1]


def _write_path(text: str) -> str:
    """Advice for a text that was meant as a path."""
    if text.endswith(".py"):
        return f"A file needs the function's name too: `{text}:my_reward`."
    return "Name a function as `package.module.function` or `path/to/file.py:function`."


def _at_path(spec: str, field: str) -> tuple[ModuleType, Any] | None:
    """Module and object of a path; `None` for text that is no path."""
    place, _, attribute = spec.rpartition(":")
    if place.endswith(".py"):
        module = module_from_file(spec, place, field)
    elif "." in spec and not spec.endswith(".py"):
        place, _, attribute = spec.rpartition(".")
        module = _module_from_name(spec, place, field)
    else:
        return None
    if not hasattr(module, attribute):
        public = _public_names(module)
        hint = did_you_mean(attribute, public, f"Its functions: {', '.join(public) or 'none'}.", most=2)
        raise InputError(field, f"{spec!r}", f"a function of {origin(module)}", hint)
    return module, getattr(module, attribute)


@contextlib.contextmanager
def _importing(module: str, spec: str, field: str) -> Iterator[None]:
    """Around an import: whatever the top level of a module raises, `sys.exit()` included, is the cause of an error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        got = f"{spec!r}, but importing {module} failed with {type(error).__name__}: {error}"
        remedy = "Fix the error, or install what is missing; TRL_DRGRPO_DEBUG=1 shows the traceback."
        raise InputError(field, got, "a module that imports", remedy) from error


def _module_from_name(spec: str, module: str, field: str) -> ModuleType:
    """Imports `module`, looking in the current directory too, as TRL's script does; last, so it shadows nothing."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    with _importing(module, spec, field):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing, cause = error.name or module, error
            if module != missing and not module.startswith(missing + "."):
                raise
    raise InputError(
        field,
        f"{spec!r}, whose module {missing!r} does not exist",
        "an importable `package.module.function`",
        f"Install it, run from the directory that holds it ({here} is searched), or name the file as "
        "`path/to/file.py:function`.",
    ) from cause


def module_from_file(spec: str, path: str, field: str = "reward_funcs") -> ModuleType:
    """Runs a file as a module of its own name, once per process; its directory is not put on the search path. `spec`:
    what the user wrote, for the message. An error of the file is the cause of the `InputError`."""
    file = user_path(path)
    if not os.path.isfile(file):  # false for a name that is too long, too
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError(field, f"{spec!r}, a file that does not exist", "`path/to/file.py:function`", remedy)
    name = f"{FILE_PREFIX}{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if name not in sys.modules:
        module_spec: Any = importlib.util.spec_from_file_location(name, file)  # of a name in `.py` there is one
        module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
        try:
            with _importing(path, spec, field):
                module_spec.loader.exec_module(module)
        except InputError:
            del sys.modules[name]
            raise
    return sys.modules[name]


def origin(found: Any) -> str:
    """Origin of a function: its module, or the file that the user named."""
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", "")
    return str(getattr(sys.modules.get(name), "__file__", name)) if name.startswith(FILE_PREFIX) else name


def _public_names(module: ModuleType) -> list[str]:
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


class RewardSpec:
    """A reward as a recipe writes it: text, or a mapping with one key."""


# Options that are a reward, and options that hold several, whichever name they belong to.
_ONE, _SEVERAL = ("reward", "gate"), ("rewards", "parts")


def check_spec(spec: Any, field: str = "reward_funcs") -> None:
    """Checks what needs no import: that a spec is text or a mapping with one known name, and its options. `field` is
    for the message."""
    if isinstance(spec, str) and spec.strip():
        return
    name, options = _split(spec, field)
    entry = REWARDS[name]
    if entry.factory is None:
        raise InputError(field, f"options for {name}", f"`{name}` alone: it takes none", "Write the name only.")
    for option, value in options.items() if isinstance(options, Mapping) else ():
        _map_specs(option, value, partial(check_spec, field=f"{field}: {name}.{option}"))


def needs_trust(spec: Any) -> bool:
    """Tell whether a checked spec names code (a file, a module) or options that may reach a server or open a sandbox.

    Example:

    ```python
    >>> [needs_trust(spec) for spec in ("math_reward", "mine.py:score", {"isolate": "mine.py:score"})]
    [False, True, True]

    ```
    """
    if isinstance(spec, str):
        return spec not in REWARDS
    (name, options), *_ = spec.items()
    if name not in HARMLESS:
        return True
    if not isinstance(options, Mapping):  # the first option, which of those around others is a reward or several
        options = {"parts" if isinstance(options, list) else "reward": options} if name in AROUND_OTHERS else {}
    inner: list[Any] = []
    for option, value in options.items():
        _map_specs(option, value, inner.append)
    return any(map(needs_trust, inner))


def _built(factory: Callable, options: Any, field: str) -> Any:
    """What a class or function makes of its options, in which rewards and limits are built first."""
    arguments = _as_options(options, factory, field)
    for option, value in arguments.items():
        arguments[option] = _map_specs(option, value, partial(resolve_reward, field=f"{field}.{option}"))
    if isinstance(limits := arguments.get("limits"), Mapping):
        arguments["limits"] = _built(Limits, limits, f"{field}.limits")
    try:
        return factory(**arguments)
    except InputError as error:
        raise error.under(f"{field}.{error.field}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # TRL's factories do not check what they are given, and no constructor checks everything.
        got = f"options that it does not accept ({type(error).__name__}: {error})"
        expected = f"options {', '.join(inspect.signature(factory).parameters)} of the documented types"
        name = field.rpartition(": ")[2]
        raise InputError(field, got, expected, f"See the docstring of `{name}`.") from error


def bare_names() -> list[str]:
    """Names that stand for a reward on their own."""
    return sorted(name for name, entry in REWARDS.items() if entry.default or entry.usual)


def _unknown(name: str, field: str, otherwise: str) -> InputError:
    """The error for a name that is not in the table: all that are, the nearest, else other advice."""
    alone = bare_names()
    others = sorted(REWARDS.keys() - set(alone))
    expected = f"one of {', '.join(alone)}, with options {', '.join(others)}, or a path"
    known = [] if name.endswith(".py") else REWARDS  # a file was meant
    return InputError(field, repr(name), expected, did_you_mean(name, known, otherwise, most=2))


def _member(name: str, field: str, *, with_options: bool) -> Callable:
    """What a name of the table stands for on its own, or its class or function that takes options."""
    entry = REWARDS[name]
    with _importing(entry.module, name, field):
        module = importlib.import_module(entry.module)
    if entry.default is not None and not with_options:
        return getattr(module, entry.default)
    factory = getattr(module, entry.factory or "")
    if with_options:
        return factory
    if entry.usual is not None:
        return factory(**entry.usual)
    needed = next(iter(inspect.signature(factory).parameters), "option")
    expected = f"a mapping with its options: `{name}: {{{needed}: ...}}`"
    raise InputError(field, f"{name!r} without options", expected, "Write it as a mapping.")


def _split(spec: Any, field: str) -> tuple[str, Any]:
    """Name and options of a mapping."""
    if not isinstance(spec, Mapping):
        remedy = "Write `accuracy_reward`, `path/to/file.py:function` or `{name: {option: value}}`."
        raise InputError(field, f"{type(spec).__name__} {spec!r}"[:100], "a name, a path, or a mapping", remedy)
    if len(spec) != 1:
        keys = ", ".join(map(str, spec)) or "no keys"
        remedy = "Indent the options below the reward's name, and start each reward with a dash."
        raise InputError(field, f"a mapping with {keys}", "a mapping with one key, the reward's name", remedy)
    name, options = next(iter(spec.items()))
    if name not in REWARDS:
        raise _unknown(str(name), field, "A path takes no options: write it as a string.")
    return name, options


def _as_options(options: Any, factory: Callable, field: str) -> dict[str, Any]:
    """The options by name; refuses unknown ones, and the absence of one without a default."""
    parameters = inspect.signature(factory).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known, takes_any = [p.name for p in by_name], any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not isinstance(options, Mapping):  # the first option, written without its name
        options = {} if options is None else {known[0]: options}
    for option in options:
        if not isinstance(option, str):
            raise InputError(field, f"the option {option!r}", "names of options", "Write them as strings.")
        if option not in known and not takes_any:
            remedy = did_you_mean(option, known, "Remove it.")
            if option in REWARDS and known[:1] == ["reward"]:
                remedy = f"A reward inside another one goes under `reward`: `reward: {{{option}: ...}}`."
            raise InputError(f"{field}.{option}", "an unknown option", f"one of {', '.join(known)}", remedy)
    if missing := [p.name for p in by_name if p.default is p.empty and p.name not in options]:
        got = f"no {', '.join(missing)}"
        raise InputError(field, got, f"the option {missing[0]}", "Add it; it has no default.")
    return dict(options)


def _map_specs(option: str, value: Any, apply: Callable[[Any], Any]) -> Any:
    """The value of an option with `apply` done to every reward in it; a value without rewards as it is."""

    def one(reward: Any) -> Any:
        return apply(reward) if isinstance(reward, str | Mapping) else reward

    def entry(found: Any) -> Any:  # a reward, or a reward and its weight
        return (one(found[0]), *found[1:]) if isinstance(found, list | tuple) and found else one(found)

    if option in _ONE:
        return one(value)
    if option in _SEVERAL and isinstance(value, Mapping):  # `name: [reward, weight]`, or `reward: weight`
        return {
            name: entry(found) if isinstance(found, list | tuple) else (one(name), found)
            for name, found in value.items()
        }
    return [entry(found) for found in value] if option in _SEVERAL and isinstance(value, list | tuple) else value


def resolve_reward(spec: str | Mapping[str, Any], field: str = "reward_funcs") -> RewardFunction:
    """
    Finds the reward function that a name stands for, or builds the one that a mapping describes.

    Args:
        spec (`str` or `Mapping[str, Any]`):
            One of

            - a name of [`REWARDS`] that needs no options: `accuracy_reward`, `math_reward`;
            - a dotted path: `my_package.rewards.score` (the current directory is searched too);
            - a file and a function in it: `rewards/mine.py:score`;
            - a mapping with one key, a name of [`REWARDS`], and its options: a mapping of them, or the first option
              alone (`{"verl": "my_rewards.py:f"}`). The options `reward` and `gate` are rewards themselves, written in
              any of these ways; `rewards` and `parts` hold several, as a list of rewards or of pairs
              `[reward, weight]`, or as a mapping `{name: weight}` or `{name: [reward, weight]}`. A mapping under
              `limits` becomes [`Limits`].
        field (`str`, *optional*, defaults to `"reward_funcs"`): Name of the setting in error messages.

    Returns:
        `Callable`: The reward function, called by TRL as `f(prompts=..., completions=..., <columns>, ...)`.

    Raises:
        [`InputError`]: If there is no such name, module, file or function, if the module fails to
            import (its own error is the cause), if what was found cannot be called, or if an option is unknown,
            missing, or has a value that the reward refuses.
    """
    if not isinstance(spec, str):
        check_spec(spec, field)
        name, options = _split(spec, field)
        return _built(_member(name, field, with_options=True), options, f"{field}: {name}")
    if spec in REWARDS:
        return _member(spec, field, with_options=False)
    if (at_path := _at_path(spec, field)) is None:
        raise _unknown(spec, field, _write_path(spec))
    module, found = at_path
    reward_func: Any = found
    if inspect.isclass(found):
        got, expected = f"{spec!r}, which is a class", "a function or an instance with `__call__`"
        remedy = f"Create an instance in the module (`my_reward = {found.__name__}(...)`) and name that."
    elif not callable(found):
        got = f"{spec!r}, which is a {type(found).__name__}"
        expected = "a function `f(completions, **kwargs) -> list[float]`"
        remedy = f"Its functions: {', '.join(_public_names(module)) or 'none'}."
    else:
        return reward_func
    raise InputError(field, got, expected, adapter_hint(found) or remedy)
