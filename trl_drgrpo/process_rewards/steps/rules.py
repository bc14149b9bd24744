"""Rules for the end of a step: separators, a regex, a function, a number of tokens, a turn of the environment.

What all of them share:

- a separator belongs to the step it ends, and so does the rest of the token it ends in;
- only what the model wrote counts: a separator inside a tool's result ends nothing, and the result belongs to the step
  of the tokens before it;
- a step of the text rules holds something to read. Whitespace, special tokens and tool results are not: leading
  separators belong to the first step, runs of separators to the step they end, and what trails (EOS) to the last one.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.steps.alignment import Alignment

LINE_BREAK = r"(?:\r\n|(?<!\r)\n|\r(?!\n))"  # one line break, whatever system wrote it; never half of "\r\n"


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
        """Whether the model wrote this token."""
        return self.tool_mask is None or self.tool_mask[token] == 1

    def cut_at_or_after(self, token: int) -> int:
        """Index of the first cut at or after a token, behind the tool result that follows it, if one does."""
        mask = self.tool_mask or ()
        while token + 1 < len(mask) and mask[token + 1] == 0:
            token += 1
        return bisect_left(self.alignment.tokens, token)


class Rule(Protocol):
    """Says after which tokens steps end. The last token need not be among them."""

    def ends(self, completion: Completion) -> list[int]: ...


@dataclass(frozen=True)
class Span:
    """A separator in a text: exclusive ends of its shortest form and of the form with the line breaks after it."""

    start: int
    end: int
    run_end: int


class TextRule:
    """A rule that reads the text only; subclasses find the separators."""

    def spans(self, text: str) -> Iterable[Span]:
        """The separators of a text, in order."""
        raise NotImplementedError

    def ends(self, completion: Completion) -> list[int]:
        """Last tokens of the steps, the last step's left out."""
        alignment, cuts = completion.alignment, []
        last_visible = len(completion.visible.rstrip())
        read = 0  # characters of the text that were looked at
        readable = False  # whether the step that is open holds something to read
        for span in self.spans(alignment.text):
            readable = readable or completion.visible[read : span.start].strip() != ""
            read = max(read, span.run_end)
            cut = self._cut(completion, span, readable)
            if cut is None or (cuts and cut <= cuts[-1]) or not (readable or cuts):
                continue
            if not readable:  # another separator right after the last one: the step it ended takes it in
                cuts.pop()
            if alignment.offsets[cut] >= last_visible:
                break
            cuts.append(cut)
            read, readable = max(read, alignment.offsets[cut]), False
        return [alignment.tokens[cut] for cut in cuts]

    def _cut(self, completion: Completion, span: Span, readable: bool) -> int | None:
        """Index of the cut for a separator: behind the line breaks after it, unless a token mixes them with text."""
        alignment = completion.alignment
        cut = bisect_right(alignment.offsets, span.run_end) - 1
        if readable:
            needed = bisect_left(alignment.offsets, span.end)
            if not completion.is_models(alignment.tokens[needed]):
                return None
            cut = max(cut, needed)
        return completion.cut_at_or_after(alignment.tokens[cut]) if cut >= 0 else None


class Separators(TextRule):
    """One or several strings. The longest wins; line breaks right after one that ends in a line break belong to it.

    Args:
        separators (sequence of `str`): Not empty. `"\\n"` in them also stands for `"\\r\\n"` and `"\\r"`.

    Example:

    ```python
    >>> [(span.start, span.end, span.run_end) for span in Separators(["\\n\\n"]).spans("a\\r\\n\\r\\n\\r\\nb")]
    [(1, 5, 7)]

    ```
    """

    def __init__(self, separators: Sequence[str]):
        normal = [re.sub(r"\r\n?", "\n", separator) for separator in separators]
        self.separators = sorted(set(normal), key=lambda separator: (-len(separator), separator))
        self.pattern = re.compile("|".join(self._one(separator) for separator in self.separators))
        self.breaks = re.compile(f"{LINE_BREAK}*")

    def _one(self, separator: str) -> str:
        return LINE_BREAK.join(re.escape(part) for part in separator.split("\n"))

    def spans(self, text: str) -> Iterator[Span]:
        """The separators of a text, in order."""
        start = 0
        while match := self.pattern.search(text, start):
            end = run_end = match.end()
            if match[0][-1] in "\r\n" and (breaks := self.breaks.match(text, end)):
                run_end = breaks.end()
            yield Span(match.start(), end, run_end)
            start = run_end


@dataclass(frozen=True)
class Regex(TextRule):
    """A regular expression, used as it is (it sees `"\\r\\n"`). A match without width ends a step: `(?=Step )`.

    Args:
        pattern (`re.Pattern`): Does not match the empty string.
    """

    pattern: re.Pattern[str]

    def spans(self, text: str) -> Iterator[Span]:
        """The separators of a text, in order."""
        return (Span(match.start(), match.end(), match.end()) for match in self.pattern.finditer(text))


@dataclass(frozen=True)
class Offsets(TextRule):
    """A function `f(text) -> list[int]`: the exclusive end of each step, in characters, ascending."""

    function: Callable[[str], Sequence[int]]
    field: str

    def spans(self, text: str) -> list[Span]:
        """The ends that the function gives, checked.

        Raises:
            `InputError`: Not a list of strictly ascending integers from 1 to the length of the text.
        """
        offsets = self.function(text)
        if not isinstance(offsets, list | tuple):
            raise self._error(f"{type(offsets).__name__} from {self._name()}")
        previous = 0
        for position, offset in enumerate(offsets):
            if isinstance(offset, bool) or not isinstance(offset, Integral):
                raise self._error(f"{offset!r} at position {position} of what {self._name()} returned")
            if not previous < offset <= len(text):
                raise self._error(
                    f"{offset} after {previous} at position {position} of what {self._name()} returned for a text "
                    f"of {len(text)} characters"
                )
            previous = offset
        return [Span(int(offset), int(offset), int(offset)) for offset in offsets]

    def _name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _error(self, got: str) -> InputError:
        return InputError(
            self.field,
            got,
            "a list of strictly ascending integers from 1 to len(text)",
            "Return the exclusive end of each step, in characters of the text it was given.",
        )


@dataclass(frozen=True)
class Interval:
    """A step ends after every `size` tokens of the model, or as soon after as a character is complete.

    Steps of whitespace only are possible here; what trails the last thing to read still opens no step.
    """

    size: int

    def ends(self, completion: Completion) -> list[int]:
        """Last tokens of the steps, the last step's left out."""
        alignment = completion.alignment
        last_visible = len(completion.visible.rstrip())
        written = [token for token in range(len(alignment.lengths)) if completion.is_models(token)]
        cuts = [completion.cut_at_or_after(token) for token in written[self.size - 1 :: self.size]]
        return [alignment.tokens[cut] for cut in cuts if alignment.offsets[cut] < last_visible]


class Turns:
    """One environment turn = one step: the model's tokens and the tool results that follow them.

    A step ends where the tool mask goes from 0 back to 1. Turns are counted by the mask alone, so a turn in which the
    model wrote nothing but EOS is a step. Without a tool mask (nobody called a tool) the completion is one turn.
    """

    def ends(self, completion: Completion) -> list[int]:
        """Last tokens of the steps, the last step's left out."""
        mask = completion.tool_mask or []
        first = mask.index(1) if 1 in mask else len(mask)
        turns = [i for i in range(first, len(mask) - 1) if mask[i] == 0 and mask[i + 1] == 1]
        return [completion.alignment.tokens[completion.cut_at_or_after(token)] for token in turns]
