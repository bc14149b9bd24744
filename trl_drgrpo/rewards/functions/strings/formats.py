"""Rewards for the form of a completion: R1's tags, a pattern of one's own, JSON of a given shape; its length.

The first three are 1 or 0 and do not look at whether the answer is correct: combine them with a reward that does
(`gated(accuracy, gate=format_reward)`). Completions are written by a model under optimization, so the tags are
searched in linear time, and a user's pattern runs under the `regex` library's own time-out. A JSON Schema is validated
by the `jsonschema` library under its own draft; one with patterns can run away on a hostile completion: give it
`limits`.

The penalties on length and repetition are TRL's own functions under checked settings. Each
reads `completion_ids`, that is tokens, and gives 0 or less: add one to an outcome reward with `weighted_sum`, or as a
further reward function. Under Dr. GRPO length needs no penalty to stay unbiased (arXiv 2503.20783, section 3.1); these
are for runs that want shorter answers, or that degenerate.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl_drgrpo.common.errors import InputError, UnscorableError, require_package, shortened
from trl_drgrpo.common.ranges import Choice, Range, finite_number, positive, refuse_outside, whole
from trl_drgrpo.rewards.columns import LogMetric
from trl_drgrpo.rewards.contract import Limits, OnError, Rewards
from trl_drgrpo.rewards.functions.strings.matching import AgainstColumn
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.sample import SampleReward, after_thinking
from trl_drgrpo.rewards.texts import Text, completion_text

# Where a tokenizer with a response template puts what stood between the thinking tags (TRL parses such completions).
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(eq=False, repr=False)
class FormatReward(SampleReward):
    """1 for `<think>...</think> <answer>...</answer>`: in this order, each tag exactly once, nothing around them,
    neither empty.

    Some chat templates open `<think>` themselves, so that the completion starts inside; others have the trainer put
    the reasoning into a field of the message. Both are recognized: TRL's `think_format_reward` scores them 0.

    Args:
        think_tag (`str`, *optional*, defaults to `"think"`): Name of the first pair of tags.
        answer_tag (`str` or `None`, *optional*, defaults to `"answer"`): Name of the second pair; `None`: the answer
            is whatever follows the first pair.
        think_opened (`"auto"`, `True` or `False`, *optional*, defaults to `"auto"`): Whether the prompt ends in the
            opening tag. `"auto"` reads it off a plain-text prompt; for messages, whose template is not seen here, a
            completion without the opening tag counts as begun inside. `False` demands the tag of the completion.
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

    think_tag: str = "think"
    answer_tag: str | None = "answer"
    think_opened: bool | str = "auto"
    name: str = "format_reward"

    allowed: ClassVar = {"think_opened": Choice(("auto", True, False), "'auto' fits most templates.")}

    def __post_init__(self):
        super().__post_init__("prompts")
        for field, tag in (("think_tag", self.think_tag), ("answer_tag", self.answer_tag)):
            if tag is not None and not re.fullmatch(r"[A-Za-z][\w-]*", str(tag)):
                raise InputError(field, repr(tag), "the name of a tag", "Write it without angle brackets.")

    def __call__(self, completions: Sequence[Text], log_metric: LogMetric = None, **kwargs: Any) -> Rewards:
        """Return the rewards of `B` completions; without `prompts` they count as conversational."""
        texts = list(map(self._with_reasoning, completions))
        prompts = kwargs.pop("prompts", None) or [None] * len(texts)
        return super().__call__(texts, log_metric, prompts=prompts, **kwargs)

    def score(self, completion: str, **columns: Any) -> float:
        """Return 1.0 or 0.0; `prompts`: the prompt of this one completion."""
        # The tag that the prompt ends in is put back, so that one pattern fits both kinds of templates.
        opening = f"<{self.think_tag}>"
        text = completion.strip()
        if self._begun_inside(text, columns.get("prompts"), opening):
            text = opening + text
        blocks = []
        for tag in (self.think_tag, self.answer_tag):
            if tag is None:
                continue
            # Counted first, so that the pattern below has one way to match and takes linear time.
            if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
                return 0.0
            blocks.append(f"<{tag}>(.*)</{tag}>")
        if self.answer_tag is None:  # the answer is the text behind the reasoning
            blocks.append("(.*)")
        match = re.fullmatch(r"\s*".join(blocks), text, re.DOTALL)
        return float(match is not None and all(map(str.strip, match.groups())))

    def _begun_inside(self, text: str, prompt: object, opening: str) -> bool:
        if self.think_opened != "auto":
            return bool(self.think_opened)
        if isinstance(prompt, str):
            return prompt.rstrip().endswith(opening)
        return opening not in text  # of messages the template is not seen here, so the benefit of the doubt

    def _with_reasoning(self, completion: Text) -> str:
        """Return the text, with the reasoning back between its tags where the trainer has parsed it out."""
        text = completion_text(completion)
        if isinstance(completion, str):
            return text
        messages = [message for message in completion if message.get("role") == "assistant"] or completion
        if messages:  # the last turn is scored, as in `completion_text`
            for key in _REASONING_KEYS:
                reasoning = messages[-1].get(key)
                if reasoning:
                    return f"<{self.think_tag}>{reasoning}</{self.think_tag}>{text}"
        return text


