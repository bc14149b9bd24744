"""Requests to a model and its replies: continuations of a prefix, one step or to the end.

A continuation of one step ends where the step rule says so, at an end token, or at its limit. The rule is asked with
the step's own tokens and one more behind them, after every token: with a separator nothing is sampled beyond the end.
A rule that looks ahead (`re:\\n(?=Step)`) shows its end later; the tokens behind it are counted and cut off.

Two samplers. A model in memory: every row of a batch ends by itself. A vLLM server: `POST /v1/completions` with token
ids in and token ids out, one request per continuation with a seed of its own, many under way at a time; the server
shares the prefixes. Separators are sent as stop strings; for the other rules a step is sampled in chunks, and what
lies behind its end is counted and cut off. TRL's own client is not used: it needs vLLM installed where the search
runs.

LoRA adapters are loaded while a server runs: `POST /v1/load_lora_adapter` with a folder that it sees. Every load has a
name of its own. vLLM looks up cached prefixes by the adapter's name and folder, so one that is loaded under an old
name, or in place, would be answered with keys and values of the weights before.
"""

import asyncio
import contextlib
import json
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.generation import VLLM_RANKS
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.process_rewards.continuations import Continuation, ModelSampler, Request
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps.alignment import REPLACEMENT
from trl_drgrpo.rewards.functions.judge.chat_client import Endpoint, RequestFailed, Session, import_http


class StepEnd:
    """Finds the end of a continuation's first step.

    Args:
        segmenter ([`StepSegmenter`]): The rule.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
    """

    def __init__(self, segmenter: StepSegmenter, tokenizer: PreTrainedTokenizerBase):
        self.segmenter = segmenter
        self.tokenizer = tokenizer
        # A separator can be complete only with a token that holds its last character, or a part of it. This spares
        # most tokens a run of the rule. Decoders drop the space of a single token: a separator that ends in a space is
        # looked for behind every token.
        closing = {separator[-1] for separator in segmenter.rule.separators}
        if " " in closing:
            closing = set()
        if closing:
            closing.add(REPLACEMENT)

        @cache
        def may_close(token: int) -> bool:
            return not closing or not closing.isdisjoint(tokenizer.decode([token]))

        self._may_close = may_close
        # A letter that may follow any text.
        self._letter = next(i for i in range(len(tokenizer)) if str(tokenizer.decode([i])).isalnum())

    def __call__(self, token_ids: Sequence[int], new: int = 1) -> int | None:
        """Return the number of tokens in the first step; None while it is not complete.

        Args:
            token_ids (`Sequence[int]`): The step's tokens so far, and maybe some behind its end.
            new (`int`, *optional*, defaults to `1`): Number of tokens at their end that are new since the last call.
        """
        ids = list(token_ids)
        if not any(map(self._may_close, ids[-new:])):
            return None
        # One more token, since the segmenter takes the last step for incomplete. A rule that looks ahead reads it, so
        # there it is a token that the model wrote.
        following = ids[0]
        if self.segmenter.rule.by_prefix:
            following = self._letter
        end = self.segmenter([*ids, following], self.tokenizer).ends[0] + 1
        return end if end <= len(ids) else None  # an end at the token of ours is none

    def ended(self, tokens: Sequence[int], request: Request, has_stopped: bool, new: int = 1) -> Continuation | None:
        """Return the continuation of these tokens; None while it goes on.

        `has_stopped`: the last token is an end token. `new`: as for a call.
        """
        # A step that is complete at the limit, or with the end token, counts as a step: it is what was asked for.
        end = None
        if not request.to_end:
            end = self(tokens, new)
        if end is not None:
            return Continuation(tuple(tokens[:end]), len(tokens), "step")
        if has_stopped:
            return Continuation(tuple(tokens), len(tokens), "stop")
        if len(tokens) >= request.limit:
            return Continuation(tuple(tokens), len(tokens), "length")
        return None


