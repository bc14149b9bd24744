"""A program that was started in a sandbox, seen from outside: its input, its output, its end.

What is in it may do anything, so nothing here waits without a deadline, keeps output without a cap, or leaves a
process behind: `Running` is a context, and leaving it kills whatever is left.
"""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from trl_drgrpo.common.errors import UnscorableError

START_SECONDS = 60.0  # to set up and reach "ready": generous, since a busy machine is no fault of the completion
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class SandboxError(UnscorableError):
    """The sandbox itself did not start: no verdict on what was to run in it."""


class Running:
    """A program that was started: what it writes is collected up to a cap and a deadline; leaving it kills it."""

    def __init__(self, process: subprocess.Popen, directory: tempfile.TemporaryDirectory | None):
        self.process = process
        self.output = bytearray()
        self._directory = directory
        self._pending = memoryview(b"")
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)

    @classmethod
    def start(
        cls, command: list[str], stdin: int, stdout: int, pass_fds: Sequence[int], own_directory: bool = False
    ) -> "Running":
        """Start `command` with an empty environment, in a session of its own."""
        directory = tempfile.TemporaryDirectory(prefix="completion-") if own_directory else None
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            env={**ENVIRONMENT, "HOME": directory.name} if directory else {},
            cwd=directory.name if directory else "/",
            start_new_session=True,
        )
        return cls(process, directory)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: Any) -> None:
        # The group: in a sandbox that is bubblewrap, with whose death all inside dies.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self._directory is not None:
            self._directory.cleanup()

    def wait_ready(self) -> None:
        """Wait until the limits are in force and the program is about to run. [`SandboxError`]: it ended before."""
        said = bytearray()
        deadline = time.monotonic() + START_SECONDS
        stream = _required(self.process.stderr)
        while not said.endswith(b"ready\n"):
            chunk = self._read_chunk(stream, deadline)
            if not chunk:
                reason = said.decode(errors="replace").strip()[-500:] or "it did not start in time"
                raise SandboxError(f"the sandbox did not start: {reason}")
            said += chunk

    def feed(self, data: bytes) -> None:
        """Sets the program's standard input; it is written while `read` waits, then closed."""
        self._pending = memoryview(data)

    def read(self, deadline: float, cap: int, enough: Callable[[bytearray], bool] = lambda output: False) -> str:
        """
        Collect standard output in `output`, until `deadline` on `time.monotonic()`, `cap` bytes, or `enough(output)`.

        Returns `"enough"`, `"end"` (the program closed its output), `"timeout"` or `"cap"`.
        """
        stdout = _required(self.process.stdout)
        while not enough(self.output):
            if len(self.output) > cap:
                return "cap"
            chunk = self._read_chunk(stdout, deadline)
            if chunk is None:
                return "timeout"
            if not chunk:
                return "end"
            self.output += chunk
        return "enough"

    def read_line(self, deadline: float, cap: int) -> bytes | None:
        """The next line of standard output without its end; `None` if there is none by the deadline."""
        if self.read(deadline, cap, lambda output: b"\n" in output) != "enough":
            return None
        line, _, rest = bytes(self.output).partition(b"\n")
        self.output = bytearray(rest)
        return line

    def exit_code(self, deadline: float) -> int | None:
        """Exit status of the program; `None` if it still ran at the deadline (`time.monotonic()`) or was killed."""
        # It is not waited for until everything of its group has been killed: the group's id stays its own so long.
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        pause = 0.0005
        while (ended := os.waitid(os.P_PID, self.process.pid, flags)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return ended.si_status if ended.si_code == os.CLD_EXITED else None

    def _read_chunk(self, stream: IO[bytes], deadline: float) -> bytes | None:
        """The next bytes of the stream, `b""` at its end, `None` at the deadline; feeds the input meanwhile."""
        stdin = self.process.stdin
        while (left := deadline - time.monotonic()) > 0:
            poll = select.poll()  # select.select is limited to file descriptors under 1024
            poll.register(stream, select.POLLIN)
            if stdin is not None and not stdin.closed and (self._pending or stream is self.process.stdout):
                poll.register(stdin, select.POLLOUT)
            ready = {fd for fd, _ in poll.poll(left * 1000)}
            if stdin is not None and not stdin.closed and stdin.fileno() in ready:
                self._write_some(stdin)
            if stream.fileno() in ready:
                return os.read(stream.fileno(), 1 << 16)
        return None

    def _write_some(self, stdin: IO[bytes]) -> None:
        try:
            self._pending = self._pending[os.write(stdin.fileno(), self._pending[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not read on: its own affair
            self._pending = memoryview(b"")
        if not self._pending:
            with contextlib.suppress(OSError):
                stdin.close()


def _required(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ValueError("this stream was given to another process")
    return stream
