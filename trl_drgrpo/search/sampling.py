"""Samples continuations from a model in memory; every row of a batch ends by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from trl_drgrpo.process_rewards.rollouts import continued
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.search.continuations import Continuation, Request, StepEnd


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
