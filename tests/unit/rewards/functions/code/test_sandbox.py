# ruff: noqa: E501  (programs as text)
import os
import platform
import socket
import stat
import struct
import subprocess
import sys
import time
import uuid

import pytest
from bubblewrap import needs_bwrap, slow
from processes import eventually, marked

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.code import sandbox as sandbox_module
from trl_drgrpo.rewards.functions.code import seccomp
from trl_drgrpo.rewards.functions.code.sandbox import Sandbox, SandboxError


def program(body: str) -> dict[str, str]:
    """A program whose `main` has this body."""
    lines = body.strip("\n").split("\n")
    return {"program": "import os, sys\ndef main():\n" + "".join(f"    {line}\n" for line in lines)}


def test_a_missing_bubblewrap_is_told_alone(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda program: None)
    with pytest.raises(InputError, match=r"no bubblewrap .*Install it") as caught:
        Sandbox(memory_mb=1234).check()  # of these settings no other test has asked
    assert "namespaces" not in str(caught.value)


def run(body: str, sandbox: Sandbox | None = None, seconds: float = 20, cap: int = 100_000) -> tuple[str, str]:
    """Output of a `main` with this body, and how reading it ended."""
    with (sandbox or Sandbox()).start(program(body), "main", seconds=seconds) as running:
        running.wait_ready()
        status = running.read(time.monotonic() + seconds, cap)
        return running.output.decode(), status


ATTEMPT = """
import ctypes, multiprocessing, mmap, pty, resource, signal, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def raw(call, *args):
    if call(*args) == -1: raise OSError(ctypes.get_errno(), "x")
def attempt(action):
    try:
        action()
        return "done"
    except BaseException as error:
        return type(error).__name__
"""


def check_attempts(outcomes: dict[str, str], body: str = "", sandbox: Sandbox | None = None) -> None:
    """Each attempt (an expression) ends in the exception of that name, or in "done"."""
    prints = "\n".join(f"print(attempt(lambda: {attempt}), flush=True)" for attempt in outcomes)
    seen = run(f"{ATTEMPT}{body}\n{prints}", sandbox)[0].split()
    assert dict(zip(outcomes, seen, strict=True)) == outcomes


DENIED = "PermissionError"


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


FORK, CLONE, SHMGET = (57, 56, 29) if platform.machine() == "x86_64" else (220, 220, 194)


@needs_bwrap
@pytest.mark.parametrize(
    "outcomes",
    [
        {
            "os.fork()": DENIED,
            "subprocess.run([sys.executable, '-c', ''])": DENIED,
            "os.posix_spawn(sys.executable, [sys.executable], {})": DENIED,
            "multiprocessing.get_context('fork').Process(target=print).start()": DENIED,
            "raw(libc.fork) or os._exit(0)": DENIED,
            f"raw(libc.syscall, {FORK}, 17, 0, 0, 0, 0) or os._exit(0)": DENIED,
            f"raw(libc.syscall, {CLONE}, 17, 0, 0, 0, 0) or os._exit(0)": DENIED,
            "raw(libc.syscall, 435, ctypes.create_string_buffer(88), 88) or os._exit(0)": "OSError",  # clone3: ENOSYS
        },
        {  # rights that were given up
            "os.setuid(0)": DENIED,
            "os.setgroups([0])": DENIED,
            "raw(libc.unshare, 0x10000000)": DENIED,
            "raw(libc.mount, b'x', b'/tmp', b'tmpfs', 0, None)": DENIED,
            "raw(libc.umount2, b'/tmp', 0)": DENIED,
            "raw(libc.ptrace, 16, 1, 0, 0)": DENIED,
            "raw(libc.setns, 0, 0)": DENIED,
            "os.pidfd_open(1)": DENIED,
            "raw(libc.process_vm_readv, 1, None, 0, None, 0, 0)": DENIED,
        },
        {  # memory
            "bytearray(300 << 20)": "MemoryError",
            "mmap.mmap(-1, 300 << 20)": "OSError",
            "os.memfd_create('x')": DENIED,
            f"raw(libc.syscall, {SHMGET}, 0, 1 << 30, 0o1600)": DENIED,
            "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))": "ValueError",
            "bytearray(20 << 20)": "done",
        },
        {  # sockets
            "socket.socket(socket.AF_INET, socket.SOCK_RAW)": DENIED,
            "raw(libc.socket, 40, 1, 0)": DENIED,  # vsock
            "raw(libc.socket, 16, 3, 0)": DENIED,  # netlink
            "raw(libc.socket, 38, 5, 0)": DENIED,  # kernel crypto
            "[end.send(b'x') for end in socket.socketpair()]": "done",  # to itself only: what asyncio needs
        },
    ],
    ids=["processes", "rights", "memory", "sockets"],
)
def test_the_sandbox_denies_every_forbidden_operation(outcomes):
    check_attempts(outcomes, sandbox=Sandbox(memory_mb=256))


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
@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        slow("9 ** 9 ** 9"),
        "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
        slow("import threading; [threading.Thread(target=lambda: 9 ** 9 ** 9).start() for _ in range(4)]"),
        slow("os.close(1)\nwhile True: pass"),
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
    with Sandbox().start(program("while True: pass"), "main", seconds=0.5) as running:
        running.wait_ready()
        assert running.read(time.monotonic() + 60, 1) == "end"  # 2 s of processor time, then SIGKILL
        assert running.exit_code(time.monotonic() + 10) != 0


