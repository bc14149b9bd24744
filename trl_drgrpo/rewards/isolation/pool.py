"""A pool of killable worker processes: any call may hang, crash or fill the memory, and costs itself only.

Every *call* has a wall-clock limit, and SIGKILL ends what exceeds it. The processes are forked from a clean little
process, not from the trainer (see `nursery.py`), so the training script is never run again and CUDA is never forked.
One worker more than may run at once is kept loaded: a killed one is replaced without waiting for its imports.

While the pool runs it has one thread per call that runs at once, which waits for its worker with the time limit of the
socket. Between two runs there are no threads.

Why not a library: `concurrent.futures` and loky lose all pending calls when one worker dies, and pebble 5.2.3 is lost
to an exception that does not unpickle or a write to its only pipe, leaves the processes that a call started, and takes
0.3 ms for a trivial call and 4 to 8 s for 20 crashes (here 0.2 ms and 0.4 s; two workers on two busy cores, measured
with `recipes/studies/isolation.py` on 2026-11-27).
"""

import atexit
import hashlib
import os
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cloudpickle

from trl_drgrpo.rewards.contract import Limits, available_workers
from trl_drgrpo.rewards.isolation.nursery import NurseryHandle, WorkerHandle
from trl_drgrpo.rewards.isolation.worker import Failure

Call = tuple[tuple[Any, ...], dict[str, Any]]

_CALLS_PER_WORKER = 1000  # then it is replaced: what it leaked goes with it
_LOAD_LIMIT = 120.0  # seconds for the imports of a reward's modules; not part of any call's limit
_UNUSED_DEATHS = 2  # per worker and run, of workers that die without having been given a call, before it is given up


class Batch:
    """A pickled function to call, and the failure that all its calls share, if it cannot be called at all."""

    def __init__(self, function: bytes):
        # By content: a worker that has this function from an earlier run need not load it again.
        self.key = hashlib.sha256(function).digest()
        self.function = function
        self.failure: Failure | None = None
        self.is_loaded = False  # by at least one worker
        self.unused_deaths = 0


