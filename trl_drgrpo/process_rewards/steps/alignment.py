"""Maps characters of the decoded completion to tokens, for any tokenizer that can decode.

Offsets of an encoding do not exist here: the tokens were sampled, and encoding their text again may give others. So
the question is answered by decoding. The definition: a step may end after token i when `decode(ids[:i + 1])` is a
beginning of `decode(ids)`; inside a character that is spread over several tokens it is not (it ends in U+FFFD there).
Taken literally that costs O(T^2); instead

- most tokens decode to the same text wherever they stand: that text is looked up once per vocabulary entry, and every
  use of it is compared with the decoded completion;
- byte-fallback tokens (`<0x0A>`) are put together as bytes, a run at a time, as SentencePiece-style decoders do;
- the others (parts of a character, decoders that look at their neighbors) are decoded in a window of at most
  `2 * CONTEXT` tokens.

Where the text of a tokenizer cannot be followed like this, no step may end: the rest of that completion is one step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
CONTEXT = 8  # tokens before a token that its text may depend on; a character has at most four bytes

# what a token adds: its text wherever it stands, the byte it stands for, or None when that depends on its neighbors
Piece: TypeAlias = str | int | None


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer, slow or fast, that is used here."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any) -> Any: ...

    @property
    def all_special_ids(self) -> list[int]: ...


@dataclass(frozen=True)
class Alignment:
    """The decoded completion, and the places where it can be cut.

    Args:
        text (`str`): The completion, decoded with its special tokens.
        lengths (`list[int]` of length `T`): Characters decoded from the tokens up to and including each token.
        tokens (`list[int]`): Tokens after which a step may end, ascending; the last one is `T - 1`.
        offsets (`list[int]`): Characters of `text` before each of those cuts, ascending; the last one is `len(text)`.
    """

    text: str
    lengths: list[int]
    tokens: list[int]
    offsets: list[int]


class Aligner:
    """Aligns completions of one tokenizer; keeps the texts of the vocabulary entries it has met.

    Args:
        tokenizer ([`Tokenizer`]): Any `transformers` tokenizer.

    Example:

    ```python
    >>> from trl_drgrpo.labs.check.tiny import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()  # a token is a byte, so "é" is two tokens
    >>> alignment = Aligner(tokenizer).align(tokenizer.encode("aéb"))
    >>> alignment.tokens, alignment.offsets
    ([0, 2, 3], [1, 2, 3])

    ```
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special_ids = _special_ids(tokenizer)
        self._pieces: dict[int, Piece] = {}

    def align(self, ids: list[int]) -> Alignment:
        """Align one completion. At most `O(T)` tokens are decoded, in windows of bounded size.

        Args:
            ids (`list[int]` of length `T >= 1`): Completion tokens.

        Returns:
            [`Alignment`]. Ids outside the vocabulary are tokens that add no character.
        """
        text = self.decode(ids)
        walk = _Walk(text, len(ids))
        self._walk(ids, walk)
        walk.mark(len(ids) - 1, len(text), True)
        tokens, offsets = walk.cuts()
        return Alignment(text, walk.lengths, tokens, offsets)

    def decode(self, ids: list[int]) -> str:
        """The text of a completion, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _walk(self, ids: list[int], walk: "_Walk") -> None:
        """Mark every token of a completion, from the first to the last."""
        for token_id in set(ids) - self._pieces.keys():
            self._pieces[token_id] = self._piece(token_id)
        pieces = [self._pieces[token_id] for token_id in ids]
        start = self._opening(ids, pieces, walk)
        while (start := walk.follow(pieces, start)) < len(ids):
            stop = start + 1
            while stop < len(ids) and type(pieces[stop]) is type(pieces[start]):
                stop += 1
            if pieces[start] is None:
                self._slide(ids, walk, start, stop)
            elif not walk.follow_bytes([piece for piece in pieces[start:stop] if isinstance(piece, int)], start):
                self._slide(ids, walk, start, len(ids))
                if walk.lengths[-1] != len(walk.text):
                    walk.clean[start:] = [False] * (len(ids) - start)
                return
            start = stop

    def _opening(self, ids: list[int], pieces: list[Piece], walk: "_Walk") -> int:
        """Mark the first tokens, which decoders treat on their own (a leading space is dropped); returns how many."""
        for i, piece in enumerate(pieces[:CONTEXT]):
            if not isinstance(piece, str):
                return i
            opening = self.decode(ids[: i + 1]) if piece else ""
            if not walk.text.startswith(opening):
                return i
            walk.mark(i, len(opening), True)
            if opening:
                return i + 1
        return min(len(ids), CONTEXT)

    def _slide(self, ids: list[int], walk: "_Walk", start: int, stop: int) -> None:
        """Mark tokens by what each adds to the decode of a window before it."""
        begin = max(0, start - CONTEXT)
        before = len(self.decode(ids[begin:start])) if begin < start else 0
        length = walk.lengths[start - 1] if start else 0
        for i in range(start, stop):
            if i - begin >= 2 * CONTEXT:
                begin = i - CONTEXT
                before = len(self.decode(ids[begin:i]))
            window = self.decode(ids[begin : i + 1])
            length += len(window) - before
            before = len(window)
            # part of a character decodes to U+FFFD, where the completion has the character
            walk.mark(i, length, 0 < length <= len(walk.text) and window[-1:] == walk.text[length - 1])

    def _piece(self, token_id: int) -> Piece:
        once = self.decode([token_id])
        token = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        byte = BYTE_TOKEN.fullmatch(token or "")
        if byte and once != token:
            return int(byte[1], 16)
        twice = self.decode([token_id, token_id])  # the second is not at the start, where a space would be dropped
        piece = twice[len(once) :]
        if not twice.startswith(once) or REPLACEMENT in piece or (token and not piece):
            return None
        return piece


class _Walk:
    """Position in a completion: characters decoded so far, and whether the last one is whole."""

    def __init__(self, text: str, tokens: int):
        self.text = text
        self.lengths = [0] * tokens
        self.clean = [False] * tokens

    def mark(self, token: int, length: int, clean: bool) -> None:
        self.lengths[token] = length
        self.clean[token] = clean

    def cuts(self) -> tuple[list[int], list[int]]:
        """Tokens after which a step may end and the characters before these cuts, both ascending.

        Of several tokens with the same characters before them the first counts: decoders that leave out an incomplete
        character show no character for its first bytes. After U+FFFD the last counts: that may be one of three bytes.
        """
        tokens: list[int] = []
        offsets: list[int] = []
        last = len(self.lengths) - 1
        reached = 0
        for token, (length, clean) in enumerate(zip(self.lengths, self.clean, strict=True)):
            if clean and length > reached:
                tokens.append(token)
                offsets.append(length)
                reached = length
            elif clean and tokens and length == reached and (token == last or self.text[length - 1] == REPLACEMENT):
                tokens[-1] = token
        return (tokens, offsets) if tokens else ([last], [0])

    def follow(self, pieces: list[Piece], start: int) -> int:
        """Mark tokens from `start` on while they have a text of their own and the completion has it there.

        Returns:
            `int`: The first token that was not marked.
        """
        text, position = self.text, self.lengths[start - 1] if start else 0
        for token in range(start, len(pieces)):
            piece = pieces[token]
            if not isinstance(piece, str) or not text.startswith(piece, position):
                return token
            position += len(piece)
            self.lengths[token] = position
            self.clean[token] = True
        return len(pieces)

    def follow_bytes(self, values: list[int], start: int) -> bool:
        """Mark a run of byte tokens: characters when all of it is UTF-8, else one U+FFFD per byte.

        Returns:
            `bool`: False, and nothing marked, when the completion has another text there or these are no byte tokens.
        """
        position = self.lengths[start - 1] if start else 0
        raw = bytes(values)
        try:
            decoded = raw.decode("utf-8")
            sizes: Sequence[int] = [len(char.encode("utf-8")) for char in decoded]
        except UnicodeDecodeError:
            decoded = REPLACEMENT * len(raw)
            sizes = [1] * len(raw)
        if not raw or not self.text.startswith(decoded, position):
            return False
        for size in sizes:
            for token in range(start, start + size - 1):
                self.mark(token, position, False)
            start, position = start + size, position + 1
            self.mark(start - 1, position, True)
        return True


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that carry no text: every special token but the unknown word, unless that one ends completions too."""
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    unknown = getattr(tokenizer, "unk_token_id", None)
    controls = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return frozenset(special - ({unknown} - controls))