class StepSampler(ModelSampler):
    """Samples steps and completions from a model in memory.

    Args:
        model, generation, batch_size: As in [`ModelSampler`].
        step_end ([`StepEnd`]): Finds the ends of steps.
    """

    def __init__(self, model: PreTrainedModel, step_end: StepEnd, generation: Mapping[str, Any], batch_size: int):
        super().__init__(model, step_end.tokenizer, generation, batch_size)
        self.step_end = step_end

    def _continue(self, rows: Sequence[Request]) -> list[Continuation]:
        watch = _Watch(rows, self.step_end, self.ends)
        self._written(rows, stopping_criteria=StoppingCriteriaList([watch]))
        return list(filter(None, watch.continuations))


class _Watch(StoppingCriteria):
    """Ends each row by itself, and stores its tokens up to its end."""

    # transformers pads a row that has ended until the last one has: the tokens behind its end are not the model's.

    def __init__(self, rows: Sequence[Request], step_end: StepEnd, eos: frozenset[int]):
        self.rows = rows
        self.step_end = step_end
        self.eos = eos
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.continuations: list[Continuation | None] = [None] * len(rows)

    def __call__(self, input_ids: torch.LongTensor, scores: object, **kwargs: Any) -> torch.BoolTensor:
        # transformers asks behind each token: the last column of `input_ids` is new.
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.continuations[i] is None:
                tokens = self.tokens[i]
                tokens.append(token)
                self.continuations[i] = self.step_end.ended(tokens, self.rows[i], token in self.eos)
        has_ended = [continuation is not None for continuation in self.continuations]
        return torch.tensor(has_ended, device=input_ids.device)  # type: ignore[return-value]


_CHUNK = 64  # tokens of a request for a step, where its end cannot be sent as a stop string
_TIMEOUT = 600.0  # seconds of a request
_SECONDS = 24 * 3600.0  # limit of one round of requests


