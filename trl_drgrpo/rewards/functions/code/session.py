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
from trl_drgrpo.rewards.functions.code.sandbox import Running, Sandbox, sources_of

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
    spent, passed, due = 0.0, [], 1
    while len(passed) < due and spent < clock.in_all and not (stop_at_first and False in passed):
        start = {"first": len(passed), "stop_at_first": stop_at_first}
        with _examiner(sandbox, job | start, clock.in_all) as examiner:
            message = _message(examiner, time.monotonic() + _SETUP_SECONDS)
            if message is None:
                raise BrokenTests("their setup does not end, or ends the process")
            due = message["tests"]
            started = time.monotonic()
            left = Clock(clock.per_test, clock.in_all - spent)
            more = list(_verdicts(examiner, left, due - len(passed), stop_at_first))
            spent += time.monotonic() - started
        if not more:
            break  # the code does not load
        passed += more
    return passed + [False] * (due - len(passed))


def run_programs(sandbox: Sandbox, code: str, tests: ProgramTests, clock: Clock, stop_at_first: bool) -> list[bool]:
    """Run a program on each input; arguments, result and errors as in [`run_function_tests`]. One that raises, or
    writes much more than is expected, has not passed."""
    source = code.encode("utf-8", "replace")
    passed, spent = [], 0.0
    for stdin, expected in tests.cases:
        if spent >= clock.in_all or (stop_at_first and False in passed):
            break
        started = time.monotonic()
        seconds = min(clock.per_test, clock.in_all - spent)
        given = b"%d\n" % len(source) + source + stdin.encode("utf-8", "replace")
        with sandbox.start(sources_of("candidate"), "run_script", seconds=seconds, stdin=given) as running:
            running.wait_ready()
            deadline = time.monotonic() + seconds
            ended = running.read(deadline, cap=2 * len(expected) + 100_000) == "end"
            ended = ended and running.exit_code(deadline) == 0
        output = running.output.decode("utf-8", "replace")
        passed.append(ended and same_output(output, expected, tests.tolerance))
        spent += time.monotonic() - started
    return passed + [False] * (len(tests.cases) - len(passed))


@contextlib.contextmanager
def _examiner(sandbox: Sandbox, job: dict[str, Any], seconds: float) -> Iterator[Running]:
    """An examiner at work, with the completion's process at its other end."""
    requests_out, requests_in = os.pipe()
    replies_out, replies_in = os.pipe()
    given = json.dumps(job | {"read_fd": replies_out, "write_fd": requests_in}).encode() + b"\n"
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as ours:  # both ends are the children's alone, once started
            for fd in (requests_out, requests_in, replies_out, replies_in):
                ours.callback(os.close, fd)
            side = sources_of("candidate")
            started = sandbox.start(side, "serve", seconds=seconds, stdin=requests_out, stdout=replies_in)
            candidate = stack.enter_context(started)
            side, own = sources_of("test_forms", "examiner"), (replies_out, requests_in)
            started = sandbox.start(side, "examine", seconds=seconds, stdin=given, pass_fds=own)
            examiner = stack.enter_context(started)
        candidate.wait_ready()
        examiner.wait_ready()
        yield examiner


def _verdicts(examiner: Running, clock: Clock, due: int, stop_at_first: bool) -> Iterator[bool]:
    """Verdicts in order, up to and including one for the test at which examiner or completion stopped, if so; none if
    the code does not load, of which the first message tells."""
    end = time.monotonic() + clock.in_all
    for number in range(due + 1):
        message = _message(examiner, min(end, time.monotonic() + clock.per_test)) or {}
        if number:
            yield message.get("passed", False)
        if "passed" not in message or not (message["passed"] or (number and not stop_at_first)):
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
