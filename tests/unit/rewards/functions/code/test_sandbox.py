# ruff: noqa: E501  (programs as text)
import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import uuid

import pytest
from bubblewrap import needs_bwrap
from processes import eventually, marked

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.code import sandbox as sandbox_module
from trl_drgrpo.rewards.functions.code import seccomp
from trl_drgrpo.rewards.functions.code.sandbox import Sandbox, SandboxError


def run(body: str, sandbox: Sandbox | None = None, seconds: float = 20, cap: int = 100_000) -> tuple[str, str]:
    """Output of a `main` with this body, and how reading it ended."""
    source = "import os, sys\ndef main():\n" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    with (sandbox or Sandbox()).start({"program": source}, "main", seconds=seconds) as running:
        running.wait_ready()
        status = running.read(time.monotonic() + seconds, cap)
        return running.output.decode(), status


def refusals(body: str, *attempts: str, **kwargs) -> list[str]:
    """What each attempt (an expression) ends in: the name of its exception, or "done"."""
    lines = [*body.strip("\n").split("\n"), "def attempt(action):"]
    lines += ["    try:", "        action()", "        return 'done'", "    except BaseException as error:"]
    lines += ["        return type(error).__name__"]
    lines += [f"print(attempt(lambda: {attempt}), flush=True)" for attempt in attempts]
    return run("\n".join(lines), **kwargs)[0].split()


# What holds in the sandbox.


@needs_bwrap
def test_ordinary_code_runs():
    body = """
import asyncio, ctypes, dataclasses, decimal, json, random, tempfile, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
with tempfile.TemporaryFile() as file: file.write(b"x")
print(sum(range(10)), os.getcwd())
"""
    assert run(body) == ("thread\n45 /tmp\n", "end")


@needs_bwrap
def test_no_new_processes_by_any_door():
    body = "import ctypes, multiprocessing, subprocess, pty\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    body += "def raw(call):\n    if call() == -1: raise OSError(ctypes.get_errno(), 'x')\n    os._exit(0)\n"
    fork, clone, clone3, thread = {
        "x86_64": (57, 56, 435, 0x11),
        "aarch64": (220, 220, 435, 0x11),
    }[seccomp.machine()]
    attempts = [
        "os.fork()",
        "subprocess.run([sys.executable, '-c', ''])",
        "os.posix_spawn(sys.executable, [sys.executable], {})",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "raw(lambda: libc.fork())",
        f"raw(lambda: libc.syscall({fork}, {thread}, 0, 0, 0, 0))",
        f"raw(lambda: libc.syscall({clone}, {thread}, 0, 0, 0, 0))",
        f"raw(lambda: libc.syscall({clone3}, ctypes.create_string_buffer(88), 88))",
    ]
    outcomes = refusals(body, *attempts)
    assert outcomes[:-1] == ["PermissionError"] * (len(attempts) - 1)
    assert outcomes[-1] == "OSError"  # ENOSYS


@needs_bwrap
@pytest.mark.skipif(os.geteuid() == 0 and not sandbox_module._is_host_root(), reason="no thread limit for this root")
def test_a_thread_bomb_ends_at_the_limit():
    body = """
import threading, time
count = 0
try:
    while count < 500:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        count += 1
except RuntimeError:
    print(count)
"""
    output, _ = run(body, Sandbox(threads=20))
    assert 0 < int(output) <= 20


@needs_bwrap
def test_memory_is_bounded_by_every_door():
    body = "import mmap, ctypes, resource\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    body += "def raw(*call):\n    if libc.syscall(*call) == -1: raise OSError(ctypes.get_errno(), 'x')\n"
    attempts = [
        "bytearray(300 << 20)",
        "mmap.mmap(-1, 300 << 20)",
        "os.memfd_create('x')",
        f"raw({29 if seccomp.machine() == 'x86_64' else 194}, 0, 1 << 30, 0o1600)",
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
        "bytearray(20 << 20)",
    ]
    assert refusals(body, *attempts, sandbox=Sandbox(memory_mb=256)) == [
        "MemoryError",
        "OSError",
        "PermissionError",
        "PermissionError",
        "ValueError",
        "done",
    ]


@needs_bwrap
@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        pytest.param("9 ** 9 ** 9", marks=pytest.mark.slow),
        "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
        pytest.param(
            "import threading; [threading.Thread(target=lambda: 9 ** 9 ** 9).start() for _ in range(4)]",
            marks=pytest.mark.slow,
        ),
        pytest.param("os.close(1)\nwhile True: pass", marks=pytest.mark.slow),
    ],
)
def test_a_loop_ends_with_its_time_and_leaves_nothing(loop):
    marker = uuid.uuid4().hex
    started = time.monotonic()
    _, status = run(f"{loop}\n'{marker}'", seconds=0.5)
    assert status == "timeout"
    assert time.monotonic() - started < 15
    assert eventually(lambda: not marked(marker))


