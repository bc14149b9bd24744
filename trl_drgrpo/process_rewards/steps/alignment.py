"""Reads a completion token by token: what each token adds to the text, and whether a step may end behind it.

Both are decided on the bytes of the tokens read so far, so what the model writes next changes neither. A step may end
behind a token unless the token breaks off inside a character. Bytes that are no character become U+FFFD, as Python's
`errors="replace"` makes them, and the text around them stays.

The bytes of a token are found once per vocabulary entry: the byte that `<0x0A>` stands for, those that GPT-2's table
gives for the token, else its text as decoded behind another token (and as decoded first: there a space may be
dropped). A token whose text depends on its neighbors has none; from the first of these on, text is decoded in windows
that end at the token in question.
"""

import re
from codecs import utf_8_decode
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
CONTEXT = 8  # tokens after which U+FFFD is final: a character has at most four bytes

# GPT-2's table, which byte-level tokens are spelled in: printable bytes are themselves, the others move up from 256.
# Byte 10, a line break, is the eleventh of these: chr(256 + 10), "Ċ".
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class Alignment:
    """The text of a completion, and the places where it can be cut.

    Args:
        text (`str`): The completion with its special tokens: its `decode`, where its bytes are UTF-8.
        lengths (`list[int]` of length `T`): Characters that the tokens up to and including each one complete.
        tokens (`list[int]`): Tokens after which a step may end, ascending; the last one is `T - 1`.
        offsets (`list[int]`): Characters of `text` before each of those cuts, ascending; the last one is `len(text)`.
    """

    text: str
    lengths: list[int]
    tokens: list[int]
    offsets: list[int]


class Aligner:
    """Aligns completions of one tokenizer; keeps the bytes of the vocabulary entries it has met.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any `transformers` tokenizer.

    Example:

    ```python
    >>> from trl_drgrpo.host_proof.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()  # a token is a byte, so "é" is two tokens
    >>> alignment = Aligner(tokenizer).align(tokenizer.encode("aéb"))
    >>> alignment.tokens, alignment.offsets
    ([0, 2, 3], [1, 2, 3])

    ```
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer: Any = tokenizer
        self.special_ids = _special_ids(tokenizer)
        self._bytes = {}  # by token id, see `_bytes_of`
        # The neighbor that other tokens are tried with, and its text as the first token and as a later one.
        self._letter = next((i for i in range(1000) if self.decode([i]).isalnum()), 0)
        self._letter_text = self.decode([self._letter])
        self._letter_behind = self.decode([self._letter] * 2)[len(self._letter_text) :]

    def align(self, ids: list[int]) -> Alignment:
        """Align one completion.

        Args:
            ids (`list[int]` of length `T >= 1`): Completion tokens.

        Returns:
            [`Alignment`]. Ids outside the vocabulary are tokens that add no character.
        """
        for token_id in set(ids) - self._bytes.keys():
            self._bytes[token_id] = self._bytes_of(token_id)
        texts, tokens = self._read(ids)
        lengths = list(accumulate(map(len, texts)))
        return Alignment("".join(texts), lengths, tokens, [lengths[token] for token in tokens])

    def decode(self, ids: list[int]) -> str:
        """Return the text of a completion as the tokenizer has it, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _read(self, ids: list[int]) -> tuple[list[str], list[int]]:
        """Return the text that each token completes, and the tokens after which no character is incomplete."""
        texts = []
        cuts = []
        begun = False  # whether a token before this one held text: the first one may lose its space
        incomplete = b""  # the bytes of a character whose last byte is still to come
        for token, token_id in enumerate(ids):
            token_bytes = self._bytes[token_id]
            if token_bytes is None:
                self._read_windows(ids, texts, cuts)
                break
            raw = incomplete + token_bytes[begun]  # first its bytes as the first token, then those as a later one
            # `final` for the last token only: before it, the bytes of an incomplete character wait.
            text, used = utf_8_decode(raw, "replace", token + 1 == len(ids))
            texts.append(text)
            begun = begun or token_bytes[1] != b""
            incomplete = raw[used:]
            if not incomplete:
                cuts.append(token)
        return texts, cuts

    def _read_windows(self, ids: list[int], texts: list[str], cuts: list[int]) -> None:
        """Read on by comparing decodes: a token's text is what it adds to the decode of the tokens before it."""
        start = 0  # the first token that is not complete
        if cuts:
            start = cuts[-1] + 1
        # A window of a few tokens before it, as the decode of the whole completion would cost T^2.
        begin = max(0, start - CONTEXT)
        for last in range(len(texts), len(ids)):
            before = ""
            if start:
                before = self.decode(ids[begin:start])
            text = self.decode(ids[begin : last + 1])
            if not text.startswith(before):
                # This token changed earlier text: all tokens up to the last one are one step, which has the rest.
                texts += [""] * (len(ids) - last - 1)
                texts.append(self.decode(ids)[len("".join(texts)) :])
                cuts.append(len(ids) - 1)
                return
            # A text that ends in U+FFFD may be a character that the next token completes, for `CONTEXT` tokens.
            added = text[len(before) :]
            is_complete = added and not text.endswith(REPLACEMENT)
            if is_complete or last + 1 == len(ids) or last - start >= CONTEXT:
                texts.append(added)
                cuts.append(last)
                # The next window begins where this character did, so it stays short.
                begin = start
                start = last + 1
            else:
                texts.append("")

    def _bytes_of(self, token_id: int) -> tuple[bytes, bytes] | None:
        """Return a token's bytes as the first token and as a later one; `None` if they depend on its neighbors."""
        token = self.tokenizer.convert_ids_to_tokens([token_id])[0] or ""
        first = self.decode([token_id])
        after_letter = self.decode([self._letter, token_id])
        before_letter = self.decode([token_id, self._letter])
        text = after_letter[len(self._letter_text) :]
        byte = BYTE_TOKEN.fullmatch(token)
        if byte and first != token:  # where it decodes to its own spelling, `<0x0A>` is ordinary text
            raw = bytes([int(byte[1], 16)])
        # WordPiece's decoder makes `don't` of `do` and `not`; that of BPE with suffixes drops a last space.
        elif (
            not after_letter.startswith(self._letter_text)
            or before_letter != first + self._letter_behind
            or (token and not text)
        ):
            return None
        elif REPLACEMENT not in text or REPLACEMENT in token:
            raw = text.encode()
        else:  # part of a character, so its text says nothing: its spelling in GPT-2's table does
            raw = bytes(_BYTES.get(char, 0) for char in token)
            if raw.decode(errors="replace") != text:
                return None
        if REPLACEMENT in first:
            return raw, raw
        return first.encode(), raw


def _special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids that carry no text: all special tokens except the unknown word.

    An unknown word that also begins, ends or pads completions (some tokenizers have one id for all) carries none.
    """
    special = set(tokenizer.all_special_ids)
    # Also those that were added as special and have no role, such as `<|im_start|>`.
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            special.add(token_id)
    unknown = getattr(tokenizer, "unk_token_id", None)
    controls = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return frozenset(special - ({unknown} - controls))
