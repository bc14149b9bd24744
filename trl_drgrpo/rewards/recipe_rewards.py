"""From the text or mapping in a recipe to the reward: a name, a path, or a name with options.

    reward_funcs:
      - accuracy_reward                                      # a name
      - my_rewards.py:score                                  # a path
      - verl: my_rewards.py:compute_score                    # an adapter and its first argument
      - isolate: {reward: my_rewards.py:slow, timeout: 5}    # a name and its options

TRL's script takes four names and dotted paths. The names here are the entries of `REWARDS`, which `register_reward`
adds to; the error for an unknown name lists the nearest ones. Nothing is imported before its name is used. A file runs
as a module with a name of its own, once per process; its directory is not added to the search path.
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
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.common.registry import RegistrationError
from trl_drgrpo.rewards.columns import adapter_hint
from trl_drgrpo.rewards.contract import Limits, RewardFunction
from trl_drgrpo.rewards.recipe_names import REWARDS

FILE_PREFIX = "trl_drgrpo_user_reward_"  # of the names of modules that were loaded from a file


def resolve_object(path: str, field: str) -> Any:
    """Return the object at `package.module.name` or `path/to/file.py:name`, of any kind.

    Refuses a path without a module, file or name, and a module that fails to import. `field` is for the message.
    """
    module_and_object = _at_path(path, field, "name")
    if module_and_object is None:
        raise InputError(field, repr(path), "a path", _write_path(path))
    return module_and_object[1]


def _write_path(text: str) -> str:
    """Return advice for a text that was meant as a path."""
    if text.endswith(".py"):
        return f"A file needs the function's name too: `{text}:my_reward`."
    return "Name a function as `package.module.function` or `path/to/file.py:function`."


def _at_path(spec: str, field: str, kind: Literal["function", "name"] = "function") -> tuple[ModuleType, Any] | None:
    """Return the module and the object of a path; `None` for text that is no path. `kind` is for the message."""
    # `file.py:name` first: a file's path may have points in it. `name.py` alone is a file without a name.
    place, _, attribute = spec.rpartition(":")
    if place.endswith(".py"):
        module = module_from_file(spec, place, field)
    elif "." in spec and not spec.endswith(".py"):
        place, _, attribute = spec.rpartition(".")
        module = _module_from_name(spec, place, field)
    else:
        return None
    if not hasattr(module, attribute):
        names = _public_functions(module)
        if kind == "name":  # of an object that need not be a function
            names = sorted(name for name in vars(module) if not name.startswith("_"))
        otherwise = f"Its {kind}s: {', '.join(names) or 'none'}."
        hint = did_you_mean(attribute, names, otherwise, most=2)
        raise InputError(field, f"{spec!r}", f"a {kind} of {origin(module)}", hint)
    return module, getattr(module, attribute)


@contextlib.contextmanager
def _importing(module: str, spec: str, field: str) -> Iterator[None]:
    """Turn errors of a module's top level, `sys.exit()` included, into an `InputError` with the error as cause."""
    try:
        yield
    except RegistrationError:  # its words are about a registration, and not about the user's settings
        raise
    except (Exception, SystemExit) as error:
        got = f"{spec!r}, but importing {module} failed with {type(error).__name__}: {error}"
        remedy = "Fix the error, or install what is missing; TRL_DRGRPO_DEBUG=1 shows the traceback."
        raise InputError(field, got, "a module that imports", remedy) from error


