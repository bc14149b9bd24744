"""Options of a reward function as plain values, which tell it from another one of the same name."""

import functools
import inspect
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from trl_drgrpo.common.secrets import is_secret

_DEEPEST = 8  # levels of rewards in rewards, and of options in options
_MOST = 100  # items of a list or mapping: a longer one is data
_LONGEST = 80  # characters
_PLAIN = (bool, int, float, type(None))


def reward_options(reward_func: object) -> dict[str, Any]:
    """Return the options of a reward function by path, JSON-ready.

    The options are the arguments of partials, the public attributes of instances, and the variables that a function
    closes over, also in rewards inside rewards. A value that is not plain is named by its type. Secrets are left out.
    A long text, or an address with a password, is replaced by a checksum.

    Example:

    ```python
    >>> from functools import partial
    >>> reward_options(partial(len, timeout=5, weights={"a": 1.0}))
    {'function': 'len', 'timeout': 5, 'weights.a': 1.0}

    ```
    """
    return dict(_flat("", _described(reward_func, _DEEPEST)))


def _described(value: object, levels: int) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, str):
        # `https://user:password@host` must not be written into a checkpoint; a checksum still tells two apart.
        if len(value) > _LONGEST or ("://" in value and "@" in value):
            return f"text {zlib.crc32(value.encode(errors='replace')):08x}"
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if levels == 0:  # deeper than any option, or an object that holds itself
        return type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
        if isinstance(value, (set, frozenset)):
            items.sort(key=repr)  # so that equal sets are described by equal lists
        return [_described(item, levels - 1) for item in items[:_MOST]]
    if isinstance(value, Mapping):
        return _described_items(value, levels - 1)
    return _described_object(value, levels - 1)


def _described_items(values: Mapping[Any, Any], levels: int) -> dict[str, Any]:
    described = {}
    for key, item in list(values.items())[:_MOST]:
        name = str(key)
        if not is_secret(name):
            described[name] = _described(item, levels)
    return described


def _described_object(value: object, levels: int) -> Any:
    # A checked reward and the function inside are one and the same reward.
    inner = getattr(value, "checked", None)  # of a wrapper that adds nothing but checks
    if inner:
        return _described(inner, levels)
    if isinstance(value, functools.partial):
        items: dict[str, object] = {"function": value.func}
        if value.args:
            items["arguments"] = value.args
        return _described_items(items | value.keywords, levels)
    if inspect.isclass(value) or inspect.isbuiltin(value) or inspect.ismodule(value):
        return value.__name__
    if inspect.ismethod(value):
        return _described_items({"function": value.__func__, "owner": value.__self__}, levels)
    if inspect.isfunction(value):
        # A factory such as TRL's `get_cosine_scaled_reward` keeps its options in the closure of what it returns.
        closed_over = inspect.getclosurevars(value).nonlocals
        name = value.__qualname__.rpartition(".")[2]
        if not closed_over:
            return name
        return {"function": name, **_described_items(closed_over, levels)}
    # A model or a client is named by its type: its attributes are no options.
    if type(value).__module__.partition(".")[0] in ("torch", "transformers", "datasets", "inspect"):
        return getattr(getattr(value, "config", None), "_name_or_path", "") or type(value).__name__
    attributes = {}
    for name, item in getattr(value, "__dict__", {}).items():
        if not name.startswith("_"):
            attributes[name] = item
    return {"kind": type(value).__name__, **_described_items(attributes, levels)}


def _flat(path: str, value: object) -> Iterator[tuple[str, Any]]:
    # `{"reward": {"timeout": 5}}` becomes `reward.timeout: 5`.
    if not isinstance(value, dict):
        yield path or "function", value
        return
    for name, item in value.items():
        yield from _flat(f"{path}.{name}" if path else name, item)
