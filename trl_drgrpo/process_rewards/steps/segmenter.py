"""Rules for the end of a step, and the segmenter that cuts completions by them into texts and inclusive token ends.

What `step_separator` may be:

| value | a step ends |
|---|---|
| `"\\n\\n"`, `["\\n\\n", "###"]` | after a separator |
| `"re:\\n(?=Step \\d)"`, `re.compile(...)` | after a match |
| `"tokens:64"`, `64` | after every 64 tokens of the model |
| `"sentence"` | after a sentence or a line |
| `"turn"` | when the model speaks again after a tool |
| `f(text) -> list[int]` | at the exclusive character offsets that `f` returns |

A single lower-case word, or one before a colon, is read as the name of a rule so that a misspelled one cannot pass for
a separator that never occurs; in a list every string is a separator. What the rules share:

- a separator belongs to the step it ends, and so does the rest of the token it is complete in; what follows, further
  line breaks included, belongs to the next step. So the tokens before a step determine where it begins;
- only what the model wrote counts: a separator inside a tool's result ends nothing, and the result belongs to the step
  of the tokens before it;
- a step of the text rules holds something to read: more than whitespace, special tokens, separators and tool results.

The alignment lists the tokens behind which a completion can be cut, and the rule the places where a step should end. A
step ends at the first possible cut at or behind its place. So a step never ends inside a character or inside a token:
when one token holds the end of a step and the beginning of the next (`".\\n\\nB"`), that beginning belongs to the step
the token ends.
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.process_rewards.steps.alignment import Aligner, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LINE_BREAK = r"\r?\n"  # a lone "\r" is none: whether it is one would depend on the next token


@dataclass(frozen=True)
class Completion:
    """A completion as the rules see it.

    Args:
        alignment ([`Alignment`]): Its text and where it can be cut.
        visible (`str`): The text, with spaces in place of special tokens and tool results.
        tool_mask (`list[int]` of length `T`, *optional*): 1 on the model's tokens, 0 on tool results.
    """

    alignment: Alignment
    visible: str
    tool_mask: list[int] | None

    def is_models(self, token: int) -> bool:
        """Tell whether the model wrote this token."""
        return self.tool_mask is None or self.tool_mask[token] == 1

    def cut_at_or_after(self, token: int) -> int:
        """Index of the first cut at or after a token, behind the tool result that follows it, if one does."""
        # A tool's result belongs to the step of the tokens that called the tool.
        mask = self.tool_mask or ()
        while token + 1 < len(mask) and mask[token + 1] == 0:
            token += 1
        return bisect_left(self.alignment.tokens, token)


Span = tuple[int, int]  # a separator in a text: its first character and its exclusive end


@dataclass(frozen=True)
class Rule:
    """Says at which cuts of a completion steps end.

    Args:
        spans (`Callable[[str], Iterable[Span]]`): The separators of a text, in order.
        by_prefix (`bool`): Whether the tokens before a step determine where it begins, by the rule's construction.
        separators (`tuple[str, ...]`): The strings that end a step, where the rule is made of them.
    """

    spans: Callable[[str], Iterable[Span]] = lambda text: ()
    by_prefix: bool = True
    separators: tuple[str, ...] = ()

    def cuts(self, completion: Completion) -> tuple[list[int], bool]:
        """Return the cuts that end complete steps, ascending, and whether a further step follows them.

        A separator before which the step holds nothing to read ends nothing.
        """
        alignment = completion.alignment
        visible = completion.visible
        cuts = []
        read = 0  # characters of the text that were looked at
        readable = False  # whether the step that is open holds something to read
        for start, end in self.spans(alignment.text):
            # A span that a cut has passed already, `start < read`, has an empty slice before it.
            readable = readable or visible[read:start].strip() != ""
            read = max(read, end)
            # The first place to cut at or behind the separator's end, which may lie inside of a token.
            token = alignment.tokens[bisect_left(alignment.offsets, end)]
            # A separator that a tool wrote ends nothing.
            if readable and completion.is_models(token):
                cut = completion.cut_at_or_after(token)
                cuts.append(cut)
                # What the cut's token holds behind the separator belongs to the step that ends here.
                read = max(read, alignment.offsets[cut])
                readable = False
        is_open = readable or visible[read:].strip() != ""
        return cuts, is_open

    def with_end(self, step: str) -> str:
        """Return a step's text with the separator that ends it, or unchanged where the rule has no separators."""
        unix_step = step.replace("\r\n", "\n")  # separators are in this form
        if not self.separators or unix_step.endswith(self.separators):
            return step
        return step + self.separators[0]

    def without_end(self, step: str) -> str:
        """Return a step's text without the separator that ends it, or several that share its last token."""
        if not self.separators:
            return step
        patterns = "|".join(map(_pattern_of, self.separators))
        return re.sub(rf"(?:{patterns})+\Z", "", step)


