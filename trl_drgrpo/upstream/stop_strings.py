"""Texts that end a completion: where a row ends, and how TRL comes to know that it has.

transformers stops a row with the token that completes a stop string, and pads it behind: TRL, which looks for an end
token, would take the padding for text. vLLM stops there, too. Both rows count as cut off by the length limit, since
their last token is no end token. So rows are cut here, and their last token is marked.
"""

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from trl_drgrpo.process_rewards.steps.alignment import Aligner

_PROMPT_TOKENS = 32  # before a completion: a stop string may begin in the prompt


class EndToken(int):
    """A last token that ends its row by the text it completes: an id that also equals the ids of end tokens.

    TRL asks `ids[-1] not in [end tokens]`, in the metrics and for `mask_truncated_completions`. There is no other
    place to tell it. A copy in another process is a plain number.
    """

    ends: frozenset[int]

    def __new__(cls, token_id: int, ends: Sequence[int]) -> "EndToken":
        marked = super().__new__(cls, token_id)
        marked.ends = frozenset(ends)
        return marked

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other) is True or other in self.ends  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


class StopStrings:
    """Cuts completions behind the first stop string.

    Args:
        strings (`Sequence[str]`): The texts.
        tokenizer (`PreTrainedTokenizerBase`): The policy's.
        ends (`Sequence[int]`): End tokens.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]):
        self.strings = strings
        self.ends = ends
        self.tokenizer = tokenizer
        self._aligner = Aligner(tokenizer)

    @cached_property
    def criteria(self) -> StoppingCriteriaList:
        """The criterion by which transformers stops a row."""
        return StoppingCriteriaList([StopStringCriteria(self.tokenizer, list(self.strings))])

    def cut(self, prompt_ids: Sequence[int], completion_ids: list[int]) -> list[int]:
        """Return the tokens up to the one that completes a stop string, which is marked; all where there is none."""
        if not completion_ids:
            return completion_ids
        before = list(prompt_ids[-_PROMPT_TOKENS:])
        alignment = self._aligner.align([*before, *completion_ids])
        written = alignment.lengths[len(before) - 1] if before else 0  # characters of the prompt
        string_ends = []
        for string in self.strings:
            # A string may begin in the prompt, but its last character is the model's.
            start = alignment.text.find(string, max(0, written - len(string) + 1))
            if start >= 0:
                string_ends.append(start + len(string))
        if not string_ends:
            return completion_ids
        end = min(string_ends)
        # `lengths` are characters of the text up to each token, so tokens that end before `end` all stay.
        last = sum(length < end for length in alignment.lengths[len(before) :])
        return [*completion_ids[:last], EndToken(completion_ids[last], self.ends)]
