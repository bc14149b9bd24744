"""Rewards for the form of a completion: R1's tags, or a pattern of one's own.

Both are 1 or 0, and the first does not look at whether the answer is correct: combine it with a reward that does
(`gated(accuracy, gate=format_reward)`).

Completions are written by a model under optimization, so the tags are searched in linear time, and a user's pattern
runs under the `regex` library's own time-out.
"""

import importlib
import re
from collections.abc import Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import positive, refuse_outside
from trl_drgrpo.rewards.contract import OnError, check_flag
from trl_drgrpo.rewards.sample import SampleReward
from trl_drgrpo.rewards.text import completion_text

# Where a tokenizer with a response template puts what stood between the thinking tags (TRL parses such completions).
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class FormatReward(SampleReward):
    """1 for `<think>...</think> <answer>...</answer>`: in this order, each tag exactly once, nothing around them.

    Some chat templates open `<think>` themselves, so that the completion starts inside; others have the trainer put
    the reasoning into a field of the message. Both are recognized: TRL's `think_format_reward` scores them 0.

    Args:
        think_tag (`str`, *optional*, defaults to `"think"`): Name of the first pair of tags.
        answer_tag (`str` or `None`, *optional*, defaults to `"answer"`): Name of the second pair; `None`: the answer
            is whatever follows the first pair.
        think_opened (`"auto"`, `True` or `False`, *optional*, defaults to `"auto"`): Whether the prompt ends in the
            opening tag. `"auto"` reads it off a plain-text prompt; for messages, whose template is not seen here, a
            completion without the opening tag counts as begun inside. `False` demands the tag of the completion.
        allow_empty (`bool`, *optional*, defaults to `False`): Whether a pair may hold nothing but blanks.
        name (`str`, *optional*, defaults to `"format_reward"`): Name in logs.

    Raises:
        [`InputError`]: A tag that is no name, or an unknown `think_opened`.

    Source: DeepSeek-R1 (arXiv 2501.12948), table 1.

    Example:

    ```python
    >>> format_reward(completions=["<think>2+2</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]

    ```
    """

    def __init__(
        self,
        think_tag: str = "think",
        answer_tag: str | None = "answer",
        think_opened: bool | str = "auto",
        allow_empty: bool = False,
        name: str = "format_reward",
    ):
        super().__init__(name, columns=("prompts",))
        for field, tag in (("think_tag", think_tag), ("answer_tag", answer_tag)):
            if tag is not None and not re.fullmatch(r"[A-Za-z][\w-]*", str(tag)):
                raise InputError(field, repr(tag), "the name of a tag", "Write it without angle brackets.")
        if think_opened not in ("auto", True, False):
            expected = "'auto', True or False"
            raise InputError("think_opened", repr(think_opened), expected, "'auto' fits most templates.")
        check_flag("allow_empty", allow_empty)
        self.think_tag, self.answer_tag = think_tag, answer_tag
        self.think_opened, self.allow_empty = think_opened, allow_empty

    def __call__(self, completions: Sequence[Any], log_metric: Any = None, **kwargs: Any) -> list[float | None]:
        """Rewards of `B` completions; without `prompts` they count as conversational."""
        texts = [self._with_reasoning(completion) for completion in completions]
        prompts = kwargs.pop("prompts", None) or [None] * len(texts)
        return super().__call__(texts, log_metric, prompts=prompts, **kwargs)

    def score(self, completion: str, **columns: Any) -> float:
        """1.0 or 0.0; `prompts`: the prompt of this one completion."""
        opening = f"<{self.think_tag}>"
        text = completion.strip()
        if self._begun_inside(text, columns.get("prompts"), opening):
            text = opening + text
        held = _between(text, self.think_tag)
        if held is None or not text.startswith(opening):
            return 0.0
        thought, answer = held
        if self.answer_tag is not None:
            answer = answer.strip()
            held = _between(answer, self.answer_tag)
            if held is None or held[1] or not answer.startswith(f"<{self.answer_tag}>"):
                return 0.0
            # The pair inside the thoughts would be its second.
            if any(f"<{slash}{self.answer_tag}>" in thought for slash in ("", "/")):
                return 0.0
            answer = held[0]
        return float(self.allow_empty or bool(thought.strip() and answer.strip()))

    def _begun_inside(self, text: str, prompt: Any, opening: str) -> bool:
        if self.think_opened != "auto":
            return bool(self.think_opened)
        if isinstance(prompt, str):
            return prompt.rstrip().endswith(opening)
        return opening not in text

    def _with_reasoning(self, completion: Any) -> str:
        """The text, with the reasoning back between its tags where the trainer has parsed it out."""
        text = completion_text(completion)
        if isinstance(completion, str):
            return text
        own = [message for message in completion if message.get("role") == "assistant"] or list(completion)
        reasoning = next((own[-1][key] for key in _REASONING_KEYS if own and own[-1].get(key)), None)
        return text if reasoning is None else f"<{self.think_tag}>{reasoning}</{self.think_tag}>{text}"


