"""The proof that this package works on versions of the host libraries that were not tested. Nothing here is loaded on
others."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

is_proving: ContextVar[bool] = ContextVar("trl_drgrpo_is_proving", default=False)


@contextmanager
def proving() -> Iterator[None]:
    """Ask for no proof of trainers in the block: they are part of one, or of a check that must not be refused."""
    before = is_proving.set(True)
    try:
        yield
    finally:
        is_proving.reset(before)
