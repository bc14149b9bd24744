"""A reward function as bytes that a worker, which has neither the trainer's script nor its modules, can load.

Plain pickle names a function by its module, which a worker cannot import where that is the running script or a file
that was loaded by its path. So functions and classes of a file that was named as a reward go as its path, for the
worker to load by itself; whatever else cannot be imported by name goes by value, with `cloudpickle`.
"""

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.paths import FILE_PREFIX, module_from_file
from trl_drgrpo.rewards.registry import resolve_reward


def portable(reward: Callable | str) -> Any:
    """A reward function, or its name, as something that `pickled` can send; unpickled, it is the function."""
    if isinstance(reward, str):
        path, _, attribute = reward.rpartition(":")
        is_file = path.endswith(".py")
        return _Named(f"{os.path.abspath(os.path.expanduser(path))}:{attribute}" if is_file else reward)
    for part in _parts(reward):
        module = sys.modules.get(getattr(part, "__module__", None) or "")
        if module is not None and not _is_of_file(module.__name__) and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
    return reward


def pickled(worker_function: Any, name: str) -> bytes:
    """A callable that holds the [`portable`] form of a reward, as bytes for a worker. Refuses one that refers to what
    no other process can have: a lock, an open file, a client. `name`: the reward's, for the message."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(worker_function)
        return buffer.getvalue()
    except Exception as error:  # any type: `__reduce__` of whatever the function refers to
        raise InputError(
            f"reward function '{name}'",
            f"one that cannot be sent to a worker process ({type(error).__name__}: {error})",
            "a function that pickles with cloudpickle",
            "Create clients, locks and files inside the function, or move it to a file of its own and name it as "
            "`path/to/file.py:function`, or run it without limits.",
        ) from error


def original(reward: Any) -> Any:
    """The reward function behind its [`portable`] form."""
    return resolve_reward(reward.spec) if isinstance(reward, _Named) else reward


class _Named:
    """Pickles as a name, unpickles as the function of that name."""

    def __init__(self, spec: str):
        self.spec = spec

    def __reduce__(self):
        return resolve_reward, (self.spec,)


class _Pickler(cloudpickle.Pickler):
    """Names functions and classes of a file that was loaded by its path as members of that file."""

    def reducer_override(self, obj: Any) -> Any:
        if inspect.isfunction(obj) or inspect.isclass(obj):
            module = sys.modules.get(getattr(obj, "__module__", None) or "")
            if module is not None and _is_of_file(module.__name__) and _member(module, obj.__qualname__) is obj:
                return _load_member, (os.path.abspath(str(module.__file__)), obj.__qualname__)
        return super().reducer_override(obj)


def _is_of_file(module: str) -> bool:
    return module.startswith(FILE_PREFIX)


def _member(module: Any, qualname: str) -> Any:
    return functools.reduce(lambda found, name: getattr(found, name, None), qualname.split("."), module)


def _load_member(path: str, qualname: str) -> Any:
    return _member(module_from_file(f"{path}:{qualname}", path), qualname)


def _parts(reward: Any) -> Iterator[Any]:
    """Function, instance and class that a callable consists of: behind partials and bound methods."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    yield reward
    if inspect.ismethod(reward):
        yield type(reward.__self__)
    elif not inspect.isroutine(reward):
        yield type(reward)


def _is_importable(module: str) -> bool:
    """Whether a new interpreter finds the module by its name; `importlib` would say yes to all that is loaded here."""
    package = module.partition(".")[0]
    if package == "__main__":
        return True  # cloudpickle knows better
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path if hasattr(finder, "find_spec"))
