"""A pool of killable worker processes: any call may hang, crash or fill the memory, and costs itself only.

What is special about it: every *call* has a wall-clock limit, whose excess is ended by SIGKILL; calls are sent in
chunks of about 20 ms of work, so that the limit per call costs no throughput; the processes are forked from a clean
little process, not from the trainer (see `nursery.py`), so the training script is never run again and CUDA is never
forked; one worker more than may run at once is kept loaded, so that a killed one is replaced without waiting for its
imports. `concurrent.futures`, loky and pebble were considered: the first two lose all pending calls when one worker
dies, and the last looks for excess every 0.1 s and shares one pipe between all workers.

The pool has no thread of its own: the thread that calls `run` also does the reading and writing. Threads take turns.
"""

import atexit
import contextlib
import hashlib
import math
import os
import pickle
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

from trl_drgrpo.rewards.contract import Limits, available_workers
from trl_drgrpo.rewards.isolation.nursery import NurseryHandle, WorkerHandle
from trl_drgrpo.rewards.isolation.worker import Failure

Call = tuple[tuple[Any, ...], dict[str, Any]]

_CHUNK_SECONDS = 0.02  # of work in one message: little enough to share a batch evenly, and a message's cost is nothing
_CHUNK_CALLS = 64
_CALLS_PER_WORKER = 1000  # then it is replaced: what it leaked goes with it


class Batch:
    """Calls to be done, outcomes of the others, and the time that one takes.

    Args:
        function (`bytes`): Function to call, pickled.
        calls (`Sequence[tuple[tuple, dict]]`): Arguments and keywords of each call.
    """

    def __init__(self, function: bytes, calls: Sequence[Call]):
        self.function, self.key = function, hashlib.sha256(function).digest()
        self.calls = calls
        self.outcomes: list[Any] = [None] * len(calls)
        self.pending = deque(range(len(calls)))
        self.unresolved = len(calls)
        self.unused_deaths = 0
        self._seconds: float | None = None

    def resolve(self, index: int, outcome: Any) -> None:
        """Notes the outcome of a call."""
        self.outcomes[index] = outcome
        self.unresolved -= 1

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


_LOAD_LIMIT = 120.0  # seconds for the imports of a reward's modules; not part of any call's limit
_FUNCTIONS_PER_WORKER = 16
_UNUSED_DEATHS = 2  # per worker and run, of workers that die without having been given a call, before it is given up


