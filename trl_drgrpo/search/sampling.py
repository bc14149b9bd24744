"""Samples continuations over token ids, one step or to the end, from a model in memory.

A continuation of one step ends where the step rule says so, at an end token, or at its limit. The rule is asked with
the step's own tokens and one more behind them, after every token: with a separator nothing is sampled beyond the end.
A rule that looks ahead (`re:\\n(?=Step)`) shows its end later; what was sampled behind it is counted and cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from trl_drgrpo.process_rewards.rollouts import continued
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
    """What the model wrote behind a prefix.

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
    """Where the first step of a continuation ends.

    Args:
        segmenter ([`StepSegmenter`]): The rule.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
    """

    def __init__(self, segmenter: StepSegmenter, tokenizer: Any):
        self.segmenter, self.tokenizer = segmenter, tokenizer
        lasts = {each[-1] for each in segmenter.rule.separators} if isinstance(segmenter.rule, Separators) else set()
        # Of a single token decoders drop a space: a separator that ends in one is looked for behind every token.
        self._closing = lasts | {"\r", REPLACEMENT} if lasts and " " not in lasts else None
        self._can_close: dict[int, bool] = {}

    def _may_close(self, token: int) -> bool:
        """Whether a separator may be complete with this token: without its last character it is not."""
        if self._closing is None:
            return True
        if token not in self._can_close:
            self._can_close[token] = any(char in self.tokenizer.decode([token]) for char in self._closing)
        return self._can_close[token]

    def __call__(self, token_ids: Sequence[int], new: int = 1) -> int | None:
        """How many of the tokens the first step has; None while it is not complete.

        Args:
            token_ids (`Sequence[int]`): The step's tokens so far, and maybe some behind its end.
            new (`int`, *optional*, defaults to `1`): How many of them were not there at the call before.
        """
        ids = list(token_ids)
        if not any(map(self._may_close, ids[-new:])):
            return None
        end = self.segmenter([*ids, ids[0]], self.tokenizer).ends[0] + 1  # one more: the last step is never complete
        return end if end <= len(ids) else None


class TransformersSampler:
    """Samples from a model in memory; the same requests and batch size give the same continuations.

    Args:
        model (`PreTrainedModel`): A causal language model; put into evaluation mode for the call and back after it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        segmenter ([`StepSegmenter`]): Says where steps end.
        temperature (`float`, *optional*, defaults to `1.0`): Of the sampling.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus of the sampling.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per call of `model.generate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        segmenter: StepSegmenter,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int = 32,
    ):
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.step_end = StepEnd(segmenter, tokenizer)
        self.decoding = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        self.eos = end_tokens(model, tokenizer)

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Sample, seeded by the first request."""
        jobs = [i for i, request in enumerate(requests) for _ in range(request.count)]
        jobs.sort(key=lambda i: len(requests[i].prefix))  # rows of like length share a batch; stable
        found: list[list[Continuation]] = [[] for _ in requests]
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(requests[0].seed)
                for start in range(0, len(jobs), self.batch_size):
                    batch = jobs[start : start + self.batch_size]
                    for i, each in zip(batch, self._continue([requests[i] for i in batch]), strict=True):
                        found[i].append(each)
        finally:
            self.model.train(was_training)
        return found

    def _continue(self, rows: Sequence[Request]) -> list[Continuation]:
        watch = _Watch(rows, self.step_end, self.eos)
        continued(
            self.model,
            self.tokenizer,
            [row.prefix for row in rows],
            max_new_tokens=max(row.limit for row in rows),
            stopping_criteria=StoppingCriteriaList([watch]),
            **self.decoding,
        )
        return [each for each in watch.found if each is not None]


class _Watch(StoppingCriteria):
    """Ends each row by itself, and keeps its tokens up to there."""

    def __init__(self, rows: Sequence[Request], step_end: StepEnd, eos: frozenset[int]):
        self.rows, self.step_end, self.eos = rows, step_end, eos
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.found: list[Continuation | None] = [None] * len(rows)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.found[i] is None:
                self.tokens[i].append(token)
                self.found[i] = self._ended(self.tokens[i], self.rows[i])
        return torch.tensor([each is not None for each in self.found], device=input_ids.device)

    def _ended(self, tokens: list[int], row: Request) -> Continuation | None:
        if not row.to_end and (end := self.step_end(tokens)) is not None:
            return Continuation(tuple(tokens[:end]), len(tokens), "step")
        if tokens[-1] in self.eos:
            return Continuation(tuple(tokens), len(tokens), "stop")
        return Continuation(tuple(tokens), len(tokens), "length") if len(tokens) >= row.limit else None


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end what a model writes, by its generation configuration, else its tokenizer."""
    stated = model.generation_config.eos_token_id
    stated = tokenizer.eos_token_id if stated is None else stated
    return frozenset(stated if isinstance(stated, list) else () if stated is None else (stated,))
