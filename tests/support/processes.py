"""Which processes are there, whether those that should end do, what one has loaded, and one that is asked lines."""

import ast
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil


def eventually(condition, patience=15.0):
    """Whether it holds, now or soon: killing a process is not waited for."""
    deadline = time.monotonic() + patience
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def running(among=None):
    """Ids of the processes that run (of these, or below this one)."""
    below = psutil.Process().children(recursive=True) if among is None else ()
    found = set()
    for pid in [process.pid for process in below] if among is None else among:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except psutil.Error:
            continue
    return found


def marked(mark):
    """Ids of the running processes that have the mark in their command line, or as `MARK` in their environment."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark or any(mark in part for part in process.cmdline()):
                found.add(process.pid)
        except psutil.Error:
            continue
    return running(found)


def gone(pids):
    """Whether the processes end."""
    return eventually(lambda: not running(pids))


HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "peft", "pyarrow", "httpx", "httpx2", "jsonschema")
HEAVY += ("sympy", "math_verify")


def loaded_after(code, heavy=HEAVY):
    """Names of the heavy modules that are loaded once `code` has run in a fresh interpreter."""
    script = f"{code}\nimport sys; print('LOADED', [m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.rsplit("LOADED", 1)[1].strip())


@contextmanager
def asked(script, seconds, **environment):
    """Inside the block a script of Python runs, the leader of its group: gives what sends it a line and reads its
    answer, or kills the group after so many seconds (what is asked later fails, too)."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    environment = {**os.environ, **environment}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, text=True, bufsize=1, **pipes)

    def ask(line):
        process.stdin.write(f"{line}\n")
        if not select.select([process.stdout], [], [], seconds)[0]:
            os.killpg(process.pid, signal.SIGKILL)
        return process.stdout.readline().strip()

    yield ask
    process.stdin.close()
    process.wait(timeout=30)
