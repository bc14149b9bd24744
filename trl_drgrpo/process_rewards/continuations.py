"""Requests to a model and its replies: continuations of prefixes, sampled from a model in memory.

Rollouts, searches and evaluations sample through here. A continuation ends at an end token, at its limit, or where a
sampler that is derived from this one says so.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from transformers import GenerationConfig

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.finite import has_no_distribution
from trl_drgrpo.common.generation import end_tokens, without_own_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    end: Literal["step", "stop", "length"]


class Sampler(Protocol):
    """Samples the continuations of several prefixes: for each request a list of `count`."""

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]: ...


class ModelSampler:
    """Samples from a model in memory; the same requests and batch size give the same continuations.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A causal language model; put into evaluation mode for the call and
            back after it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        generation (`Mapping[str, Any]`): Fields of a generation configuration. The model's own adds nothing that
            changes what is sampled.
        batch_size (`int`): Continuations per call of `model.generate`.
        by_length (`bool`, *optional*, defaults to `True`): Whether rows of like length share a batch; else those of
            one prefix and of the next do.
        around (`Callable`, *optional*): A context around each call of `generate`, made from the model.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        generation: Mapping[str, Any],
        batch_size: int,
        *,
        by_length: bool = True,
        around: Callable[[Any], AbstractContextManager] = nullcontext,
    ):
        self.model: Any = model
        self.batch_size = batch_size
        self.by_length = by_length
        self.around = around
        # As in training, both the model's and the tokenizer's end tokens end a completion.
        self.ends = frozenset(end_tokens(model.generation_config.eos_token_id, tokenizer.eos_token_id))
        # The last one that is set: 0 may be an id, so `or` would not do.
        self.pad: Any = 0
        for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token_id is not None:
                self.pad = token_id
        self.generation = {
            **generation,
            "pad_token_id": self.pad,
            "eos_token_id": sorted(self.ends) or None,
        }

    def __call__(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """Sample, seeded by the first request. The global random state is put back afterwards."""
        if not requests:
            return []
        continuations_of = []
        jobs = []  # the request of each row to sample
        for i, request in enumerate(requests):
            continuations_of.append([])
            jobs += [i] * request.count
        # Rows of like length share a batch, so that little is padded. The sort is stable: a seed gives one order.
        if self.by_length:
            jobs.sort(key=lambda i: len(requests[i].prefix))
        devices = []
        if self.model.device.type == "cuda":
            devices.append(self.model.device)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(requests[0].seed)
                for start in range(0, len(jobs), self.batch_size):
                    batch = jobs[start : start + self.batch_size]
                    rows = [requests[i] for i in batch]
                    for i, continuation in zip(batch, self._continue(rows), strict=True):
                        continuations_of[i].append(continuation)
        finally:
            self.model.train(was_training)
        return continuations_of

    def _continue(self, rows: Sequence[Request]) -> list[Continuation]:
        """Return one continuation of each row, to its end."""
        continuations = []
        for row, tokens in zip(rows, self._written(rows), strict=True):
            written = tokens[: row.limit]  # a batch is sampled up to its longest limit
            reason: Literal["stop", "length"] = "length"
            # `generate` pads a row behind its end token.
            for place, token in enumerate(written):
                if token in self.ends:
                    written = written[: place + 1]
                    reason = "stop"
                    break
            continuations.append(Continuation(tuple(written), len(written), reason))
        return continuations

    def _written(self, rows: Sequence[Request], **options: Any) -> list[list[int]]:
        """Return the new tokens of each row, padded behind its end token."""
        device = self.model.device
        # Padded on the left, (B, S): generation goes on at the last column.
        width = max(len(row.prefix) for row in rows)
        input_ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            start = width - len(row.prefix)
            input_ids[i, start:] = torch.tensor(row.prefix)
            mask[i, start:] = 1
        limit = max(row.limit for row in rows)
        config = GenerationConfig(**self.generation, max_new_tokens=limit)
        try:
            with without_own_settings(self.model), self.around(self.model):
                output = self.model.generate(
                    input_ids=input_ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=config,
                    **options,
                )
            return output[:, width:].tolist()
        except torch.OutOfMemoryError as error:
            got = f"{len(rows)} completions at a time, which do not fit into the memory of {device}"
            remedy = "Lower it, or the length of a completion; what a command has written is kept."
            raise InputError("batch_size", got, "as many as fit", remedy) from error
        except RuntimeError as error:
            if not has_no_distribution(error):
                raise
            remedy = "The model has diverged, or overflows in this dtype: name an earlier checkpoint, or float32."
            raise InputError("model", "logits that are NaN or infinite", "finite logits", remedy) from None
