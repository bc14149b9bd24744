"""TRL's fused head in the model's own precision, for calculations in float64."""

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class PlainHeadOutput:
    """Output of a fused forward, as TRL reads it. A dataclass, so that DDP finds the tensors in it."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: None = None


def use_plain_lm_head(model: Any) -> None:
    """Serve TRL's fused head by a plain log-softmax in the model's own dtype, for calculations in float64.

    TRL 1.16 computes per-token log-probabilities in a chunked kernel that is float32 whatever the model is. The
    contract is kept: `model(..., labels=labels, fused_lm_head=True)` returns `log_probs` and `entropy`, one column
    shorter than `labels`, zero where the next label is -100; with `shift_labels` instead, as many columns as those.

    Args:
        model ([`~transformers.PreTrainedModel`]): A model that a trainer has prepared (not its PEFT wrapper).
    """
    fused_forward = model.forward

    @functools.wraps(fused_forward)
    def forward(*args, fused_lm_head=False, labels: Any = None, shift_labels: Any = None, **kwargs):
        if not fused_lm_head:
            return fused_forward(*args, labels=labels, **kwargs)
        kwargs.update(use_cache=False)
        logits = fused_forward(*args, **kwargs).logits
        if shift_labels is None:
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        log_probs = logits.log_softmax(dim=-1)  # (B, T - 1, V)
        unscored = shift_labels == -100
        token_log_probs = log_probs.gather(-1, shift_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return PlainHeadOutput(token_log_probs.masked_fill(unscored, 0.0), entropy.masked_fill(unscored, 0.0))

    model.forward = forward
