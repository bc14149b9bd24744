"""The process between the trainer and its workers, and the trainer's side of both.

Why a process of its own: the trainer must not fork (CUDA, threads), a fresh interpreter per worker costs a tenth of a
second, and `multiprocessing` would run the training script again in each. This one is small and single-threaded and
runs no user code, so forking it is safe and takes milliseconds.

Each worker has two sockets to the trainer: its channel, for calls and answers, and its leash, which the nursery holds.
The trainer lets go of a leash to have the worker killed, and reads from it how the worker ended.

Why nothing is left behind: on Linux the nursery and every worker are *subreapers*, so a process that a reward
started, however it detached itself, ends up a child of the worker or, once that is dead, of the nursery, which kills
every child that is no worker. The nursery ends, with all of these, when its control socket closes or its parent is
gone: also after `kill -9` of the trainer. Should the nursery itself be killed, the kernel kills the workers
(`PR_SET_PDEATHSIG`). Elsewhere than on Linux a killed worker takes its process group along, and no more than that.
"""

import contextlib
import ctypes
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl_drgrpo.rewards.contract import ONE_THREAD
from trl_drgrpo.rewards.isolation.worker import LENGTH, serve

_PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from trl_drgrpo.rewards.isolation.nursery import main; main()"
_FRAME_LIMIT = 1 << 30  # bytes; a longer frame is none: something else was written to the channel
_SEND_LIMIT = 30.0  # seconds in which an idle worker takes what it is sent, or counts as dead
_END_PATIENCE = 0.5  # seconds in which the nursery says how a killed worker ended
_MEMORY = struct.Struct("<Q")  # of a new worker in MB, or 0; sent with the ends of its two sockets
_STATUS = struct.Struct("<q")  # of a worker that ended, as `os.waitstatus_to_exitcode` gives it


@dataclass(eq=False)
class WorkerHandle:
    """The trainer's side of one worker.

    Args:
        channel (`socket.socket`): To send it calls and receive its answers.
        leash (`socket.socket`): To the nursery.
    """

    channel: socket.socket
    leash: socket.socket
    received: bytearray = field(default_factory=bytearray)
    loaded: set[bytes] = field(default_factory=set)  # keys of functions
    jobs: deque[Any] = field(default_factory=deque)  # what it was given, the running one first: calls, or one key
    deadline: float = math.inf  # of the running one
    calls: int = 0

    @property
    def is_calling(self) -> bool:
        """Tell whether it has calls to do; it may also be loading a function, or have nothing to do."""
        return bool(self.jobs) and isinstance(self.jobs[0], int)

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

    def kill(self) -> None:
        """Has it killed, and all that it started; does not wait for it."""
        with contextlib.suppress(OSError):
            self.leash.shutdown(socket.SHUT_WR)  # not only closed: a forked child of the trainer may hold it, too

    def end(self) -> str:
        """How it ended. Kills it first: one that has only closed its channel lives on. Others are dead."""
        self.kill()
        try:
            self.leash.settimeout(_END_PATIENCE)
            (status,) = _STATUS.unpack(self.leash.recv(_STATUS.size))
        except (OSError, struct.error):
            return "status unknown"
        return f"exit status {status}" if status >= 0 else f"signal {-status}"

    def close(self) -> None:
        """Ends it, and the connection to it."""
        self.kill()
        self.channel.close()
        self.leash.close()


class NurseryHandle:
    """The trainer's side of the nursery: one subprocess, started with exec, never by a plain fork."""

    def __init__(self):
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *sys.path]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the trainer, which then ends it
                env=ONE_THREAD | os.environ,
            )

    def is_alive(self) -> bool:
        """Tell whether it can be asked for workers."""
        return self._process.poll() is None

    def fork(self, memory_mb: int) -> WorkerHandle:
        """Asks for a new worker; one that could not be made shows as a closed channel."""
        channel, its_end = socket.socketpair()
        leash, held = socket.socketpair()
        with its_end, held, contextlib.suppress(OSError):
            socket.send_fds(self._control, [_MEMORY.pack(memory_mb)], [its_end.fileno(), held.fileno()])
        channel.settimeout(_SEND_LIMIT)
        return WorkerHandle(channel, leash)

    def close(self) -> None:
        """Ends it, and with it all workers."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_CHECK = 1.0  # seconds; a forked child of the trainer may hold the control socket open after its death
_PRINTS = 10_000_000  # bytes of standard output and error that workers may pass on
_FAREWELL = 3.0  # seconds for killed processes to go


def main() -> NoReturn:
    """Entry point: `python -c "..." <control file descriptor> <pid of the trainer>`; returns by ending the process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    sys.argv[1:] = []
    os.set_inheritable(control.fileno(), False)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # prints of a reward are no results of the trainer
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    Nursery(control, parent).run()
    os._exit(0)