@needs_bwrap
def test_processor_time_is_the_kernels_affair_too():
    with Sandbox().start({"m": "def main():\n    while True: pass"}, "main", seconds=0.5) as running:
        running.wait_ready()
        assert running.read(time.monotonic() + 60, 1) == "end"  # 2 s of processor time, then SIGKILL
        assert running.exit_code(time.monotonic() + 10) != 0


@needs_bwrap
def test_endless_output_is_cut_off():
    output, status = run("while True: os.write(1, b'x' * 65536)", cap=1_000_000)
    assert status == "cap"
    assert len(output) < 1_000_000 + 65537


@needs_bwrap
def test_nothing_outside_can_be_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_DRGRPO_CANARY", "feather")
    canary = tmp_path / "canary"
    canary.write_text("feather")
    shown = sandbox_module._interpreter_files(Sandbox()._python())
    apart = ["/proc", "/sys", "/home", "/run", "/var", "/boot", "/opt", "/mnt", "/srv"]
    apart = [place for place in apart if not any(file.startswith(f"{place}/") for file in shown)]
    body = f"apart = {apart}\nplaces = {[str(canary), os.path.expanduser('~/.bashrc'), __file__, '/etc/passwd', '/etc/shadow']!r}\n"
    body += """
print([place for place in places if os.path.exists(place)])
print(sorted(set(os.environ) - {'HOME', 'LANG', 'PATH', 'PWD', 'LC_CTYPE', 'OMP_NUM_THREADS',
    'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'}))
def writable(place):
    try:
        open(place, "w").close()
        return True
    except OSError:
        return False
stdlib = os.path.dirname(os.__file__)
print([place for place in (*places, "/x", "/dev/x", "/usr/lib/x", stdlib + "/x.py", os.__file__) if writable(place)])
print([place for place in apart if os.path.exists(place)])
print(os.path.exists("/dev/tty"), os.getuid() != 0, os.getpid() < 10)
"""
    output, _ = run(body)
    assert output.split("\n")[:5] == ["[]", "[]", "[]", "[]", "False True True"]
    assert canary.read_text() == "feather"


@needs_bwrap
def test_no_descriptor_of_the_host_is_inherited(tmp_path):
    held = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(held, True)
    body = """
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in range(1000) if is_open(fd)])
"""
    try:
        assert run(body)[0] == "[0, 1, 2]\n"
    finally:
        os.close(held)


@needs_bwrap
def test_links_lead_nowhere(tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("feather")
    body = f"canary = {str(canary)!r}\nos.symlink(canary, '/tmp/link'); os.symlink('/', '/tmp/root')"
    attempts = [
        "open('/tmp/link').read()",
        "open('/tmp/link', 'w')",
        "open('/tmp/root' + canary).read()",
        "open('/tmp/../../..' + canary).read()",
        "os.link(os.__file__, '/tmp/hard')",
        "os.chroot('/tmp')",
        "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))",
    ]
    outcomes = refusals(body, *attempts)
    assert outcomes[:4] == ["FileNotFoundError"] * 4
    assert set(outcomes[4:]) <= {"OSError", "PermissionError"}
    assert canary.read_text() == "feather"


@needs_bwrap
def test_no_socket_reaches_a_server(tmp_path):
    arrived = []
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "socket"))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{uuid.uuid4().hex}")
    servers = [tcp, unix, abstract]

    def accept(server):
        with contextlib.suppress(OSError):
            arrived.append(server.accept())

    for server in servers:
        server.listen()
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    body = "import socket, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    body += "def raw(*call):\n    if libc.socket(*call) == -1: raise OSError(ctypes.get_errno(), 'x')\n"
    attempts = [
        f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)",
        f"socket.socket(socket.AF_UNIX).connect({unix.getsockname()!r})",
        f"socket.socket(socket.AF_UNIX).connect({abstract.getsockname()!r})",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW)",
        "raw(40, 1, 0)",  # vsock
        "raw(16, 3, 0)",  # netlink
        "raw(38, 5, 0)",  # kernel crypto
        "[end.send(b'x') for end in socket.socketpair()]",  # to itself only: what asyncio needs
    ]
    try:
        assert refusals(body, *attempts) == ["PermissionError"] * (len(attempts) - 1) + ["done"]
        assert arrived == []
    finally:
        for server in servers:
            server.close()


