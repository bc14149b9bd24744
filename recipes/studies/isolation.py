"""Times and misdeeds of isolated calls, here and with pebble.

Each misdeed of `tests/support/misbehaving.py` runs twice among four harmless calls, on two workers with a second and
128 MB each. Printed are the outcomes, then calls per second and the seconds of 20 crashes.

Command: `pip install pebble && python recipes/studies/isolation.py`.
"""
# ruff: noqa: T201

import contextlib
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

import misbehaving

from trl_drgrpo.rewards.contract import Limits
from trl_drgrpo.rewards.isolation.pool import Failure, WorkerPool

MEMORY_MB = 128


def limit_memory():
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB * 2**20,) * 2)


class Pebble:
    def __init__(self):
        from pebble import ProcessPool  # for this comparison alone

        context = multiprocessing.get_context("forkserver")  # the trainer itself must not fork
        self.pool = ProcessPool(2, initializer=limit_memory, context=context)

    def outcomes(self, values):
        futures = [self.pool.schedule(misbehaving.misbehave, args=[value], timeout=1.0) for value in values]
        outcomes = []
        for future in futures:
            try:
                outcomes.append(future.result(timeout=30))
            except BaseException as error:  # sys.exit() in a call comes back as itself
                outcomes.append(type(error).__name__)
        return outcomes

    def close(self):
        self.pool.stop()


class Ours:
    def __init__(self):
        self.pool = WorkerPool(Limits(timeout=1.0, memory_mb=MEMORY_MB, workers=2))

    def outcomes(self, values):
        outcomes = self.pool.run(pickle.dumps(misbehaving.misbehave), [((value,), {}) for value in values])
        return [outcome.reason[:40] if isinstance(outcome, Failure) else outcome for outcome in outcomes]

    def close(self):
        self.pool.close()


def seconds(pool, values):
    pool.outcomes([1, 2])  # the workers are there
    started = time.perf_counter()
    pool.outcomes(values)
    return time.perf_counter() - started


def measure(kind, misdeed):
    pool = {"pebble": Pebble, "ours": Ours}[kind]()
    if misdeed == "speed":
        print(kind, f"{2000 / seconds(pool, range(2000)):.0f} calls a second", flush=True)
        print(kind, f"20 crashes: {seconds(pool, ['exit status 3'] * 20):.2f} s", flush=True)
    else:
        print(kind, repr(misdeed), pool.outcomes([0, misdeed, 2, 3, misdeed, 5]), flush=True)
    pool.close()


def main():
    for kind in ("pebble", "ours"):
        for misdeed in ("speed", *misbehaving.MISDEEDS):
            process = subprocess.Popen([sys.executable, __file__, kind, misdeed], start_new_session=True)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                print(kind, repr(misdeed), "still runs after 30 s", flush=True)
            with contextlib.suppress(ProcessLookupError):  # workers that are left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) == 3 else main()
