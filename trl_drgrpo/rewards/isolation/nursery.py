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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from trl_drgrpo.rewards.contract import ONE_THREAD
from trl_drgrpo.rewards.isolation.worker import Failure, serve

# The trainer's own search path goes along as arguments: a script may have changed it since its interpreter started.
_PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from trl_drgrpo.rewards.isolation.nursery import main; main()"
_END_PATIENCE = 0.5  # seconds in which the nursery says how a killed worker ended
_NUMBER = struct.Struct("<q")  # megabytes of a new worker, or the exit code of one that ended


@dataclass(eq=False)
class WorkerHandle:
    """The trainer's side of one worker.

    Args:
        channel (`socket.socket`): To send it requests and receive its answers.
        leash (`socket.socket`): To the nursery.
    """

    channel: socket.socket
    leash: socket.socket
    loaded: set[bytes] = field(default_factory=set)  # keys of functions that it was sent
    loading: deque[bytes] = field(default_factory=deque)  # those of them that it has not answered for
    calls: int = 0

    def __post_init__(self):
        self._answers = self.channel.makefile("rb")

    def send(self, request: tuple[bytes, list[str], bytes, bytes], limit: float) -> None:
        """Send it a request, which an idle worker takes at once."""
        # The limit is the socket's own, so a waiting thread needs no clock of ours and no signal.
        self.channel.settimeout(limit)
        self.channel.sendall(pickle.dumps(request))

    def answer(self, limit: float) -> tuple[bytes, Failure | None, bool]:
        """Wait for its next answer. Raises `TimeoutError` beyond the limit, any error where none can come."""
        self.channel.settimeout(limit)
        return pickle.load(self._answers)

    def load(self, key: bytes, function: bytes, limit: float) -> None:
        """Send it a function that it does not have, without waiting for the answer."""
        if key in self.loaded:
            return
        self.loaded.add(key)
        self.loading.append(key)
        with contextlib.suppress(OSError):  # it is dead, as its answer will show
            self.send((key, sys.path, function, b""), limit)

    def kill(self) -> None:
        """Have it killed, and all that it started, without waiting for that."""
        with contextlib.suppress(OSError):
            self.leash.shutdown(socket.SHUT_WR)  # not only closed: a forked child of the trainer may hold it, too

    def end(self) -> str:
        """Say how it ended. Kills it first: one that has only closed its channel lives on."""
        self.kill()
        try:
            self.leash.settimeout(_END_PATIENCE)
            (status,) = _NUMBER.unpack(self.leash.recv(_NUMBER.size))
        except (OSError, struct.error):  # too late, or cut short: the nursery itself is gone
            return "status unknown"
        # As `os.waitstatus_to_exitcode` has it: 3 is `exit(3)`, -11 a segmentation fault.
        return f"exit status {status}" if status >= 0 else f"signal {-status}"

    def close(self) -> None:
        """End it, and the connection to it."""
        self.kill()
        for connection in (self._answers, self.channel, self.leash):
            connection.close()


class NurseryHandle:
    """The trainer's side of the nursery: one subprocess, started with exec, never by a plain fork."""

    def __init__(self):
        self._control, nursery_end = socket.socketpair()
        command = [sys.executable, "-P", "-c", _PROGRAM, str(nursery_end.fileno()), str(os.getpid()), *sys.path]
        with nursery_end:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[nursery_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the trainer, which then ends it
                env=ONE_THREAD | os.environ,  # the user's own settings win
            )

    def is_alive(self) -> bool:
        """Tell whether it can be asked for workers."""
        return self._process.poll() is None

    def fork(self, memory_mb: int) -> WorkerHandle:
        """Ask for a new worker; one that could not be made shows as a closed channel."""
        channel, worker_end = socket.socketpair()
        leash, nursery_end = socket.socketpair()
        # The other ends travel as descriptors and are closed here, so that a dead worker's channel reads as closed.
        with worker_end, nursery_end, contextlib.suppress(OSError):
            ends = [worker_end.fileno(), nursery_end.fileno()]
            socket.send_fds(self._control, [_NUMBER.pack(memory_mb)], ends)
        return WorkerHandle(channel, leash)

    def close(self) -> None:
        """End it, and with it all workers."""
        self._control.close()
        try:
            self._process.wait(5)  # it needs `_FAREWELL` at most
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK = 1.0  # seconds; a forked child of the trainer may hold the control socket open after its death
_PIPE_SIZE = 1 << 16
_PRINTS = 10_000_000  # bytes of standard output and error that workers may pass on
_FAREWELL = 3.0  # seconds for killed processes to go