def _between(text: str, tag: str) -> tuple[str, str] | None:
    """The content of a pair of tags and the text behind it; `None` unless each occurs once, in order."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    begin, end = text.find(opening) + len(opening), text.find(closing)
    return (text[begin:end], text[end + len(closing) :]) if begin <= end else None


class RegexReward(SampleReward):
    r"""1 where a pattern is found in the completion; with `column`, where what it found is that column's text.

    Args:
        pattern (`str`): For the `regex` library (a superset of `re`'s syntax).
        column (`str`, *optional*): Dataset column that the group `answer`, or else the first group, or else the whole
            match must equal, blanks around both left out. Of several matches the last counts.
        whole (`bool`, *optional*, defaults to `False`): The pattern must match the whole completion.
        ignore_case (`bool`, *optional*, defaults to `False`): Whether upper and lower case are the same; also for
            `column`.
        dotall (`bool`, *optional*, defaults to `True`): Whether `.` matches a line break.
        timeout (`float`, *optional*, defaults to 1.0): Seconds per completion; a pattern that takes longer leaves the
            completion unscored (`None`), counted in `rewards/<name>/failed_frac`.
        name (`str`, *optional*, defaults to `"regex_reward"`): Name in logs.
        on_error (`str`, *optional*, defaults to `"unscorable"`): `"raise"`: a time-out is an error.

    Raises:
        [`InputError`]: An empty pattern, one that does not compile, a time-out that is not
            positive.

    Example:

    ```python
    >>> RegexReward(r"#### *(\S+)", column="answer")(completions=["... #### 72", "... #### 7"], answer=["72", "72"])
    [1.0, 0.0]

    ```
    """

    def __init__(
        self,
        pattern: str,
        column: str | None = None,
        whole: bool = False,
        ignore_case: bool = False,
        dotall: bool = True,
        timeout: float = 1.0,
        name: str = "regex_reward",
        on_error: OnError = "unscorable",
    ):
        super().__init__(name, columns=() if column is None else (column,), on_error=on_error)
        for field, flag in (("whole", whole), ("ignore_case", ignore_case), ("dotall", dotall)):
            check_flag(field, flag)
        if not pattern:
            raise InputError("pattern", repr(pattern), "a non-empty pattern", "An empty one matches every text.")
        regex = importlib.import_module("regex")
        flags = (regex.IGNORECASE if ignore_case else 0) | (regex.DOTALL if dotall else 0)
        try:
            self.pattern = regex.compile(pattern, flags)
        except (regex.error, TypeError, ValueError) as error:
            remedy = "Use the syntax of the regex library; in YAML put it in single quotes."
            raise InputError("pattern", f"{pattern!r} ({error})", "a pattern that compiles", remedy) from error
        refuse_outside("timeout", timeout, positive(remedy="1 second is ample for a sound pattern."))
        self.column, self.whole, self.ignore_case, self.timeout = column, whole, ignore_case, timeout

    def score(self, completion: str, **columns: Any) -> float | None:
        """1.0 or 0.0; `TimeoutError` from a pattern that runs away."""
        if self.column is None:
            search = self.pattern.fullmatch if self.whole else self.pattern.search
            return float(search(completion, timeout=self.timeout) is not None)
        truth = columns[self.column]
        if truth is None:
            return None
        found = self._last_match(completion)
        return float(found is not None and self._normal(found) == self._normal(str(truth)))

    def _last_match(self, text: str) -> str | None:
        if self.whole:
            match = self.pattern.fullmatch(text, timeout=self.timeout)
        else:
            match = None
            for match in self.pattern.finditer(text, timeout=self.timeout):  # noqa: B007, the last one is wanted
                pass
        if match is None:
            return None
        if "answer" in self.pattern.groupindex:
            return match["answer"]
        return match[1] if self.pattern.groups else match[0]

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


format_reward = FormatReward()
