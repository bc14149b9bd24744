"""The texts that a process reward model reads, and the way from a text to token ids and the places that are read.

Steps come as they were generated: with the separator at their end, special tokens of the policy's tokenizer included
(`<|im_end|>`). A process reward model was trained on neither. And a policy that writes the model's own step marker
into its completion would be scored at places of its choosing: markers are taken out, repeatedly, until none is left.

Two ways to token ids. *Piecewise*: prompt, steps and separators are tokenized one by one and joined, as TRL's former
PRM trainer did. *Whole*: the rendered text is tokenized at once, as the marker formats do, and character places become
token positions by the tokenizer's offsets; looking for the marker's id in the input would find the policy's copies
too.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.rewards.texts import prompt_text as whole_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # a text, or messages

# How the chat formats in use end a turn or a text; the policy's tokenizer need not be the process reward model's.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
)

# Private-use characters that mark places in a text while a chat template is rendered around it; removed afterwards.
PROMPT_START = "\ue000"
PROMPT_END = "\ue001"
STEP = "\ue002"
_MARKS = (PROMPT_START, PROMPT_END, STEP)
_MARK = re.compile("|".join(_MARKS))


def prompt_without_system(prompt: Prompt) -> str:
    r"""Return a prompt as plain text.

    Args:
        prompt (`str` or list of messages): As in the dataset.

    Returns:
        `str`: The text itself, or the texts of all messages but the system's, separated by an empty line.

    Example:

    ```python
    >>> prompt_without_system([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}])
    '1+1='

    ```
    """
    if isinstance(prompt, str):
        return prompt
    return whole_prompt([message for message in prompt if message["role"] != "system"])


def prompt_ids(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", template: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a prompt: a text as it is, messages by the chat template, ready for the answer.

    Args:
        prompt (`str` or list of messages): As in the dataset.
        tokenizer (`PreTrainedTokenizerBase`): Has a chat template, for messages.
        template (`Mapping`, *optional*): More variables for the chat template (`chat_template_kwargs`).

    Raises:
        `InputError`: A prompt without tokens, or a chat template that fails.
    """
    encoded: Any
    if isinstance(prompt, str):
        encoded = tokenizer(prompt)
    else:
        from jinja2 import TemplateError

        rendering = {**(template or {}), "add_generation_prompt": True, "return_dict": True}
        try:
            encoded = tokenizer.apply_chat_template(prompt, **rendering)
        except TemplateError as error:  # jinja's sandbox also refuses a template that reaches for more than messages
            message = str(error).rstrip(".")
            got = f"one that fails with {type(error).__name__}: {message}"
            remedy = "Look at chat_template.jinja."
            raise InputError("chat template", got, "one that renders the prompts", remedy) from error
    ids = list(encoded["input_ids"])
    # A model can go on from a token, not from nothing.
    if not ids:
        remedy = "Check the prompt, the tokenizer and its chat template."
        raise InputError("prompt", f"no tokens of {shortened(prompt)}", "at least one token", remedy)
    return ids


