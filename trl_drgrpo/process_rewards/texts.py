"""The texts that a process reward model reads: prompts as text, steps without what does not belong into them.

Steps come as they were generated: with the separator at their end, special tokens of the policy's tokenizer included
(`<|im_end|>`). A process reward model was trained on neither. And a policy that writes the model's own step marker
into its completion would be scored at places of its choosing: markers are taken out, repeatedly, until none is left.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
PROMPT_START, PROMPT_END, STEP = "\ue000", "\ue001", "\ue002"
_MARKS = (PROMPT_START, PROMPT_END, STEP)


def prompt_text(prompt: Any) -> str:
    r"""A prompt as plain text.

    Args:
        prompt (`str` or list of messages): As in the dataset.

    Returns:
        `str`: The text itself, or the texts of all messages but the system's, separated by an empty line.

    Example:

    ```python
    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}])
    '1+1='

    ```
    """
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message_text(message) for message in prompt if message["role"] != "system")


def prompt_ids(prompt: Any, tokenizer: Any, template: Mapping[str, Any] | None = None) -> list[int]:
    """The token ids of a prompt: a text as the tokenizer encodes it, messages by its chat template, ready for the
    assistant's turn. `template`: more that the chat template is given (`chat_template_kwargs`)."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    rendering = {**(template or {}), "add_generation_prompt": True, "return_dict": True}
    return list(tokenizer.apply_chat_template(prompt, **rendering)["input_ids"])


def message_text(message: dict[str, Any]) -> str:
    """The text of a message; of its text parts, where the content is a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


class Cleaner:
    """Takes tokens out of steps and prompts.

    Args:
        special_tokens (`Iterable[str]`): Removed from steps wherever they occur.
        marker (`str`, *optional*): The model's step marker, removed from prompts and steps. A marker made of letters
            (`ки`) is removed where it stands alone only: it is a part of ordinary words too. Of one made of line
            breaks, every run of as many or more is removed, whatever white space is between them.
    """

    def __init__(self, special_tokens: Iterable[str], marker: str | None = None):
        marks = [re.escape(mark) for mark in _MARKS]
        if marker is not None:
            marks.append(_pattern(marker))
        longest_first = sorted({token for token in special_tokens if token}, key=len, reverse=True)
        self._from_prompts = re.compile("|".join(marks))
        self._from_steps = re.compile("|".join([*marks, *map(re.escape, longest_first)]))

    def step(self, text: str) -> str:
        r"""The step without special tokens, empty lines before it and white space after it; may be empty.

        Example:

        ```python
        >>> Cleaner(["<|im_end|>"]).step("  so 3+8=11.\n\n<|im_end|>")
        '  so 3+8=11.'

        ```
        """
        return _remove(self._from_steps, text).lstrip("\r\n").rstrip()

    def bare(self, text: str) -> str:
        """The text without special tokens, as a tokenizer decodes it that skips them; white space stays."""
        return _remove(self._from_steps, text)

    def prompt(self, text: str) -> str:
        """The prompt without markers."""
        return _remove(self._from_prompts, text)


def _pattern(marker: str) -> str:
    if marker.isalnum():
        return rf"(?<!\w){re.escape(marker)}(?!\w)"
    if marker.isspace():
        return rf"[^\S\n]*(?:\n[^\S\n]*){{{marker.count(chr(10))},}}"
    return re.escape(marker)


def _remove(pattern: re.Pattern[str], text: str) -> str:
    """Without any match, even those that only arise when another one is taken out."""
    while (shorter := pattern.sub("", text)) != text:
        text = shorter
    return text


def take_out_marks(text: str) -> tuple[str, dict[str, list[int]]]:
    r"""The text without marks, and where they were.

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
    pieces: list[str] = []
    places: dict[str, list[int]] = {mark: [] for mark in _MARKS}
    length = 0
    for piece in re.split(f"([{''.join(_MARKS)}])", text):
        if piece in places:
            places[piece].append(length)
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), places


def split_into_steps(text: str, separator: str) -> list[str]:
    r"""Split a text behind every occurrence of the separator; joining the steps gives the text back.

    Example:

    ```python
    >>> split_into_steps("a\nb\n", "\n")
    ['a\n', 'b\n']

    ```
    """
    pieces = text.split(separator)
    steps = [piece + separator for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
    return steps


def texts_of(steps: Sequence[str], cleaner: Cleaner) -> tuple[list[str], list[int]]:
    """The cleaned steps in which something is left to read, and their indices among all steps."""
    cleaned = [(index, text) for index, step in enumerate(steps) if (text := cleaner.step(step))]
    return [text for _, text in cleaned], [index for index, _ in cleaned]