@dataclass(eq=False, repr=False)
class RegexReward(AgainstColumn):
    r"""1 where a pattern is found in the completion; with `column`, where what it found is that column's text.

    Args:
        pattern (`str`): For the `regex` library (a superset of `re`'s syntax); `.` matches a line break, too.
        column (`str`, *optional*): Dataset column that the group `answer`, or else the first group, or else the whole
            match must equal, blanks around both left out. Of several matches the last counts.
        ignore_case (`bool`, *optional*, defaults to `False`): Whether upper and lower case are the same; also for
            `column`.
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

    pattern: str
    column: str | None = None
    ignore_case: bool = False
    timeout: float = 1.0
    name: str = "regex_reward"
    on_error: OnError = "unscorable"

    truths = ()
    allowed: ClassVar = {
        "ignore_case": bool,
        "timeout": positive(remedy="1 second is ample for a sound pattern."),
    }

    def __post_init__(self):
        super().__post_init__()
        if not self.pattern:
            raise InputError("pattern", repr(self.pattern), "a non-empty pattern", "An empty one matches every text.")
        # Not `re`, which knows no time-out: a pattern that runs away would stop the run.
        regex = importlib.import_module("regex")
        flags = regex.DOTALL
        if self.ignore_case:
            flags |= regex.IGNORECASE
        try:
            self.compiled = regex.compile(self.pattern, flags)
        except (regex.error, TypeError, ValueError) as error:
            remedy = "Use the syntax of the regex library; in YAML put it in single quotes."
            got = f"{self.pattern!r} ({error})"
            raise InputError("pattern", got, "a pattern that compiles", remedy) from error

    def score(self, completion: str, **columns: Any) -> float | None:
        """Return 1.0 or 0.0; `TimeoutError` from a pattern that runs away."""
        if self.column is None:
            return float(self.compiled.search(completion, timeout=self.timeout) is not None)
        return super().score(completion, **columns)

    def read(self, truth: object) -> str:
        return self.normal(str(truth))

    def is_right(self, completion: str, truth: str) -> bool:
        """Tell whether the last match is the truth."""
        group = "answer"
        if group not in self.compiled.groupindex:
            group = min(self.compiled.groups, 1)  # 0, the whole match, where there is no group
        # The time-out is that of the regex library, which bounds a pattern on any thread and without a worker.
        answer = None
        for match in self.compiled.finditer(completion, timeout=self.timeout):
            answer = match[group]
        return answer is not None and self.normal(answer) == truth


format_reward = FormatReward()

_FENCE = re.compile(r"^[^\S\n]*```.*$", re.MULTILINE)
_JSONSCHEMA = ("jsonschema", "reward json_schema_reward", "a schema", "json")  # for `require_package`


@dataclass(eq=False, repr=False)
class JsonSchemaReward(SampleReward):
    """1 for a completion that is JSON and fits a schema.

    What counts is the text after the last `</think>`: all of it, or, where that is no JSON, its last fenced block.
    `NaN` and `Infinity`, which Python would read, are no JSON. A schema may refer to its own parts and to the
    published drafts; nothing is ever fetched.

    Args:
        schema (`Mapping`, *optional*): The schema. `None` without `column`: any JSON will do.
        column (`str`, *optional*): Dataset column with the schema of each row, as JSON text or as a mapping.
        invalid_score (`float`, *optional*, defaults to 0.0): Score of JSON that does not fit.
        limits ([`Limits`], *optional*): For schemas with patterns that may run away.
        name (`str`, *optional*, defaults to `"json_schema_reward"`): Name in logs.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What a row's unusable schema costs.

    Raises:
        [`InputError`]: jsonschema is not installed, both `schema` and `column`, no valid schema.

    Example:

    ```python
    >>> shape = {"type": "object", "required": ["city"]}
    >>> JsonSchemaReward(shape)(completions=['{"city": "Rome"}', "Rome", '{"town": "Rome"}'])
    [1.0, 0.0, 0.0]

    ```
    """

    schema: Mapping[str, Any] | bool | None = None
    column: str | None = None
    invalid_score: float = 0.0
    limits: Limits | None = None
    name: str = "json_schema_reward"
    on_error: OnError = "unscorable"

    truths = ("text", "mapping", "boolean")

    def __post_init__(self):
        super().__post_init__()
        self.invalid_score = finite_number("invalid_score", self.invalid_score)
        self.lowest_reward = min(0.0, self.invalid_score)
        if self.column is not None:
            if self.schema is not None:
                raise InputError("schema", "a schema and a column of schemas", "one of them", "Remove one.")
            require_package(*_JSONSCHEMA)  # that it is missing is known before the run
        elif self.schema is not None:
            if not isinstance(self.schema, (Mapping, bool)):
                remedy = "Fix the schema, or set `column` for one schema per row."
                got = shortened(self.schema)
                raise InputError("schema", got, "a JSON Schema: a mapping, true or false", remedy)
            _validator(self.schema)

    def score(self, completion: str, **columns: Any) -> float | None:
        """Return 1.0, `invalid_score` or 0.0."""
        schema = self.schema
        if self.column is not None:
            schema = columns[self.column]
            if schema is None:
                return None
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except ValueError as error:
                    raise UnscorableError(f"column {self.column!r} holds a schema that is no JSON ({error})") from None
            _validator(schema)  # before the completion is read: an invalid schema is an error of the row
        is_json, value = _read_json(completion)
        if not is_json:
            return 0.0
        try:
            is_valid = schema is None or _validator(schema).is_valid(value)
        except RecursionError:  # nested as deeply as the parser lets through
            is_valid = False
        return 1.0 if is_valid else self.invalid_score


def _read_json(text: str) -> tuple[bool, Any]:
    text = after_thinking(text).strip()
    # The whole text first: JSON may have a fence in one of its strings.
    # Between fences stand in turn what is outside and inside of a block; behind the last one, nothing is closed.
    closed = _FENCE.split("\n".join(text.splitlines()))[1:-1:2]
    for candidate in (text, *closed[-1:]):
        try:
            return True, json.loads(candidate, parse_constant=_no_constant)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            continue
    return False, None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _validator(schema: object) -> Any:
    """The validator of a schema's own draft, with a registry that fetches nothing."""
    require_package(*_JSONSCHEMA)
    jsonschema = importlib.import_module("jsonschema")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # Checked by hand: `is_valid` trusts its schema, and fails on an invalid one in the middle.
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "its top level"
        remedy = "Fix the schema."
        raise InputError("schema", f"a schema with {error.message} at {where}", "a JSON Schema", remedy) from error
    # The published drafts are all that this registry has: a reference to any other address is not followed.
    return kind(schema, registry=importlib.import_module("jsonschema_specifications").REGISTRY)


