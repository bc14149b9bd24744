"""Parses `step_separator` and explains parse errors.

| spec | a step ends |
|---|---|
| `"\\n\\n"`, `["\\n\\n", "###"]` | after a separator |
| `"re:\\n(?=Step \\d)"`, `re.compile(...)` | after a match |
| `"tokens:64"`, `64` | after every 64 tokens of the model |
| `"turn"` | when the model speaks again after a tool |
| `f(text) -> list[int]` | at the exclusive character offsets that `f` returns |

A single lower-case word, or one before a colon, is read as the name of a rule so that a misspelled one cannot pass for
a separator that never occurs; in a list every string is a separator.
"""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.process_rewards.steps.segmenter import StepSegmenter
from trl_drgrpo.process_rewards.steps.separators import Interval, Offsets, Regex, Separators, Turns

StepSpec: TypeAlias = (
    str | int | Sequence[str] | re.Pattern[str] | Callable[[str], Sequence[int]] | StepSegmenter
)  # what a configuration, or Python code, may give
RULES = ("re", "tokens", "turn")


def step_segmenter(spec: StepSpec, field: str = "step_separator") -> StepSegmenter:
    """Build what cuts completions into steps.

    Args:
        spec (`str`, `int`, sequence of `str`, `re.Pattern`, callable or [`StepSegmenter`]):
            - a separator, or several of which the first to be complete ends the step. `"\\n"` also matches
              `"\\r\\n"`. A separator of escapes alone (a backslash and an n, as a shell passes them on) means the
              line breaks and tabs it spells;
            - `"re:<pattern>"` or a compiled pattern, used as it is;
            - `"tokens:<n>"` or `n`: a fixed number of the model's tokens;
            - `"turn"`: one environment turn, the model's tokens and the tool results that follow;
            - a function from the decoded completion (special tokens included) to the exclusive ends of its steps, in
              characters, strictly ascending;
            - a [`StepSegmenter`], which is returned.
        field (`str`, *optional*, defaults to `"step_separator"`): Name of the spec in error messages.

    Returns:
        [`StepSegmenter`].

    Raises:
        `InputError`: An empty separator, an invalid regex or one that matches the empty string, an interval below 1,
            or something that is none of the above.

    Example:

    ```python
    >>> step_segmenter(["\\n\\n", "###"])
    StepSegmenter(['\\n\\n', '###'])
    >>> step_segmenter("token:64")
    Traceback (most recent call last):
    trl_drgrpo.common.errors.InputError: step_separator: got 'token:64'; expected a separator, ... Did you mean ...

    ```
    """
    if isinstance(spec, StepSegmenter):
        return spec
    name = repr(spec)
    if isinstance(spec, str):
        rule = _from_string(spec, field)
    elif isinstance(spec, int) and not isinstance(spec, bool):
        rule = _interval(spec, field)
    elif isinstance(spec, re.Pattern):
        rule = _regex(spec, field)
    elif callable(spec):
        rule, name = Offsets(spec, field), getattr(spec, "__name__", name)
    elif isinstance(spec, list | tuple):
        rule = _separators(spec, field)
    else:
        raise InputError(field, name, "a string, a list of strings, a regex, an integer or a function", _FORMS)
    return StepSegmenter(rule, name)


def configured_segmenter(separators: Sequence[str]) -> StepSegmenter:
    """The segmenter of a configuration's list, where a list of one is that one: `["turn"]` is the rule.

    Args:
        separators (sequence of `str`): As in `DrGRPOConfig.step_separator`.
    """
    return step_segmenter(separators[0] if len(separators) == 1 else separators)


_FORMS = "Examples: '\\n\\n', ['\\n\\n', '###'], 're:\\n+', 'tokens:64', 'turn'."


def _from_string(spec: str, field: str) -> Separators | Regex | Interval | Turns:
    name, colon, value = spec.partition(":")
    if name == "re" and colon:
        return _regex(value, field)
    if name == "tokens" and colon:
        return _interval(value, field)
    if spec == "turn":
        return Turns()
    if re.fullmatch("[a-z_]+", name) and (value or not colon or name in RULES):
        hint = did_you_mean(name, RULES, "", form="{!r}")
        remedy = f"{hint} To use it as a separator, put it in a list: [{spec!r}].".lstrip()
        raise InputError(field, repr(spec), "a separator, 're:<pattern>', 'tokens:<n>' or 'turn'", remedy)
    return _separators([spec], field)


def _separators(separators: Sequence[str], field: str) -> Separators:
    if not separators:
        raise InputError(field, "an empty list", "at least one separator", _FORMS)
    for separator in separators:
        if not isinstance(separator, str):
            raise InputError(field, f"{separator!r} in a list", "strings", _FORMS)
        if separator == "":
            raise InputError(field, "an empty separator", "at least one character", _FORMS)
        if separator.startswith("re:"):
            remedy = "Use one regex: 're:first|second'."
            raise InputError(field, f"{separator!r} in a list", "plain separators", remedy)
    # One of escapes alone, as a shell or a quoted YAML string passes it on, means the characters that it spells.
    escaped = re.compile(r"(\\[nrt])+")
    return Separators(
        [each.encode().decode("unicode_escape") if escaped.fullmatch(each) else each for each in separators]
    )


def _regex(pattern: str | re.Pattern[str], field: str) -> Regex:
    got = pattern if isinstance(pattern, str) else pattern.pattern
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        remedy = "See Python's `re` module."
        raise InputError(field, f"the regex {got!r} ({error})", "a valid regular expression", remedy) from error
    if not isinstance(compiled.pattern, str):
        raise InputError(field, f"a regex of bytes, {got!r}", "a regex of text", "Leave out the b prefix.")
    if compiled.search(""):
        got = f"the regex {got!r}, which matches the empty string"
        remedy = "It would end a step after every character: use + in place of *, for example."
        raise InputError(field, got, "a regex that needs at least one character", remedy)
    return Regex(compiled)


def _interval(size: str | int, field: str) -> Interval:
    number = int(size) if re.fullmatch(r"\s*[+-]?\d+\s*", str(size)) else 0
    if number < 1:
        got, remedy = f"an interval of {size!r} tokens", "For example 'tokens:64'."
        raise InputError(field, got, "an integer of at least 1", remedy)
    return Interval(number)
