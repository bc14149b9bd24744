"""From a completion to its code, from a dataset's column to tests, and what counts as the same output.

Test sets of this field come in three forms, all accepted: assert statements (MBPP: a list; HumanEval: one source text
with `check(candidate)`; pytest functions), pairs of input and output (APPS, CodeContests, TACO), and calls with
arguments and result (`fn_name`, as in APPS). Where a set stores them as JSON text, that is read.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trl_drgrpo.rewards.functions.code.test_forms import is_near

_PYTHON_LABELS = ("python", "py", "python3")
# ASCII only: Python would read digits of other scripts, which no expected output has.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_WORD = re.compile(r"[\[\](){},;:]|[^\s\[\](){},;:]+")  # a list's numbers are words, its brackets too
# The values go in as JSON text: `nan` and `inf` written as Python would be names, and those are the completion's.
_ONE_CALL = """
import json as _json
_args, _expected = _json.loads({values!r})
_result = {name}(*_args)
assert __same__(_result, _expected, {tolerance!r}) or __same__([_result], _expected, {tolerance!r})
"""


@dataclass(frozen=True)
class FunctionTests:
    """Python tests: a source text, or a list of them, one test each."""

    tests: str | list[str]
    setup: str = ""
    entry_point: str | None = None


@dataclass(frozen=True)
class ProgramTests:
    """Pairs of standard input and expected standard output."""

    cases: list[tuple[str, str]]
    tolerance: float | None = None


def fenced_code(completion: str) -> str | None:
    """
    Return the last complete block of Markdown fenced as `python`, `py` or `python3`, in any case; `None` without one.
    A block cut off by the length limit is not complete.

    Example:

    ```python
    >>> fenced_code("First:\\n~~~\\n```python\\nx = 1\\n```\\nBetter:\\n```py\\nx = 2\\n```\\n")
    'x = 2\\n'

    ```
    """
    code = None
    block = None
    label = ""
    # Line by line, in one pass: a pattern over the whole text would be quadratic in the number of fences.
    for line in completion.splitlines(keepends=True):
        text = line.strip()
        if block is None:
            if text.startswith("```"):
                block = []
                label = text.lstrip("`").strip().lower().split(" ")[0]  # "```python title=x" has a label, too
        elif text.startswith("```") and not text.strip("`"):  # a fence with a label, inside a block, is part of it
            if label in _PYTHON_LABELS:
                code = "".join(block)
            block = None
        else:
            block.append(line)
    return code


def parse_tests(
    tests: object, setup: Any = None, entry_point: Any = None, tolerance: float | None = None
) -> FunctionTests | ProgramTests | None:
    """The tests of one row.

    Args:
        tests: Source text; a list of source texts; a list of `{"input": ..., "output": ...}`; `{"input": [...],
            "output": [...]}` (also `inputs`, `outputs`), with `fn_name` for calls instead of programs; or any of these
            as JSON text.
        setup (`str`, *optional*): Source that tests and code need.
        entry_point (`str`, *optional*): Name of the function under test.
        tolerance (`float`, *optional*): For programs and calls, see [`same_output`].

    Returns:
        [`FunctionTests`], [`ProgramTests`], or `None` if it is none of these, or empty.
    """
    for option in (setup, entry_point):
        if option is not None and not isinstance(option, str):
            return None
    # No source text of tests begins like this, but datasets without nested columns store lists as JSON text.
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            return None
    # APPS has lists of inputs and outputs, HumanEval one text, MBPP a list of texts, other sets a list of pairs.
    if isinstance(tests, Mapping):
        return _parallel(tests, setup, tolerance)
    if isinstance(tests, str):
        return FunctionTests(tests, setup or "", entry_point) if tests.strip() else None
    if not isinstance(tests, Sequence) or not tests:
        return None
    if all(isinstance(test, str) and test.strip() for test in tests):
        return FunctionTests(list(tests), setup or "", entry_point)
    if all(isinstance(test, Mapping) for test in tests):
        pairs = [(_either(test, "input"), _either(test, "output")) for test in tests]
        return _programs(pairs, tolerance)
    return None


def same_output(output: str, expected: str, tolerance: float | None = None) -> bool:
    """
    Compare a program's output with the expected one: equal lines, without white space at their ends and at the end.

    With a `tolerance`, relative and absolute, numbers are compared as such, and lines by their words. Whole
    numbers, of which one is written without a point and an exponent, must be equal.

    Example:

    ```python
    >>> same_output("1  \\n2\\n\\n", "1\\n2")
    True
    >>> same_output("0.3333", "0.333333"), same_output("0.3333", "0.333333", tolerance=1e-4)
    (False, True)

    ```
    """
    lines = list(map(str.rstrip, output.rstrip().split("\n")))
    expected_lines = list(map(str.rstrip, expected.rstrip().split("\n")))
    if lines == expected_lines:
        return True
    if tolerance is None or len(lines) != len(expected_lines):
        return False
    for line, expected_line in zip(lines, expected_lines, strict=True):
        words = _WORD.findall(line)
        expected_words = _WORD.findall(expected_line)
        if len(words) != len(expected_words):
            return False
        for word, expected_word in zip(words, expected_words, strict=True):
            if word != expected_word and not _close(word, expected_word, tolerance):
                return False
    return True


def _close(word: str, expected_word: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected_word)):
        return False
    value = _number(word)
    expected = _number(expected_word)
    # `1e999` is infinite as a float, and so is every other number that is too large.
    if math.inf in (abs(value), abs(expected)):
        return False
    return is_near(value, expected, tolerance)


def _number(word: str) -> int | float:
    if _INTEGER.fullmatch(word):
        return int(Decimal(word))  # a decimal may have more digits than Python lets an integer's text have
    return float(word)


def _parallel(tests: Mapping[str, Any], setup: str | None, tolerance: float | None):
    inputs = _either(tests, "input")
    outputs = _either(tests, "output")
    name = tests.get("fn_name")
    for column in (inputs, outputs):
        if not isinstance(column, Sequence) or isinstance(column, str):
            return None
    if len(inputs) != len(outputs) or not inputs:
        return None
    if name is None:
        return _programs(list(zip(inputs, outputs, strict=True)), tolerance)
    # The name becomes source text, so it must be no more than a name.
    if not isinstance(name, str) or not name.isidentifier():
        return None
    if not all(isinstance(args, list) for args in inputs):
        return None
    calls = []
    for args, expected in zip(inputs, outputs, strict=True):
        values = json.dumps([args, expected])
        calls.append(_ONE_CALL.format(name=name, values=values, tolerance=tolerance))
    return FunctionTests(calls, setup or "", name)


def _programs(pairs: Sequence[tuple[Any, Any]], tolerance: float | None) -> ProgramTests | None:
    cases = []
    for case in pairs:  # one that is no text makes the row unscorable, not the case
        stdin, stdout = map(_text, case)
        if stdin is None or stdout is None:
            return None
        cases.append((stdin, stdout))
    return ProgramTests(cases, tolerance)


def _text(value: object) -> str | None:
    """Return an input or output as one text; some sets store a list of lines. `None` for anything else."""
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def _either(row: Mapping[str, Any], name: str) -> Any:
    return row.get(name, row.get(name + "s"))  # `input` or `inputs`