def _module_from_name(spec: str, module: str, field: str) -> ModuleType:
    """Import `module`. The current directory is searched too, as TRL's script does, but last: it hides nothing."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    with _importing(module, spec, field):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or module
            is_parent = module == missing or module.startswith(missing + ".")
            if not is_parent:  # the module exists, and a module that it imports does not
                raise
            cause = error
    # Outside of `_importing`, which would wrap it in a second error.
    raise InputError(
        field,
        f"{spec!r}, whose module {missing!r} does not exist",
        "an importable `package.module.function`",
        f"Install it, run from the directory that holds it ({here} is searched), or name the file as "
        "`path/to/file.py:function`.",
    ) from cause


def module_from_file(spec: str, path: str, field: str = "reward_funcs") -> ModuleType:
    """Run a file as a module with a name of its own, once per process, and return the module.

    The file's directory is not added to the search path. `spec` is what the user wrote, for the message. An error of
    the file is the cause of the `InputError`.
    """
    file = user_path(path)
    if not os.path.isfile(file):  # not `file.is_file()`, which raises for a name that is too long
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError(field, f"{spec!r}, a file that does not exist", "`path/to/file.py:function`", remedy)
    checksum = zlib.crc32(str(file.resolve()).encode())  # two files of one name are two modules
    name = f"{FILE_PREFIX}{file.stem}_{checksum:08x}"
    if name not in sys.modules:
        module_spec: Any = importlib.util.spec_from_file_location(name, file)  # never `None` for a name in `.py`
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module  # before it runs, as Python does: dataclasses look their module up there
        try:
            with _importing(path, spec, field):
                module_spec.loader.exec_module(module)
        except InputError:
            del sys.modules[name]
            raise
    return sys.modules[name]


def origin(module_or_object: object) -> str:
    """Return the name of the module that an object comes from, or the file that the user named."""
    if isinstance(module_or_object, ModuleType):
        name = module_or_object.__name__
    else:
        name = getattr(module_or_object, "__module__", "")
    if not name.startswith(FILE_PREFIX):
        return name
    return str(getattr(sys.modules.get(name), "__file__", name))


def _public_functions(module: ModuleType) -> list[str]:
    names = []
    for name, value in vars(module).items():
        if callable(value) and not name.startswith("_"):
            names.append(name)
    return sorted(names)


# Only ever a type in annotations: the command line reads the kinds of its flags from them.
class RewardSpec:
    """A reward as a recipe writes it: text, or a mapping with one key."""


# Options that hold a reward, and options that hold several, whichever reward they belong to.
_ONE = ("reward", "gate")
_SEVERAL = ("rewards", "parts")


def check_spec(spec: object, field: str = "reward_funcs") -> None:
    """Check what needs no import of a reward: that a spec is text or a mapping with one registered name, and that the
    name takes options. Rewards in the options are checked too. `field` is for the message."""
    if isinstance(spec, str) and spec.strip():  # whether it leads anywhere, an import would tell
        return
    name, options = _split(spec, field)
    if REWARDS[name].factory is None:
        raise InputError(field, f"options for {name}", f"`{name}` alone: it takes none", "Write the name only.")
    if isinstance(options, Mapping):
        for option, value in options.items():
            _map_specs(option, value, partial(check_spec, field=f"{field}: {name}.{option}"))


def needs_trust(spec: str | Mapping[str, Any]) -> bool:
    """Tell whether a checked spec names code (a file, a module) or options that may reach a server or open a sandbox.

    Example:

    ```python
    >>> [needs_trust(spec) for spec in ("math_reward", "mine.py:score", {"isolate": "mine.py:score"})]
    [False, True, True]

    ```
    """
    if isinstance(spec, str):
        return spec not in REWARDS
    [(name, options)] = spec.items()
    if not REWARDS[name].is_harmless:
        return True
    if not isinstance(options, Mapping):
        # The first option, written without its name. Of a wrapper it holds rewards, and a list holds several.
        first_option = "parts" if isinstance(options, list) else "reward"
        options = {first_option: options} if REWARDS[name].role == "wrapper" else {}
    inner_specs: list[Any] = []
    for option, value in options.items():
        _map_specs(option, value, inner_specs.append)  # only collects: nothing of a recipe runs before it is trusted
    return any(map(needs_trust, inner_specs))


def _built(factory: Callable, options: object, field: str) -> Any:
    """Call a class or function with its options, after the rewards and limits in them are built."""
    # From the inside to the outside: rewards in the options, then their limits, then the reward itself.
    arguments = _as_options(options, factory, field)
    for option, value in arguments.items():
        arguments[option] = _map_specs(option, value, partial(resolve_reward, field=f"{field}.{option}"))
    limits = arguments.get("limits")
    if isinstance(limits, Mapping):
        arguments["limits"] = _built(Limits, limits, f"{field}.limits")
    try:
        return factory(**arguments)
    except InputError as error:  # it names the option; the path to it in the recipe is added
        raise error.under(f"{field}.{error.field}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # TRL's factories do not check their arguments, and no constructor checks everything.
        got = f"options that it does not accept ({type(error).__name__}: {error})"
        expected = f"options {', '.join(inspect.signature(factory).parameters)} of the documented types"
        name = field.rpartition(": ")[2]
        raise InputError(field, got, expected, f"See the docstring of `{name}`.") from error


def _unknown(name: str, field: str, otherwise: str) -> InputError:
    """Return the error for a name that is not registered. It lists all names, and the nearest or else other advice."""
    alone = sorted(name for name, entry in REWARDS.items() if entry.stands_alone)
    with_options = sorted(REWARDS.keys() - alone)
    expected = f"one of {', '.join(alone)}, with options {', '.join(with_options)}, or a path"
    candidates = [] if name.endswith(".py") else REWARDS  # a file was meant
    return InputError(field, repr(name), expected, did_you_mean(name, candidates, otherwise, most=2))


def _member(name: str, field: str, *, with_options: bool) -> Callable:
    """Return the reward that a name stands for on its own, or its class or function that takes options."""
    # Three ways: the reward itself; its factory, for options; its factory called with the usual options.
    entry = REWARDS[name]
    is_reward = entry.reward is not None and not with_options
    home = entry.reward if is_reward else entry.factory
    with _importing(str(home).partition(":")[0], name, field):
        member = REWARDS.load(name, home)
    if is_reward or with_options:
        return member
    if entry.usual_options is not None:
        return member(**entry.usual_options)
    needed = next(iter(inspect.signature(member).parameters), "option")  # the first, which is as a rule required
    expected = f"a mapping with its options: `{name}: {{{needed}: ...}}`"
    raise InputError(field, f"{name!r} without options", expected, "Write it as a mapping.")


def _split(spec: object, field: str) -> tuple[str, Any]:
    """Return the name and the options of a mapping with one key."""
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


def _as_options(options: object, factory: Callable, field: str) -> dict[str, Any]:
    """Return the options by name. Refuses unknown options, and the absence of one without a default."""
    # What the factory takes, by its signature.
    names = []
    required_names = []
    takes_any = False
    for parameter in inspect.signature(factory).parameters.values():
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                required_names.append(parameter.name)
    if options is None:
        options = {}
    elif not isinstance(options, Mapping):  # the first option, written without its name
        if not names:
            raise InputError(field, "a value without a name", "a mapping of options", "Write the option's name.")
        options = {names[0]: options}
    for option in options:
        if not isinstance(option, str):  # YAML reads the keys `yes` and `1` as other types
            raise InputError(field, f"the option {option!r}", "names of options", "Write them as strings.")
        if option not in names and not takes_any:
            remedy = did_you_mean(option, names, "Remove it.")
            if option in REWARDS and names[:1] == ["reward"]:
                remedy = f"A reward inside another one goes under `reward`: `reward: {{{option}: ...}}`."
            raise InputError(f"{field}.{option}", "an unknown option", f"one of {', '.join(names)}", remedy)
    missing = [name for name in required_names if name not in options]
    if missing:
        got = f"no {', '.join(missing)}"
        raise InputError(field, got, f"the option {missing[0]}", "Add it; it has no default.")
    return dict(options)


def _map_specs(option: str, value: object, apply: Callable[[Any], Any]) -> Any:
    """Return the value of an option with `apply` done to each reward in it; a value without rewards as it is."""

    def one(reward: object) -> Any:
        return apply(reward) if isinstance(reward, str | Mapping) else reward

    def with_weight(part: object) -> Any:
        """Apply to a reward, or to the first of a pair of reward and weight."""
        if isinstance(part, list | tuple) and part:
            return (one(part[0]), *part[1:])
        return one(part)

    if option in _ONE:
        return one(value)
    if option in _SEVERAL and isinstance(value, Mapping):
        parts = {}
        for name, part in value.items():
            if isinstance(part, list | tuple):  # `name: [reward, weight]`
                parts[name] = with_weight(part)
            else:  # `reward: weight`
                parts[name] = (one(name), part)
        return parts
    if option in _SEVERAL and isinstance(value, list | tuple):
        return [with_weight(part) for part in value]
    return value


def resolve_reward(spec: str | Mapping[str, Any], field: str = "reward_funcs") -> RewardFunction:
    """
    Find the reward function that a name stands for, or build the one that a mapping describes.

    Args:
        spec (`str` or `Mapping[str, Any]`):
            One of

            - a registered name that needs no options: `accuracy_reward`, `math_reward`;
            - a dotted path: `my_package.rewards.score` (the current directory is searched too);
            - a file and a function in it: `rewards/mine.py:score`;
            - a mapping with one key, a registered name, and its options: a mapping of them, or the first option
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
    at_path = _at_path(spec, field)
    if at_path is None:
        raise _unknown(spec, field, _write_path(spec))
    # What the path leads to must be callable. A class is, but TRL would take its instances for rewards.
    module, candidate = at_path
    if inspect.isclass(candidate):
        got = f"{spec!r}, which is a class"
        expected = "a function or an instance with `__call__`"
        remedy = f"Create an instance in the module (`my_reward = {candidate.__name__}(...)`) and name that."
    elif not callable(candidate):
        got = f"{spec!r}, which is a {type(candidate).__name__}"
        expected = "a function `f(completions, **kwargs) -> list[float]`"
        remedy = f"Its functions: {', '.join(_public_functions(module)) or 'none'}."
    else:
        reward_func: Any = candidate
        return reward_func
    raise InputError(field, got, expected, adapter_hint(candidate) or remedy)