@dataclass(frozen=True)
class Interval(Rule):
    """A step ends after every `size` tokens of the model, or as soon after as a character is complete.

    Steps of whitespace only are possible here, but not as the last one: that is the closing.
    """

    size: int = 1

    def cuts(self, completion: Completion) -> tuple[list[int], bool]:
        """Return the cuts, see [`Rule`]."""
        alignment = completion.alignment
        # Tool results are not counted.
        written = list(filter(completion.is_models, range(len(alignment.lengths))))
        last_tokens = written[self.size - 1 :: self.size]
        # A set, because the ends of two short steps may share the character that is complete next.
        cuts = sorted(set(map(completion.cut_at_or_after, last_tokens)))
        if cuts and cuts[-1] == len(alignment.tokens) - 1:
            cuts.pop()  # the last step ends by itself
        read = 0
        if cuts:
            read = alignment.offsets[cuts[-1]]
        is_open = completion.visible[read:].strip() != ""
        return cuts, is_open


@dataclass(frozen=True)
class Turns(Rule):
    """One environment turn = one step: the model's tokens and the tool results that follow them.

    A step ends where the tool mask goes from 0 back to 1. Turns are counted by the mask alone, so a turn in which the
    model wrote nothing but EOS is a step. Without a tool mask (nobody called a tool) the completion is one turn.
    """

    def cuts(self, completion: Completion) -> tuple[list[int], bool]:
        """Return the cuts, see [`Rule`]."""
        mask = completion.tool_mask or []
        cuts = []
        has_spoken = False  # a tool result before the model's first token ends no turn
        for token in range(len(mask) - 1):
            has_spoken = has_spoken or mask[token] == 1
            if has_spoken and mask[token] < mask[token + 1]:
                cuts.append(completion.cut_at_or_after(token))
        return cuts, True


# The strings and values that a configuration may hold

RuleSpec: TypeAlias = str | int | Sequence[str] | re.Pattern[str] | Callable[[str], Sequence[int]]
RULES = ("re", "tokens", "sentence", "turn")
_FORMS = "Examples: '\\n\\n', ['\\n\\n', '###'], 're:\\n+', 'sentence', 'tokens:64', 'turn'."


def rule_of(spec: RuleSpec, field: str) -> Rule:
    """Build the rule that a value of `step_separator` names. Errors: as in [`step_segmenter`], under `field`."""
    if isinstance(spec, str):
        return _from_string(spec, field)
    if isinstance(spec, int) and not isinstance(spec, bool):  # YAML's `on` would be an interval of 1
        return _interval(spec, field)
    if isinstance(spec, re.Pattern):
        return _regex(spec, field)
    if callable(spec):
        return _offsets(spec, field)
    if isinstance(spec, list | tuple):
        return _separators(spec, field)
    raise InputError(field, repr(spec), "a string, a list of strings, a regex, an integer or a function", _FORMS)


def _from_string(spec: str, field: str) -> Rule:
    name, colon, value = spec.partition(":")
    if name == "re" and colon:
        return _regex(value, field)
    if name == "tokens" and colon:
        return _interval(value, field)
    if spec == "turn":
        return Turns()
    if spec == "sentence":
        return Rule(_sentence_ends)
    # `token:64` and `sentense` would be separators that never occur; `answer:` with nothing behind it is one.
    if re.fullmatch("[a-z_]+", name) and (value or not colon or name in RULES):
        hint = did_you_mean(name, RULES, "", form="{!r}")
        remedy = f"{hint} To use it as a separator, put it in a list: [{spec!r}].".lstrip()
        expected = "a separator, 're:<pattern>', 'tokens:<n>', 'sentence' or 'turn'"
        raise InputError(field, repr(spec), expected, remedy)
    return _separators([spec], field)


