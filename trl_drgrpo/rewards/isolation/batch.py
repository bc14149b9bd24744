"""The calls of one run of the pool, and what came of them."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[tuple[Any, ...], dict[str, Any]]

_CHUNK_SECONDS = 0.02  # of work in one message: little enough to share a batch evenly, and a message's cost is nothing
_CHUNK_CALLS = 64


@dataclass(frozen=True)
class Failure:
    """A call without a result.

    Args:
        reason (`str`): In a few words: `ValueError: ...`, `no result within 5 s`, `the worker died (signal 11)`.
        traceback (`str`): As text, where the call raised and its message does not say all.
        of_row (`bool`): Whether the call would have failed whatever was written: no completion is to blame.
    """

    reason: str
    traceback: str = ""
    of_row: bool = False


class Batch:
    """Calls to be done, outcomes of the others, and the time that one takes.

    Args:
        function (`bytes`): Function to call, pickled.
        calls (`Sequence[tuple[tuple, dict]]`): Arguments and keywords of each call.
        stop_at_failure (`bool`): Whether the first failure gives up all other calls.
    """

    def __init__(self, function: bytes, calls: Sequence[Call], stop_at_failure: bool):
        self.function, self.key = function, hashlib.sha256(function).digest()
        self.calls = calls
        self.stop_at_failure = stop_at_failure
        self.outcomes: list[Any] = [None] * len(calls)
        self.pending = deque(range(len(calls)))
        self.unresolved = len(calls)
        self.unused_deaths = 0
        self._seconds: float | None = None

    def resolve(self, index: int, outcome: Any) -> None:
        """Notes the outcome of a call."""
        if self.unresolved == 0:
            return  # given up already
        self.outcomes[index] = outcome
        self.unresolved -= 1
        if self.stop_at_failure and isinstance(outcome, Failure):
            self.pending.clear()
            self.unresolved = 0

    def fail_pending(self, failure: Failure) -> None:
        """One failure for all calls that no worker has."""
        while self.pending:
            self.resolve(self.pending.popleft(), failure)

    def note_seconds(self, seconds: float) -> None:
        """Notes the time of one call: a moving average decides how many go into a chunk."""
        self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds

    def chunk_size(self) -> int:
        """Calls that together take about `_CHUNK_SECONDS`: one, until that is known."""
        if self._seconds is None:
            return 1
        return max(1, min(_CHUNK_CALLS, int(_CHUNK_SECONDS / max(self._seconds, 1e-6))))