class WorkerPool:
    """Runs calls in worker processes under limits; starts them on first use, and anew after `close`.

    Args:
        limits ([`Limits`]): Per call and worker.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._size = limits.workers or available_workers()
        self._lock = threading.Lock()
        self._nursery: NurseryHandle | None = None
        self._workers: list[WorkerHandle] = []
        self._selector = selectors.DefaultSelector()

    def run(self, function: bytes, calls: Sequence[Call]) -> list[Any]:
        """
        Calls a pickled function once per entry of `calls`, at most `limits.workers` at a time.

        Returns per call its result or a [`Failure`], in order.
        """
        batch = Batch(function, calls)
        with self._lock:
            try:
                self._drop_dead(batch)
                while batch.unresolved:
                    self._staff(batch)
                    self._assign(batch)
                    self._collect(batch)
            except BaseException:  # an interrupt: nobody knows what each of them was sent
                self._dismiss_all()
                raise
        return batch.outcomes

    def close(self, patience: float = -1) -> None:
        """Ends all workers. A `run` of another thread is waited for, at most `patience` seconds (-1: to its end)."""
        locked = self._lock.acquire(timeout=patience)
        try:
            self._dismiss_all()
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None
        finally:
            if locked:
                self._lock.release()

    def _drop_dead(self, batch: Batch) -> None:
        """Workers that ended since the last run, so that no call is given to them and blamed."""
        if self._nursery is not None and not self._nursery.is_alive():
            self._dismiss_all()
        for key, _ in self._selector.select(0):
            self._receive(key.data, batch)

    def _staff(self, batch: Batch) -> None:
        """As many workers as can be busy, and one more that is loaded by the time one of them is killed."""
        due = min(self._size, len(batch.calls)) + 1
        while len(self._workers) < due:
            if self._nursery is None or not self._nursery.is_alive():
                self._nursery = NurseryHandle()
            worker = self._nursery.fork(self._limits.memory_mb or 0)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            self._workers.append(worker)

    def _assign(self, batch: Batch) -> None:
        busy = sum(worker.is_calling for worker in self._workers)
        for worker in list(self._workers):
            if not batch.pending or worker.jobs:
                continue
            if batch.key not in worker.loaded:
                if len(worker.loaded) >= _FUNCTIONS_PER_WORKER:
                    self._dismiss(worker)
                else:
                    self._give(worker, batch, [batch.key], batch.function, [])
            elif busy < self._size:
                numbers, packed = self._chunk(worker, batch)
                busy += bool(packed) and self._give(worker, batch, numbers, b"", packed)

    def _chunk(self, worker: WorkerHandle, batch: Batch) -> tuple[list[int], list[bytes]]:
        """The next calls for a worker: their numbers, and what they are."""
        share = math.ceil(len(batch.pending) / self._size)
        size = min(batch.chunk_size(), share, _CALLS_PER_WORKER - worker.calls)
        numbers, packed = [], []
        while batch.pending and len(packed) < size:
            number = batch.pending.popleft()
            try:
                packed.append(_packed(batch.calls[number]))
                numbers.append(number)
            except Exception as error:  # whatever the `__reduce__` of an argument may raise
                reason = f"arguments that do not pickle ({type(error).__name__}: {error})"
                batch.resolve(number, Failure(reason, of_row=True))
        return numbers, packed

    def _give(
        self, worker: WorkerHandle, batch: Batch, jobs: Sequence[Any], function: bytes, calls: list[bytes]
    ) -> bool:
        """Sends a worker a function or calls; returns whether it took them."""
        worker.jobs.extend(jobs)
        worker.deadline = time.monotonic() + (_LOAD_LIMIT if function else self._limits.timeout)
        message = (batch.key, list(sys.path) if function else None, function, calls)
        try:
            worker.channel.sendall(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:  # it died while it had nothing to do: what it was to get goes to the next
            self._requeue(worker, batch)
            self._died(worker, batch)
            return False
        return True

    def _collect(self, batch: Batch) -> None:
        """Waits for the next answer or the next excess of a limit, and deals with all there are."""
        active = [worker for worker in self._workers if worker.jobs]
        if not active:
            return
        wait = min(worker.deadline for worker in active) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, wait)):
            self._receive(key.data, batch)
        # Dealing with one may have taken a while: who has answered meanwhile is read before it is judged.
        answered = [key.data for key, _ in self._selector.select(0)]
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.jobs and worker not in answered]:
            if now >= worker.deadline and worker.is_calling:
                self._fail(worker, batch, Failure(f"no result within {self._limits.timeout:g} s"))
            elif now >= worker.deadline:
                self._fail(worker, batch, Failure(f"not loaded within {_LOAD_LIMIT:g} s", of_row=True))

    def _receive(self, worker: WorkerHandle, batch: Batch) -> None:
        try:
            data = worker.channel.recv(1 << 18)
        except OSError:
            data = b""
        worker.received += data
        try:
            for answer in worker.frames():
                self._handle(worker, batch, *answer)
        except Exception:  # no frame, or not the one that is due: the reward has written to the channel itself
            data = b""
        if not data and worker in self._workers:
            self._died(worker, batch)

    def _handle(
        self, worker: WorkerHandle, batch: Batch, result: bytes, failure: Any, seconds: float, retire: bool
    ) -> None:
        if not worker.is_calling:
            if failure is None:
                worker.loaded.add(worker.jobs.popleft())
            elif worker.jobs[0] == batch.key:
                reason = f"not loaded in a worker: {failure.reason}"
                self._fail(worker, batch, Failure(reason, failure.traceback, of_row=True))
            else:  # of an earlier run
                worker.jobs.popleft()
            return
        batch.note_seconds(seconds)
        batch.resolve(worker.jobs.popleft(), failure or _unpacked(result))
        worker.deadline = time.monotonic() + self._limits.timeout
        worker.calls += 1
        if retire or worker.calls >= _CALLS_PER_WORKER:
            self._requeue(worker, batch)
            self._dismiss(worker)

    def _died(self, worker: WorkerHandle, batch: Batch) -> None:
        if worker.is_calling:
            self._fail(worker, batch, Failure(f"the worker died ({worker.end()})"))
            return
        # Perhaps something else killed it: another one is started, until that has been tried often enough.
        batch.unused_deaths += 1
        if batch.unused_deaths > _UNUSED_DEATHS * (self._size + 1):
            when = "while it loaded the function" if worker.jobs else "before it was given a call"
            batch.fail_pending(Failure(f"the worker died {when} ({worker.end()})", of_row=True))
        self._dismiss(worker)

    def _fail(self, worker: WorkerHandle, batch: Batch, failure: Failure) -> None:
        """Ends a worker whose running job has failed. Where that was to load the function, and no other worker has
        done better, none will, so all calls share the failure; the next `run` tries again."""
        failed = worker.jobs.popleft()
        self._requeue(worker, batch)
        self._dismiss(worker)
        if isinstance(failed, int):
            batch.resolve(failed, failure)
        elif failed == batch.key and not any(batch.key in other.loaded for other in self._workers):
            for other in [other for other in self._workers if batch.key in other.jobs]:
                self._dismiss(other)  # the next run does not hear of this failure from them
            batch.fail_pending(failure)

    def _requeue(self, worker: WorkerHandle, batch: Batch) -> None:
        batch.pending.extendleft(reversed([job for job in worker.jobs if isinstance(job, int)]))
        worker.jobs.clear()

    def _dismiss(self, worker: WorkerHandle) -> None:
        with contextlib.suppress(KeyError, ValueError):  # another thread was first, at the end of the interpreter
            self._workers.remove(worker)
            self._selector.unregister(worker.channel)
        worker.close()

    def _dismiss_all(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker)


def _packed(call: Call) -> bytes:
    """A call as bytes; what the script that is running defined goes by value, for no worker has that script."""
    try:
        packed = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
    except Exception:  # plain pickle refuses what cloudpickle may take: lambdas, local classes
        return cloudpickle.dumps(call)
    return cloudpickle.dumps(call) if b"__main__" in packed else packed


def _unpacked(result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:  # it was sent from a worker that has modules which are not here
        return Failure(f"a result that does not unpickle ({type(error).__name__}: {error})")


_POOLS: dict[Limits, WorkerPool] = {}


def pool_for(limits: Limits) -> WorkerPool:
    """The pool of this process for these limits; its processes start with its first call."""
    if limits not in _POOLS:  # a pool that another thread was first with costs a descriptor
        _POOLS.setdefault(limits, WorkerPool(limits))
    return _POOLS[limits]


def close_pools(patience: float = -1) -> None:
    """Ends the workers of all pools, as the end of the interpreter does; the next call starts new ones. A call of
    another thread is waited for, at most `patience` seconds (-1: to its end)."""
    for pool in list(_POOLS.values()):
        pool.close(patience)


atexit.register(close_pools, 0.5)
# A forked child (a data loader's worker) has copies of sockets that are not its own: it starts its own pools.
os.register_at_fork(after_in_child=_POOLS.clear)
