"""The reward of code: unit tests, run in a sandbox, decided by a process that the completion cannot touch.

What holds, for both forms of tests: the completion's code runs in `bubblewrap` (see `sandbox.py`), and the verdict is
made outside of its process from values that it returned or printed. It never sees an expected value, so leaving early,
patching `assert` or the interpreter, objects that equal everything, and forged messages gain nothing.

What does not hold, because no test can give it: a completion that knows the expected values by heart (from its
prompt, say) passes; so does one incorrect where no test looks. The completion's code runs behind `setup` and can
read all of it: expected values or a reference solution in it are given away. A function's process lives for all its
tests, so earlier calls can influence later ones.

What is asked of the completion: the entry point; without one, what the tests import from `solution`; without either,
the one name that they call and nobody defines. Two such names in tests that belong together (`deep_equal(f(3), [9])`)
are one too many, for the completion would examine itself: define the helper in `setup` or in the tests, or give
all that is tested as the entry point (`"encode, decode"`).

What results may be: plain data, dates and named tuples; an enumeration or a class that `setup` or the tests define:
objects are compared by their attributes, as that class of theirs says. Objects of the completion's own classes can be
used by attributes, methods, `len`, `str` and the like.

What code may use without an import is what the graders of this field import (see `prelude`).

What cannot be tested and is scored `None`: tests that pass objects of their own classes to the code; classes of tests
(`unittest`), coroutines, pytest's fixtures and parameters; tests in which nothing is asserted or nothing is asked of
the completion; names and modules that the tests use and that are not there. What counts as failed: tests that compare
or add objects of the completion's own class (its `__eq__` could say yes to everything) or of a library, or ask
something of them that cannot cross, which is
counted in `rewards/<name>/failed_frac`; a test that used the completion and came to none of its asserts; an assert
that fails, though an `except` of the test swallows it; an object where plain data is due; processes (`subprocess`,
`multiprocessing`) and sockets in the code; packages that `python` does not have.

How it runs: function tests take two sandboxes that share a pair of pipes and nothing else: the examiner's, with the
tests, and the completion's, with its code (see `examiner.py`). Programs take one sandbox per test, and their output is
compared here. A test that hangs or ends the completion's process fails; the tests after it get fresh processes.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_drgrpo.common.errors import InputError, RewardError, UnscorableError
from trl_drgrpo.common.ranges import Range, finite_number, whole
from trl_drgrpo.rewards.columns import LogMetric
from trl_drgrpo.rewards.contract import OnError, Rewards, available_workers, check_column
from trl_drgrpo.rewards.functions.code.problems import (
    FunctionTests,
    ProgramTests,
    fenced_code,
    parse_tests,
    same_output,
)
from trl_drgrpo.rewards.functions.code.sandbox import Running, Sandbox, sources_of
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.sample import SampleReward
from trl_drgrpo.rewards.texts import prompt_text

_MAX_VERDICT = 1 << 16
_MAX_CODE = 1 << 20  # characters; as JSON all of them fit in one message, so that no length makes tests unscorable
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
    spent = 0.0
    passed = []
    expected = 1  # until the examiner says how many tests there are
    # A round ends with the last test, or with one that hangs or ends a process. That one has failed, and the next
    # round goes on behind it with fresh processes.
    while len(passed) < expected and spent < clock.in_all and not (stop_at_first and False in passed):
        start = {"first": len(passed), "stop_at_first": stop_at_first}
        with _examiner(sandbox, job | start, clock.in_all) as examiner:
            message = _message(examiner, time.monotonic() + _SETUP_SECONDS)
            if message is None:
                raise BrokenTests("their setup does not end, or ends the process")
            expected = message["tests"]
            # The clock starts here: neither the sandbox nor the tests' own setup is the completion's doing.
            started = time.monotonic()
            clock_left = Clock(clock.per_test, clock.in_all - spent)
            verdicts = list(_verdicts(examiner, clock_left, expected - len(passed), stop_at_first))
            spent += time.monotonic() - started
        if not verdicts:
            break  # the code does not load
        passed += verdicts
    return passed + [False] * (expected - len(passed))


def run_programs(sandbox: Sandbox, code: str, tests: ProgramTests, clock: Clock, stop_at_first: bool) -> list[bool]:
    """Run a program on each input; arguments, result and errors as in [`run_function_tests`]. One that raises, or
    writes much more than is expected, has not passed."""
    source = code.encode("utf-8", "replace")  # lone surrogates, which a tokenizer may produce, have no bytes
    passed = []
    spent = 0.0
    for stdin, expected in tests.cases:
        if spent >= clock.in_all or (stop_at_first and False in passed):
            break
        started = time.monotonic()
        seconds = min(clock.per_test, clock.in_all - spent)
        side = sources_of("prelude", "candidate")
        # The code and its input share one file. An argument of the command line would be limited to 128 KiB.
        input_bytes = b"%d\n" % len(source) + source + stdin.encode("utf-8", "replace")
        with sandbox.start(side, "run_script", seconds=seconds, stdin=input_bytes) as running:
            running.wait_ready()
            deadline = time.monotonic() + seconds
            # An output this much longer than the expected one is wrong already.
            ended = running.read(deadline, cap=2 * len(expected) + 100_000) == "end"
            ended = ended and running.exit_code(deadline) == 0
        output = running.output.decode("utf-8", "replace")
        passed.append(ended and same_output(output, expected, tests.tolerance))
        spent += time.monotonic() - started
    return passed + [False] * (len(tests.cases) - len(passed))


@contextlib.contextmanager
def _examiner(sandbox: Sandbox, job: dict[str, Any], seconds: float) -> Iterator[Running]:
    """An examiner at work, with the completion's process at its other end."""
    # Two pipes between the sandboxes, and none from the completion to here: only the examiner's verdicts are read.
    requests_out, requests_in = os.pipe()
    replies_out, replies_in = os.pipe()
    job_line = json.dumps(job | {"read_fd": replies_out, "write_fd": requests_in}).encode() + b"\n"
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as fds_of_children:  # both ends are the children's alone, once started
            for fd in (requests_out, requests_in, replies_out, replies_in):
                fds_of_children.callback(os.close, fd)
            side = sources_of("prelude", "candidate")
            started = sandbox.start(side, "serve", seconds=seconds, stdin=requests_out, stdout=replies_in)
            candidate = stack.enter_context(started)
            side = sources_of("prelude", "test_forms", "examiner")
            ends_of_examiner = (replies_out, requests_in)
            started = sandbox.start(side, "examine", seconds=seconds, stdin=job_line, pass_fds=ends_of_examiner)
            examiner = stack.enter_context(started)
        # Both were started before either is waited for, so that they set up side by side.
        candidate.wait_ready()
        examiner.wait_ready()
        yield examiner