@needs_bwrap
def test_nothing_outside_can_be_killed():
    bystander = subprocess.Popen(["sleep", "60"])
    body = f"import signal\nhost = [{os.getpid()}, {bystander.pid}]"
    attempts = ["os.kill(1, 9)", "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(1, 9)"]
    attempts += ["os.kill(host[0], 9)", "os.kill(host[1], 9)", "print('alive')"]
    try:
        output = refusals(body, *attempts)
        assert output[-2:] == ["alive", "done"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@needs_bwrap
def test_the_disk_fills_at_its_limit_and_is_gone_afterwards():
    body = """
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.errno, written >> 20)
"""
    assert run(body, Sandbox(disk_mb=4))[0] == "28 4\n"  # ENOSPC
    big = "with open('/tmp/x', 'wb') as file:\n    file.seek(5 << 20); file.write(b'x'); file.flush()"
    assert run(f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ntry:\n    {big.replace(chr(10), chr(10) + '    ')}\nexcept OSError as error: print(error.errno)", Sandbox(disk_mb=4))[0] == "27\n"  # fmt: skip
    assert run("print(os.listdir('/tmp'))")[0] == "[]\n"


EMPTY_FILES = """
made = 0
try:
    while made < 20_000:
        open(f"/tmp/{made}", "w").close()
        made += 1
except OSError:
    pass
print(made)
"""


@needs_bwrap
def test_empty_files_are_counted():
    assert 4000 < int(run(EMPTY_FILES)[0]) < 4096
    links = EMPTY_FILES.replace('open(f"/tmp/{made}", "w").close()', 'os.link("/tmp/file", f"/tmp/{made}")')
    assert 4000 < int(run("open('/tmp/file', 'w').close()" + links)[0]) < 4096


@needs_bwrap
def test_where_files_cannot_be_counted_that_is_said(monkeypatch, caplog):
    which = sandbox_module.shutil.which
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None if name == "unshare" else which(name))
    sandbox_module._room.cache_clear()
    try:
        assert int(run(EMPTY_FILES)[0]) == 20_000
        assert run("print(1)") == ("1\n", "end")
    finally:
        sandbox_module._room.cache_clear()
    assert caplog.text.count("number of files in its /tmp is not limited") == 1


@needs_bwrap
@pytest.mark.parametrize(
    "crash",
    [
        "import ctypes; ctypes.string_at(0)",
        pytest.param("sys.setrecursionlimit(10 ** 9)\nf = lambda x: f(x + 1)\nf(0)", marks=pytest.mark.slow),
        "os.abort()",
        pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow),
        "os.execv('/nowhere', ['x'])",
        "sys.stdout.close(); raise SystemExit(3)",
    ],
)
def test_a_crash_is_a_failure_and_no_more(crash):
    source = "import os, sys\ndef main():\n" + "".join(f"    {line}\n" for line in crash.split("\n"))
    with Sandbox().start({"m": source}, "main", seconds=20) as running:
        running.wait_ready()
        # Python frames without end fill the memory, and then take their time to unwind.
        status = running.read(time.monotonic() + 3, 1000)
        assert status in ("end", "timeout")
        assert running.exit_code(time.monotonic() + (20 if status == "end" else 0)) != 0


@needs_bwrap
def test_rights_cannot_be_won_back():
    body = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    body += "def raw(call, *args):\n    if call(*args) == -1: raise OSError(ctypes.get_errno(), 'x')\n"
    attempts = [
        "os.setuid(0)",
        "os.setgroups([0])",
        "raw(libc.unshare, 0x10000000)",
        "raw(libc.mount, b'x', b'/tmp', b'tmpfs', 0, None)",
        "raw(libc.umount2, b'/tmp', 0)",
        "raw(libc.ptrace, 16, 1, 0, 0)",
        "raw(libc.setns, 0, 0)",
        "os.pidfd_open(1)",
        "raw(libc.process_vm_readv, 1, None, 0, None, 0, 0)",
    ]
    assert refusals(body, *attempts) == ["PermissionError"] * len(attempts)