def main() -> NoReturn:
    """Entry point: `python -c "..." <control file descriptor> <pid of the trainer>`; returns by ending the process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    sys.argv[1:] = []
    os.set_inheritable(control.fileno(), False)  # programs that a reward starts must not hold it
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # prints of a reward are no results of the trainer
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    Nursery(control, parent).run()
    os._exit(0)


class Nursery:
    """Forks and kills workers on command.

    Args:
        control (`socket.socket`): Brings orders for workers.
        parent (`int`): Process to live for.
    """

    def __init__(self, control: socket.socket, parent: int):
        self.control = control
        self.parent = parent
        self.leashes: dict[int, socket.socket] = {}  # of the workers, by pid
        self.wakeup, alarm = os.pipe()  # written to when a child ends
        self.prints, self.printing = os.pipe()  # of all workers
        self.printed = 0
        for end in (self.wakeup, alarm, self.prints):
            os.set_blocking(end, False)
        # The end of a child is a byte in a pipe, for which `select` can wait beside the sockets. Without a handler of
        # Python's own, the signal would be ignored and no byte written.
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        for source in (control, self.wakeup, self.prints):
            self.selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Work until the trainer is gone, then end all workers."""
        try:
            while os.getppid() == self.parent:
                ready = {key.fileobj: key.data for key, _ in self.selector.select(_PARENT_CHECK)}
                if self.prints in ready:
                    self._pass_on()
                if self.wakeup in ready:
                    os.read(self.wakeup, _PIPE_SIZE)
                for leash, pid in ready.items():
                    if pid is not None:  # the trainer has let go of a worker
                        # A leash that was let go stays readable, so `select` would return at once from now on.
                        self.selector.unregister(leash)
                        # Nothing was collected since `select`, so the pid is still that of this worker.
                        _kill_group(pid)
                self._bury()
                if self.control in ready and not self._obey():
                    break
        finally:
            # Several rounds: a killed worker's own children become those of the nursery only then.
            deadline = time.monotonic() + _FAREWELL
            while time.monotonic() < deadline and (self.leashes or _children()):
                for pid in self.leashes.keys() | _children():
                    _kill_group(pid)
                time.sleep(0.002)
                self._bury()
            self._pass_on()  # what the pipe still holds

    def _pass_on(self) -> None:
        """Pass prints of workers on to standard error, up to a limit: beyond it they are dropped."""
        with contextlib.suppress(OSError):  # nothing there, or nobody to read it
            # Read also when nothing is shown any more: a full pipe would stop the workers at their next print.
            text = os.read(self.prints, _PIPE_SIZE)
            is_open = self.printed < _PRINTS
            self.printed += len(text)
            if is_open:
                os.write(2, text)
                if self.printed >= _PRINTS:
                    os.write(2, b"\n[prints of reward functions in workers: 10 MB shown, the rest is dropped]\n")

    def _obey(self) -> bool:
        """Fork a worker as ordered; returns whether the trainer is still there."""
        order, ends, _, _ = socket.recv_fds(self.control, _NUMBER.size, 2)
        if not order:
            return False
        nursery = os.getpid()
        try:
            pid = os.fork() if len(ends) == 2 else -1
        except OSError:
            pid = -1  # no process, or above no descriptor, left for this user: the pool sees the channel close
        if pid == 0:
            try:
                self._become_worker(nursery, ends[0], *_NUMBER.unpack(order))
            finally:
                os._exit(1)  # whatever happens, a worker never returns into the loop of the nursery
        if pid > 0:
            self.leashes[pid] = leash = socket.socket(fileno=ends.pop())
            self.selector.register(leash, selectors.EVENT_READ, pid)
        for end in ends:
            os.close(end)
        return True

    def _become_worker(self, nursery: int, channel: int, memory_mb: int) -> NoReturn:
        os.setsid()  # a group of its own, which is killed as one
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != nursery:  # it died before the lines above
            os._exit(1)
        # The nursery's handling of signals is not the reward's affair, and its descriptors are not its property.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(self.printing, stream)
        os.dup2(channel, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        if memory_mb:
            _limit_memory(memory_mb * 2**20)
        serve(socket.socket(fileno=3))

    def _bury(self) -> None:
        """Collect the dead, tell the trainer how workers ended, and kill what they leave behind."""
        with contextlib.suppress(ChildProcessError):  # no child is left
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                leash = self.leashes.pop(pid, None)
                if leash is not None:
                    with contextlib.suppress(KeyError):  # the trainer had let go of it
                        self.selector.unregister(leash)
                    with leash, contextlib.suppress(OSError):  # nobody may be reading
                        leash.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)
                for stray in {pid, *_children()} - self.leashes.keys():  # the group of the dead lives on without it
                    _kill_group(stray)


def _children() -> set[int]:
    """Return the children of this process that exist now, the dead but uncollected among them."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:  # not Linux
        return set()


def _kill_group(pid: int) -> None:
    """Kill a process and its group; what had left the group comes to the nursery and is killed there."""
    # Both: a process need not be the leader of the group of its number.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit_memory(limit: int) -> None:
    """Limit the private writable memory of this process (`RLIMIT_DATA`).

    Not `RLIMIT_AS`: that counts address space, and shared libraries (torch with CUDA) or reserved ranges take many
    gigabytes of it without using memory. Not a watched RSS: a watcher sees an allocation after it was made.
    """
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
