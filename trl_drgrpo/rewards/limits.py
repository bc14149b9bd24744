"""Limits on one call of a reward: time, memory, and calls at once."""

import numbers
import os
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.ranges import finite_number

_MOST_SECONDS = 10**6  # some eleven days; what waits for sockets takes no more than twice that
_MOST_MB = 2**40  # an exabyte, which the system can still count in bytes
_MOST_WORKERS = 10_000


@dataclass(frozen=True)
class Limits:
    """Limits on one call of a reward. Rewards with equal limits share their workers.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Wall-clock seconds per call, at most a million. Imports while the reward is loaded, and its `warm_up()`
            where it has such a method, are not counted; a module that the first call imports is.
        memory_mb (`int`, *optional*, defaults to `4096`):
            Megabytes of private writable memory per worker (Linux' `RLIMIT_DATA`; shared libraries do not count); what
            exceeds it is a `MemoryError` in the reward. Processes that a reward starts have this limit each. `None`:
            no limit.
        workers (`int`, *optional*):
            Calls that run at once. `None`: the cores this process may use, divided by the trainer processes on this
            machine (`LOCAL_WORLD_SIZE`), at least 1.
        calls_per_worker (`int`, *optional*, defaults to `1000`): A worker is replaced after that many.

    Raises:
        [`InputError`]: A value outside its range.
    """

    timeout: float = 5.0
    memory_mb: int | None = 4096
    workers: int | None = None
    calls_per_worker: int = 1000

    def __post_init__(self):
        remedy = "Give the longest time that one right answer may take."
        expected = f"a positive number of seconds, at most {_MOST_SECONDS}"
        seconds = finite_number("timeout", self.timeout, expected, remedy)
        if not 0 < seconds <= _MOST_SECONDS:
            raise InputError("timeout", repr(self.timeout), expected, remedy)
        self._check("memory_mb", 64, _MOST_MB, "or None", "An empty worker takes about 20; None sets no limit.")
        self._check("workers", 1, _MOST_WORKERS, "or None", "None takes one per core that is there for this process.")
        self._check("calls_per_worker", 1, 10**18, "", "1 gives every call a fresh process.")

    def _check(self, field: str, least: int, most: int, or_none: str, remedy: str) -> None:
        value: Any = getattr(self, field)
        if value is None and or_none:
            return
        expected = f"a whole number, at least {least} {or_none}".rstrip()
        number = finite_number(field, value, expected, remedy)
        if number < least or not isinstance(value, numbers.Integral):
            raise InputError(field, shortened(value), expected, remedy)
        if number > most:
            expected = f"a whole number, at most {most} {or_none}".rstrip()
            raise InputError(field, shortened(value), expected, remedy)


def available_workers() -> int:
    """Cores this process may use, divided by the trainer processes here (`LOCAL_WORLD_SIZE`), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(local_processes) if local_processes.isdigit() else 1))