@needs_bwrap
def test_a_killed_trainer_takes_its_sandboxes_along():
    marker = uuid.uuid4().hex
    script = (
        "import time; from trl_drgrpo.rewards.functions.code.sandbox import Sandbox\n"
        f"with Sandbox().start({{'m': 'def main(): import time; time.sleep(100)  # {marker}'}}, 'main', seconds=9) as it:\n"
        "    it.wait_ready(); print('ready', flush=True); time.sleep(100)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    assert marked(marker)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert eventually(lambda: not marked(marker))


@needs_bwrap
def test_input_that_is_not_read_blocks_nobody():
    source, given = "def main(): print('x' * 200000)", b"y" * 5_000_000
    with Sandbox().start({"m": source}, "main", seconds=20, stdin=given) as running:
        running.wait_ready()
        assert running.read(time.monotonic() + 20, 1_000_000) == "end"
        assert len(running.output) == 200001


@needs_bwrap
def test_an_environment_of_its_own_lends_its_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (packages / "borrowed.py").write_text("value = 7")
    (tmp_path / "env" / "secret").write_text("x")
    body = f"import borrowed; print(borrowed.value, os.path.exists({str(tmp_path / 'env' / 'secret')!r}))"
    assert run(body, Sandbox(python=str(tmp_path / "env/bin/python")))[0] == "7 False\n"
    assert run("import borrowed")[0] == ""


# Without bubblewrap.


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"sandbox: got no bubblewrap .*apt-get install bubblewrap"):
        Sandbox(disk_mb=3).check()


def test_a_machine_without_a_filter_is_refused(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    with pytest.raises(InputError, match="no system call filter; expected x86_64 or aarch64"):
        seccomp.machine()


@pytest.mark.parametrize("script", ["echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "exit 0"])
def test_a_bubblewrap_that_does_not_work_is_found_out(tmp_path, monkeypatch, script):
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: str(fake))
    with pytest.raises(InputError, match="a bubblewrap that does not work here.*unprivileged user namespaces"):
        Sandbox(disk_mb=5).check()


@needs_bwrap
def test_walls_with_a_hole_are_found_out(monkeypatch):
    monkeypatch.setattr(seccomp, "filter_program", lambda machine: struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000))
    with pytest.raises(InputError, match="from which these are in reach: fork, network"):
        Sandbox(disk_mb=6).check()


def test_no_sandbox_says_so_and_still_limits(recwarn):
    bare = Sandbox("none", memory_mb=256, disk_mb=1)
    with pytest.warns(RuntimeWarning, match='sandbox="none": code written by the model runs with your files'):
        bare.check()
    body = "import resource\nprint(sorted(os.environ), os.getcwd() == os.environ['HOME'] != '/tmp')"
    output, status = run(body, bare)
    assert status == "end"
    assert "TRL" not in output
    assert output.endswith("True\n")
    attempts = ["bytearray(300 << 20)", "open('x', 'wb').truncate(2 << 20)", "bytearray(1 << 20)"]
    outcomes = refusals("import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)", *attempts, sandbox=bare)
    assert outcomes == ["MemoryError", "OSError", "done"]


def test_no_sandbox_still_ends_the_group_with_the_run():
    marker = uuid.uuid4().hex
    body = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)  # {marker}'])"
    run(f"{body}\nprint(1)", Sandbox("none"), seconds=1)
    assert eventually(lambda: not marked(marker))


def test_a_program_that_does_not_start_is_no_verdict():
    with (
        pytest.raises(SandboxError, match="the sandbox did not start: Traceback"),
        Sandbox("none").start({"m": "this is no Python"}, "main", seconds=1) as running,
    ):
        running.wait_ready()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_as_the_kernel_would_read_it(machine):
    program = [struct.unpack("<HBBI", part) for part in chunks(seccomp.filter_program(machine))]
    arch, clone, socket_call, read = {
        "x86_64": (0xC000003E, 56, 41, 0),
        "aarch64": (0xC00000B7, 220, 198, 63),
    }[machine]
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000

    def verdict(number, argument=0, architecture=arch):
        accumulator, at = 0, 0
        data = {0: number, 4: architecture, 16: argument}
        while True:
            code, if_true, if_false, value = program[at]
            at += 1
            if code == 0x06:
                return value
            if code == 0x20:
                accumulator = data[value]
                continue
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false

    assert verdict(read) == allow
    assert verdict(socket_call) == refuse
    assert verdict(clone, argument=0x11) == refuse  # fork
    assert verdict(clone, argument=0x3D0F00) == allow  # pthread_create
    assert verdict(435) == 0x00050000 | 38  # clone3: ENOSYS
    assert verdict(read, architecture=0x40000003) == kill
    assert verdict(read | 0x40000000) == (refuse if machine == "x86_64" else allow)


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + 8] for at in range(0, len(data), 8)]
