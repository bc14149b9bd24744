# ruff: noqa: E501  (completions and tests, one to a line)
import io
import json
import math
import os
import pickle
import subprocess
import time
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from datetime import UTC
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest
from bubblewrap import REASON, needs_bwrap, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import CodeReward, code_reward
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.functions.code import examiner, wire
from trl_drgrpo.rewards.functions.code.problems import (
    FunctionTests,
    ProgramTests,
    fenced_code,
    parse_tests,
    same_output,
)
from trl_drgrpo.rewards.functions.code.sandbox import Sandbox, SandboxError

# Without the sandbox the same things hold; where there is one, `make test` asks only with it.
KINDS = [pytest.param("bwrap", marks=needs_bwrap), pytest.param("none", marks=() if REASON else pytest.mark.slow)]
pytestmark = pytest.mark.filterwarnings('ignore:sandbox="none"')

ADD = "def add(a, b):\n    return a + b"


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def graded(codes, tests, setup="", entry_point=None, **options) -> list[float | None]:
    """Scores of several codes by the same tests."""
    columns = {"tests": tests, "setup": setup, "entry_point": entry_point}
    options = {"timeout": 20.0, "total_timeout": 60.0, "sandbox": "none", **options}
    reward = CodeReward(**{name: name for name in columns}, **options)
    return reward(
        completions=[fenced(c) for c in codes], **{name: [each] * len(codes) for name, each in columns.items()}
    )


def scored(code: str, tests, kind: str = "none", **options) -> float | None:
    return graded([code], tests, sandbox=kind, on_error="raise", **options)[0]


# What is scored, with the sandbox and without.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "tests", "reward"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0.0),
        ("def add(a, b): return a - b", ["assert add(1, 2) == 3"], 0.0),
        ("def sub(a, b): return a + b", ["assert add(1, 2) == 3"], 0.0),
        ("def add(a, b:\n", ["assert add(1, 2) == 3"], 0.0),
        ("raise SystemExit(0)", ["assert add(1, 2) == 3"], 0.0),
        # Statements around the asserts, and helpers of the tests.
        (ADD, "def twice(x):\n    return 2 * x\nfor i in range(5):\n    assert add(i, i) == twice(i)", 1.0),
        (ADD, "result = add(1, 2)\nassert result == 3", 1.0),
        (ADD, "assert math.isclose(add(0.1, 0.2), 0.3)", 1.0),
        # pytest functions, as in KodCode.
        (ADD, "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3", 1.0),
        (ADD, "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 4", 0.0),
        # Results that are plain data keep their type; others can be used.
        ("def f(): return {1: (2, [3], {4})}, 5 + 0j, b'x', None", ["assert f() == ({1: (2, [3], {4})}, 5+0j, b'x', None)"], 1.0),
        ("def f(): return (1, 2)", ["assert f() == [1, 2]"], 0.0),
        ("def f():\n    i = 0\n    while True:\n        yield i\n        i += 1", ["g = f()\nassert [next(g), next(g)] == [0, 1]", "assert 3 in f()"], 1.0),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)", ["s = Stack()\ns.push(4)\nassert s.items == [4] and len(s) == 1"], 1.0),
        # Arguments changed in place, functions as arguments, exceptions.
        ("def f(items, key=None): items.sort(key=key)", ["x = [2, 1]\nf(x)\nassert x == [1, 2]", "x = [1, 2]\nf(x, key=lambda v: -v)\nassert x == [2, 1]"], 1.0),
        ("def f(kind, x): return isinstance(x, kind)", ["assert f(int, 3) is True"], 1.0),
        ("def f(x):\n    if x < 0: raise ValueError('no')", ["try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"], 1.0),
        # Programs.
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}], 1.0),
        ("print(sum(map(int, input().split())))", {"input": ["1 2"], "output": ["4"]}, 0.0),
        ("import sys\nprint(sys.stdin.read(), end='')", [{"input": "x\n" * 200_000, "output": "x\n" * 200_000}], 1.0),
        ("if __name__ == '__main__':\n    print('yes')", [{"input": "", "output": "yes"}], 1.0),
        ("import threading\nthreading.Thread(target=lambda: print(7)).start()", [{"input": "", "output": "7"}], 1.0),
        ("print(3)\nraise ValueError", [{"input": "", "output": "3"}], 0.0),
        # Calls, as in APPS.
        ("class Solution:\n    def go(self, a, b): return (a, [b])", json.dumps({"fn_name": "go", "inputs": [[1, 2]], "outputs": [[1, [2]]]}), 1.0),
        ("def go(a): return a + 1", {"fn_name": "go", "inputs": [[1], [2]], "outputs": [2, [3]]}, 1.0),
        ("def go(a): return a", {"fn_name": "go", "inputs": [[1]], "outputs": [2]}, 0.0),
    ],
)  # fmt: skip
def test_scores(kind, code, tests, reward):
    assert scored(code, tests, kind) == reward


