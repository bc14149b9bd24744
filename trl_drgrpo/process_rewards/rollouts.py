"""Rollouts: continuations of a prefix, sampled in batches.

Monte-Carlo values take any callable `generate(prefixes, k) -> list[list[str]]`. Here are the two that need no writing:
`TransformersRollouts` for a model in memory, and `TrainerRollouts` for the policy in training, sampled the way its
trainer samples completions (vLLM, DeepSpeed, FSDP included). Prefixes are texts or, exact to the token, lists of
token ids.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError

Prefixes = Sequence[str] | Sequence[Sequence[int]]


class TrainerRollouts:
    """Samples continuations from a trainer's policy, with the trainer's own backend and sampling settings.

    The trainer does not exist yet when its step reward functions are built; it introduces itself to the scorer:

    ```python
    scorer = MonteCarloScorer(TrainerRollouts(), verifier, tokenizer=tokenizer)
    trainer = DrGRPOTrainer(..., step_reward_funcs=scorer)
    ```

    Continuations have up to `max_completion_length` tokens, whatever the prefix has already. Sampling draws from the
    global random state, as the trainer's own does. All processes make the same number of calls to the backend.

    Args:
        trainer (`DrGRPOTrainer`, *optional*): The trainer; by default the one that the scorer is given to.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per call of the backend and process; at least
            the `k` of one prefix. Raise it for vLLM, which schedules by itself.
    """

    collective = True

    def __init__(self, trainer: Any = None, *, batch_size: int = 32):
        if batch_size < 1:
            raise InputError("batch_size", str(batch_size), "at least 1", "Give a positive number.")
        self.trainer, self.batch_size = trainer, batch_size

    def __call__(self, prefixes: Sequence[Sequence[int]], k: int) -> list[list[str]]:
        """Sample.

        Args:
            prefixes (`N` lists of token ids): What is continued; rendered prompt and the completion so far.
            k (`int`): Continuations per prefix.

        Returns:
            `list[list[str]]`: `N` lists of `k` continuations, without special tokens and without their prefix.

        Raises:
            `InputError`: Without a trainer, or with prefixes that are texts.
        """
        trainer = self.trainer
        if trainer is None:
            remedy = "Pass the scorer to the trainer itself, or set `rollouts.trainer = trainer`."
            raise InputError("TrainerRollouts.trainer", "none", "the trainer whose policy is sampled", remedy)
        if any(isinstance(prefix, str) for prefix in prefixes):
            remedy = "Pass the policy's `tokenizer` to the Monte-Carlo scorer."
            raise InputError("prefixes", "texts", "lists of token ids", remedy)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        per_call = max(1, self.batch_size // k)
        order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))  # rows of like length share a call
        calls = torch.tensor(math.ceil(len(prefixes) / per_call), device=trainer.accelerator.device)
        texts: list[list[str]] = [[] for _ in prefixes]
        for call in range(int(trainer.accelerator.gather(calls).max())):
            batch = order[call * per_call : (call + 1) * per_call]
            rows = [list(prefixes[i]) for i in batch]
            if trainer.accelerator.num_processes > 1:  # the backend wants as many rows from every process
                rows += [rows[-1] if rows else [tokenizer.eos_token_id]] * (per_call - len(rows))
            sampled = trainer.sample_completions([row for row in rows for _ in range(k)], num_generations=k)
            decoded = tokenizer.batch_decode(sampled, skip_special_tokens=True)
            for position, i in enumerate(batch):
                texts[i] = decoded[position * k : (position + 1) * k]
        return texts


class TransformersRollouts:
    """Samples continuations; the same seed, prefixes and calls give the same texts.

    Args:
        model (`PreTrainedModel`): A causal language model; put into evaluation mode for the call and back after it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        max_new_tokens (`int`, *optional*, defaults to `256`): Continuations are cut here.
        temperature (`float`, *optional*, defaults to `1.0`): Sampling temperature, > 0.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus of the sampling; 1.0 = the whole distribution.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per call of `model.generate`.
        seed (`int`, *optional*, defaults to `0`): Every call is seeded with `seed` plus the number of calls before.
            The global random state is put back afterwards.
        skip_special_tokens (`bool`, *optional*, defaults to `True`): Leave special tokens out of the texts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        seed: int = 0,
        skip_special_tokens: bool = True,
    ):
        for field, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if value < 1:
                raise InputError(field, str(value), "at least 1", "Give a positive number.")
        if temperature <= 0:
            remedy = "Greedy rollouts are all the same: raise it."
            raise InputError("temperature", str(temperature), "more than 0", remedy)
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.seed, self.calls = seed, 0
        self.skip_special_tokens = skip_special_tokens
        self.decoding = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}

    def __call__(self, prefixes: Prefixes, k: int) -> list[list[str]]:
        """Sample.

        Args:
            prefixes (`N` texts or lists of token ids): What is continued. A text is tokenized with the tokenizer's own
                special tokens; render chat prompts beforehand.
            k (`int`): Continuations per prefix.

        Returns:
            `list[list[str]]`: `N` lists of `k` continuations, without their prefix.
        """
        encoded = [
            list(self.tokenizer(prefix)["input_ids"]) if isinstance(prefix, str) else list(prefix)
            for prefix in prefixes
        ]
        jobs = [i for i in range(len(encoded)) for _ in range(k)]
        jobs.sort(key=lambda i: len(encoded[i]))  # rows of like length share a batch; stable
        texts: list[list[str]] = [[] for _ in encoded]
        was_training = self.model.training
        self.model.eval()
        try:
            self._sample(encoded, jobs, texts)
        finally:
            self.model.train(was_training)
        self.calls += 1
        return texts

    def _sample(self, encoded: list[list[int]], jobs: list[int], texts: list[list[str]]) -> None:
        """One continuation per job, added to the texts of its prefix."""
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(self.seed + self.calls)
            for start in range(0, len(jobs), self.batch_size):
                batch = jobs[start : start + self.batch_size]
                for i, text in zip(batch, self._continue([encoded[i] for i in batch]), strict=True):
                    texts[i].append(text)

    def _continue(self, prefixes: list[list[int]]) -> list[str]:
        """One continuation per prefix."""
        output = continued(self.model, self.tokenizer, prefixes, max_new_tokens=self.max_new_tokens, **self.decoding)
        return self.tokenizer.batch_decode(output, skip_special_tokens=self.skip_special_tokens)


def continued(model: Any, tokenizer: Any, prefixes: Sequence[Sequence[int]], **generation: Any) -> torch.Tensor:
    """One continuation per prefix, which are padded on the left for the call.

    Args:
        model (`PreTrainedModel`): A causal language model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prefixes (`B` lists of token ids): What is continued.
        **generation: For `model.generate`.

    Returns:
        `torch.Tensor` `(B, T)`: The new tokens, padded on the right behind those that end a continuation.
    """
    width = max(map(len, prefixes))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    input_ids = torch.full((len(prefixes), width), pad)  # (B, S)
    attention_mask = torch.zeros_like(input_ids)
    for i, prefix in enumerate(prefixes):
        input_ids[i, width - len(prefix) :] = torch.tensor(prefix)
        attention_mask[i, width - len(prefix) :] = 1
    output = model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        pad_token_id=pad,
        **generation,
    )
    return output[:, width:]
