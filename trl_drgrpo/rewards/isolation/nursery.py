"""The process between the trainer and its workers, and how a reward function gets to them.

Why a process of its own: the trainer must not fork (CUDA, threads), a fresh interpreter per worker costs a tenth of a
second, and `multiprocessing` would run the training script again in each. This one is small and single-threaded and
runs no user code, so forking it is safe and takes milliseconds.

Why nothing is left behind: on Linux the nursery and every worker are *subreapers*, so a process that a reward
started, however it detached itself, ends up a child of the worker or, once that is dead, of the nursery, which kills
every child that is no worker. The nursery ends, with all of these, when its control socket closes or its parent is
gone: also after `kill -9` of the trainer. Should the nursery itself be killed, the kernel kills the workers
(`PR_SET_PDEATHSIG`). Elsewhere than on Linux a killed worker takes its process group along, and no more than that.

A function travels as bytes ([`pickled`]). Plain pickle names it by its module, which a worker cannot import where that
is the running script or a file that was loaded by its path. So functions and classes of a file that was named as a
reward go as its path, for the worker to load by itself; whatever else cannot be imported by name goes by value, with
`cloudpickle`.
"""

import contextlib
import ctypes
import functools
import inspect
import io
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.isolation.worker import COMMAND, ENDED, serve
from trl_drgrpo.rewards.recipe_rewards import FILE_PREFIX, module_from_file
from trl_drgrpo.rewards.signatures import behind_partials


def portable(reward: Callable) -> Callable:
    """The same reward function, which `pickled` can now send."""
    for part in _parts(reward):
        module = sys.modules.get(getattr(part, "__module__", None) or "")
        if module is not None and not _is_of_file(module.__name__) and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
    return reward


def pickled(worker_function: Any, name: str) -> bytes:
    """A callable that holds the [`portable`] form of a reward, as bytes for a worker. Refuses one that refers to what
    no other process can have: a lock, an open file, a client. `name`: the reward's, for the message."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(worker_function)
        return buffer.getvalue()
    except Exception as error:  # any type: `__reduce__` of whatever the function refers to
        raise InputError(
            f"reward function '{name}'",
            f"one that cannot be sent to a worker process ({type(error).__name__}: {error})",
            "a function that pickles with cloudpickle",
            "Create clients, locks and files inside the function, or move it to a file of its own and name it as "
            "`path/to/file.py:function`, or run it without limits.",
        ) from error


class _Pickler(cloudpickle.Pickler):
    """Names functions and classes of a file that was loaded by its path as members of that file."""

    def reducer_override(self, obj: Any) -> Any:
        if inspect.isfunction(obj) or inspect.isclass(obj):
            module = sys.modules.get(getattr(obj, "__module__", None) or "")
            if module is not None and _is_of_file(module.__name__) and _member(module, obj.__qualname__) is obj:
                return _load_member, (os.path.abspath(str(module.__file__)), obj.__qualname__)
        return super().reducer_override(obj)


def _is_of_file(module: str) -> bool:
    return module.startswith(FILE_PREFIX)


def _member(module: Any, qualname: str) -> Any:
    return functools.reduce(lambda found, name: getattr(found, name, None), qualname.split("."), module)


def _load_member(path: str, qualname: str) -> Any:
    return _member(module_from_file(f"{path}:{qualname}", path), qualname)


def _parts(reward: Any) -> Iterator[Any]:
    """Function, instance and class that a callable consists of: behind partials and bound methods."""
    reward = behind_partials(reward)
    yield reward
    if inspect.ismethod(reward):
        yield type(reward.__self__)
    elif not inspect.isroutine(reward):
        yield type(reward)


def _is_importable(module: str) -> bool:
    """Whether a new interpreter finds the module by its name; `importlib` would say yes to all that is loaded here."""
    package = module.partition(".")[0]
    if package == "__main__":
        return True  # cloudpickle knows better
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path if hasattr(finder, "find_spec"))


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
        control (`socket.socket`): Stream of `COMMAND` records in, `ENDED` records out.
        parent (`int`): Process to live for.
    """

    def __init__(self, control: socket.socket, parent: int):
        self.control = control
        self.parent = parent
        self.numbers: dict[int, int] = {}  # of the workers, by pid
        self.wakeup, self.alarm = os.pipe()
        self.prints, self.printing = os.pipe()  # of all workers
        self.passed_on = 0
        for end in (self.prints, self.alarm, self.wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Until the trainer is gone; then ends all workers."""
        try:
            while os.getppid() == self.parent:
                ready, _, _ = select.select([self.control, self.wakeup, self.prints], [], [], _PARENT_CHECK)
                if self.prints in ready:
                    self._pass_on()
                if self.wakeup in ready:
                    os.read(self.wakeup, 4096)
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
        try:
            record, channels, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
        except ConnectionResetError:  # closed with reports of ours unread
            return False
        if len(record) < COMMAND.size:  # closed: a record of a few bytes arrives in one piece
            return False
        kind, number, memory_mb = COMMAND.unpack(record)
        if kind == b"F" and channels:
            self._fork(number, channels[0], memory_mb)
        if kind == b"K":
            for pid in [pid for pid, known in self.numbers.items() if known == number]:
                _kill_tree(pid)
        return True

    def _fork(self, number: int, channel: int, memory_mb: int) -> None:
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no process left for this user; the pool sees the channel close
            os.close(channel)
            return
        if pid:
            self.numbers[pid] = number
            os.close(channel)
            return
        try:
            self._become_worker(nursery, channel, memory_mb)
        finally:
            os._exit(1)

    def _become_worker(self, nursery: int, channel: int, memory_mb: int) -> NoReturn:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != nursery:  # it died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        for stream in (1, 2):
            os.dup2(self.printing, stream)
        for own in (self.wakeup, self.alarm, self.prints, self.printing):
            os.close(own)
        os.set_inheritable(channel, False)
        if memory_mb:
            _limit_memory(memory_mb * 2**20)
        serve(socket.socket(fileno=channel))

    def _bury(self) -> None:
        """Collects the dead, and kills what dead workers leave behind."""
        while ended := self._wait():
            pid, status = ended
            _kill_tree(pid)  # its group, which its own end does not end
            for stray in _children() - self.numbers.keys() - {pid}:
                _kill_tree(stray)
            number = self.numbers.pop(pid, None)
            if number is not None:
                with contextlib.suppress(OSError):  # nobody may be reading; this is only for a message
                    self.control.send(ENDED.pack(number, os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)

    def _wait(self) -> tuple[int, int] | None:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        return (pid, status) if pid else None

    def _end(self) -> None:
        for _ in range(2 * _PRINTS >> 16):
            if not select.select([self.prints], [], [], 0)[0]:
                break
            self._pass_on()
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline and (left := _children() | self.numbers.keys()):
            for pid in left:
                _kill_tree(pid)
            time.sleep(0.002)
            while ended := self._wait():
                self.numbers.pop(ended[0], None)


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
