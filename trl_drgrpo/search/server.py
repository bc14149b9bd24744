"""Samples continuations from a vLLM server: `POST /v1/completions` with token ids in and token ids out.

One request per continuation, many under way at a time; the server shares the prefixes. Requests carry their
own seeds, so the same search gives the same file again as far as the server's kernels do. Separators are sent
as stop strings. For the other rules a step is sampled in chunks, and what lies behind its end is counted and cut off.
TRL's own client is not used: it needs vLLM installed where the search runs.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.rules import Separators
from trl_drgrpo.rewards.functions.judge.chat_client import Endpoint, RequestFailed, Session
from trl_drgrpo.search.continuations import Continuation, Request, StepEnd

_CHUNK = 64  # tokens
_SECONDS = 24 * 3600.0  # of one round: the time-out is that of each request


class ServerSampler:
    """Samples from a vLLM server.

    Args:
        base_url (`str`): Of the server, as TRL's `vllm_server_base_url`: without `/v1`.
        model (`str`): Name of the model there.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        segmenter ([`StepSegmenter`]): Says where steps end.
        temperature, top_p (`float`): Of the sampling.
        concurrency (`int`): Requests under way at a time.
        timeout (`float`, *optional*, defaults to `600.0`): Seconds per request.

    Raises:
        `InputError`: No address of a server. Calls raise it where the server does not answer as it should.
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
            self.endpoint = Endpoint(f"{base_url.rstrip('/')}/v1", model, concurrency=concurrency, timeout=timeout)
        except InputError as error:
            raise error.under("vllm_server_base_url") from error
        self.tokenizer, self.step_end = tokenizer, StepEnd(segmenter, tokenizer)
        self.sampling = {"temperature": temperature, "top_p": top_p, "n": 1, "return_token_ids": True}
        self.stops = list(segmenter.rule.separators) if isinstance(segmenter.rule, Separators) else None

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Sample, each continuation with a seed of its own."""
        try:
            return asyncio.run(self._sample(requests))
        except RequestFailed as error:
            remedy = "Start it with `vllm serve`, under the name given as --model; finished problems are kept."
            expected = "completions with token ids from /v1/completions"
            raise InputError(
                "vllm_server_base_url", f"{error} from {self.endpoint.base_url}", expected, remedy
            ) from None

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
            if not request.to_end and (end := self.step_end(tokens, len(new))) is not None:
                return Continuation(tuple(tokens[:end]), len(tokens), "step")
            if has_stopped:
                return Continuation(tuple(tokens), len(tokens), "stop")
            if len(tokens) >= request.limit:
                return Continuation(tuple(tokens), len(tokens), "length")

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
