"""Requests to a model and its replies: continuations of a prefix, one step or to the end.

A continuation of one step ends where the step rule says so, at an end token, or at its limit. The rule is asked with
the step's own tokens and one more behind them, after every token: with a separator nothing is sampled beyond the end.
A rule that looks ahead (`re:\\n(?=Step)`) shows its end later; the tokens behind it are counted and cut off.

Two samplers. A model in memory: every row of a batch ends by itself. A vLLM server: `POST /v1/completions` with token
ids in and token ids out, one request per continuation with a seed of its own, many under way at a time; the server
shares the prefixes. Separators are sent as stop strings; for the other rules a step is sampled in chunks, and what
lies behind its end is counted and cut off. TRL's own client is not used: it needs vLLM installed where the search
runs.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.monte_carlo import continued, sampled_in_batches
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.alignment import REPLACEMENT
from trl_drgrpo.process_rewards.steps.separators import Separators
from trl_drgrpo.rewards.functions.judge.chat_client import Endpoint, RequestFailed, Session
from trl_drgrpo.search.served_adapters import served_name

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

    def ended(self, tokens: Sequence[int], request: Request, has_stopped: bool, new: int = 1) -> Continuation | None:
        """The continuation that these tokens are; None while it goes on. `has_stopped`: the last one is an end token.
        `new`: as for a call."""
        if not request.to_end and (end := self(tokens, new)) is not None:
            return Continuation(tuple(tokens[:end]), len(tokens), "step")
        if has_stopped or len(tokens) >= request.limit:
            return Continuation(tuple(tokens), len(tokens), "stop" if has_stopped else "length")
        return None


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
        return sampled_in_batches(
            self.model, requests, jobs, self._continue, batch_size=self.batch_size, seed=requests[0].seed
        )

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
                self.found[i] = self.step_end.ended(self.tokens[i], self.rows[i], token in self.eos)
        return torch.tensor([each is not None for each in self.found], device=input_ids.device)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end what a model writes, by its generation configuration, else its tokenizer."""
    stated = model.generation_config.eos_token_id
    stated = tokenizer.eos_token_id if stated is None else stated
    return frozenset(stated if isinstance(stated, list) else () if stated is None else (stated,))


_CHUNK = 64  # tokens
_SECONDS = 24 * 3600.0  # of one round: the time-out is that of each request


class ServerSampler:
    """Samples from a vLLM server.

    Args:
        base_url (`str`): Of the server, as TRL's `vllm_server_base_url`: without `/v1`.
        model (`str`): Name of the model there, or the folder of an adapter, which it is made to load.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        segmenter ([`StepSegmenter`]): Says where steps end.
        temperature, top_p (`float`): Of the sampling.
        concurrency (`int`): Requests under way at a time.
        timeout (`float`, *optional*, defaults to `600.0`): Seconds per request.

    Raises:
        `InputError`: No address of a server, or one that does not load the adapter. Calls raise it where the server
            does not answer as it should.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any,
        segmenter: StepSegmenter,
        *,
        temperature: float,
        top_p: float,
        concurrency: int,
        timeout: float = 600.0,
    ):
        try:
            endpoint = Endpoint(f"{base_url.rstrip('/')}/v1", model, concurrency=concurrency, timeout=timeout)
        except InputError as error:
            raise error.under("vllm_server_base_url") from error
        self.endpoint = replace(endpoint, model=served_name(self, base_url, model))
        self.tokenizer, self.step_end = tokenizer, StepEnd(segmenter, tokenizer)
        self.sampling = {"temperature": temperature, "top_p": top_p, "n": 1, "return_token_ids": True}
        self.stops = list(segmenter.rule.separators) if isinstance(segmenter.rule, Separators) else None

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Sample, each continuation with a seed of its own."""
        try:
            return asyncio.run(self._sample(requests))
        except RequestFailed as error:
            got, expected = f"{error} from {self.endpoint.base_url}", "completions with token ids from /v1/completions"
            remedy = "Start it with `vllm serve`, under the name given as --model; finished problems are kept."
            raise InputError("vllm_server_base_url", got, expected, remedy) from None

    async def _sample(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        async with Session(self.endpoint, _SECONDS) as session:
            jobs = [
                asyncio.gather(*(self._continue(session, request, request.seed + i) for i in range(request.count)))
                for request in requests
            ]
            return [list(found) for found in await asyncio.gather(*jobs)]

    async def _continue(self, session: Session, request: Request, seed: int) -> Continuation:
        tokens: list[int] = []
        while True:
            left = request.limit - len(tokens)
            body = {"model": self.endpoint.model, "prompt": [*request.prefix, *tokens], "seed": seed, **self.sampling}
            if not request.to_end and self.stops is not None:
                body |= {"stop": self.stops, "include_stop_str_in_output": True}
            body["max_tokens"] = left if request.to_end or self.stops is not None else min(left, _CHUNK)
            new, has_stopped = self._read(await session.post("completions", body))
            tokens, seed = [*tokens, *new], seed + 1
            if (found := self.step_end.ended(tokens, request, has_stopped, len(new))) is not None:
                return found

    def _read(self, reply: Any) -> tuple[list[int], bool]:
        """The new tokens, and whether the model ended the completion."""
        try:
            choice = reply["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            has_stopped = choice["finish_reason"] == "stop" and choice.get("stop_reason") not in (self.stops or ())
        except (KeyError, IndexError, TypeError, ValueError):
            raise RequestFailed("a reply without token_ids (vLLM gives them since 0.10.2)") from None
        if not ids and not has_stopped:
            raise RequestFailed("a reply without a token")
        return ids or [self.tokenizer.eos_token_id], has_stopped