# Marks that may end a sentence. Those of Chinese and Arabic have no other use, and no space behind them.
_MARKS = re.compile(rf"[.!?]|[\u3002\uff01\uff1f\u061f]|{LINE_BREAK}")
_FENCE = "```"
# Behind these a full stop ends a sentence, as behind a word of several letters.
_CLOSERS = frozenset(")]}\"'\u201d\u2019$%*`")
_WORD = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]+\Z")
_ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "prof", "st", "vs", "cf", "eq", "eqs", "fig", "approx", "etc", "resp"]
)


def _sentence_ends(text: str) -> Iterator[Span]:
    """Yield the marks that end a sentence, each decided by the text before it.

    What follows would tell `3.14` from `3. Then`, but where a step ends must not depend on what is written next. So
    wherever the text before a mark leaves it open, the mark ends nothing, and the sentence goes on to the next one: a
    step of two sentences is a step, half a number is none.
    """
    for match in _MARKS.finditer(text):
        mark = match[0]
        if mark not in (".", "!", "?") or _ends_a_sentence(text[: match.start()], mark):
            yield match.span()


def _ends_a_sentence(text: str, mark: str) -> bool:
    """Tell whether a full stop, an exclamation mark or a question mark ends a sentence behind this text."""
    if text.count(_FENCE) % 2 == 1:  # in a block of code lines end, sentences do not
        return False
    if mark == "?":
        return True
    before = text[-24:]  # more than the longest abbreviation
    last = before[-1:]
    if last in _CLOSERS:
        is_factorial = mark == "!" and last in (")", "]", "}", "$")  # `(n+1)!`
        return not is_factorial
    match = _WORD.search(before)
    if match is None:  # a number or a symbol
        return False
    word = match[0]
    is_initial = len(word) == 1
    is_command = before[: match.start()].endswith("\\")  # LaTeX: `\left.`
    is_abbreviation = "." in word or word.lower() in _ABBREVIATIONS  # `e.g.` has one inside
    return not (is_initial or is_command or is_abbreviation)


def _separators(separators: Sequence[str], field: str) -> Rule:
    """Build the rule of one or several strings. The first one to be complete ends the step.

    A line break in them also stands for `"\\r\\n"`.
    """
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
    # A separator of escapes alone, as a shell or a quoted YAML string passes it on, means the characters it spells.
    escaped = re.compile(r"(\\[nrt])+")
    texts = set()
    for text in separators:
        if escaped.fullmatch(text):
            text = text.encode().decode("unicode_escape")
        texts.add(text.replace("\r\n", "\n"))
    sorted_separators = sorted(sorted(texts), key=len)
    patterns = [re.compile(_pattern_of(separator)) for separator in sorted_separators]

    def spans(text: str) -> Iterator[Span]:
        start = 0
        while True:
            # The first to be complete, which the text so far decides; among equals the shortest, by the order above.
            first = None
            for pattern in patterns:
                match = pattern.search(text, start)
                if match and (first is None or match.end() < first.end()):
                    first = match
            if first is None:
                return
            yield first.span()
            start = first.end()

    return Rule(spans, separators=tuple(sorted_separators))


def _pattern_of(separator: str) -> str:
    """Return the regex of a separator, in which each line break may be `"\\r\\n"`."""
    return LINE_BREAK.join(map(re.escape, separator.split("\n")))


def _offsets(function: Callable[[str], Sequence[int]], field: str) -> Rule:
    """Build the rule of a function `f(text) -> list[int]`: exclusive ends of the steps in characters, ascending."""

    def spans(text: str) -> list[Span]:
        offsets = function(text)
        name = getattr(function, "__name__", type(function).__name__)
        expected = "a list of strictly ascending integers from 1 to len(text)"
        remedy = "Return the exclusive end of each step, in characters of the text it was given."
        if not isinstance(offsets, list | tuple):
            raise InputError(field, f"{type(offsets).__name__} from {name}", expected, remedy)
        ends = []
        previous = 0
        for position, offset in enumerate(offsets):
            place = f"at position {position} of what {name} returned"
            if isinstance(offset, bool) or not isinstance(offset, Integral):
                raise InputError(field, f"{offset!r} {place}", expected, remedy)
            if not previous < offset <= len(text):
                got = f"{offset} after {previous} {place} for a text of {len(text)} characters"
                raise InputError(field, got, expected, remedy)
            previous = int(offset)
            ends.append((previous, previous))  # a separator without width
        return ends

    # A function sees the whole text, so what is written later may move an end.
    return Rule(spans, by_prefix=False)


