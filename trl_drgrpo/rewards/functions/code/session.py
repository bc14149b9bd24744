"""One completion against its tests: starting the processes, keeping the clock, collecting verdicts.

Function tests take two sandboxes that share a pair of pipes and nothing else: the examiner's, with the tests, and the
completion's, with its code (see `examiner.py`). Programs take one sandbox per test, and their output is compared here.
A test that hangs or ends the completion's process fails; the tests after it get fresh processes.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import RewardError, UnscorableError
from trl_drgrpo.rewards.functions.code.problems import FunctionTests, ProgramTests, same_output
from trl_drgrpo.rewards.functions.code.sandbox import Running, Sandbox, source_of

_PATH = "trl_drgrpo.rewards.functions.code."
_MAX_VERDICT = 1 << 16
_SETUP_SECONDS = 60.0  # of the tests' own setup: importing a large library on a busy machine


@dataclass(frozen=True)
class Clock:
    """Seconds of wall-clock: `per_test`, and `in_all` for one completion. Setting up a sandbox does not count."""

    per_test: float
    in_all: float


class BrokenTests(UnscorableError):
    """The tests cannot be run, whatever the completion."""


def run_function_tests(
    sandbox: Sandbox, code: str, tests: FunctionTests, clock: Clock, stop_at_first: bool
) -> list[bool]:
    """Run the tests of a function; returns which passed: with `stop_at_first` none behind the first failure.
    [`BrokenTests`]: the tests do not compile, or pass on what cannot cross between two processes."""
    job = {"code": code, "tests": tests.tests, "setup": tests.setup, "entry_point": tests.entry_point}
    job["stop_at_first"] = stop_at_first
    spent, passed, due = 0.0, [], 1
    while len(passed) < due:
        if spent >= clock.in_all or (stop_at_first and False in passed):
            break
        with _examiner(sandbox, {**job, "first": len(passed)}, clock.in_all) as examiner:
            due = _number_of_tests(examiner)
            started = time.monotonic()
            left = Clock(clock.per_test, clock.in_all - spent)
            more = list(_verdicts(examiner, left, due - len(passed), stop_at_first))
            spent += time.monotonic() - started
        if not more:
            break  # the code does not load
        passed += more
    return passed + [False] * (due - len(passed))


def run_programs(sandbox: Sandbox, code: str, tests: ProgramTests, clock: Clock, stop_at_first: bool) -> list[bool]:
    """Run a program on each input; arguments, result and errors as in [`run_function_tests`]."""
    passed, spent = [], 0.0
    for stdin, expected in tests.cases:
        if spent >= clock.in_all or (stop_at_first and False in passed):
            break
        started = time.monotonic()
        seconds = min(clock.per_test, clock.in_all - spent)
        output = run_program(sandbox, code, stdin, seconds, cap=2 * len(expected) + 100_000)
        passed.append(output is not None and same_output(output, expected, tests.tolerance))
        spent += time.monotonic() - started
    return passed + [False] * (len(tests.cases) - len(passed))


def run_program(sandbox: Sandbox, code: str, stdin: str, seconds: float, cap: int) -> str | None:
    """Standard output of a program; `None` if it fails, takes longer than `seconds`, or writes over `cap` bytes."""
    source = code.encode("utf-8", "replace")
    with sandbox.start(_sources("candidate"), "run_script", seconds=seconds) as running:
        running.wait_ready()
        running.feed(b"%d\n" % len(source) + source + stdin.encode("utf-8", "replace"))
        deadline = time.monotonic() + seconds
        if running.read(deadline, cap) != "end" or running.exit_code(deadline) != 0:
            return None
        return running.output.decode("utf-8", "replace")


@contextlib.contextmanager
def _examiner(sandbox: Sandbox, job: dict[str, Any], seconds: float) -> Iterator[Running]:
    """An examiner at work, with the completion's process at its other end."""
    requests_out, requests_in = os.pipe()
    replies_out, replies_in = os.pipe()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(contextlib.ExitStack())  # both ends are the children's alone, once started
        for fd in (requests_out, requests_in, replies_out, replies_in):
            ours.callback(os.close, fd)
        candidate = stack.enter_context(
            sandbox.start(_sources("candidate"), "serve", seconds=seconds, stdin=requests_out, stdout=replies_in)
        )
        examiner = stack.enter_context(
            sandbox.start(_sources("examiner"), "examine", seconds=seconds, pass_fds=(replies_out, requests_in))
        )
        ours.close()
        candidate.wait_ready()
        examiner.wait_ready()
        examiner.feed(json.dumps({**job, "read_fd": replies_out, "write_fd": requests_in}).encode() + b"\n")
        yield examiner


def _number_of_tests(examiner: Running) -> int:
    message = _message(examiner, time.monotonic() + _SETUP_SECONDS)
    if message is None:
        raise BrokenTests("their setup does not end, or ends the process")
    return message["tests"]


def _verdicts(examiner: Running, clock: Clock, due: int, stop_at_first: bool) -> Iterator[bool]:
    """Verdicts in order, up to and including one for the test at which examiner or completion stopped, if so."""
    end = time.monotonic() + clock.in_all
    message = _message(examiner, min(end, time.monotonic() + clock.per_test))
    if message is None or not message.get("loaded"):
        return
    for _ in range(due):
        message = _message(examiner, min(end, time.monotonic() + clock.per_test))
        if message is None or "passed" not in message:
            yield False
            return
        yield bool(message["passed"])
        if stop_at_first and not message["passed"]:
            return


def _message(examiner: Running, deadline: float) -> dict[str, Any] | None:
    line = examiner.read_line(deadline, _MAX_VERDICT)
    if line is None:
        return None
    message = json.loads(line)
    if "broken" in message:
        raise BrokenTests(message["broken"])
    if "undecided" in message:
        remedy = "Compare attributes, or define the class in setup."
        raise RewardError("code_reward", message["undecided"], "results that can be compared", remedy)
    return message


def _sources(module: str) -> dict[str, str]:
    names = ("wire", "test_forms", module) if module == "examiner" else ("wire", module)
    return {_PATH + name: source_of(f"{name}.py") for name in names}