def completion_like(prompt: Prompt, text: str) -> Any:
    """Return a completion in the form of its prompt (or of another completion): text, or one assistant message."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


class Cleaner:
    """Takes tokens out of steps and prompts.

    Args:
        special_tokens (`Iterable[str]`, *optional*): Removed from steps wherever they occur, as `END_TOKENS` are.
        marker (`str`, *optional*): The model's step marker, removed from prompts and steps. A marker made of letters
            (`ки`) is removed where it stands alone only: it is a part of ordinary words too. Of one made of line
            breaks, every run of as many or more is removed, whatever white space is between them.
    """

    def __init__(self, special_tokens: Iterable[str] = (), marker: str | None = None):
        patterns = [*_MARKS]
        if marker is not None:
            patterns.append(_pattern(marker))
        # A prompt may hold special tokens: it comes from the dataset, not from the policy.
        self._from_prompts = re.compile("|".join(patterns))
        tokens = {*special_tokens, *END_TOKENS} - {""}
        # A regex takes the first alternative that matches: a token must not lose its beginning to a shorter one.
        longest_first = sorted(tokens, key=len, reverse=True)
        patterns += map(re.escape, longest_first)
        self._from_steps = re.compile("|".join(patterns))

    def step(self, text: str) -> str:
        r"""Return the step without special tokens, empty lines before it and white space after it; may be empty.

        Example:

        ```python
        >>> Cleaner().step("  so 3+8=11.\n\n<|im_end|>")
        '  so 3+8=11.'

        ```
        """
        return _remove(self._from_steps, text).lstrip("\r\n").rstrip()

    def bare(self, text: str) -> str:
        """Return the text without special tokens, as decoded with `skip_special_tokens`; white space stays."""
        return _remove(self._from_steps, text)

    def prompt(self, text: str) -> str:
        """Return the prompt without markers."""
        return _remove(self._from_prompts, text)


def _pattern(marker: str) -> str:
    """Return the regex that finds a step marker in prompts and steps, see [`Cleaner`]."""
    if marker.isalnum():
        return rf"(?<!\w){re.escape(marker)}(?!\w)"
    if marker.isspace():
        blank = r"[^\S\n]*"  # white space but line breaks
        line_breaks = marker.count("\n")
        return rf"{blank}(?:\n{blank}){{{line_breaks},}}"
    return re.escape(marker)


def _remove(pattern: re.Pattern[str], text: str) -> str:
    """Remove all matches, also those that arise only when another one is taken out: of `<ex<extra_0>tra_0>`, both."""
    shorter = pattern.sub("", text)
    while shorter != text:
        text = shorter
        shorter = pattern.sub("", text)
    return text


def take_out_marks(text: str) -> tuple[str, dict[str, list[int]]]:
    r"""Return the text without marks, and where they were.

    Args:
        text (`str`): A text with `PROMPT_START`, `PROMPT_END` and `STEP` in it.

    Returns:
        `tuple[str, dict[str, list[int]]]`: For each mark the indices, in the text returned, of the characters that
        followed it.

    Example:

    ```python
    >>> text, places = take_out_marks(f"{PROMPT_START}1+1{PROMPT_END}: {STEP}2")
    >>> text, places[PROMPT_END], places[STEP]
    ('1+1: 2', [3], [5])

    ```
    """
    places: dict[str, list[int]] = {mark: [] for mark in _MARKS}
    # Each mark before it is one character, and is taken out.
    for marks_before, match in enumerate(_MARK.finditer(text)):
        places[match[0]].append(match.start() - marks_before)
    return _MARK.sub("", text), places


def texts_of(steps: Sequence[str], cleaner: Cleaner) -> tuple[list[str], list[int]]:
    """Return the cleaned steps in which something is left to read, and their indices among all steps."""
    texts = []
    indices = []
    for index, text in enumerate(map(cleaner.step, steps)):
        if text:
            texts.append(text)
            indices.append(index)
    return texts, indices


def unread(count: int, indices: Sequence[int]) -> list[float | None]:
    """Return rewards of `count` steps before those at `indices`, which hold text, are scored.

    They are 0 before the first text, where nothing was written yet, and `None` from there on. No later text changes
    that, so these rewards are causal.
    """
    first = count
    if indices:
        first = indices[0]
    return [0.0] * first + [None] * (count - first)


@dataclass(frozen=True)
class ScoringInput:
    """One row for a process reward model.

    Args:
        input_ids (`list[int]`): The tokens.
        positions (`list[int | None]`): For each step the index of the token whose logits are read; `None` where the
            format could not be met.
        cut (`tuple[int, int]`): First and one past the last token of the prompt: what may be cut, from its left.
    """

    input_ids: list[int]
    positions: list[int | None]
    cut: tuple[int, int]

    @property
    def read(self) -> list[int]:
        """Positions that are read."""
        return [position for position in self.positions if position is not None]

    def fit(self, max_length: int) -> "ScoringInput | None":
        """Cut tokens off the prompt's left until the row fits; `None` if the rest alone is too long."""
        excess = max(0, len(self.input_ids) - max_length)
        start, end = self.cut
        if excess > end - start:
            return None
        return self._without(excess, range(len(self.positions)))

    def parts(self, max_length: int) -> list["ScoringInput"]:
        """Return the row in parts of at most `max_length` tokens, each with the positions that are read in it.

        Each step is read with the text before it. Where that is too long, the prompt loses tokens on its left, an
        eighth of `max_length` at a time; a step that is too long without any prompt is in no part. So nothing behind a
        step decides what is read of the text before it.
        """
        if len(self.input_ids) <= max_length:
            return [self]
        start, end = self.cut
        # Steps whose prompt loses about as many tokens share a part, and so a forward pass.
        stride = max(1, max_length // 8)
        steps_of = defaultdict(list)  # by tokens that the prompt loses
        for step, position in enumerate(self.positions):
            if position is None:
                continue
            # Rounded up to a multiple of the stride, but no more than the prompt has.
            excess = max(0, position + 1 - max_length)
            lost = min(math.ceil(excess / stride) * stride, end - start)
            if excess <= lost:
                steps_of[lost].append(step)
        parts = []
        for lost, steps in steps_of.items():
            part = self._without(lost, steps)
            # Later text does not fit; it is read in another part, or nowhere.
            parts.append(replace(part, input_ids=part.input_ids[:max_length]))
        return parts

    def _without(self, lost: int, steps: Collection[int]) -> "ScoringInput":
        """Return the row without `lost` tokens on the prompt's left, in which only some steps are read."""
        start, end = self.cut
        positions: list[int | None] = [None] * len(self.positions)
        for step in steps:
            position = self.positions[step]
            if position is not None:
                positions[step] = position - lost
        input_ids = self.input_ids[:start] + self.input_ids[start + lost :]
        return ScoringInput(input_ids, positions, (start, end - lost))


def encode_piecewise(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    steps: Sequence[str],
    separator: str,
) -> ScoringInput:
    """Join prompt and steps as TRL's former PRM trainer did; each step is read at its last token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the process reward model.
        prompt (`str`): The prompt as text.
        steps (`Sequence[str]`): Texts without separator, none empty.
        separator (`str`): Follows every step, the last included; may be empty.

    Returns:
        [`ScoringInput`]: `[bos] prompt step separator step separator ...`.
    """
    input_ids = []
    if tokenizer.bos_token_id is not None:
        input_ids.append(tokenizer.bos_token_id)
    start = len(input_ids)
    input_ids += _ids(tokenizer, prompt)
    end = len(input_ids)
    separator_ids = _ids(tokenizer, separator)
    positions = []
    for step in steps:
        input_ids += _ids(tokenizer, step) + separator_ids
        positions.append(len(input_ids) - 1)
    return ScoringInput(input_ids, positions, (start, end))


def encode_marked(
    tokenizer: "PreTrainedTokenizerBase",
    marked_text: str,
    marks: int,
    special_tokens: bool,
    token_id: int | None = None,
    shift: int = 0,
) -> ScoringInput:
    """Tokenize a rendered text at once.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A fast one (with offsets).
        marked_text (`str`): The text, with `PROMPT_START` and `PROMPT_END` around the prompt and `STEP` before the
            character at which each step is read, or else behind the last character of each step.
        marks (`int`): How many `STEP` there were before a chat template was rendered. Where one got lost (some cut
            reasoning out of an answer), no step can be scored.
        special_tokens (`bool`): Whether the tokenizer adds its own; not for a text that a chat template made.
        token_id (`int`, *optional*): The token that must be behind each mark; a step where another one is cannot be
            scored. `None`: a step is read at the last token that begins before its mark. A token that holds
            characters from both sides belongs to what is before.
        shift (`int`, *optional*, defaults to 0): Added to that token's index: -1 reads the logits that predict it.

    Returns:
        [`ScoringInput`]: One position per mark.
    """
    text, places = take_out_marks(marked_text)
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True)
    input_ids = list(encoded["input_ids"])
    offsets = encoded["offset_mapping"]
    if not places[PROMPT_START] or not places[PROMPT_END]:
        remedy = "Use the tokenizer and the chat template that the model was trained with."
        raise InputError("tokenizer", "a chat template that leaves the prompt out", "one that includes it", remedy)
    first = places[PROMPT_START][0]
    last = places[PROMPT_END][-1]
    # Tokens that lie in the prompt as a whole; one that holds characters from both sides is not cut.
    cut = (0, 0)
    prompt_tokens = [token for token, (start, end) in enumerate(offsets) if first <= start < end <= last]
    if prompt_tokens:
        cut = (prompt_tokens[0], prompt_tokens[-1] + 1)
    positions: list[int | None] = [None] * marks
    if len(places[STEP]) != marks:
        return ScoringInput(input_ids, positions, cut)
    if token_id is not None:
        # A special token that the tokenizer added has the offsets (0, 0), so the ends do not ascend by themselves.
        ends = list(accumulate((end for _, end in offsets), max))
        for step, place in enumerate(places[STEP]):
            # The first token that ends behind the mark is the one that holds the character there.
            token = bisect_right(ends, place)
            if input_ids[token : token + 1] == [token_id] and token + shift >= 0:
                positions[step] = token + shift
    else:
        with_text = [token for token, (start, end) in enumerate(offsets) if start < end]
        starts = [offsets[token][0] for token in with_text]
        # How many tokens begin before each mark.
        counts = [bisect_left(starts, place) for place in places[STEP]]
        if 0 not in counts:  # else nothing is before the first mark
            positions = [with_text[count - 1] for count in counts]
    return ScoringInput(input_ids, positions, cut)


def single_token_id(tokenizer: "PreTrainedTokenizerBase", text: str) -> int | None:
    """Return the id of a text that is one token of the vocabulary, else `None`."""
    ids = _ids(tokenizer, text)
    # A marker that the vocabulary lacks may come out as the one unknown token.
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        return None
    return ids[0]


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