def _regex(pattern: str | re.Pattern[str], field: str) -> Rule:
    """Build the rule of a regular expression, which is used as it is: it sees `"\\r\\n"`.

    A match without width ends a step: `(?=Step )`.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:  # of a text: a compiled pattern is valid
        got = f"the regex {pattern!r} ({error})"
        raise InputError(field, got, "a valid regular expression", "See Python's `re` module.") from error
    text = compiled.pattern
    if not isinstance(text, str):
        raise InputError(field, f"a regex of bytes, {text!r}", "a regex of text", "Leave out the b prefix.")
    if compiled.search(""):
        got = f"the regex {text!r}, which matches the empty string"
        remedy = "It would end a step after every character: use + in place of *, for example."
        raise InputError(field, got, "a regex that needs at least one character", remedy)
    # A lookahead or a greedy match reads on behind the end, so `by_prefix` is not known.
    return Rule(lambda text: map(re.Match.span, compiled.finditer(text)), by_prefix=False)


def _interval(size: str | int, field: str) -> Interval:
    number = 0
    if re.fullmatch(r"\s*[+-]?\d+\s*", str(size)):
        number = int(size)
    if number < 1:
        got = f"an interval of {size!r} tokens"
        remedy = "For example 'tokens:64'."
        raise InputError(field, got, "an integer of at least 1", remedy)
    return Interval(size=number)


# A completion becomes steps

_ROWS_TO_LOOK_AT = 8  # rows of a batch in which steps that depend on later text are looked for


@dataclass(frozen=True)
class Steps:
    """The steps of one completion.

    Args:
        texts (`tuple[str, ...]` of length `S`): One text per step. Both are empty for a completion without tokens.
        ends (`tuple[int, ...]` of length `S`):
            Inclusive index of each step's last token, in completion tokens; strictly increasing.
        closing (`int`, *optional*):
            Index of the completion's last token, where tokens without anything to read (EOS) follow the last step.
            They are the decision to stop: no reward is given for them, and credit treats them as a step of their own.
    """

    texts: tuple[str, ...]
    ends: tuple[int, ...]
    closing: int | None = None


class StepSegmenter:
    """Cuts completions into steps. Build one with [`step_segmenter`].

    Args:
        rule ([`Rule`]): Rule for step ends.
        name (`str`): Name in messages.
    """

    def __init__(self, rule: Rule, name: str):
        self.rule = rule
        self.name = name
        self._aligner: Aligner | None = None
        self._looked_for: set[str] = set()  # biases that were looked for already

    def __repr__(self) -> str:
        return f"StepSegmenter({self.name})"

    def __call__(
        self,
        completion_ids: list[int],
        tokenizer: "PreTrainedTokenizerBase",
        tool_mask: list[int] | None = None,
    ) -> Steps:
        """Cut one completion into steps.

        Args:
            completion_ids (`list[int]` of length `T`):
                Completion tokens without padding; EOS, if there is one, included.
            tokenizer (`PreTrainedTokenizerBase`): The tokenizer they belong to, slow or fast.
            tool_mask (`list[int]` of length `T`, *optional*): 1 on the model's tokens, 0 on tool results.

        Returns:
            [`Steps`]: A partition of the completion, its closing left out. Texts include special tokens and are
            those of `decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)` where the bytes are
            UTF-8. No tokens, no steps.

        Raises:
            `InputError`: `tool_mask` has another length than the completion or other values than 0 and 1, or a
                function given as rule breaks its contract.

        Example:

        ```python
        >>> from trl_drgrpo.host_proof.tiny import tiny_tokenizer
        >>> from trl_drgrpo.process_rewards.steps import step_segmenter
        >>> tokenizer = tiny_tokenizer()  # a token is a byte
        >>> step_segmenter("\\n\\n")(tokenizer.encode("1+1=2\\n\\n2+2=4\\n\\n<|im_end|>"), tokenizer)
        Steps(texts=('1+1=2\\n\\n', '2+2=4\\n\\n'), ends=(6, 13), closing=14)

        ```
        """
        ids = list(map(int, completion_ids))
        mask = None
        if tool_mask is not None:
            mask = list(map(int, tool_mask))
            _check_tool_mask(mask, len(ids))
        if not ids:
            return Steps((), ())
        # The aligner holds the vocabulary's bytes, so it is kept while the tokenizer stays the same.
        if self._aligner is None or self._aligner.tokenizer is not tokenizer:
            self._aligner = Aligner(tokenizer)
        alignment = self._aligner.align(ids)
        is_hidden = [token_id in self._aligner.special_ids for token_id in ids]
        for i, entry in enumerate(mask or ()):
            is_hidden[i] |= entry == 0
        visible = _visible(alignment, is_hidden)
        cuts, is_open = self.rule.cuts(Completion(alignment, visible, mask))
        return _steps(alignment, cuts, is_open)

    def of_text(self, text: str) -> tuple[str, ...]:
        """Cut a text whose tokens are not known into the texts of its steps, with a character as a token.

        Args:
            text (`str`): A completion. Its closing (white space behind its last separator) is left out.
        """
        if not text:
            return ()
        lengths = list(range(1, len(text) + 1))
        alignment = Alignment(text, lengths, list(range(len(text))), lengths)
        cuts, is_open = self.rule.cuts(Completion(alignment, text, None))
        return _steps(alignment, cuts, is_open).texts

    def looks_ahead(
        self,
        completion_ids: list[int],
        tokenizer: "PreTrainedTokenizerBase",
        tool_mask: list[int] | None = None,
    ) -> bool:
        """Tell whether tokens behind a step's end decide that it ends there, as with a lookahead or a greedy match.

        Cuts the completion off around each end, puts its first token there, and compares the ends.

        Args:
            completion_ids, tokenizer, tool_mask: As for a call.
        """
        if self.rule.by_prefix:
            return False
        ends = self(completion_ids, tokenizer, tool_mask).ends
        # Around an end, not only at it: a shorter text may also end a step too early or too late.
        # The row's first token stands in for whatever the model might have written next.
        nearby: set[int] = set()
        for end in ends:
            nearby.update(range(max(0, end - 2), end + 3))
        for last in nearby:
            if last >= ends[-1]:
                continue
            prefix = [*completion_ids[: last + 1], completion_ids[0]]
            mask = None
            if tool_mask is not None:
                mask = [*tool_mask[: last + 1], tool_mask[0]]
            ends_of_prefix = self(prefix, tokenizer, mask).ends
            if (last in ends_of_prefix) != (last in ends):
                return True
        return False

    def warn_of_looking_ahead(
        self,
        biased: str,
        completions: Sequence[Sequence[int]],
        tokenizer: "PreTrainedTokenizerBase",
        tool_masks: Sequence[list[int]] | None = None,
    ) -> None:
        """Warn where tokens behind a step decide that it ends, which biases something.

        Args:
            biased (`str`): What is biased, for the message. Of each name only the first call looks.
            completions (`B` lists of ints): Completion tokens of a batch, of which the first rows are looked at.
            tokenizer: As for a call.
            tool_masks (`B` lists of ints, *optional*): As for a call; may be padded.
        """
        if biased in self._looked_for:
            return
        self._looked_for.add(biased)
        # Each end of a row is cut off five times, so the first rows have to do.
        for i, ids in enumerate(completions[:_ROWS_TO_LOOK_AT]):
            mask = None
            if tool_masks:
                mask = tool_masks[i][: len(ids)]
            if ids and self.looks_ahead(list(ids), tokenizer, mask):
                logger.warning(
                    "step_separator: where %s ends a step depends on the text after it, which slightly biases %s "
                    "(completion %d of the batch). Use a rule that reads only the text before.",
                    self,
                    biased,
                    i,
                )
                return


def one_step_frac(list_of_steps: Iterable[Steps]) -> float:
    """Share of completions that came out as one step: near 1, the separator does not occur in what the model writes.

    Args:
        list_of_steps (iterable of [`Steps`]): One per completion.

    Returns:
        `float`: From 0 to 1, among completions with tokens; 0.0 when there is none.

    Example:

    ```python
    >>> one_step_frac([Steps(("a",), (0,)), Steps(("a", "b"), (0, 1)), Steps((), ())])
    0.5

    ```
    """
    counts = [len(steps.ends) for steps in list_of_steps if steps.ends]
    return counts.count(1) / max(1, len(counts))


def _check_tool_mask(mask: list[int], length: int) -> None:
    if len(mask) != length:
        got = f"{len(mask)} entries for {length} completion tokens"
        remedy = "Pass the mask of the same completion, without padding."
        raise InputError("tool_mask", got, "one entry per token", remedy)
    other_values = set(mask) - {0, 1}
    if other_values:
        remedy = "1 marks the model's tokens, 0 those of tool results."
        raise InputError("tool_mask", f"{min(other_values)}", "0 or 1", remedy)


def _visible(alignment: Alignment, is_hidden: list[bool]) -> str:
    """Return the text with spaces in place of hidden tokens: same length, nothing to read there."""
    texts = []
    start = 0
    for stop, is_space in zip(alignment.lengths, is_hidden, strict=True):
        text = alignment.text[start:stop]
        if is_space:
            text = " " * len(text)
        texts.append(text)
        start = stop
    return "".join(texts)


def _steps(alignment: Alignment, cuts: list[int], is_open: bool) -> Steps:
    """Return the steps that end at the cuts. The rest is a last step if it is open, else the closing."""
    last = len(alignment.tokens) - 1
    closing = None
    if cuts and not is_open and cuts[-1] < last:
        closing = alignment.tokens[last]
    else:
        # Without a closing the last step runs through the last token, whether a separator ends it or not.
        cuts = sorted({*cuts, last})
    texts = []
    ends = []
    start = 0
    for cut in cuts:
        stop = alignment.offsets[cut]
        texts.append(alignment.text[start:stop])
        ends.append(alignment.tokens[cut])
        start = stop
    return Steps(tuple(texts), tuple(ends), closing)


StepSpec: TypeAlias = RuleSpec | StepSegmenter


def step_segmenter(spec: StepSpec, field: str = "step_separator") -> StepSegmenter:
    """Build the segmenter that cuts completions into steps.

    Args:
        spec (`str`, `int`, sequence of `str`, `re.Pattern`, callable or [`StepSegmenter`]):
            - a separator, or several of which the first to be complete ends the step. `"\\n"` also matches
              `"\\r\\n"`. A separator of escapes alone (a backslash and an n, as a shell passes them on) means the
              line breaks and tabs it spells;
            - `"re:<pattern>"` or a compiled pattern, used as it is;
            - `"tokens:<n>"` or `n`: a fixed number of the model's tokens;
            - `"sentence"`: a sentence or a line. A full stop behind a digit ends nothing, as it may be a decimal
              point: what decides is the text before the mark, never what follows;
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
    name = getattr(spec, "__name__", repr(spec))
    return StepSegmenter(rule_of(spec, field), name)