class ServerSampler:
    """Samples from a vLLM server.

    Args:
        base_url (`str`): Address of the server, as TRL's `vllm_server_base_url`: without `/v1`.
        model (`str`): Name of the model there, or the folder of an adapter, which the server then loads.
        step_end ([`StepEnd`]): Finds the ends of steps.
        sampling (`Mapping[str, Any]`): Fields of each request: temperature, top_p, ...
        concurrency (`int`): Requests under way at a time.

    Raises:
        `InputError`: No address of a server, or one that does not load the adapter. Calls raise it where the server
            does not answer as it should.
    """

    def __init__(self, base_url: str, model: str, step_end: StepEnd, sampling: Mapping[str, Any], concurrency: int):
        try:
            endpoint = Endpoint(f"{base_url.rstrip('/')}/v1", model, concurrency=concurrency, timeout=_TIMEOUT)
        except InputError as error:
            raise error.under("vllm_server_base_url") from error
        self.endpoint = replace(endpoint, model=served_name(self, base_url, model))
        self.step_end = step_end
        self.sampling = {**sampling, "n": 1, "return_token_ids": True}
        self.stops = list(step_end.segmenter.rule.separators)

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Sample. Each continuation has a seed of its own."""
        try:
            return asyncio.run(self._sample(requests))
        except RequestFailed as error:
            got = f"{error} from {self.endpoint.base_url}"
            expected = "completions with token ids from /v1/completions"
            remedy = "Start it with `vllm serve`, under the name given as --model; finished problems are kept."
            raise InputError("vllm_server_base_url", got, expected, remedy) from None

    async def _sample(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        async with Session(self.endpoint, _SECONDS) as session:
            jobs = []
            for request in requests:
                # One request per continuation: each goes on by itself, chunk after chunk, with a seed of its own.
                seeds = range(request.seed, request.seed + request.count)
                coroutines = [self._continue(session, request, seed) for seed in seeds]
                jobs.append(asyncio.gather(*coroutines))
            return list(map(list, await asyncio.gather(*jobs)))

    async def _continue(self, session: Session, request: Request, seed: int) -> Continuation:
        tokens: list[int] = []
        while True:  # until a chunk ends the continuation
            body = {
                "model": self.endpoint.model,
                "prompt": [*request.prefix, *tokens],
                "seed": seed,
                "max_tokens": request.limit - len(tokens),
                **self.sampling,
            }
            if not request.to_end:
                if self.stops:
                    body |= {"stop": self.stops, "include_stop_str_in_output": True}
                else:
                    body["max_tokens"] = min(body["max_tokens"], _CHUNK)
            new, has_stopped = self._read(await session.post("completions", body))
            tokens += new
            seed += 1  # the next chunk must not repeat the draws of this one
            continuation = self.step_end.ended(tokens, request, has_stopped, len(new))
            if continuation is not None:
                return continuation

    def _read(self, reply: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the new tokens, and whether the model ended the completion."""
        try:
            choice = reply["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            # vLLM also names a stop string of ours as the reason.
            has_stopped = choice["finish_reason"] == "stop" and choice.get("stop_reason") not in self.stops
        except (KeyError, IndexError, TypeError, ValueError):
            raise RequestFailed("a reply without token_ids (vLLM gives them since 0.10.2)") from None
        if not ids and not has_stopped:
            raise RequestFailed("a reply without a token")
        return ids or [self.step_end.tokenizer.eos_token_id], has_stopped  # type: ignore[return-value]


# Adapters on a server ------------------------------------------------------------------------------------------------

_ADAPTER = "adapter_config.json"


class AdapterRefused(Exception):
    """The server did not load an adapter; the message has the reason."""


def serve_command(model: str, rank: int, options: str = "") -> str:
    """Return the command that starts a server for adapters of this rank on a model."""
    # vLLM takes these ranks alone: the smallest that is large enough.
    offered = next((offered_rank for offered_rank in VLLM_RANKS if offered_rank >= rank), VLLM_RANKS[-1])
    variables = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    logprobs = "--logprobs-mode processed_logprobs --max-logprobs -1"
    return f"{variables} vllm serve {model} --enable-lora --max-lora-rank {offered} {logprobs}{options}"


def load_adapter(base_url: str, name: str, folder: Path) -> None:
    """Load the adapter of a folder under a name; `AdapterRefused` where the server does not."""
    status, answer = _post(base_url, "load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    # vLLM answers 404 both for a route that it lacks and for a folder that it does not see.
    if status == 404 and "lora" not in answer.lower():
        raise AdapterRefused("it has no /v1/load_lora_adapter: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set")
    if status != 200:
        if status == 404 or "No adapter found" in answer:
            answer = f"it does not see {folder}"
        raise AdapterRefused(answer)


def unload_adapter(base_url: str, name: str) -> None:
    """Take an adapter off the server's list, if the server still answers."""
    with contextlib.suppress(import_http().TransportError):
        _post(base_url, "unload_lora_adapter", {"lora_name": name}, seconds=5.0)


def served_name(owner: object, base_url: str, model: str) -> str:
    """Return the name under which a server has a model.

    A local adapter is loaded, until `owner` is gone; any other model has its own name. Where the server does not load
    it, an `InputError` has the command that starts one which does.
    """
    folder = user_path(model).absolute()
    if not (folder / _ADAPTER).is_file() or (folder / "config.json").is_file():
        return model
    config = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))
    name = f"{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        load_adapter(base_url, name, folder)
    except (AdapterRefused, import_http().TransportError) as error:
        command = serve_command(str(config.get("base_model_name_or_path")), config.get("r") or 1)
        got = f"{base_url}, which does not load the adapter {model}: {error}"
        raise InputError("vllm_server_base_url", got, "a server that does", f"Start it with: {command}") from None
    weakref.finalize(owner, unload_adapter, base_url, name)
    return name


def _post(base_url: str, route: str, body: dict[str, Any], seconds: float = _TIMEOUT) -> tuple[int, str]:
    """Post to the server; return status and message of the answer."""
    response = import_http().post(f"{base_url.rstrip('/')}/v1/{route}", json=body, timeout=seconds)
    # Errors of vLLM come as `{"error": {"message": ...}}`, or without the outer level; a success is plain text.
    try:
        answer = response.json()
        answer = answer.get("error", answer).get("message", response.text)
    except (ValueError, AttributeError):
        answer = response.text
    return response.status_code, " ".join(str(answer).split())[:300]