@pytest.mark.parametrize("kind", KINDS)
def test_humaneval(kind):
    prompt = 'from typing import List\n\ndef longest(x: List[str]) -> str:\n    """The longest."""\n'
    test = "def check(candidate):\n    assert candidate(['a', 'bb']) == 'bb', 'longest'\n    assert abs(len(candidate(['a'])) - 1) < 1e-6\n"
    reward = CodeReward("test", "prompt", "entry_point", timeout=20, total_timeout=60, sandbox=kind)
    codes = {
        "def longest(x: List[str]) -> str:\n    return max(x, key=len)": 1.0,
        "def longest(x):\n    return x[0]": 0.0,
        "y = 1": 0.0,  # the prompt's own stub stays
    }
    columns = {"prompts": [prompt] * 3, "test": [test] * 3, "entry_point": ["longest"] * 3}  # as TRL passes them
    assert reward(completions=list(map(fenced, codes)), **columns) == list(codes.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_fraction_counts_tests_after_a_hang_and_after_a_crash(kind):
    code = "import os, time\ndef f(x):\n    if x == 1: time.sleep(1000)\n    if x == 2: os._exit(0)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in range(5)] + ["assert f(7) == 8"]
    assert scored(code, tests, kind, partial=True, timeout=2) == pytest.approx(3 / 6)
    program = "x = int(input())\nwhile x == 1: pass\nprint(x)"
    cases = [{"input": str(x), "output": str(min(x, 3))} for x in range(5)]
    assert scored(program, cases, kind, partial=True, timeout=2) == pytest.approx(3 / 5)


def test_all_or_nothing_stops_at_the_first_failure(tmp_path):
    code = f"def f(x):\n    open({str(tmp_path)!r} + '/' + str(x), 'w').close()\n    return x"
    assert scored(code, [f"assert f({x}) == {min(x, 1)}" for x in range(5)]) == 0.0
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@pytest.mark.parametrize("tests", [["assert f(0)", "assert f(1)", "assert f(2)"], [{"input": "", "output": ""}] * 3])
def test_the_time_of_a_completion_is_bounded_too(tests):
    code = "import time\ndef f(x): time.sleep(1000)\nif __name__ == '__main__': f(0)"
    started = time.monotonic()
    assert scored(code, tests, partial=True, timeout=1.0, total_timeout=1.5) == 0.0
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("where", ["def f(x):\n    while True: pass", "while True: pass"])
def test_a_loop_is_no_answer(where):
    assert scored(where, ["assert f(1)"], timeout=0.5) == 0.0


# What graders of this field put in front of a solution.

WITHOUT_IMPORTS = {
    "typing": "def f(x: List[int]) -> Optional[int]:\n    return x",
    "modules": "def f(x): return math.gcd(x, x) + len(re.findall('a', string.digits)) + int(random.random()) + copy.copy(0) + operator.add(0, 0) * sys.maxsize",
    "members": "def f(x): return deque([gcd(x, x)])[0] + int(sqrt(4)) - 2 + len(defaultdict(int)) + len(Counter()) + bisect_left([1], 0) + next(accumulate([0]))",
    "a heap": "def f(x):\n    heap = []\n    heappush(heap, x)\n    return reduce(lambda a, b: a + b, heap) if heap[0] < inf else 0",
    "dates": "def f(x): return x + (datetime.date(2020, 1, 1) - datetime.date(2020, 1, 1)).days + int(0 * time.time())",
    "a cache": "@lru_cache(maxsize=None)\ndef f(x): return x",
    "a built-in function": "def f(x): return pow(x, 1, 10) + sum([]) + open.__module__.count('math')",
    "its own definition": "def gcd(a, b): return a\ndef f(x): return gcd(x, 100)",
    "the future": "'text'\nfrom __future__ import annotations\ndef f(x: Unknown): return x",
    "a deep recursion": "def down(n): return 0 if n == 0 else down(n - 1)\ndef f(x): return x + down(9000)",
    "a long integer": "def f(x): return x + len(str(10 ** 9999)) - 10_000",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", ["", "y = 1\ndef unused(x: List[int]): pass"])
def test_code_may_use_what_graders_import(kind, setup):
    rewards = graded(WITHOUT_IMPORTS.values(), ["assert f(3) == 3"], setup, sandbox=kind)
    assert dict(zip(WITHOUT_IMPORTS, rewards, strict=True)) == dict.fromkeys(WITHOUT_IMPORTS, 1.0)


def test_programs_may_use_it_too():
    programs = [f"{code}\nprint(f(int(input())))" for code in WITHOUT_IMPORTS.values()]
    rewards = graded(programs, [{"input": "3", "output": "3"}])
    assert dict(zip(WITHOUT_IMPORTS, rewards, strict=True)) == dict.fromkeys(WITHOUT_IMPORTS, 1.0)


@pytest.mark.parametrize("name", ["add", "gcd", "deque", "sum"])
def test_imports_of_graders_are_no_answer(name):
    for tests in (f"from solution import {name}\nassert {name}", f"import solution\nassert solution.{name}"):
        assert scored("y = 1", tests) == 0.0
    setup = f"def of_setup(): return {name}"
    assert graded(["y = 1"], [f"assert {name} and of_setup()"], setup, entry_point=name) == [0.0]
    assert graded(["y = 1"], ["assert of_setup()"], setup, entry_point=name) == [0.0]


def test_code_may_go_on_where_its_setup_ends():
    setup = "from __future__ import annotations\ndef f(x: Unknown):\n    'The same.'\n"
    codes = {
        "    return x": 1.0,
        "    return 0": 0.0,
        "def f(x: Unknown): return x": 1.0,
        "from __future__ import division\ndef f(x): return x": 1.0,
    }
    assert graded(codes, ["assert f(1) == 1"], setup, entry_point="f") == list(codes.values())


# The verdict cannot be forged. `SECRET` is what only the tests know.

SECRET = "feather-9d156191a6334670a377fe1f5499e219"
FORGERIES = {
    # One of each sort for every change; all of them in the slow tests.
    "leaves at once in the call": "import os\ndef f(x): os._exit(0)",
    "equals everything": "class E:\n    def __eq__(self, other): return True\n    __ne__ = lambda s, o: False\ndef f(x): return E()",
    "replaces the comparison": "import operator, builtins\noperator.eq = lambda a, b: True\nbuiltins.isinstance = lambda a, b: True\nbuiltins.all = lambda x: True\ndef f(x): return 1",
    "writes a verdict everywhere": "import os\ndef f(x):\n    for line in (b'{\"loaded\": true}', b'{\"passed\": true}', b'{\"value\": true}') * 9:\n        for fd in range(64):\n            try: os.write(fd, line + b'\\n')\n            except OSError: pass\n    return 1",
    "a message too long": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try:\n            while True: os.write(fd, b'[' * 65536)\n        except OSError: pass",
    "searches its memory": "import gc, sys, os\ndef f(x):\n    found = set()\n    def note(v):\n        if isinstance(v, str) and 'feather-' in v: found.add(v[v.index('feather-'):][:40])\n    frame = sys._getframe()\n    while frame:\n        for v in [*frame.f_locals.values(), *frame.f_globals.values()]: note(str(v)[:10**6])\n        frame = frame.f_back\n    for thing in gc.get_objects():\n        if isinstance(thing, dict):\n            for v in list(thing.values()): note(v)\n        elif isinstance(thing, (list, tuple)):\n            for v in list(thing): note(v)\n    for v in [*sys.argv, *sys.orig_argv, *os.environ.values()]: note(v)\n    found -= {v for v in found if len(v) < 40 or not v[8:].isalnum()}\n    return found.pop() if found else 1",
    # The others.
    "leaves before the asserts": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": "import sys\ndef f(x): sys.exit(0)",
    "becomes another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "a string that equals everything": "class E(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef f(x): return E('no')",
    "a list that equals everything": "class E(list):\n    def __eq__(self, other): return True\n    def __iter__(self): return iter([1])\ndef f(x): return E()",
    "claims to be a string": "class E:\n    __class__ = str\n    def __eq__(self, other): return True\n    def __str__(self): return 'x'\ndef f(x): return E()",
    "a metaclass that equals everything": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\nclass E(metaclass=M): pass\ndef f(x): return E",
    "asserts nothing": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\ndef f(x): return 1",
    "replaces json": "import json\njson.dumps = lambda m: '{\"passed\": true}'\ndef f(x): return 1",
    "prints a verdict": "print('{\"passed\": true}\\nPASSED\\nOK')\ndef f(x):\n    print('{\"passed\": true}')\n    return 1",
    "writes a verdict at exit": "import atexit, os\n@atexit.register\ndef last():\n    for fd in range(64):\n        try: os.write(fd, b'{\"passed\": true}\\n')\n        except OSError: pass\ndef f(x): return 1",
    "writes a verdict from a thread": "import os, threading, time\ndef go():\n    for _ in range(99):\n        time.sleep(0.001)\n        for fd in range(3, 64):\n            try: os.write(fd, b'{\"passed\": true}\\n')\n            except OSError: pass\nthreading.Thread(target=go, daemon=True).start()\ndef f(x):\n    time.sleep(0.1)\n    return 1",
    "a message too deep": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'{\"value\": ' + b'[' * 100000 + b']' * 100000 + b'}\\n')\n        except OSError: pass\n    return 1",
    "values that are none": "import os\ndef f(x):\n    for m in (b'{\"value\": {\"Decimal\": \"x\"}}', b'{\"value\": {\"object\": \"x\"}}', b'{\"callback\": 7, \"args\": []}', b'{\"raised\": 3}', b'{\"value\": 1, \"changed\": {\"0\": []}}', b'null'):\n        for fd in range(3, 64):\n            try: os.write(fd, m + b'\\n')\n            except OSError: pass\n    return 1",
    "raises the success": "def f(x): raise StopIteration",
    "raises what is no exception": "class B(BaseException):\n    def __str__(self): raise self\ndef f(x): raise B",
    "reads on where requests come from": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.set_blocking(fd, False); data = os.read(fd, 10**6)\n        except OSError: continue\n        if b'feather-' in data: return data[data.index(b'feather-'):][:40].decode()\n    return 1",
}  # fmt: skip

OF_EACH_SORT = 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*[*FORGERIES][:OF_EACH_SORT], *map(slow, [*FORGERIES][OF_EACH_SORT:])])
def test_forgeries_fail(name, kind):
    tests = [f"assert f(1) == {SECRET!r}", f"assert f(2) == {SECRET!r}"]
    for form in (tests, f"def test_one():\n    assert {SECRET!r} == f(1)"):
        assert scored(FORGERIES[name], form, kind, timeout=5) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["leaves before the asserts", "leaves at once", "prints a verdict", "searches its memory"]
)
def test_forgeries_of_programs_fail(name, kind):
    code = FORGERIES[name].replace("def f(x):", "def f(x=1):") + "\ntry: print(f())\nexcept NameError: pass"
    assert scored(code, [{"input": "x", "output": SECRET}], kind, timeout=5) == 0.0


