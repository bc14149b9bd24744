"""From a text with marks to token ids, the positions that are read off, and the part that may be cut.

Two ways. *Piecewise*: prompt, steps and separators are tokenized one by one and joined, as TRL's former PRM trainer
did. *Whole*: the rendered text is tokenized at once, as the marker formats do, and character places become token
positions by the tokenizer's offsets; looking for the marker's id in the input would find the policy's copies too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.texts import PROMPT_END, PROMPT_START, STEP, take_out_marks


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

    def fit(self, max_length: int) -> "ScoringInput | None":
        """Cut tokens off the prompt's left until the row fits; `None` if the rest alone is too long."""
        excess = len(self.input_ids) - max_length
        start, end = self.cut
        if excess <= 0:
            return self
        if excess > end - start:
            return None
        input_ids = self.input_ids[:start] + self.input_ids[start + excess :]
        positions = [None if position is None else position - excess for position in self.positions]
        return ScoringInput(input_ids, positions, (start, end - excess))


def encode_piecewise(tokenizer: Any, prompt: str, steps: Sequence[str], separator: str) -> ScoringInput:
    """Prompt and steps as TRL's former PRM trainer joins them; each step is read at its last token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the process reward model.
        prompt (`str`): The prompt as text.
        steps (`Sequence[str]`): Texts without separator, none empty.
        separator (`str`): Follows every step, the last included; may be empty.

    Returns:
        [`ScoringInput`]: `[bos] prompt step separator step separator ...`.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt_ids = _ids(tokenizer, prompt)
    separator_ids = _ids(tokenizer, separator)
    input_ids = start + prompt_ids
    positions: list[int | None] = []
    for step in steps:
        input_ids = input_ids + _ids(tokenizer, step) + separator_ids
        positions.append(len(input_ids) - 1)
    return ScoringInput(input_ids, positions, (len(start), len(start) + len(prompt_ids)))


def encode_whole(
    tokenizer: Any, marked_text: str, marks: int, token_id: int, shift: int, special_tokens: bool
) -> ScoringInput:
    """Tokenize a rendered text at once.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A fast one (with offsets).
        marked_text (`str`): The text, with `PROMPT_START` and `PROMPT_END` around the prompt and `STEP` before the
            character at which each step is read.
        marks (`int`): How many `STEP` there were before a chat template was rendered. Where one got lost (some cut
            reasoning out of an answer), no step can be scored.
        token_id (`int`): The token that must be there; a step where another one is cannot be scored.
        shift (`int`): Added to that token's index: -1 reads the logits that predict it.
        special_tokens (`bool`): Whether the tokenizer adds its own; not for a text that a chat template made.

    Returns:
        [`ScoringInput`].
    """
    input_ids, offsets, places, cut = _tokenized(tokenizer, marked_text, special_tokens)
    if len(places) != marks:
        return ScoringInput(input_ids, [None] * marks, cut)
    positions: list[int | None] = []
    token = 0
    for place in places:
        while token < len(offsets) and offsets[token][1] <= place:
            token += 1
        found = token < len(offsets) and input_ids[token] == token_id and token + shift >= 0
        positions.append(token + shift if found else None)
    return ScoringInput(input_ids, positions, cut)


def encode_boundaries(tokenizer: Any, marked_text: str, marks: int, special_tokens: bool) -> ScoringInput:
    """Tokenize a rendered text at once; a position is the last token that begins before its mark.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): A fast one (with offsets).
        marked_text (`str`): The text, with `PROMPT_START` and `PROMPT_END` around the prompt and `STEP` behind the
            last character of each step. A token that holds characters from both sides belongs to what is before.
        marks (`int`): As in [`encode_whole`].
        special_tokens (`bool`): Whether the tokenizer adds its own; not for a text that a chat template made.

    Returns:
        [`ScoringInput`]: One position per mark; all `None` where one is lost, or no token is before the first.
    """
    input_ids, offsets, places, cut = _tokenized(tokenizer, marked_text, special_tokens)
    before = [sum(start < place for start, end in offsets if start < end) for place in places]
    if len(places) != marks or 0 in before:
        return ScoringInput(input_ids, [None] * marks, cut)
    with_text = [i for i, (start, end) in enumerate(offsets) if start < end]
    return ScoringInput(input_ids, [with_text[count - 1] for count in before], cut)


def _tokenized(
    tokenizer: Any, marked_text: str, special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]], list[int], tuple[int, int]]:
    """Token ids and their offsets, the places of `STEP`, and the tokens of the prompt: first and one past the last."""
    text, places = take_out_marks(marked_text)
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True)
    input_ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if not places[PROMPT_START] or not places[PROMPT_END]:
        remedy = "Use the tokenizer and the chat template that the model was trained with."
        raise InputError("tokenizer", "a chat template that leaves the prompt out", "one that includes it", remedy)
    first, last = places[PROMPT_START][0], places[PROMPT_END][-1]
    prompt = [i for i, (start, end) in enumerate(offsets) if first <= start < end <= last]
    return input_ids, offsets, places[STEP], (prompt[0], prompt[-1] + 1) if prompt else (0, 0)


def single_token_id(tokenizer: Any, text: str) -> int | None:
    """The id of a text that is one token of the vocabulary, else `None`."""
    ids = _ids(tokenizer, text)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