@needs_bwrap
def test_endless_output_is_cut_off():
    output, status = run("while True: os.write(1, b'x' * 65536)", cap=1_000_000)
    assert status == "cap"
    assert len(output) < 1_000_000 + 65537


@needs_bwrap
def test_code_in_the_sandbox_reads_and_writes_no_file_of_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_DRGRPO_CANARY", "feather")
    canary = tmp_path / "canary"
    canary.write_text("feather")
    shown = sandbox_module._interpreter_files(Sandbox()._python())
    apart = ["/proc", "/sys", "/home", "/run", "/var", "/boot", "/opt", "/mnt", "/srv"]
    apart = [place for place in apart if not any(file.startswith(f"{place}/") for file in shown)]
    places = [str(canary), os.path.expanduser("~/.bashrc"), __file__, "/etc/passwd", "/etc/shadow"]
    body = f"{ATTEMPT}apart, places = {apart}, {places}"
    body += """
print([place for place in places if os.path.exists(place)])
print(sorted(set(os.environ) - {'HOME', 'LANG', 'PATH', 'PWD', 'LC_CTYPE', 'OMP_NUM_THREADS',
    'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'}))
places += ["/x", "/dev/x", "/usr/lib/x", os.path.dirname(os.__file__) + "/x.py", os.__file__]
print([place for place in places if attempt(lambda: open(place, "w").close()) == "done"])
print([place for place in apart if os.path.exists(place)])
print(os.path.exists("/dev/tty"), os.getuid() != 0, os.getpid() < 10, attempt(lambda: os.write(0, b"x")) != "done")
"""
    output, _ = run(body)
    assert output.split("\n")[:5] == ["[]", "[]", "[]", "[]", "False True True True"]
    assert canary.read_text() == "feather"


@needs_bwrap
def test_no_descriptor_of_the_host_is_inherited(tmp_path):
    held = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(held, True)
    try:
        body = f"{ATTEMPT}print([fd for fd in range(1000) if attempt(lambda: os.fstat(fd)) == 'done'])"
        assert run(body)[0] == "[0, 1, 2]\n"
    finally:
        os.close(held)


@needs_bwrap
def test_links_lead_nowhere(tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("feather")
    body = f"canary = {str(canary)!r}\nos.symlink(canary, '/tmp/link'); os.symlink('/', '/tmp/root')"
    missing = "FileNotFoundError"
    outcomes = {
        "open('/tmp/link').read()": missing,
        "open('/tmp/link', 'w')": missing,
        "open('/tmp/root' + canary).read()": missing,
        "open('/tmp/../../..' + canary).read()": missing,
        "os.chroot('/tmp')": DENIED,
        "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))": DENIED,
        "os.link(os.__file__, '/tmp/hard')": "OSError",
    }
    check_attempts(outcomes, body)
    assert canary.read_text() == "feather"


@needs_bwrap
def test_no_socket_reaches_a_server(tmp_path):
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "socket"))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{uuid.uuid4().hex}")
    servers = [tcp, unix, abstract]
    for server in servers:
        server.listen()
        server.setblocking(False)
    attempts = [f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 2)"]
    attempts += [f"socket.socket(socket.AF_UNIX).connect({server.getsockname()!r})" for server in (unix, abstract)]
    try:
        check_attempts(dict.fromkeys(attempts, DENIED))
        for server in servers:
            with pytest.raises(BlockingIOError):
                server.accept()  # nobody has come
    finally:
        for server in servers:
            server.close()


@needs_bwrap
def test_code_in_the_sandbox_kills_no_process_of_the_host():
    bystander = subprocess.Popen(["sleep", "60"])
    kills = ["os.kill(1, 9)", "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(1, 9)"]
    kills += [f"os.kill({pid}, 9)" for pid in (os.getpid(), bystander.pid)]
    prints = "".join(f"print(attempt(lambda: {kill}))\n" for kill in kills)
    try:
        assert run(f"{ATTEMPT}{prints}print('alive')")[0].endswith("alive\n")
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
    ignore = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    check_attempts({"open('/tmp/x', 'wb').truncate(5 << 20)": "OSError"}, ignore, Sandbox(disk_mb=4))
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
        slow("sys.setrecursionlimit(10 ** 9)\nf = lambda x: f(x + 1)\nf(0)"),
        "os.abort()",
        slow("os.kill(os.getpid(), 9)"),
        "os.execv('/nowhere', ['x'])",
        "sys.stdout.close(); raise SystemExit(3)",
    ],
)
def test_a_crash_is_a_failure_and_no_more(crash):
    with Sandbox().start(program(crash), "main", seconds=20) as running:
        running.wait_ready()
        # Python frames without end fill the memory, and then take their time to unwind.
        status = running.read(time.monotonic() + 3, 1000)
        assert status in ("end", "timeout")
        assert running.exit_code(time.monotonic() + (20 if status == "end" else 0)) != 0


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
    with Sandbox().start(program("print('x' * 200000)"), "main", seconds=20, stdin=b"y" * 5_000_000) as running:
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
    outcomes = {"bytearray(300 << 20)": "MemoryError", "open('x', 'wb').truncate(2 << 20)": "OSError"}
    check_attempts({**outcomes, "bytearray(1 << 20)": "done"}, "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)", bare)


def test_no_sandbox_still_ends_the_group_with_the_run():
    marker = uuid.uuid4().hex
    start = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)  # {marker}'])"
    run(start, Sandbox("none"), seconds=1)
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