def test_the_secret_would_have_been_enough_and_would_have_been_found():
    assert scored(f"def f(x): return {SECRET!r}", [f"assert f(1) == {SECRET!r}"]) == 1.0
    assert scored(FORGERIES["searches its memory"], [f"assert f([{SECRET!r}]) == {SECRET!r}"]) == 1.0


PERSUADED = {
    "eq contains bool gt lt le ge instancecheck": "True",
    "sub rsub abs float": "0.5",
    "hash len index int": "1",
    "iter": "iter([self])",
    "getattr": "lambda *args: True",
}
YES_TO_ALL = "class Yes:\n" + "".join(
    f"    def __{name}__(self, *args): return {value}\n"
    for names, value in PERSUADED.items()
    for name in names.split()
)


@pytest.mark.parametrize(
    "test",
    [
        f"assert {SECRET!r} in f(1)",
        f"assert f(1) in [{SECRET!r}]",
        f"assert not f(1) != {SECRET!r}",
        f"assert f(1) is {SECRET!r}",
        f"assert {{f(1)}} == {{{SECRET!r}}}",
        f"assert [f(1)].count({SECRET!r})",
        f"assert {{{SECRET!r}: 1}}[f(1)]",
        f"assert isinstance(f(1), str) and f(1).endswith({SECRET!r})",
        f"import re\nassert re.fullmatch({SECRET!r}, f(1))",
        "assert abs(f(1) - 0.5) < 1e-6",
        "assert f(1) > 3",
        "assert sorted(f(1)) == ['feather', 'x']",
    ],
)
def test_an_object_that_says_yes_to_everything_persuades_no_test(test):
    assert scored(YES_TO_ALL + "def f(x): return Yes()", [test]) == 0.0


@needs_bwrap
def test_killing_everything_in_reach_changes_nothing():
    code = "import os, signal\nfor pid in (1, os.getppid(), -1):\n    try: os.kill(pid, 9)\n    except OSError: pass\ndef f(x): return 1"
    assert scored(code, ["assert f(1) == 2"], "bwrap") == 0.0
    assert scored(code, ["assert f(1) == 1"], "bwrap") == 1.0


@needs_bwrap
@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True: os.fork()",
        slow("x = []\nwhile True: x.append(b'y' * (1 << 26))"),
        "import os\nn = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
        slow("import threading\nwhile True: threading.Thread(target=input).start()"),
        slow("while True: print('x' * 1000)"),
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_bombs_cost_their_own_completion_only(bomb):
    reward = CodeReward(timeout=3, total_timeout=20, on_error="raise")
    completions = [fenced(ADD), fenced(f"{bomb}\n{ADD}"), fenced(ADD)]
    assert reward(completions=completions, tests=[["assert add(1, 2) == 3"]] * 3) == [1.0, 0.0, 1.0]
    programs = [fenced("print(3)"), fenced(f"{bomb}\nprint(3)")]
    assert reward(completions=programs, tests=[[{"input": "", "output": "3"}]] * 2) == [1.0, 0.0]


# Tests that cannot be run.


OF_NO_KNOWN_FORM = [
    None,
    [],
    "",
    "   ",
    3,
    "[not json",
    [{"input": "1"}],
    [{"input": 1, "output": 2}],
    ["assert f()", 3],
]
UNEVEN = ['{"inputs": [1]}', {"input": ["1"], "output": ["1", "2"]}, {"input": "1", "output": "1"}]
UNCALLABLE = [{"fn_name": name, "inputs": [args], "outputs": [1]} for name, args in (("not a name", [1]), ("f", 1))]
UNTESTABLE = [["assert f(1 == 1"], "x = 1", ["class Own: pass\nassert f(Own()) == 1"]]