def configured_segmenter(spec: StepSpec, field: str = "step_separator") -> StepSegmenter:
    """Build the segmenter of a configuration's list. A list of one means its one entry: `["turn"]` is the rule.

    Args:
        spec, field: As in [`step_segmenter`].
    """
    if isinstance(spec, list | tuple) and len(spec) == 1:
        spec = spec[0]
    return step_segmenter(spec, field)


def joining_text(separator: str | Sequence[str], field: str = "step_separator") -> str:
    """Return the separator as the text that joins steps. It may be empty.

    Args:
        separator (`str` or sequence of one): As in [`step_segmenter`].
        field (`str`, *optional*): Name in error messages.

    Raises:
        `InputError`: A rule, which is no text.
    """
    if separator == "":
        return ""
    separators = rule_of(separator, field).separators
    if len(separators) != 1:
        remedy = "Of steps that a rule ends, ' ' or '\\n', for example: whatever stood between them."
        raise InputError(field, repr(separator), "the text behind every step", remedy)
    return separators[0]


def segmenter_without_turns(spec: StepSpec, field: str = "step_separator") -> StepSegmenter:
    """Build the segmenter of completions that no environment answers. The rule `"turn"` is refused.

    Args:
        spec, field: As in [`configured_segmenter`].
    """
    segmenter = configured_segmenter(spec, field)
    if isinstance(segmenter.rule, Turns):
        expected = "a separator, 'sentence', 're:<pattern>' or 'tokens:<n>'"
        remedy = "There is no environment here, so no turns: set a separator."
        raise InputError(field, "'turn'", expected, remedy)
    return segmenter
