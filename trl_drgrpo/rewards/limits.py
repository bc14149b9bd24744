"""Limits on one call of a reward: time, memory, and calls at once."""

import os
from dataclasses import dataclass

from trl_drgrpo.common.ranges import positive, refuse_outside, whole

# Workers are as many as cores: threads within each would only wait for each other, and each takes memory.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_RANGES = {
    # At most some eleven days; what waits for sockets takes no more than twice that.
    "timeout": positive(highest=10**6, remedy="Give the longest time that one correct answer may take, in seconds."),
    # At most an exabyte, which the system can still count in bytes.
    "memory_mb": whole(64, 2**40, optional=True, remedy="An empty worker takes about 20; None sets no limit."),
    "workers": whole(1, 10_000, optional=True, remedy="None uses one per available core."),
}


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

    Raises:
        [`InputError`]: A value outside its range.
    """

    timeout: float = 5.0
    memory_mb: int | None = 4096
    workers: int | None = None

    def __post_init__(self):
        for field, allowed in _RANGES.items():
            refuse_outside(field, getattr(self, field), allowed)


def available_workers() -> int:
    """Cores this process may use, divided by the trainer processes here (`LOCAL_WORLD_SIZE`), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(local_processes) if local_processes.isdigit() else 1))
