"""Whether the sandbox works on this machine, for the tests that need it; cases that take their time."""

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.code.sandbox import Sandbox


def why_not() -> str:
    """The reason why it does not; empty where it does."""
    try:
        Sandbox().check()
    except InputError as error:
        return str(error)
    return ""


REASON = why_not()
needs_bwrap = pytest.mark.needs_program("a working bubblewrap (Debian: apt-get install bubblewrap)", missing=REASON)


def slow(case):
    """A case that only the slow tests ask."""
    return pytest.param(case, marks=pytest.mark.slow)
