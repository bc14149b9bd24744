"""What reward functions do to the process they run in. Importable by name and quick to import, as workers load it."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time


class Unpleasant(Exception):
    """Pickles, and does not unpickle: its constructor wants more than `args` has."""

    def __init__(self, first, second):
        super().__init__(first)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unreadable:
    """An argument that pickles and fails to unpickle."""

    def __reduce__(self):
        return int, ("no numbe",)


def grow(size):
    filled = []
    while True:
        filled.append(bytearray(size))


def raises(error):
    raise error


def fork_and_return():
    """Parent and child both return: the worker's own protocol must not be spoken twice."""
    os.fork()
    return 1.0


def kill_self(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def write_everywhere():
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, (8).to_bytes(8, "little") + b"8 bytes.")
    time.sleep(600)


def sleep_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    time.sleep(600)


def leave_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def interrupted_by_alarm():
    """What math-verify does: a time-out by SIGALRM, which Python allows on the main thread only."""

    def stop(*_):
        raise TimeoutError("alarm")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except TimeoutError:
        return float(threading.current_thread() is threading.main_thread())
    finally:
        signal.signal(signal.SIGALRM, previous)


def noise():
    print("noise by print")  # noqa: T201
    os.write(1, b"\x00\x00\x00\x08noise by descriptor\n")
    print("noise on stder", file=sys.stderr)  # noqa: T201
    return 1.0


# name -> (what to call, how the reason begins)
MISDEEDS = {
    "hang": (lambda: time.sleep(600), "no result within"),
    "hang holding the interpreter": (lambda: re.match(r"(a+)+$", "a" * 40 + "b"), "no result within"),
    "hang deaf to signals": (sleep_deaf, "no result within"),
    "exit status 3": (lambda: os._exit(3), "the worker died (exit status 3)"),
    "exit status 0": (lambda: os._exit(0), "the worker died (exit status 0)"),
    "segmentation fault": (lambda: ctypes.string_at(0), "the worker died (signal 11)"),
    "killed": (kill_self, "the worker died (signal 9)"),
    "sys.exit": (lambda: sys.exit(1), "SystemExit: 1"),
    "KeyboardInterrupt": (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "exception": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    "exception that does not unpickle": (lambda: raises(Unpleasant("a", "b")), "misbehaving.Unpleasant: a"),
    "exception without a text": (lambda: raises(Unspeakable()), "misbehaving.Unspeakable"),
    "long exception": (lambda: raises(ValueError("x" * 10**7)), "ValueError: x"),
    "unpicklable result": (lambda: threading.Lock(), "TypeError: cannot pickle"),
    "memory at once": (lambda: bytearray(10**11), "MemoryErro"),
    "memory bit by bit": (lambda: grow(10**6), "MemoryErro"),
    "writes to all descriptors": (write_everywhere, "the worker died"),
    "closed descriptors": (lambda: os.closerange(3, 256), "the worker died"),
}


def misbehave(what):
    return MISDEEDS[what][0]() if what in MISDEEDS else what


def start_processes(path):
    """A child, a child in a session of its own, and a daemon that has detached itself; their ids go to a file."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    pids = [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        daemon = subprocess.Popen(command).pid
        os.write(writer, str(daemon).encode())
        os._exit(0)
    os.wait()
    pids.append(int(os.read(reader, 100)))
    path.write_text(" ".join(map(str, pids)))


def multiply(path, generations):
    """Doubles, in sessions of their own, and stays: what is left of a fork bomb that had a limit."""
    for _ in range(generations):
        if os.fork() == 0:
            os.setsid()
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def same(completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
