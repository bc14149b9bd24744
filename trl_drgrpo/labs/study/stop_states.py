"""The hidden state in which a completion might have stopped, for a probe.

From each completion one position is drawn, in proportion to the probability that the policy gives to a stop token
there, among the tokens that the policy wrote itself. So a position counts as much as the policy may stop there, and
a long completion, also one that was cut off, counts no more than a short one. The state is the last layer's, from
which the next token's distribution is read.
"""

from typing import Any

import numpy as np
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.correctness_probe import ProbeScores, StopStates, joined, probe_correctness
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import TokenBatch


class StateCollector:
    """Draws a state from each completion of the batches that it is shown.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy.
        seed (`int`, *optional*, defaults to `0`): Of the draws; the sampler's generator is not touched.
    """

    def __init__(self, trainer: DrGRPOTrainer, seed: int = 0):
        if trainer.model.get_output_embeddings() is None:
            got = f"{type(trainer.model).__name__} without an output embedding"
            raise InputError("--probe", got, "a causal language model", "Leave the probe out.")
        self.trainer = trainer
        self.rng = np.random.default_rng(seed)
        self.parts: list[StopStates] = []
        self.prompts: dict[tuple[int, ...], int] = {}

    def add(self, tokens: TokenBatch, mask: torch.Tensor, right: np.ndarray) -> None:
        """Take a state of each row.

        Args:
            tokens ([`TokenBatch`]): The rows.
            mask (`torch.Tensor` of shape `(B, T)`): 1 on tokens that the policy wrote; rows without one are left out.
            right (`np.ndarray` of shape `(B,)`, bool): Verdicts.
        """
        size = self.trainer.args.per_device_train_batch_size
        for first in range(0, len(mask), size):
            rows = slice(first, first + size)
            part = TokenBatch(tokens.input_ids[rows], tokens.attention_mask[rows], tokens.completion_width)
            states, log_stop = stopping(self.trainer, part)
            own = mask[rows].bool().cpu()
            for row in own.any(dim=1).nonzero().flatten().tolist():
                (positions,) = own[row].nonzero(as_tuple=True)
                hazard = log_stop[row, positions].double().exp()
                drawn = _draw(log_stop[row, positions].double().numpy(), self.rng)
                self.parts.append(
                    StopStates(
                        states[row, positions[drawn]].float().cpu().numpy()[None],
                        np.array([drawn]),
                        np.array([right[first + row]]),
                        np.array([self._prompt(part, row)]),
                        np.array([float((hazard * (1 - hazard)).sum())]),
                    )
                )

    def probe(self) -> ProbeScores:
        """The probe on everything that was collected, see [`probe_correctness`]."""
        return probe_correctness(joined(self.parts))

    def _prompt(self, tokens: TokenBatch, row: int) -> int:
        """A number for the row's prompt, the same whenever it comes."""
        width = tokens.input_ids.size(1) - tokens.completion_width
        ids = tokens.input_ids[row, :width][tokens.attention_mask[row, :width].bool()]
        return self.prompts.setdefault(tuple(ids.tolist()), len(self.prompts))


@torch.no_grad()
def stopping(trainer: DrGRPOTrainer, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """States that the completion's tokens were drawn from, and the log-probability of a stop token in each.

    Args:
        trainer ([`DrGRPOTrainer`]): Owns the policy; its temperature counts.
        tokens ([`TokenBatch`]): Rows, in one forward.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]` of shapes `(B, T, d)` and `(B, T)`, the second on the CPU.
    """
    caught: list[torch.Tensor] = []

    def catch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        caught.append(inputs[0].detach())

    hook = trainer.model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        with trainer.accelerator.autocast():
            output = trainer.model(
                input_ids=tokens.input_ids,
                attention_mask=tokens.attention_mask,
                position_ids=(tokens.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
                logits_to_keep=tokens.completion_width + 1,
                use_cache=False,
            )
    finally:
        hook.remove()
    predicting = slice(-tokens.completion_width - 1, -1)
    stops = sorted(trainer.stop_token_ids)
    log_stop = []
    for logits in output.logits[:, predicting]:  # row by row: a vocabulary is large
        scaled = logits.float() / trainer.args.temperature
        log_stop.append((scaled[:, stops].logsumexp(dim=1) - scaled.logsumexp(dim=1)).cpu())
    return caught[0][:, predicting], torch.stack(log_stop)


def _draw(log_weights: np.ndarray, rng: np.random.Generator) -> int:
    weights = np.exp(log_weights - log_weights.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))
