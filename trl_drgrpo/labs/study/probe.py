"""The one-step measurement on a real model with its data and rewards: all that a run would use, without a step.

Completions come from the trainer's own generation and rewards, so a measurement is about the very run that would start
from this configuration. Per batch there is one forward of its rows and one backward per objective and quantity. Only
trainable parameters count, the adapter of a LoRA run for example.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.validation import refuse_truncated_sampling
from trl_drgrpo.labs.study.direction import QUANTITIES, Changes, Rollouts, ScoreSums, measure
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.labs.study.stop_states import StateCollector
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batch_rows import token_batch
from trl_drgrpo.upstream.batches import CreditedBatch, TokenBatch

MEMORY_LIMIT = 16 * 2**30  # bytes for the gradients of all batches, on the CPU
_BYTES = 4


def measure_model(
    trainer: DrGRPOTrainer,
    batches: int,
    on_batch: Callable[[int, Rollouts], None] | None = None,
    states: StateCollector | None = None,
) -> Changes:
    """Effect of one update of each objective on the lengths of correct and incorrect answers and on the pass rate.

    Args:
        trainer ([`DrGRPOTrainer`]): Not trained; in one process. Its configuration says how many rows a batch has
            (`per_device_train_batch_size * steps_per_generation`), L, and what is correct (`correct_reward`,
            `correct_threshold`).
        batches (`int`): K, generation batches to sample, at least 3. Standard errors fall with `1 / sqrt(K)`.
        on_batch (`Callable`, *optional*): Called with each batch's number and rollouts, for progress.
        states ([`StateCollector`], *optional*): Shown each batch.

    Returns:
        [`Changes`]: Per update of unit length (Euclidean, over the trainable parameters).

    Raises:
        [`InputError`]: Too few batches, several processes, a sampler that is not the policy
            (`top_p`, `top_k`, `min_p`), too many trainable parameters, missing rewards, or a reward without a known
            value from which a completion is correct.
    """
    _check(trainer, batches)
    if (excess := too_large(trainer, batches)) is not None:
        raise excess
    return measure(_sample(trainer, batches, on_batch, states))


def look_at_model(
    trainer: DrGRPOTrainer, batches: int, on_batch: Callable[[int, Rollouts], None] | None, states: StateCollector
) -> None:
    """The same batches without a gradient, for a model whose gradients do not fit.

    Args:
        trainer, batches, on_batch, states: As in [`measure_model`].

    Raises:
        [`InputError`]: As [`measure_model`], whatever the number of parameters.
    """
    _check(trainer, batches)
    for _ in _sample(trainer, batches, on_batch, states):
        pass


def _sample(
    trainer: DrGRPOTrainer,
    batches: int,
    on_batch: Callable[[int, Rollouts], None] | None,
    states: StateCollector | None,
) -> Iterator[tuple[Rollouts, ScoreSums]]:
    trainer.model.train()
    for number, (batch, inputs) in enumerate(islice(sampled_batches(trainer), batches)):
        tokens, mask, right = token_batch(inputs), batch.trained_mask, _right(trainer, batch)
        rollouts = _reduced(batch, mask, right, trainer)
        if states is not None:
            states.add(tokens, mask, right)
        yield rollouts, partial(score_sums, trainer, tokens, mask)
        if on_batch is not None:
            on_batch(number, rollouts)


def score_sums(trainer: DrGRPOTrainer, tokens: TokenBatch, mask: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    """`sum_i w_i grad log pi(o_i)` over a batch, for several weights at once.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy.
        tokens ([`TokenBatch`]): The rows; `per_device_train_batch_size` of them run at a time.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on the tokens that count.
        weights (`np.ndarray` of shape `(W, B)`): NaN in a row of weights gives NaN.

    Returns:
        `np.ndarray` of shape `(W, n)`, float32: Over the n trainable parameters.
    """
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    sums = np.zeros((len(weights), sum(p.numel() for p in parameters)), dtype=np.float32)
    known = [w for w in range(len(weights)) if np.isfinite(weights[w]).all()]
    sums[[w for w in range(len(weights)) if w not in known]] = np.nan
    size = trainer.args.per_device_train_batch_size
    for first in range(0, len(mask), size):
        rows = slice(first, first + size)
        part = TokenBatch(tokens.input_ids[rows], tokens.attention_mask[rows], tokens.completion_width)
        log_probs = trainer.score_tokens(trainer.model, part)[0]
        per_row = (log_probs * mask[rows]).sum(dim=1)
        for position, w in enumerate(known):
            factors = torch.as_tensor(weights[w, rows], dtype=per_row.dtype, device=per_row.device)
            last = position == len(known) - 1
            grads = torch.autograd.grad(factors @ per_row, parameters, retain_graph=not last, allow_unused=True)
            sums[w] += _flat(grads, parameters)
    return sums


def _reduced(batch: CreditedBatch, mask: torch.Tensor, right: np.ndarray, trainer: DrGRPOTrainer) -> Rollouts:
    rewards = batch.rewards.cpu().double().numpy()
    if np.isnan(rewards).any():
        got = f"{int(np.isnan(rewards).sum())} of {len(rewards)} completions without a reward"
        raise InputError("reward_funcs", got, "a reward for each", "Measure with a reward that scores everything.")
    lengths = mask.sum(dim=1).clamp(min=1).cpu().numpy()
    stopped = np.array([ids[-1] in trainer.stop_token_ids for ids in batch.scored.completion_ids])
    right = np.asarray(right, dtype=bool)
    return Rollouts(rewards, right, lengths, batch.num_generations, trainer.loss_normalizer, stopped)


def _right(trainer: DrGRPOTrainer, batch: CreditedBatch) -> np.ndarray:
    """Mask of correct rows, `(B,)`; those without a reward are refused elsewhere."""
    rule = trainer.diagnostics.correctness_rule
    judged = rule.judge(batch.scored.rewards_per_func[:, rule.index].tolist()) if rule else None
    if judged is None:
        expected = "a reward of 0 or 1, or the value from which on a completion is correct"
        raise InputError("correct_threshold", "none", expected, "Set it, and correct_reward for another reward.")
    return np.array([right is True for right in judged])


def _flat(grads: Any, parameters: list[torch.nn.Parameter]) -> np.ndarray:
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
    return torch.cat([part.detach().float().flatten().cpu() for part in parts]).numpy()


def _check(trainer: DrGRPOTrainer, batches: int) -> None:
    if batches < 3:
        raise InputError(
            "batches", str(batches), "at least 3", "Raise it: the standard error is a jackknife over batches."
        )
    if trainer.accelerator.num_processes > 1:
        got = f"{trainer.accelerator.num_processes} processes"
        raise InputError("launch", got, "one process", "Run the measurement without accelerate or torchrun.")
    remedy = "Leave it at its default: the score function is that of the whole distribution."
    refuse_truncated_sampling(trainer.args, remedy)


def too_large(trainer: DrGRPOTrainer, batches: int) -> InputError | None:
    """The error to raise if the gradients of so many batches do not fit into memory, else `None`."""
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    needed = trainable * batches * (len(OBJECTIVES) + len(QUANTITIES)) * _BYTES
    if needed > MEMORY_LIMIT:
        got = f"{trainable:,} of them, {needed / 2**30:.0f} GiB of gradients for {batches} batches"
        expected = f"at most {MEMORY_LIMIT / 2**30:.0f} GiB"
        return InputError("trainable parameters", got, expected, "Measure with LoRA, or with fewer batches.")
    return None
