"""Values of an object or a mapping replaced for the time of a block."""

from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, **values: Any):
    """Attributes of `owner` replaced inside the block, restored after it; what came from its class does so again."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def item_swapped(owner: dict, key: Any, value: Any):
    """One entry of `owner` replaced inside the block, restored after it."""
    before = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = before