@pytest.mark.parametrize("tests", OF_NO_KNOWN_FORM + UNEVEN + UNCALLABLE + UNTESTABLE)
def test_broken_tests_are_unscorable_and_counted(tests, caplog):
    metrics = {}
    reward = CodeReward(sandbox="none", name=f"code_{uuid.uuid4().hex}")
    completions = [fenced("def f(x): return 1")]
    assert reward(completions=completions, tests=[tests], log_metric=metrics.__setitem__) == [None]
    assert metrics == {f"rewards/{reward.__name__}/failed_frac": 1.0}
    assert "BrokenTests" in caplog.text


@pytest.mark.parametrize("setup", ["import no_such_module", "1 / 0", "raise SystemExit", "import os; os._exit(0)"])
def test_a_setup_that_fails_by_itself_is_unscorable(setup):
    assert graded([ADD], ["assert add(1, 1) == 2"], setup) == [None]


def test_whoever_wants_to_know_gets_the_error():
    with pytest.raises(RewardError, match="code_reward.*holds no tests of a known form"):
        scored(ADD, 3)


def test_a_sandbox_that_fails_in_training_is_no_zero():
    class Gone(Sandbox):
        def start(self, *args, **kwargs):
            raise SandboxError("no memory")

    metrics = {}
    reward = CodeReward(sandbox=Gone("none"), name="gone_reward")
    tests = [["assert add(1, 2) == 3"], [{"input": "", "output": ""}]]
    assert reward(completions=[fenced(ADD), "no code"], tests=tests, log_metric=metrics.__setitem__) == [None, 0.0]
    assert metrics == {"rewards/gone_reward/failed_frac": 0.5}


# Texts that look like tests: the code that is right, the code that is wrong.

