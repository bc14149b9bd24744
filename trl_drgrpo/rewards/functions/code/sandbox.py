"""How untrusted code is run: bubblewrap's arguments, and a started program seen from outside.

What is in it may do anything, so nothing here waits without a deadline, keeps output without a cap, or leaves a
process behind: leaving the context of `Sandbox.start` kills whatever is left.
"""

import contextlib
import functools
import json
import logging
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trl_drgrpo.common.errors import InputError, UnscorableError
from trl_drgrpo.rewards.contract import ONE_THREAD
from trl_drgrpo.rewards.functions.code import seccomp

START_SECONDS = 60.0  # to set up and reach "ready": generous, since a busy machine is no fault of the completion
ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", **ONE_THREAD}


class SandboxError(UnscorableError):
    """The sandbox itself did not start: no verdict on what was to run in it."""


class Running:
    """A program that was started: what it writes is collected up to a cap and a deadline."""

    def __init__(self, process: Any):
        self.process = process
        self.output = bytearray()

    def wait_ready(self) -> None:
        """Wait until the limits are in force and the program is about to run. [`SandboxError`]: it ended before."""
        output = bytearray()
        deadline = time.monotonic() + START_SECONDS
        while not output.endswith(b"ready\n"):
            chunk = _read_chunk(self.process.stderr, deadline)
            if not chunk:
                reason = output.decode(errors="replace").strip()[-500:] or "it did not start in time"
                raise SandboxError(f"the sandbox did not start: {reason}")
            output += chunk

    def read(self, deadline: float, cap: int, enough: Callable[[bytearray], bool] = lambda output: False) -> str:
        """
        Collect standard output in `output`, until `deadline` on `time.monotonic()`, `cap` bytes, or `enough(output)`.

        Returns `"enough"`, `"end"` (the program closed its output), `"timeout"` or `"cap"`.
        """
        while not enough(self.output):
            if len(self.output) > cap:
                return "cap"
            chunk = _read_chunk(self.process.stdout, deadline)
            if not chunk:
                return "timeout" if chunk is None else "end"
            self.output += chunk
        return "enough"

    def read_line(self, deadline: float, cap: int) -> bytes | None:
        """The next line of standard output without its end; `None` if there is none by the deadline."""
        if self.read(deadline, cap, lambda output: b"\n" in output) != "enough":
            return None
        line, _, self.output = self.output.partition(b"\n")
        return bytes(line)

    def exit_code(self, deadline: float) -> int | None:
        """Exit status of the program; `None` if it still ran at the deadline (`time.monotonic()`) or was killed."""
        # WNOWAIT leaves it uncollected: until its whole group has been killed, the group's id must stay its own.
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        pause = 0.0005  # most programs end with their output, so the first looks are close together
        while True:
            ended = os.waitid(os.P_PID, self.process.pid, flags)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else None
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _read_chunk(stream: IO[bytes], deadline: float) -> bytes | None:
    """The next bytes of a stream, `b""` at its end, `None` at the deadline."""
    poll = select.poll()  # select.select is limited to file descriptors under 1024
    poll.register(stream, select.POLLIN)
    seconds_left = deadline - time.monotonic()
    if seconds_left <= 0 or not poll.poll(seconds_left * 1000):
        return None
    return os.read(stream.fileno(), 1 << 16)  # unbuffered: a buffered read would wait for all that it asks for


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[int]:
    """Descriptor of a file without a name with this in it, which can be read from its start and not be written to."""
    # A file and not a pipe, whose writer would wait for a program that never reads its input.
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        # Opened again by its name: the descriptor of the temporary file could be written to.
        descriptor = os.open(file.name, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """In a sandbox the group is bubblewrap, with whose death all inside dies."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


logger = logging.getLogger(__name__)

_FILES = 4096  # in /tmp: an empty one takes no byte of its size, but about a KiB of the kernel's memory
_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
# argv: limits, [[module name, source], ...], function to call. Modules arrive as text, so that no file of the package
# has to be visible inside.
_PACKAGE = __name__.rpartition(".")[0]
_BOOTSTRAP = f"""
import json, sys, types
limits, sources, entry = (json.loads(argument) for argument in sys.argv[1:4])
del sys.argv[1:]
package = sys.modules["{_PACKAGE}"] = types.ModuleType("{_PACKAGE}")
for name, source in sources:
    module = sys.modules["{_PACKAGE}." + name] = types.ModuleType("{_PACKAGE}." + name)
    setattr(package, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
package.wire.confine(limits)
getattr(module, entry)()
"""
_PROBE = '''
import json, os, socket

def probe():
    """Things within reach: each entry that is not empty is a hole."""
    reached = {"environment": sorted(set(os.environ) - set(ALLOWED)), "proc": os.path.exists("/proc/1")}
    reached["files"] = [place for place in HIDDEN if os.path.lexists(place)][:3]
    reached["root"] = os.access("/", os.W_OK) or os.geteuid() == 0
    for name, action in (("fork", lambda: os.fork() or os._exit(0)), ("network", socket.socket)):
        try:
            reached[name] = bool(action())
        except OSError:
            reached[name] = False
    open("/tmp/probe", "w").write("x")
    print(json.dumps(reached))
'''


@dataclass(frozen=True)
class Sandbox:
    """Runs untrusted Python code.

    Args:
        kind (`str`, *optional*, defaults to `"bwrap"`): `"bwrap"`: bubblewrap. `"none"`: a plain subprocess with
            resource limits, which is **no sandbox**: files and network are open to the code. A warning says so.
        python (`str`, *optional*): Interpreter for the code. Defaults to the one that this environment was made from,
            so that only the standard library is there; for more packages, make an environment of its own
            (`python -m venv`) and name its `bin/python`. Its files can be read by the code.
        memory_mb (`int`, *optional*, defaults to `1024`): Address space of the process, in MiB.
        disk_mb (`int`, *optional*, defaults to `16`): Size of its /tmp, and of any one file, in MiB.
        threads (`int`, *optional*, defaults to `64`): Threads at most. Not enforced by kernels before 5.14 for callers
            other than root, nor for a root that lacks CAP_SYS_ADMIN: there `memory_mb` is the only bound.

    Raises:
        [`InputError`]: An unknown kind, or a limit that is too small.
    """

    kind: str = "bwrap"
    python: str | None = None
    memory_mb: int = 1024
    disk_mb: int = 16
    threads: int = 64

    def __post_init__(self):
        if self.kind not in ("bwrap", "none"):
            raise InputError("sandbox", repr(self.kind), '"bwrap" or "none"', 'Use "bwrap": "none" protects nothing.')
        for field, least in (("memory_mb", 64), ("disk_mb", 1), ("threads", 1)):
            if getattr(self, field) < least:
                got = str(getattr(self, field))
                raise InputError(field, got, f"at least {least}", "The interpreter itself does not fit in less.")
        if self.python is not None and not os.access(self.python, os.X_OK):
            raise InputError("python", repr(self.python), "an executable Python", "Set its full path.")

    def check(self) -> None:
        """Build a sandbox once and look at it from inside, before training starts. Refuses where bubblewrap is missing
        or cannot create namespaces, or something that it should keep away is in reach."""
        if self.kind == "bwrap":
            _check_walls(self)
            return
        text = (
            'sandbox="none": code written by the model runs with your files, your network and your permissions. '
            "Use it only on a machine that you can afford to lose."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def start(
        self,
        sources: Mapping[str, str],
        entry: str,
        *,
        seconds: float,
        stdin: bytes | int = b"",
        stdout: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
    ) -> Iterator[Running]:
        """
        Start a program; leaving the `with` block kills all that runs inside.

        `sources`: module name to source, loaded in order, standard library only. `entry`: function of the last module
        to call, without arguments. `seconds`: processor time after which the kernel ends it; wall-clock time is the
        caller's, see [`Running.read`]. `stdin`: what it can read, or a file descriptor. `stdout`: a file descriptor,
        or a pipe to this process; `pass_fds`: further ones that stay open.
        """
        # `wire` comes first, as the other modules import it.
        modules = [*sources_of("wire").items(), *sources.items()]
        arguments = map(json.dumps, (self._limits(seconds), modules, entry))
        # -I: neither PYTHON* variables nor the current directory decide what is imported. -B: no caches are written.
        command = [self._python(), "-I", "-B", "-c", _BOOTSTRAP, *arguments]
        with contextlib.ExitStack() as stack:
            stdin_file = stack.enter_context(_file_of(stdin)) if isinstance(stdin, bytes) else stdin
            environment = {}
            folder = "/"
            if self.kind == "none":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="completion-"))
                environment = {**ENVIRONMENT, "HOME": folder}
            else:
                rules = stack.enter_context(_file_of(seccomp.filter_program(seccomp.machine())))
                # bubblewrap limits the bytes of a /tmp, but not its number of files: see `_room`.
                room = _room(_bwrap(), self.disk_mb << 20)
                tmp = ["--bind", _ROOM, "/tmp"]
                if not room:
                    tmp = ["--perms", "1777", "--size", str(self.disk_mb << 20), "--tmpfs", "/tmp"]
                walls = _walls(self._python(), tmp)
                command = [*room, _bwrap(), "--seccomp", str(rules), *walls, *command]
                pass_fds = [*pass_fds, rules]
            process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            # Left in the other order: killed first, then waited for, and its files closed last.
            stack.enter_context(process)
            stack.callback(_kill_group, process)
            yield Running(process)

    def _limits(self, seconds: float) -> dict[str, int | None]:
        """Return the limits that [`wire.confine`] sets inside."""
        uid = None
        threads = None
        if self.kind == "bwrap":
            if _is_host_root():
                # The kernel exempts root from the limit of processes, so each sandbox gets a user of its own. The id
                # is random: two sandboxes of one user would count each other's threads.
                uid = 1_900_000_000 + secrets.randbelow(100_000_000)
            # Older kernels count per user id on the whole machine: the limit would refuse for others' processes.
            if uid or _kernel() >= (5, 14):
                threads = self.threads
        return {
            "memory": self.memory_mb << 20,  # of the one process: the filter lets it fork no other
            "file": self.disk_mb << 20,
            "cpu": math.ceil(seconds) + 1,  # the kernel counts whole seconds
            "threads": threads,
            "uid": uid,
        }

    def _python(self) -> str:
        if self.python is not None:
            return os.path.abspath(self.python)
        # In an environment `sys.executable` would show all installed packages; the base has the standard library.
        return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.lru_cache
def sources_of(*names: str) -> dict[str, str]:
    """Sources of modules of this folder, for the inside."""
    sources = {}
    for name in names:
        sources[name] = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return sources


@functools.lru_cache  # the reward asks with every call
def _check_walls(sandbox: Sandbox) -> None:
    shown = (*_SYSTEM_LIBRARIES, *_interpreter_files(sandbox._python()))
    hidden = []
    for place in _private_places():
        # A folder on the way to what is shown exists inside, too.
        if not any(f"{path}/".startswith(f"{place}/") for path in shown):
            hidden.append(place)
    constants = f"ALLOWED = {[*ENVIRONMENT, 'PWD', 'LC_CTYPE']!r}\nHIDDEN = {hidden!r}\n"
    try:
        with sandbox.start({"probe": constants + _PROBE}, "probe", seconds=20) as running:
            running.wait_ready()
            running.read(time.monotonic() + START_SECONDS, cap=10_000)
        reached_by_name = json.loads(running.output.decode())
    except InputError:  # there is none
        raise
    except (SandboxError, OSError, ValueError) as error:
        raise InputError(
            "sandbox",
            f"a bubblewrap that does not work here ({error})",
            "one that can create namespaces",
            "Allow unprivileged user namespaces (in a container: --privileged, or a seccomp profile that lets "
            "`unshare` pass; on Ubuntu 24.04: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`), or set "
            'sandbox="none", which protects nothing.',
        ) from error
    holes = [name for name, reached in reached_by_name.items() if reached]
    if holes:
        got = f"a sandbox from which these are in reach: {', '.join(holes)}"
        raise InputError("sandbox", got, "none of them", "Please report it with `uname -r` and `bwrap --version`.")


def _private_places() -> list[str]:
    """Files of this machine that nobody would want to show: a sample, to look for from inside."""
    places = ["/etc/passwd", "/etc/hostname", "/proc/1", "/sys", "/var", "/run"]
    for folder in (Path.home(), Path.cwd()):
        with contextlib.suppress(OSError):
            places += sorted(map(str, folder.iterdir()))[:100]
    return places


def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise InputError(
            "sandbox",
            "no bubblewrap (`bwrap`) on this machine",
            "bubblewrap 0.8 or newer",
            'Install it: `apt-get install bubblewrap`; or set sandbox="none", which protects nothing.',
        )
    return path


_ROOM = "/sys"  # a folder of every Linux that bubblewrap does not read


@functools.lru_cache
def _room(bwrap: str, disk_bytes: int) -> tuple[str, ...]:
    """Return the command before bubblewrap: a namespace whose /tmp is a file system of limited bytes and files,
    which bubblewrap itself cannot limit. Empty, with a warning, where that cannot be had."""
    unshare = shutil.which("unshare")
    mount = shutil.which("mount")
    # Mounting takes root, or a user namespace in which this user counts as root.
    own_user = () if _is_host_root() else ("--user", "--map-root-user")
    options = f"size={disk_bytes},nr_inodes={_FILES},mode=1777"
    script = f'"{mount}" -t tmpfs -o {options} tmpfs {_ROOM} && exec "$@"'
    room = (str(unshare), "--mount", *own_user, "/bin/sh", "-c", script, "sh")
    # Tried with bubblewrap in it, as `_walls` will use it: some systems allow one user namespace and no second inside.
    attempt = [*room, bwrap, "--ro-bind", "/", "/", "--bind", _ROOM, "/tmp"]
    if own_user:
        attempt.append("--unshare-user")
    attempt += ["/bin/sh", "-c", ":"]
    if unshare and mount and subprocess.run(attempt, capture_output=True).returncode == 0:
        return room
    logger.warning("sandbox: the number of files in its /tmp is not limited: `unshare` and `mount` do not work here.")
    return ()


def _walls(python: str, tmp: Sequence[str]) -> list[str]:
    """Arguments of bubblewrap, `tmp` those that make its /tmp; the order counts, and the root is closed for writing
    last."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    # A killed trainer leaves no sandbox behind. A session of its own has no terminal to type commands into.
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"]
    if _is_host_root():  # to become another user, whose limits the kernel enforces, once inside
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    # Only what an interpreter needs is there: no /proc, of /home an interpreter's own files at most, of /etc one file,
    # of /dev four devices.
    shown = (*_SYSTEM_LIBRARIES, *_interpreter_files(python))
    devices = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
    options += tmp
    folders = set()
    for place in (*shown, *devices):
        folders |= {*map(str, Path(place).parents)}
    for folder in sorted(folders - {"/", "/tmp"}):
        options += ["--perms", "0755", "--dir", folder]  # else bubblewrap makes them for its own user alone
    for place in shown:
        options += ["--ro-bind-try", place, place]
    for device in devices:
        options += ["--dev-bind", device, device]
    # Shared memory takes from the limited disk, too.
    return [*options, "--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp", "--"]


@functools.lru_cache
def _interpreter_files(python: str) -> tuple[str, ...]:
    """The interpreter, its libraries, and, where it is that of an environment, what is installed there."""
    # Asked of that interpreter, which need not be the one that runs here.
    ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    answer = subprocess.run([python, "-I", "-c", ask], capture_output=True, check=True, env={}, timeout=60)
    prefix, base_prefix = json.loads(answer.stdout)
    places = [python]
    # bin/python of an environment is a link to the base, often through further links. Each must be there inside; ten
    # are enough, and a circle of links ends, too.
    while os.path.islink(places[-1]) and len(places) < 10:
        link = places[-1]
        places.append(os.path.join(os.path.dirname(link), os.readlink(link)))
    places += [os.path.realpath(python), f"{base_prefix}/lib", f"{base_prefix}/lib64"]
    if prefix != base_prefix:
        places += [f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/pyvenv.cfg"]
    return tuple(dict.fromkeys(os.path.normpath(place) for place in places))


@functools.lru_cache
def _is_host_root() -> bool:
    """Root with the right to mount: then no user namespace is needed. A container's root often lacks it."""
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(capabilities >> 21 & 1)  # CAP_SYS_ADMIN


@functools.lru_cache
def _kernel() -> tuple[int, ...]:
    """Major and minor number of the running kernel."""
    version = os.uname().release.split("-")[0]  # 6.8.0-45-generic
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
