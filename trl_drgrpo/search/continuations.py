"""Requests to a model and its replies: continuations of a prefix, one step or to the end.

A continuation of one step ends where the step rule says so, at an end token, or at its limit. The rule is asked with
the step's own tokens and one more behind them, after every token: with a separator nothing is sampled beyond the end.
A rule that looks ahead (`re:\\n(?=Step)`) shows its end later; the tokens behind it are counted and cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.alignment import REPLACEMENT
from trl_drgrpo.process_rewards.steps.rules import Separators

End = Literal["step", "stop", "length"]


@dataclass(frozen=True)
class Request:
    """Continuations of one prefix.

    Args:
        prefix (`tuple[int, ...]`): Prompt and completion so far.
        count (`int`): How many.
        limit (`int`): Most tokens of each.
        to_end (`bool`): To the end of the completion, in place of one step.
        seed (`int`): Of the sampling.
    """

    prefix: tuple[int, ...]
    count: int
    limit: int
    to_end: bool
    seed: int


@dataclass(frozen=True)
class Continuation:
    """Tokens that the model wrote behind a prefix.

    Args:
        token_ids (`tuple[int, ...]`): At least one; an end token included.
        sampled (`int`): Tokens that were sampled for it: more, where the rule showed the step's end later.
        end (`str`): `"step"`, `"stop"` (end token) or `"length"` (limit).
    """

    token_ids: tuple[int, ...]
    sampled: int
    end: End


class Sampler(Protocol):
    """Samples the continuations of several prefixes: for each request a list of `count`."""

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]: ...


class StepEnd:
    """Finds the end of a continuation's first step.

    Args:
        segmenter ([`StepSegmenter`]): The rule.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
    """

    def __init__(self, segmenter: StepSegmenter, tokenizer: Any):
        self.segmenter, self.tokenizer = segmenter, tokenizer
        lasts = {each[-1] for each in segmenter.rule.separators} if isinstance(segmenter.rule, Separators) else set()
        # Of a single token decoders drop a space: a separator that ends in one is looked for behind every token.
        self._closing = lasts | {REPLACEMENT} if lasts and " " not in lasts else None
        self._can_close: dict[int, bool] = {}
        self._letter = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]).isalnum())

    def _may_close(self, token: int) -> bool:
        """Whether a separator may be complete with this token: without its last character it is not."""
        if self._closing is None:
            return True
        if token not in self._can_close:
            self._can_close[token] = any(char in self.tokenizer.decode([token]) for char in self._closing)
        return self._can_close[token]

    def __call__(self, token_ids: Sequence[int], new: int = 1) -> int | None:
        """Number of tokens in the first step; None while it is not complete.

        Args:
            token_ids (`Sequence[int]`): The step's tokens so far, and maybe some behind its end.
            new (`int`, *optional*, defaults to `1`): How many of them were not there at the call before.
        """
        ids = list(token_ids)
        if not any(map(self._may_close, ids[-new:])):
            return None
        # One more token: the last step is never complete. A rule that looks ahead gets something that was written.
        following = self._letter if self.segmenter.rule.by_prefix else ids[0]
        end = self.segmenter([*ids, following], self.tokenizer).ends[0] + 1
        return end if end <= len(ids) else None