LEETCODE = "\nclass Solution:\n    f = staticmethod(f)"
RIGHT = "def f(x):\n    if x < 0: raise ValueError('no')\n    return x" + LEETCODE
WRONG = "def f(x): return 'wrong'" + LEETCODE
UNIT_TEST = "class T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)"
HUMANEVAL_PLUS = """import math
def assertion(out, exp, atol):
    exact_match = out == exp
    if not exact_match and atol != 0:
        assert math.isclose(out, exp, rel_tol=1e-07, abs_tol=atol)
    else:
        assert exact_match
def check(candidate):
    inputs, results = [[1], [2]], [1, 2]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        # Entries of a list are read as a text is.
        (["def test_a():\n    assert f(1) == 1"], None),
        (json.dumps(["def test_a():\n    assert f(1) == 1"]), None),
        (["def check(c):\n    assert c(1) == 1"], "f"),
        # What a runner of tests would call is called; the rest of the text is no excuse.
        ("if __name__ == '__main__':\n    assert f(1) == 1", None),
        ("def main():\n    assert f(1) == 1\nif __name__ == '__main__':\n    main()", None),
        ("assert f is not None\ndef check(candidate):\n    assert candidate(1) == 1", "f"),
        ("def test_value(): return 1\ndef check(candidate):\n    assert candidate(1) == test_value()", "f"),
        ("def check(x, y):\n    assert f(x) == y\ndef test_a():\n    check(1, 1)", "f"),
        ("def test_case(x, y):\n    assert f(x) == y\ntest_case(1, 1)\ntest_case(2, 2)", None),
        ("def a():\n    assert f(1) == 1\ndef test_b():\n    assert f(2) == 2\nfor t in [a, test_b]: t()", None),
        ("def test_a():\n    assert f(1) == one()\ndef one(): return 1", None),
        ("def check(candidate):\n    assert candidate(1) == 1\ncheck(f)", None),
        # Checks of all kinds, and asserts that are swallowed.
        (HUMANEVAL_PLUS, "f"),
        ("def check(candidate):\n    assert candidate(1) == 1, 'x'\n    assert True, 'This prints'", "f"),
        ("if f(1) != 1:\n    raise AssertionError('x')", None),
        ("try:\n    f(-1)\n    assert False\nexcept ValueError: pass", None),
        ("try:\n    f(-1)\nexcept ValueError: pass\nelse: raise AssertionError", None),
        ("try:\n    assert f(1) == 1\nexcept AssertionError: print('failed')", None),
        ("try:\n    assert f(1) == 1\nexcept AssertionError:\n    raise AssertionError('again')", None),
        ("try:\n    assert f(1) == 2\nexcept AssertionError:\n    assert f(1) == 1", None),
        ("import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(1) == 1", None),
        ("for digit in str(f(4)).strip('wrong'):\n    assert digit == '4'", None),  # checks nothing of the wrong one
        ("def ref(x): return x\nfor i in range(4):\n    assert f(i) == ref(i)", None),
        # The completion as a module.
        ("from solution import f as g\ndef test_a():\n    assert g(1) == 1", None),
        ("from solution import *\ndef test_a():\n    assert f(1) == 1", None),
        ("import solution\ndef test_a():\n    assert solution.f(1) == 1", None),
        ("def test_a():\n    from solution import f\n    assert f(1) == 1", None),
        # Names of the tests' own inner scopes are nobody's.
        (["assert [f for f in [1]] == [1]\nassert f(1) == 1"], None),
        (["assert sorted([2, 1], key=lambda f: f) == [1, 2] and f(1) == 1"], None),
        ("def help(f): return f\nclass C: f = 1\nassert f(1) == help(1)", None),
        (["from collections import Counter\nassert Counter([f(1)]) == Counter([1])"], None),
        # LeetCode.
        ("def check(candidate):\n    assert candidate(x = 1) == 1", "Solution().f"),
        (["assert Solution().f(1) == 1"], None),
        (["assert Solution().f(1) == 1"], "f"),
    ],
)
def test_shapes_of_tests_that_tell_right_from_wrong(tests, entry_point):
    assert graded([RIGHT, WRONG], tests, entry_point=entry_point) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        # Nothing is asserted.
        (["f(1) == 1"], None),
        (["print(f(1) == 1)"], None),
        (["pass"], None),
        (["# comment"], None),
        (["assert f(1) == 1", "f(2) == 2"], None),
        (["assert (f(1) == 1, 'msg')"], None),
        (["assert lambda: f(1) == 1"], None),
        (["assert [f(1) == 1]"], None),
        (["assert f(1), 1"], None),
        (["assert 1 == 1"], "f"),
        ("for x in []:\n    assert f(x) == 1", None),
        ("def test_a():\n    return f(1) == 1", None),
        ("def check(c):\n    return c(1) == 1", "f"),
        # Tests that nobody here can run, alone or beside others.
        (["def check(c):\n    assert c(1) == 1"], None),
        (["import unittest\n" + UNIT_TEST], None),
        (f"import unittest\nassert f\n{UNIT_TEST}\nif __name__ == '__main__':\n    unittest.main()", None),
        ("assert f(0) is not None\nclass TestF:\n    def test_a(self):\n        assert f(1) == 1", None),
        ("assert f(0) is not None\ndef test_a(x, y):\n    assert f(x) == y", None),
        ("def test_a():\n    assert f(1) == 1\n    yield", None),
        ("async def test_a():\n    assert f(1) == 1", None),
        ("import no_such_module\nassert f(1) == 1", None),
        # Names that are not the completion's to define.
        ("def f(x): return x\nassert f(1) == 1", None),
        ("def f(x): return x\nassert f(1) == 1", "f"),
        (["assert np.allclose(f(1), 1)"], None),
        (["assert f(1) == pytest.approx(1)"], None),
        (["assert f(1) == approx(1)"], None),
        (["assert Counter([f(1)]) == Counter([1])"], None),
        (["assert f(1) == EXPECTED"], None),
        (["assert f(1) == other(1)"], "f"),
        # A helper that nobody defines: with it the completion would judge itself.
        (["assert same(f(1), 1)"], None),
        (["x = f(1)\nassert same(x, 1)"], None),
        ("expected = other(1)\nassert f(1) == expected", None),
        ("def test_a():\n    assert f(1) == E\ndef test_b():\n    assert other(1) == 1\nE = other(1)", None),
        (["from solution import f\nassert same(f(1), 1)"], None),
        (["from solution import *\nassert same(f(1), 1)"], None),
        (["import solution\nassert same(solution.f(1), 1)"], None),
        ("def check(candidate):\n    assert same(candidate(1), 1)", "f"),
    ],
)
def test_tests_that_check_nothing_or_belong_to_nobody_are_unscorable(tests, entry_point):
    forged = (
        "class Yes:\n    allclose = staticmethod(lambda *a: True)\n    approx = staticmethod(lambda x: 0)\n"
        "np = pytest = Yes\napprox = Counter = other = lambda x: 0\nEXPECTED = 0\ndef f(x): return 0\n"
        "def same(*args): return True"
    )
    assert graded([RIGHT, WRONG, forged], tests, entry_point=entry_point) == [None, None, None]


def test_the_helper_that_nobody_defines_is_named(caplog):
    assert graded([RIGHT] * 2, ["assert same(f(1), 1)"], name="helper_reward") == [None, None]
    assert caplog.text.count("the tests use f, same together, all undefined") == 1


@pytest.mark.parametrize(
    ("tests", "setup", "entry_point", "names"),
    [
        (["assert f(1) == 1", "assert g(1) == 2"], "", None, ["f", "g"]),
        ("def test_a():\n    assert f(1) == 1\ndef test_b():\n    assert g(1) == 2", "", None, ["f", "g"]),
        ("r = f(1)\nassert r == 1\nr = g(1)\nassert r == 2", "", None, ["f", "g"]),
        ("import math\nassert math.isclose(f(1), 1)\nassert math.isclose(g(1), 2)", "", None, ["f", "g"]),
        (["assert f(g(1)) == 1"], "", "f, g", ["f", "g"]),
        ("def check(one, other):\n    assert other(one(1)) == 1", "", "f, g", ["f", "g"]),
        (["same(1, 1)"], "def same(x, y): assert f(x) == y", None, ["f"]),
        (["assert same(f(1), 1)"], "def same(x, y): return x == y", None, ["f"]),
        # Names that others make are not asked for.
        (["assert abs(f(1)) == len([x for x in range(3)])"], "", None, ["f"]),
        (["import math as m\nassert m.isclose(f(1), 2)"], "", None, ["f"]),
        ("def help(a, *b, c=1, **d):\n    return f(a, b, c, d)\nassert help(1)", "", None, ["f"]),
        ("try:\n    f()\nexcept ValueError as error:\n    assert error", "", None, ["f"]),
        ("assert (lambda x: f(x))(1) and (y := 3) == y", "", None, ["f"]),
    ],
)
def test_several_names_are_asked_for_where_none_can_judge_another(tests, setup, entry_point, names):
    assert examiner.prepare(tests, setup, entry_point)[2] == names


def test_a_helper_that_the_setup_calls_and_nobody_defines_is_not_asked_for():
    with pytest.raises(ValueError, match="the tests use f, same together"):
        examiner.prepare(["compare(1, 1)"], "def compare(x, y): assert same(f(x), y)", None)


# Results that are no plain data.

POINT = "from dataclasses import dataclass\n@dataclass(order=True)\nclass Point:\n    x: object\n    y: int = 2\n"
NAMED = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\n"
COLOR = "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\n"
YES = "    def __eq__(self, other): return True\n    __lt__ = __add__ = __eq__\n    def __getattr__(self, name): return Point()\n"
KEYED = "class Keyed:\n    def __init__(self, x): self.x = x\n    def is_at(self, x): return self.x == x and self.zero\n    @property\n    def zero(self): return self.x != 0\n    def __eq__(self, other): return other.is_at(self.x)\n"
COMPLETION_NAMED = (
    "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    def twice(self): return 2 * self.x\n"
)
VECTOR = "class Vector:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return Vector(self.x + o.x)\n    def __eq__(self, o): return self.x == getattr(o, 'x', o)\n    def __repr__(self): return 'V'\n"


@pytest.mark.parametrize(
    ("setup", "tests", "codes"),
    [
        # A class that the tests know compares, whoever made the object.
        (
            POINT,
            ["assert f() == Point(1, 2)", "assert Point(1) == f() and [f()] == [Point(1)]", "assert isinstance(f(), Point) and f().x == 1 and f() < Point(3)", "assert repr(f()) == 'Point(x=1, y=2)' and f() == f()"],
            {"def f(): return Point(1)": 1.0, POINT + "def f(): return Point(1)": 1.0, "def f(): return Point(2)": 0.0, "def f(): return 1": 0.0, f"class Point:\n{YES}def f(): return Point()": 0.0, f"class Other:\n{YES}def f(): return Other()": 0.0},
        ),
        ("", [POINT + "assert f() == Point(Point(1))"], {POINT + "def f(): return Point(Point(1))": 1.0, POINT + "def f(): return Point(Point(2))": 0.0}),
        (POINT.replace("order", "frozen"), ["assert f() == {Point(1)}"], {"def f(): return {Point(1)}": 1.0, "def f(): return {Point(2)}": 0.0}),
        # Not even where the comparison asks the other object.
        (KEYED, ["assert Keyed(1) == f()"], {"def f(): return Keyed(1)": 1.0, "def f(): return Keyed(2)": 0.0, "class Keyed:\n    x = 1\n    def __init__(self, x): self.x = 2\n    def is_at(self, x): return True\n    def __getattribute__(self, n): return 0 if n == 'x' else object.__getattribute__(self, n)\ndef f(): return Keyed(3)": 0.0}),
        (COLOR, ["assert f(Color.BLUE) is Color.RED"], {"def f(c): return Color.RED if c is Color.BLUE else 0": 1.0, "def f(c): return Color.BLUE": 0.0, "def f(c): return 1": 0.0}),
        # Names of items travel.
        (NAMED, ["assert f(Point(1, 2)) == Point(2, 1)", "assert f(Point(1, 2)).y == 1"], {"def f(p): return Point(p.y, p.x)": 1.0, "def f(p): return p": 0.0, "def f(p): return (2, 1)": 0.0}),
        ("", ["p = f()\nassert p == (1,) and p.x == 1 and p.twice() == 2 and repr(p) == 'P(x=1)'"], {COMPLETION_NAMED + "def f(): return P(1)": 1.0, COMPLETION_NAMED + "def f(): return P(2)": 0.0}),
        # Dates and deques.
        ("import datetime as d", ["assert f(d.date(2020, 1, 1)) == d.date(2020, 1, 2)"], {"def f(x): return x + d.timedelta(days=1)": 1.0, "def f(x): return x": 0.0}),
        ("from collections import deque", ["x = deque([1], maxlen=2)\nassert f(x) == deque([1, 2]) == x"], {"def f(x):\n    x.append(2)\n    return x": 1.0, "def f(x): return x": 0.0}),
        # Nobody here can compare what was returned; another completion might return plain data.
        ("", ["assert Vector(1) + Vector(2) == Vector(3)"], {VECTOR: 0.0, f"class Point:\n{YES}class Vector(Point):\n    def __init__(self, x): pass": 0.0}),
        ("", ["assert Vector(1) == 1"], {VECTOR: 0.0}),
        ("", ["v = Vector(1)\nx = [v]\nv.items = x\nassert x[0] != 1"], {VECTOR: 0.0}),
        ("", ["assert f() == f()"], {"def f(): return object()": 0.0, "def f(): return 1": 1.0}),
        ("class Node: pass", ["assert f() == Node()"], {"def f(): return Node()": 0.0}),
        ("from pathlib import Path", ["assert f() == Path('x')"], {"def f(): return Path('x')": 0.0}),
        # What the tests can use of an object.
        ("", ["v = Vector(1)\nassert v != None and v.x == 1 and repr(v) == 'V' and isinstance(v, Vector)"], {VECTOR: 1.0}),
        # A completion has no way to make good tests unscorable.
        ("", ["assert f(1) + f(2) == 3"], {f"class Point:\n{YES}def f(x): return Point()": 0.0, "def f(x): return x": 1.0}),
    ],
)  # fmt: skip
def test_results_that_are_no_plain_data(setup, tests, codes):
    assert graded(codes, tests, setup) == list(codes.values())


@pytest.mark.parametrize("code", ["y = 1", "f = 3", "def f(x): return []", "def f(x): raise TypeError"])
def test_a_completion_cannot_have_its_tests_called_broken(code):
    tests = "try:\n    for one, other in zip(f(1), [1]):\n        assert one == other\nexcept Exception: pass"
    assert graded(["def f(x): return [1]", code], tests) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["x", "n", "gcd", "string", "copy", "select"])
def test_a_solution_may_be_called_as_a_local_or_a_module_is(name):
    tests = [f"assert [{name} for {name} in [1]] == [1] and {name}(1) == 1", f"assert (lambda {name}: {name}(1))({name}) == 1"]  # fmt: skip
    assert scored(f"def {name}(v): return v", tests) == 1.0
    assert scored(f"def {name}(v): return 0", tests) == 0.0


RETURNED = {
    "an object": "class A: pass\ndef f(x): return A()",
    "a generator": "def f(x): yield from [1, 2, 3]",
    "an iterator": "def f(x): return iter([1, 2, 3])",
    "a dictionary": "def f(x): return {1: 2}",
    "a number": "def f(x): return 1",
    "nothing": "def f(x): return None",
    "itself": "def f(x): return f",
    "a list in itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "a deep list": "def f(x):\n    a = []\n    for _ in range(10 ** 5): a = [a]\n    return a",
    "a huge list": "def f(x): return ['x' * 10 ** 6] * 40",
    "a hostile object": "class A:\n    def __getattribute__(self, name): raise SystemExit\n    __eq__ = __repr__ = __iter__ = __len__ = __hash__ = None\ndef f(x): return A()",
    "an end": "import os\ndef f(x): os._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(3)[:2] == [1, 2]",
        "assert f(3)[:2, ...] == [1, 2]",
        "assert f(3)[Own()] == [1, 2]",
        "x = f(3)\nx.append(Own())\nassert x[0] == 5",
        "x = f(3)\nx[0] = Own()\nassert x[1] == 7",
        "assert f(3)(Own()) == 1",
    ],
)
def test_return_values_of_a_completion_make_no_test_unscorable(tests):
    setup = "class Own: pass"
    rewards = dict(zip(RETURNED, graded(RETURNED.values(), [tests], setup, entry_point="f"), strict=True))
    assert set(rewards.values()) == {0.0}, rewards


@pytest.mark.parametrize(
    "text", ["x = '\ud800'", "x = '\0'", "(" * 10_000, "x = " + "-" * 100_000 + "1", "#" * (1 << 20), "\U0001f600" * (1 << 20)]
)  # fmt: skip
def test_no_text_of_code_makes_tests_unscorable(text):
    for tests in (["assert f(1) == 2"], [{"input": "", "output": "2"}]):
        assert graded([f"{text}\ndef f(x): return 1"], tests) == [0.0]


def test_a_slice_is_plain_data():
    code = "class Row:\n    def __getitem__(self, at): return [1, 2, 3][at]\ndef f(x): return Row()"
    assert graded([code], ["assert f(0)[:2] == [1, 2] and f(0)[::-1] == [3, 2, 1]", "assert f(0)[2] == 3"]) == [1.0]


def test_a_completion_that_ends_its_process_breaks_no_later_test():
    later = "try:\n    for item in x:\n        assert item == 1\nexcept NameError: pass"
    codes = ["def f(x): return [1]", "import os\ndef f(x): os._exit(0)"]
    assert graded(codes, ["x = f(1)\nassert x == [1]", later], entry_point="f", partial=True) == [1.0, 0.0]


# The form of the reward.


def test_it_is_a_reward_function_of_trl():
    from trl.trainer.utils import get_callable_name

    assert get_callable_name(code_reward) == "code_reward"
    check_columns(code_reward, ["prompt", "tests"], "code_reward")
    with pytest.raises(InputError, match="a column 'tests', which the function requires"):
        check_columns(code_reward, ["prompt", "test_list"], "code_reward")
    check_columns(CodeReward("a", "b", "c"), ["prompt", "a", "b", "c"], "code")


def test_no_sandbox_starts_before_the_first_call(monkeypatch, tmp_path):
    (tmp_path / "bwrap").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def popen(*args, **kwargs):
        raise RuntimeError("started a process")

    monkeypatch.setattr(subprocess, "Popen", popen)
    reward = pickle.loads(pickle.dumps(CodeReward(partial=True, sandbox=Sandbox(memory_mb=512))))
    assert (reward.partial, reward.sandbox.memory_mb, reward.__name__) == (True, 512, "code_reward")
    with pytest.raises(RuntimeError, match="started a process"):
        CodeReward(sandbox=Sandbox(memory_mb=513))(completions=[fenced(ADD)], tests=[["assert add(1, 2) == 3"]])


def test_messages_missing_code_and_order():
    reward = CodeReward(sandbox="none", workers=3, timeout=20, total_timeout=60)
    completions = [
        [{"role": "assistant", "content": fenced(ADD)}],
        "I do not know.",
        fenced("def add(a, b): return 0"),
        ADD,
        "```python\ndef add(a, b): return a + b",  # cut off
        [{"role": "assistant", "content": None}],
    ]
    tests = [["assert add(1, 2) == 3"]] * 6
    assert reward(completions=completions, tests=tests) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    lenient = CodeReward(sandbox="none", require_fence=False)
    assert lenient(completions=completions[:4], tests=tests[:4]) == [1.0, 0.0, 0.0, 1.0]
    assert reward(completions=[], tests=[]) == []


@pytest.mark.slow
def test_completions_are_run_at_the_same_time():
    code = "import time\ndef f(x):\n    time.sleep(4)\n    return x"
    reward = CodeReward(sandbox="none", workers=8, timeout=60, total_timeout=60)
    started = time.monotonic()
    assert reward(completions=[fenced(code)] * 8, tests=[["assert f(1) == 1"]] * 8) == [1.0] * 8
    assert time.monotonic() - started < 20  # one after the other: 32


# Pure logic.


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nx\n```", "x\n"),
        ("```py\nx\n```\n```Python3\ny\n```", "y\n"),
        ("```python\nx\n```\n```bash\nls\n```", "x\n"),
        ("```python\nx\n```\n```python\ny", "x\n"),
        ("  ```python title=a\n  x\n  ```  ", "  x\n"),
        ("```python\n```", ""),
        ("```python\ns = '''\n```python\n'''\n```", "s = '''\n```python\n'''\n"),
        ("```\nx\n```", None),
        ("```python x = 1```", None),
        ("", None),
    ],
)
def test_the_last_whole_python_block_counts(completion, code):
    assert fenced_code(completion) == code


@given(st.text(alphabet="`python\n x'\r\u2028", max_size=200))
def test_any_text_has_a_block_or_none(text):
    code = fenced_code(text)
    assert code is None or code in text


def test_many_fences_take_no_more_time_than_their_number():
    started = time.monotonic()
    assert fenced_code("```python\n" * 500_000) is None
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        ("1\n2\n", "1\n2", None, True),
        ("1 \n2\t\n\n\n", "1\n2", None, True),
        ("\n1", "1", None, False),
        (" 1", "1", None, False),
        ("1 2", "1\n2", 1e-6, False),
        ("1  2", "1 2", 1e-6, True),
        ("0.1000001 x", "0.1 x", 1e-6, True),
        ("0.1001", "0.1", 1e-6, False),
        ("1e400", "1", 1e-6, False),
        ("nan", "1", 1e-6, False),
        ("inf", "1e400", 0.5, False),
        ("1_0", "10", 1e-6, False),
        ("1", "1 2", 1e-6, False),
        ("", "", None, True),
        ("\r\n1\r\n", "\n1\n", None, True),
        # Whole numbers must be equal, however they are written; two floats need not.
        ("987654322", "987654321", 1e-6, False),
        ("987654322.0", "987654321", 1e-6, False),
        ("987654321", "987654322.0", 1e-6, False),
        ("987654321.0", "987654321", 1e-6, True),
        ("1e9", "1000000000", 1e-6, True),
        ("1e9", "1000000001", 1e-6, False),
        ("+7", "7", 1e-6, True),
        ("007", "7", 1e-6, True),
        ("-0.0", "0", 1e-6, True),
        ("-0", "0", 1e-6, True),
        ("2.9999999999", "3", 1e-6, True),
        ("123456789.123", "123456789.124", 1e-6, True),
        ("1" * 5000 + "2", "1" * 5000 + "1", 1e-6, False),
        ("0" + "1" * 5000, "1" * 5000, 1e-6, True),
        ("1" * 5000, "1.5", 1e-6, False),
        ("1e400", "1e500", 1e-6, False),
        ("nan", "nan", 1e-6, True),
        ("True", "1", 1e-6, False),
        # In lists, too.
        ("[0.3333333, 2]", "[0.33333334,2]", 1e-6, True),
        ("[987654322, 0.5]", "[987654321, 0.5]", 1e-6, False),
        ("(1.0000001; 2)", "(1; 2)", 1e-6, True),
        ("[[1], 2]", "[1, [2]]", 1e-6, False),
    ],
)
def test_same_output_ignores_white_space_and_takes_a_tolerance(output, expected, tolerance, same):
    assert same_output(output, expected, tolerance) is same


NAN = float("nan")


@pytest.mark.parametrize(
    ("result", "due", "tolerance", "reward"),
    [
        ("987654322", 987654321, 1e-6, 0.0),
        ("987654322.0", 987654321, 1e-6, 0.0),
        ("987654321.0", 987654321, 1e-6, 1.0),
        ("10**30 + 1", 10**30, 1e-6, 0.0),
        ("10**400", 0.5, 1e-6, 0.0),
        ("0.3333333", 1 / 3, 1e-6, 1.0),
        ("0.3333333", 1 / 3, None, 0.0),
        ("0.3333333", [1 / 3], 1e-6, 1.0),
        ("[[0.1 + 0.2, 'a'], (2, None)]", [[0.3, "a"], [2, None]], 1e-6, 1.0),
        ("[[0.1 + 0.2, 'a'], (2, None)]", [[0.3, "a"], [2, None]], None, 0.0),
        ("[[0.3, 'b'], [2, None]]", [[0.3, "a"], [2, None]], 1e-6, 0.0),
        ("[[0.3, 'a'], [3, None]]", [[0.3, "a"], [2, None]], 1e-6, 0.0),
        ("{'a': [0.1 + 0.2]}", {"a": [0.3]}, 1e-6, 1.0),
        ("{'a': [0.4]}", {"a": [0.3]}, 1e-6, 0.0),
        ("{'b': [0.3]}", {"a": [0.3]}, 1e-6, 0.0),
        ("[1.0]", [1.0, 2.0], 1e-6, 0.0),
        ("__import__('fractions').Fraction(1, 3)", 1 / 3, 1e-6, 1.0),
        ("__import__('decimal').Decimal('0.3333333')", 1 / 3, 1e-6, 1.0),
        ("True", 0.9999999, 1e-6, 0.0),
        ("True", True, 1e-6, 1.0),
        ("-0.0", 0, 1e-6, 1.0),
        ("float('nan')", NAN, 1e-6, 1.0),
        ("float('nan')", 1, 1e-6, 0.0),
        ("1", NAN, 1e-6, 0.0),
        ("float('inf')", math.inf, 1e-6, 1.0),
        ("1e308", math.inf, 1e-6, 0.0),
        ("'0.3333333'", 1 / 3, 1e-6, 0.0),
        ("object()", 1.0, 1e-6, 0.0),
        ("type('E', (), {'__eq__': lambda a, b: True, '__float__': lambda a: 1.0})()", 1.0, 1e-6, 0.0),
    ],
)
def test_the_tolerance_of_returned_values(result, due, tolerance, reward):
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [due]}
    assert scored(f"def f(): return {result}", tests, tolerance=tolerance) == reward


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.datetimes(timezones=st.just(UTC)) | st.datetimes() | st.dates() | st.times() | st.timedeltas()
    | st.complex_numbers(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False) | st.binary().map(bytearray)
    | st.builds(range, st.integers(-9, 9), st.integers(), st.integers(1, 9)),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.integers() | st.text(), inner, max_size=4)
    | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=9)) | st.frozensets(st.text() | st.integers(), max_size=4) | st.sets(st.text() | st.integers(), max_size=4),
    max_leaves=12,
)  # fmt: skip


def across(value):
    stream = io.BytesIO()
    wire.send(stream, {"value": wire.encode(value, refuse)})
    stream.seek(0)
    return wire.decode(wire.receive(stream)["value"], refuse)


def refuse(*args):
    raise ValueError("not plain data")


@given(plain)
def test_plain_data_crosses_unchanged(value):
    assert repr(across(value)) == repr(value) or across(value) == value
    assert type(across(value)) is type(value)


def test_special_values_cross():
    assert math.isnan(across(float("nan")))
    assert across("\ud800") == "\ud800"
    assert across(10**6000) == 10**6000  # longer than Python prints
    assert str(across(-0.0)) == "-0.0"


def test_subclasses_of_plain_data_arrive_as_plain_data():
    numpy = pytest.importorskip("numpy")
    Point = namedtuple("Point", "x y")
    values = [OrderedDict(a=1), Counter("aab"), IntEnum("E", "A B").B, numpy.float32(0.5), numpy.int64(3)]
    assert [(type(across(v)), across(v)) for v in values] == [
        (dict, {"a": 1}),
        (dict, {"a": 2, "b": 1}),
        (int, 2),
        (float, 0.5),
        (int, 3),
    ]
    for other in (Point(1, 2), object(), numpy.zeros(2), len):
        with pytest.raises(ValueError, match="not plain data"):
            across(other)
    assert (across(Fraction(1, 3)), across(Decimal("0.10"))) == (Fraction(1, 3), Decimal("0.1"))


@pytest.mark.parametrize("line", [b"", b"{", b"[]\n", b"3\n", b"{}", b"[" * 10**5 + b"\n", b"\xff\n"])
def test_an_unreadable_line_ends_the_stream(line):
    with pytest.raises(EOFError):
        wire.receive(io.BytesIO(line))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["MyError", "ValueError", "Exception"], ValueError),
        (["UnicodeDecodeError", "ValueError", "Exception"], ValueError),
        (["SystemExit", "BaseException"], RuntimeError),
        (["print", "eval", "object"], RuntimeError),
        ([3, None], RuntimeError),
    ],
)
def test_exceptions_arrive_as_the_nearest_built_in_one(names, kind):
    assert type(wire.exception_of({"raised": names, "text": "x"})) is kind


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["input", "output", "inputs", "outputs", "fn_name", "x"]), inner, max_size=4
            )
        ),
        max_leaves=10,
    )
)
def test_any_column_is_tests_or_none(column):
    for form in (column, json.dumps(column)):
        assert isinstance(parse_tests(form), (FunctionTests, ProgramTests, type(None)))


def test_expected_values_of_calls_are_never_names():
    tests = parse_tests('{"fn_name": "f", "inputs": [[NaN]], "outputs": [Infinity]}')
    assert isinstance(tests, FunctionTests)
    _, _, names = examiner.prepare(tests.tests, "", "f")
    assert set(names) == {"f"}
    assert scored("nan = inf = Infinity = 1\ndef f(x): return 1", {"fn_name": "f", "inputs": [[1]], "outputs": [math.inf]}) == 0.0  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("assert f()\nassert f()", 2),
        ("x = f()\nassert x\ny = 1", 1),
        ("def check(candidate):\n    assert candidate()", 1),
        ("def check(candidate):\n    assert candidate()\ncheck(f)", 1),
        ("def test_a():\n    assert f()\ndef test_b():\n    assert f()", 2),
        ("def help():\n    assert f()\nif True:\n    assert f()", 1),
    ],
)
def test_how_a_text_is_counted_as_tests(text, count):
    assert len(examiner.prepare(text, "", "f")[1]) == count