def _verdicts(examiner: Running, clock: Clock, due: int, stop_at_first: bool) -> Iterator[bool]:
    """Verdicts in order, up to and including one for the test at which examiner or completion stopped, if so; none if
    the code does not load, of which the first message tells."""
    end = time.monotonic() + clock.in_all
    for number in range(due + 1):  # 0: whether the code loads
        message = _message(examiner, min(end, time.monotonic() + clock.per_test)) or {}
        passed = message.get("passed", False)
        if number:
            yield passed
        if "passed" not in message:  # too late, or one of the processes has gone
            return
        if not passed and (number == 0 or stop_at_first):
            return


def _message(examiner: Running, deadline: float) -> dict[str, Any] | None:
    line = examiner.read_line(deadline, _MAX_VERDICT)
    if line is None:
        return None
    message = json.loads(line)
    if "broken" in message:
        raise BrokenTests(message["broken"])
    if "undecided" in message:
        # No `UnscorableError`: the completion chose what to return, and must not get out of its test that way.
        remedy = "Compare attributes, or define the class in setup."
        raise RewardError("code_reward", message["undecided"], "results that can be compared", remedy)
    return message


@dataclass(eq=False, repr=False)
class CodeReward(SampleReward):
    """Unit tests for Python: 1.0 if the code passes, else 0.0.

    The code is the last block fenced as Python. The tests are assert statements (a list, or one text, as in MBPP and
    HumanEval), pairs of standard input and output (APPS, CodeContests, TACO), or calls (`fn_name`): see
    [`parse_tests`]. Rows whose tests cannot be run, whatever the completion, are
    scored `None` and counted in `rewards/<name>/failed_frac`; the first is logged with the reason.

    Args:
        tests (`str`, *optional*, defaults to `"tests"`): Column with the tests.
        setup (`str`, *optional*): Column with source that goes before code and tests (imports; HumanEval's prompt:
            `"prompt"`, of which TRL passes the texts as `prompts`). The completion's code can read it: no expected
            values and no reference solution belong there.
        entry_point (`str`, *optional*): Column with the name of the function under test, for `check(candidate)`, or
            with several names (`"encode, decode"`). No other name is asked of the completion.
        partial (`bool`, *optional*, defaults to `False`): Give the fraction of tests passed instead of all or nothing.
            All or nothing stops at the first test that fails.
        require_fence (`bool`, *optional*, defaults to `True`): Without a block of Python the score is 0.0; `False`:
            then the whole completion is the code.
        tolerance (`float`, *optional*): Compare numbers in a program's output, or in the result of a call (`fn_name`),
            with this tolerance, absolute and relative. Whole numbers must be equal.
        timeout (`float`, *optional*, defaults to `5.0`): Seconds of wall-clock per test.
        total_timeout (`float`, *optional*, defaults to `30.0`): Seconds of wall-clock per completion; tests that it
            does not reach count as failed.
        workers (`int`, *optional*): Completions at a time. Defaults to the cores this process may use, divided by the
            processes on this machine (`LOCAL_WORLD_SIZE`).
        sandbox (`str` or [`Sandbox`], *optional*, defaults to `"bwrap"`): `"bwrap"`, or
            `"none"`: **no sandbox**, in so many words; or a `Sandbox` with other limits.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What tests that cannot be run, or a sandbox that
            does not start during training, cost: `"unscorable"`, this completion's score (`None`); `"raise"`, the run.
        name (`str`, *optional*, defaults to `"code_reward"`): Name in logs and metrics.

    Raises:
        [`InputError`]: A value that does not fit. On the first call, or from `check()`: a machine
            on which bubblewrap is missing or does not work.

    Example:

    ```python
    >>> humaneval = CodeReward(tests="test", setup="prompt", entry_point="entry_point")
    >>> mbpp = CodeReward(tests="test_list", partial=True)

    ```
    """

    tests: str = "tests"
    setup: str | None = None
    entry_point: str | None = None
    partial: bool = False
    require_fence: bool = True
    tolerance: float | None = None
    timeout: float = 5.0
    total_timeout: float = 30.0
    workers: int | None = None
    sandbox: Any = "bwrap"  # or a Sandbox
    on_error: OnError = "unscorable"
    name: str = "code_reward"

    truths = ("text", "list", "mapping")
    allowed: ClassVar = {
        "tolerance": Range(0, 1, below=True, optional=True, remedy="1e-6 is usual."),
        "workers": whole(1, optional=True, remedy="Leave it out for all cores."),
        **dict.fromkeys(("partial", "require_fence"), bool),
    }

    def __post_init__(self):
        if not isinstance(self.sandbox, (str, Sandbox)):
            got = repr(self.sandbox)
            expected = '"bwrap", "none" or a Sandbox'
            raise InputError("sandbox", got, expected, 'Leave it out for "bwrap".')
        if isinstance(self.sandbox, str):
            self.sandbox = Sandbox(self.sandbox)
        for field, seconds in (("timeout", self.timeout), ("total_timeout", self.total_timeout)):
            finite_number(field, seconds, "a finite number of seconds", "Set both, timeout at most total_timeout.")
        if not 0 < self.timeout <= self.total_timeout:
            got = f"timeout={self.timeout} and total_timeout={self.total_timeout}"
            raise InputError("timeout", got, "0 < timeout <= total_timeout, finite", "They are seconds: set both.")
        if self.setup == "prompt":  # TRL passes that column as `prompts`
            self.setup = "prompts"
        columns = {}  # each once: two fields may name one column
        for field, column in (("tests", self.tests), ("setup", self.setup), ("entry_point", self.entry_point)):
            if field == "tests" or column is not None:
                check_column(column, field)
                columns[column] = None
        super().__post_init__(*columns)
        self.clock = Clock(self.timeout, self.total_timeout)
        self.threads = self.workers or available_workers()  # the work is in other processes

    def check(self) -> None:
        """Try the sandbox, before training starts or with the first call. Says what to install where it does not
        work."""
        self.sandbox.check()

    def score(self, completion: str, **columns: Any) -> float:
        """
        Score of one completion, in [0, 1]. `columns`: this row's values of the columns named at construction.

        [`BrokenTests`]: the tests cannot be run, whatever the completion. [`SandboxError`]: the sandbox did not start.
        """
        setup = None
        if self.setup == "prompts":
            setup = prompt_text(columns[self.setup])
        elif self.setup:
            setup = columns[self.setup]
        entry_point = columns[self.entry_point] if self.entry_point else None
        # Before the code is looked at: a row without tests is unscorable whatever was written.
        tests = parse_tests(columns[self.tests], setup, entry_point, self.tolerance)
        if tests is None:
            raise BrokenTests(f"the column {self.tests!r} holds no tests of a known form")
        code = fenced_code(completion)
        if code is None:
            if self.require_fence:
                return 0.0
            code = completion
        if len(code) > _MAX_CODE:
            return 0.0
        # All or nothing is decided by the first failure; a share needs all tests.
        run: Any = run_programs if isinstance(tests, ProgramTests) else run_function_tests
        passed = run(self.sandbox, code, tests, self.clock, not self.partial)
        if self.partial:
            return sum(passed) / len(passed)
        return float(all(passed))

    def __call__(self, completions: Sequence[Any], log_metric: LogMetric = None, **kwargs: Any) -> Rewards:
        self.check()
        return super().__call__(completions, log_metric, **kwargs)


code_reward = CodeReward()


register_reward(
    "code_reward", code_reward, help="1 if the code passes the row's tests, in a sandbox.", factory=CodeReward
)
