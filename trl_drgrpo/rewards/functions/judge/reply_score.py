"""Reading a judge's reply: the last score in it, by a pattern or a JSON key, within its range.

The last one, because a judge may quote the text it grades, and that text may say `Score: 10`.
"""

import importlib
import json
import math
import re
from typing import Any

from trl_drgrpo.common.errors import InputError

_SCORE_PATTERN = r"(?i)\bscore\W{0,5}\s*[:=]\s*\W{0,3}?(?P<score>[-+]?\d+(?:\.\d+)?)"


class ScoreReader:
    r"""The score in a reply: found by a pattern or a key, a number, within its range.

    Args:
        pattern (`str` or `None`): Pattern of the `regex` library; `None`: `Score: <number>`.
        key (`str` or `None`): Instead, the key of a JSON object in the reply.
        score_range (`tuple[float, float]`): Lowest and highest score.
        normalize (`bool`): Map the range to 0..1.

    Raises:
        [`InputError`]: Both a pattern and a key, a pattern that does not compile or has no group, a
            range that is none.

    Example:

    ```python
    >>> read = ScoreReader(None, None, (0, 10), normalize=True)
    >>> read("It says 'Score: 10', which is beside the point.\nScore: 4")
    0.4

    ```
    """

    def __init__(self, pattern: str | None, key: str | None, score_range: Any, normalize: bool):
        if pattern is not None and key is not None:
            raise InputError("score_key", "score_key and score_pattern", "only one of them", "Remove one.")
        regex = importlib.import_module("regex")
        try:
            self.pattern = regex.compile(pattern or _SCORE_PATTERN)
        except (regex.error, TypeError) as error:
            remedy = "Use the syntax of the regex library."
            raise InputError("score_pattern", f"{pattern!r} ({error})", "a pattern", remedy) from error
        if not self.pattern.groups:
            raise InputError(
                "score_pattern", repr(pattern), "a pattern with a group for the score", "Add parentheses."
            )
        self.key, self.normalize = key, normalize
        self.low, self.high = number_pair("score_range", score_range)
        if not self.low < self.high:
            raise InputError("score_range", repr(score_range), "the lower end first", "Swap them.")

    def __call__(self, reply: str) -> float:
        """Raises `ValueError` naming the problem of the reply."""
        found = self._by_pattern(reply) if self.key is None else self._by_key(reply)
        if found is None or isinstance(found, bool):
            raise ValueError(f"no score in the reply {_short(reply)}")
        try:
            score = float(found)
        except (OverflowError, TypeError, ValueError):
            raise ValueError(f"no number but {_short(found)} as the score") from None
        if not self.low <= score <= self.high:
            raise ValueError(f"a score of {score:g}, out of {self.low:g}..{self.high:g}")
        return (score - self.low) / (self.high - self.low) if self.normalize else score

    def _by_pattern(self, reply: str) -> str | None:
        try:
            matches = list(self.pattern.finditer(reply, timeout=2.0))
        except TimeoutError:
            raise ValueError("a reply on which score_pattern takes more than 2 s") from None
        if not matches:
            return None
        return matches[-1]["score" if "score" in self.pattern.groupindex else 1]

    def _by_key(self, reply: str) -> Any:
        """From the reply as a whole, else from the last object in it that has the key."""
        starts = [0, *[match.start() for match in re.finditer(r"\{", reply)][:-101:-1]]
        for start in starts:
            try:
                value, _ = json.JSONDecoder().raw_decode(reply, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and self.key in value:
                return value[self.key]
        return None


def number_pair(field: str, value: Any) -> tuple[float, float]:
    """A setting that is two finite numbers, or an `InputError` about `field`."""
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not is_pair or not all(isinstance(each, (int, float)) and math.isfinite(each) for each in value):
        raise InputError(field, repr(value), "two finite numbers", "For example [0, 10].")
    return value[0], value[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:57]}...{text[-57:]}"
