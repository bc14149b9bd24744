"""The trainer's side of the processes: starting the nursery, asking it for workers, reading what they send."""

import contextlib
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.isolation.worker import COMMAND, ENDED, LENGTH

_PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from trl_drgrpo.rewards.isolation.nursery import main; main()"
_FRAME_LIMIT = 1 << 30  # bytes; a longer frame is none: something else was written to the channel
_SEND_LIMIT = 30.0  # seconds in which an idle worker takes what it is sent, or counts as dead
# Workers are as many as cores: threads within each would only wait for each other, and each takes memory.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(eq=False)
class WorkerHandle:
    """The trainer's side of one worker.

    Args:
        number (`int`): What the nursery calls it.
        channel (`socket.socket`): To send it frames and receive its own.
    """

    number: int
    channel: socket.socket
    received: bytearray = field(default_factory=bytearray)
    loaded: set[bytes] = field(default_factory=set)
    loading: bytes = b""  # key of the function it is loading
    chunk: deque[int] = field(default_factory=deque)  # calls it was given, the running one first
    deadline: float = math.inf
    calls: int = 0

    def frames(self) -> Iterator[tuple[Any, ...]]:
        """The messages that have arrived completely; one that is none raises when it is reached, not before."""
        while len(self.received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.received)[0]
            if end > _FRAME_LIMIT:
                raise ValueError(f"a frame of {end} bytes")
            if len(self.received) < end:
                break
            body = bytes(self.received[LENGTH.size : end])
            del self.received[:end]
            yield pickle.loads(body)


class NurseryHandle:
    """The trainer's side of the nursery: one subprocess, started with exec, never by a plain fork.

    Raises:
        [`InputError`]: On a system without `fork`.
    """

    def __init__(self):
        if not hasattr(os, "fork"):
            remedy = "Set `limits=None`: the reward then runs in this process, without limits."
            raise InputError("limits", f"the platform {sys.platform}", "Linux or macOS", remedy)
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *sys.path]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the trainer, which then ends it
                env=_ONE_THREAD | os.environ,
            )
        self._next_number = 0
        self._ended: dict[int, int] = {}
        self._received = b""

    def is_alive(self) -> bool:
        """Whether it can be asked for workers."""
        return self._process.poll() is None

    def fork(self, memory_mb: int) -> WorkerHandle:
        """Asks for a new worker; one that could not be made shows as a closed channel."""
        self._read_ended(0)  # so that its reports never fill the socket
        self._next_number += 1
        channel, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [COMMAND.pack(b"F", self._next_number, memory_mb)], [theirs.fileno()])
        channel.settimeout(_SEND_LIMIT)
        return WorkerHandle(self._next_number, channel)

    def kill(self, number: int) -> None:
        """Has a worker killed, and all that it started; does not wait for it."""
        with contextlib.suppress(OSError):
            self._control.sendall(COMMAND.pack(b"K", number, 0))

    def exit_status(self, number: int, patience: float = 0.5) -> int | None:
        """Exit code of a dead worker, or minus the signal's number; None where that is not known."""
        deadline = time.monotonic() + patience
        while number not in self._ended and (left := deadline - time.monotonic()) > 0:
            if not self._read_ended(left):
                break
        return self._ended.pop(number, None)

    def _read_ended(self, patience: float) -> bool:
        self._control.settimeout(patience)
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            return False
        finally:
            self._control.settimeout(None)
        self._received += data
        complete = len(self._received) // ENDED.size * ENDED.size
        if len(self._ended) > 1000:
            self._ended.clear()  # of killed workers, whose end nobody asks for
        self._ended.update(ENDED.iter_unpack(self._received[:complete]))
        self._received = self._received[complete:]
        return bool(data)

    def close(self) -> None:
        """Ends it, and with it all workers."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