class WorkerPool:
    """Runs calls in worker processes under limits; starts them on first use, and anew after `close`.

    Args:
        limits ([`Limits`]): Per call and worker.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._size = limits.workers or available_workers()
        self._running = threading.Lock()  # one run at a time, so that no more workers than `_size` are at work
        self._hiring = threading.Lock()  # for the nursery's control socket and the list of idle workers
        self._nursery: NurseryHandle | None = None
        self._idle: deque[WorkerHandle] = deque()  # the most recently used first, the one in reserve last

    def run(self, function: bytes, calls: Sequence[Call]) -> list[Any]:
        """
        Call a pickled function once per entry of `calls`, at most `limits.workers` at a time.

        Returns per call its result or a [`Failure`], in order.
        """
        batch = Batch(function)
        with self._running, ThreadPoolExecutor(self._size) as threads:
            try:
                outcomes = list(threads.map(partial(self._outcome, batch), calls))
            except BaseException:  # an interrupt: the threads go on when their workers are dead
                # Leaving the `with` block waits for the threads. The failure keeps them from hiring new workers.
                batch.failure = Failure("interrupted")
                self._end()
                raise
        if batch.failure is not None:
            self._end()  # else the next run would hear of it from workers that are still loading the function
        return outcomes

    def close(self, patience: float = -1) -> None:
        """End all workers. A `run` of another thread is waited for, at most `patience` seconds (-1: to its end)."""
        is_idle = self._running.acquire(timeout=patience)
        self._end()
        if is_idle:
            self._running.release()

    def _end(self) -> None:
        with self._hiring:
            while self._idle:
                self._idle.popleft().close()
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None

    def _outcome(self, batch: Batch, call: Call) -> Any:
        """Have a worker do a call; a worker that dies before it is given the call is replaced."""
        try:
            request = (batch.key, [], b"", _pickled_call(call))
        except Exception as error:  # whatever the `__reduce__` of an argument may raise
            return Failure(f"arguments that do not pickle ({type(error).__name__}: {error})", of_row=True)
        # A death before the call was given is not the call's fault, so the call is tried again. Once it was given, its
        # worker's death is its result: a second try could crash a second worker.
        while batch.failure is None:
            worker = self._hire(batch)
            if not self._is_ready(worker, batch):
                continue
            try:
                worker.send(request, self._limits.timeout)
            except OSError:
                self._note_unused_death(worker, batch, "before it was given a call")
                continue
            return self._answer(worker)
        return batch.failure

    def _hire(self, batch: Batch) -> WorkerHandle:
        """Take an idle worker; another one stays in reserve and loads the function."""
        with self._hiring:
            if self._nursery is None or not self._nursery.is_alive():
                while self._idle:  # they died with their nursery
                    self._idle.popleft().close()
                self._nursery = NurseryHandle()
            while len(self._idle) < 2:
                self._idle.append(self._nursery.fork(self._limits.memory_mb or 0))
            # Loading is only begun here: the reserve imports while the call runs, and is ready when that is killed.
            for worker in (self._idle[0], self._idle[-1]):
                worker.load(batch.key, batch.function, _LOAD_LIMIT)
            return self._idle.popleft()

    def _is_ready(self, worker: WorkerHandle, batch: Batch) -> bool:
        """Wait until a worker has loaded what it was sent; closes it if that fails."""
        # Answers come in the order of the requests. A worker in reserve may owe those of earlier runs' functions, too.
        while worker.loading:
            key = worker.loading.popleft()
            try:
                _, failure, _ = worker.answer(_LOAD_LIMIT)
            except TimeoutError:
                failure = Failure(f"not loaded within {_LOAD_LIMIT:g} s", of_row=True)
            except Exception:  # it is gone
                self._note_unused_death(worker, batch, "while it loaded the function")
                return False
            else:
                if failure is None:
                    continue
                failure = Failure(f"not loaded in a worker: {failure.reason}", failure.traceback, of_row=True)
            worker.close()
            if key == batch.key and not batch.is_loaded:  # else the failure is not the function's
                batch.failure = failure
            return False
        batch.is_loaded = True
        return True

    def _note_unused_death(self, worker: WorkerHandle, batch: Batch, when: str) -> None:
        # Perhaps something else killed it: another one is started, until that has been tried often enough.
        batch.unused_deaths += 1
        if batch.unused_deaths > _UNUSED_DEATHS * (self._size + 1):
            batch.failure = Failure(f"the worker died {when} ({worker.end()})", of_row=True)
        worker.close()

    def _answer(self, worker: WorkerHandle) -> Any:
        """Wait for the outcome of a call; the worker is idle again, or closed."""
        try:
            result, failure, is_full = worker.answer(self._limits.timeout)
        except TimeoutError:
            outcome = Failure(f"no result within {self._limits.timeout:g} s")
        except Exception:  # it is gone, or this is no answer: the reward has written to the channel itself
            outcome = Failure(f"the worker died ({worker.end()})")
        else:
            worker.calls += 1
            if not is_full and worker.calls < _CALLS_PER_WORKER:
                self._idle.appendleft(worker)  # in front: the one in reserve stays at the end
            else:
                worker.close()
            return failure or _unpickled_result(result)
        worker.close()  # after a failure its state is unknown: an answer that comes late would be the next call's
        return outcome


def _pickled_call(call: Call) -> bytes:
    """Pickle a call; what the running script defined goes by value, for no worker has that script."""
    # Plain pickle first: most calls are texts and numbers, for which cloudpickle is only slower.
    try:
        pickled = pickle.dumps(call)
    except Exception:  # plain pickle refuses what cloudpickle may take: lambdas, local classes
        return cloudpickle.dumps(call)
    return cloudpickle.dumps(call) if b"__main__" in pickled else pickled


def _unpickled_result(result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:  # the worker has modules which are not here
        return Failure(f"a result that does not unpickle ({type(error).__name__}: {error})")


_POOLS: dict[Limits, WorkerPool] = {}


def pool_for(limits: Limits) -> WorkerPool:
    """Return the pool of this process for these limits; its processes start with its first call."""
    return _POOLS.setdefault(limits, WorkerPool(limits))


def close_pools(patience: float = -1) -> None:
    """
    End the workers of all pools, as the end of the interpreter does; the next call starts new ones.

    Args:
        patience (`float`, *optional*, defaults to `-1`):
            Seconds for which a call of another thread is waited for; -1: to its end.
    """
    for pool in list(_POOLS.values()):
        pool.close(patience)


atexit.register(close_pools, 0.5)
# A forked child (a data loader's worker) has copies of sockets that are not its own: it starts its own pools.
os.register_at_fork(after_in_child=_POOLS.clear)
