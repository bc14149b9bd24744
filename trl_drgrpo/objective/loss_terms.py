"""Tokens of a micro-batch as additional loss terms see them, and the sum that stays Dr. GRPO's.

Pure tensors. Shapes: `B` rows, `T` completion tokens (padded).
"""

from dataclasses import dataclass

import torch

from trl_drgrpo.common.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """Completion tokens of a micro-batch.

    Every tensor is `(B, T)` and 0 where `mask` is False, so a term may compute with all of it.

    Args:
        logps (`torch.Tensor`): Log-probabilities under the policy, in nats; carries gradient.
        old_logps (`torch.Tensor`): The same under the policy that sampled the completions; no gradient.
        ref_logps (`torch.Tensor` or `None`): The same under the frozen reference; only where `beta > 0`.
        entropies (`torch.Tensor`): Entropy of the policy's next-token distribution, in nats; carries gradient.
        advantages (`torch.Tensor`): Advantage of each token.
        mask (`torch.Tensor` of bools): Tokens that are trained on.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    ref_logps: torch.Tensor | None
    entropies: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        """Importance ratio `exp(logp - old_logp)` of each token `(B, T)`; carries gradient."""
        return torch.exp(self.logps - self.old_logps)


def loss_tokens(
    logps: torch.Tensor,
    entropies: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
) -> LossTokens:
    """Build the tokens of a micro-batch, with zeros where nothing is trained on.

    Args:
        logps, entropies, old_logps, ref_logps (`torch.Tensor` of shape `(B, T)`): As in [`LossTokens`]. Without
            `old_logps` the completions come from the policy itself.
        advantages (`torch.Tensor` of shape `(B,)`, `(B, 1)` or `(B, T)`): One per row, or one per token.
        mask (`torch.Tensor` of shape `(B, T)`): 1 or True on tokens that are trained on.
    """
    is_trained = mask.bool()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    if old_logps is None:
        old_logps = logps.detach()

    # 0 and not NaN: a term that multiplies by the mask would make 0 * NaN, and a gradient of NaN from it.
    def cleared(values: torch.Tensor) -> torch.Tensor:
        return values.expand_as(is_trained).masked_fill(~is_trained, 0.0)

    return LossTokens(
        logps=cleared(logps),
        old_logps=cleared(old_logps),
        ref_logps=None if ref_logps is None else cleared(ref_logps),
        entropies=cleared(entropies),
        advantages=cleared(advantages),
        mask=is_trained,
    )


def summed_term(
    name: str,
    per_token_loss: torch.Tensor,
    tokens: LossTokens,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum a term's loss over the tokens that are trained on.

    Args:
        name (`str`): The term, for messages.
        per_token_loss (`torch.Tensor` of shape `(B, T)`): Result of the term.
        tokens ([`LossTokens`]): Tokens that the term was given.
        weights (`torch.Tensor` of shape `(B, 1)` or `(B, T)`, *optional*): Weights of the tokens.

    Returns:
        `torch.Tensor`, scalar. The trainer divides it by `B * L`, as it does the policy's loss.

    Raises:
        [`InputError`]: Another shape, or no tensor.
    """
    shape = tuple(tokens.mask.shape)
    if not isinstance(per_token_loss, torch.Tensor) or tuple(per_token_loss.shape) != shape:
        got = type(per_token_loss).__name__
        if hasattr(per_token_loss, "shape"):
            got = f"the shape {tuple(per_token_loss.shape)}"
        remedy = "Return one loss per token, without a mean or a sum: the trainer sums and divides."
        raise InputError(name, got, f"a tensor of the shape {shape}", remedy)
    if weights is not None:
        per_token_loss = per_token_loss * weights
    # Masked after the weights: a term may return NaN where nothing is trained on.
    return per_token_loss.masked_fill(~tokens.mask, 0.0).sum()