json_schema_reward = JsonSchemaReward()  # any JSON


_PENALTY = Range(highest=0, remedy="A penalty lowers the reward: negate it.")


def repetition_penalty(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable:
    """TRL's `get_repetition_penalty_reward`: share of repeated token n-grams times `max_penalty`.

    Args:
        ngram_size (`int`, *optional*, defaults to 3): Tokens per n-gram.
        max_penalty (`float`, *optional*, defaults to -1.0): What a fully repetitive completion comes near; 0 or less.

    Returns:
        `Callable`: A reward function, called `repetition_penalty_reward` in logs.

    Raises:
        [`InputError`]: `ngram_size` below 1, a positive `max_penalty`.

    Example:

    ```python
    >>> repetition_penalty(ngram_size=2)(completion_ids=[[1, 2, 3], [5, 5, 5, 5, 5]])  # 1 - 1/4 of the second repeat
    [0.0, -0.75]

    ```
    """
    refuse_outside("ngram_size", ngram_size, whole(1, remedy="It counts tokens."))
    refuse_outside("max_penalty", max_penalty, _PENALTY)
    return _trl("get_repetition_penalty_reward")(ngram_size=ngram_size, max_penalty=max_penalty)


def overlong_penalty(max_completion_length: int, soft_tokens: int) -> Callable:
    """TRL's `get_soft_overlong_punishment` (DAPO, arXiv 2503.14476, eq. 13): 0, then linear, -1 at the end.

    Args:
        max_completion_length (`int`): Tokens at which it reaches -1; the run's own `max_completion_length` as a rule.
        soft_tokens (`int`): Length of the linear part in front of that, at most `max_completion_length`.

    Returns:
        `Callable`: A reward function, called `soft_overlong_punishment_reward` in logs.

    Raises:
        [`InputError`]: A length below 1, or a linear part longer than the whole.
    """
    refuse_outside("max_completion_length", max_completion_length, whole(1, remedy="It counts tokens."))
    refuse_outside("soft_tokens", soft_tokens, whole(0, remedy="It counts tokens."))
    if soft_tokens > max_completion_length:
        expected = f"at most max_completion_length={max_completion_length}"
        raise InputError("soft_tokens", str(soft_tokens), expected, "Lower it: it is a part of that length.")
    return _trl("get_soft_overlong_punishment")(
        max_completion_len=max_completion_length, soft_punish_cache=soft_tokens
    )


def _trl(name: str) -> Callable:
    return getattr(importlib.import_module("trl.rewards"), name)


register_reward(
    "format_reward",
    format_reward,
    help="1 for `<think>..</think> <answer>..</answer>`.",
    factory=FormatReward,
    is_harmless=True,
)
register_reward("regex_reward", help="1 if a pattern matches.", factory=RegexReward, is_harmless=True)
register_reward(
    "json_schema_reward",
    json_schema_reward,
    help="1 for JSON that fits a schema.",
    factory=JsonSchemaReward,
    is_harmless=True,
)
register_reward(
    "repetition_penalty", help="Negative for repeated n-grams.", factory=repetition_penalty, is_harmless=True
)
register_reward(
    "overlong_penalty",
    help="Falls from 0 to -1 over the last tokens before the limit.",
    factory=overlong_penalty,
    is_harmless=True,
)