class Nursery:
    """Forks and kills workers on command.

    Args:
        control (`socket.socket`): From which orders for workers come.
        parent (`int`): Process to live for.
    """

    def __init__(self, control: socket.socket, parent: int):
        self.control = control
        self.parent = parent
        self.leashes: dict[int, socket.socket] = {}  # of the workers, by pid
        self.wakeup, alarm = os.pipe()
        self.prints, self.printing = os.pipe()  # of all workers
        self.passed_on = 0
        for end in (self.prints, alarm, self.wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        for source in (control, self.wakeup, self.prints):
            self.selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the trainer is gone; then ends all workers."""
        try:
            while os.getppid() == self.parent:
                ready = {key.fileobj: key.data for key, _ in self.selector.select(_PARENT_CHECK)}
                if self.prints in ready:
                    self._pass_on()
                if self.wakeup in ready:
                    os.read(self.wakeup, 4096)
                for leash, pid in ready.items():
                    if pid is not None:  # a worker's: the trainer has let go of it
                        self.selector.unregister(leash)
                        _kill_tree(pid)
                self._bury()
                if self.control in ready and not self._obey():
                    break
        finally:
            self._end()

    def _pass_on(self) -> None:
        """What workers print, to standard error: no result of the trainer. Beyond a limit it is dropped, not kept."""
        with contextlib.suppress(OSError):  # nothing there, or nobody to read it
            text = os.read(self.prints, 1 << 16)
            if self.passed_on < _PRINTS:
                os.write(2, text)
                self.passed_on += len(text)
                if self.passed_on >= _PRINTS:
                    os.write(2, b"\n[prints of reward functions in workers: 10 MB shown, the rest is dropped]\n")

    def _obey(self) -> bool:
        order, ends, _, _ = socket.recv_fds(self.control, _MEMORY.size, 2)
        if len(order) < _MEMORY.size:  # closed: an order of a few bytes arrives in one piece
            return False
        nursery = os.getpid()
        try:
            pid = os.fork() if len(ends) == 2 else -1
        except OSError:
            pid = -1  # no process, or above no descriptor, left for this user: the pool sees the channel close
        if pid == 0:
            try:
                self._become_worker(nursery, ends[0], *_MEMORY.unpack(order))
            finally:
                os._exit(1)
        if pid > 0:
            self.leashes[pid] = leash = socket.socket(fileno=ends.pop())
            self.selector.register(leash, selectors.EVENT_READ, pid)
        for end in ends:
            os.close(end)
        return True

    def _become_worker(self, nursery: int, channel: int, memory_mb: int) -> NoReturn:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != nursery:  # it died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(self.printing, stream)
        own = os.dup2(channel, 3, inheritable=False)
        os.closerange(own + 1, 1 << 16)  # the nursery's
        if memory_mb:
            _limit_memory(memory_mb * 2**20)
        serve(socket.socket(fileno=own))

    def _bury(self) -> None:
        """Collects the dead, and kills what dead workers leave behind."""
        while pid := self._collect():
            _kill_tree(pid)  # its group, which its own end does not end
            for stray in _children() - self.leashes.keys():
                _kill_tree(stray)

    def _collect(self) -> int:
        """A process that has ended, 0 if there is none; of a worker the trainer is told how."""
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if leash := self.leashes.pop(pid, None):
            if leash in self.selector.get_map():
                self.selector.unregister(leash)
            with leash, contextlib.suppress(OSError):  # nobody may be reading; this is only for a message
                leash.send(_STATUS.pack(os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)
        return pid

    def _end(self) -> None:
        for _ in range(2 * _PRINTS >> 16):
            if self.prints not in {key.fileobj for key, _ in self.selector.select(0)}:
                break
            self._pass_on()
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline and (left := _children() | self.leashes.keys()):
            for pid in left:
                _kill_tree(pid)
            time.sleep(0.002)
            while self._collect():
                pass


def _children() -> set[int]:
    """Children of this process that exist now, the dead but uncollected among them."""
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:  # not Linux
        return set()


def _kill_tree(pid: int) -> None:
    """Kills a process and its group; what had left the group comes to the nursery and is killed there."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _limit_memory(limit: int) -> None:
    """Private writable memory of this process (`RLIMIT_DATA`).

    Not `RLIMIT_AS`: that counts address space, and shared libraries (torch with CUDA) or reserved ranges take many
    gigabytes of it without using memory. Not a watched RSS: a watcher sees an allocation after it was made.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
