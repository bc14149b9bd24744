"""Additional terms beside TRL's loss: settings that they refuse, and their sum over the loss's divisor."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from trl_drgrpo.common.errors import InputError, UpstreamError
from trl_drgrpo.objective.loss_terms import loss_tokens, summed_term
from trl_drgrpo.upstream.batches import Rollouts, ScoredTokens, trained_mask
from trl_drgrpo.upstream.hooks import LossTerm, Metrics

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.trl_overrides import HostTrainer


def check_loss_term(term: LossTerm, args: "DrGRPOConfig") -> None:
    """Refuse settings under which a term would not be what it says."""
    if type(term).per_token_loss is LossTerm.per_token_loss:
        raise InputError("features", f"{term.name} without per_token_loss", "a loss per token", "Define the method.")
    refused = {}
    if term.reads_all_rows:
        remedy = f"Skipped groups would be missing from {term.name}, which reads all rows: turn it off."
        refused |= {"dynamic_sampling": (False, remedy), "curriculum": (False, remedy)}
    if term.replaces_policy_loss:
        remedy = f"It belongs to the clipped loss, which {term.name} replaces: remove it, or put it into the term."
        refused |= dict.fromkeys(("delta", "off_policy_mask_threshold"), (None, remedy))  # with the value that is off
        refused["top_entropy_quantile"] = (1.0, remedy)
    for name, (expected, remedy) in refused.items():
        value = getattr(args, name)
        if value != expected:
            raise InputError(name, f"{value!r} with {term.name}", repr(expected), remedy)


def loss_of_terms(
    trainer: "HostTrainer", inputs: Rollouts, terms: Sequence[LossTerm], scored: ScoredTokens, logged: Metrics
) -> torch.Tensor:
    """Return the sum of terms over the divisor of TRL's loss, which has just been computed.

    Args:
        trainer ([`HostTrainer`]): With L in the place of its `max_completion_length`, see [`Hooks.loss_constants`].
        inputs ([`Rollouts`]): The micro-batch.
        terms (`Sequence[LossTerm]`): The terms.
        scored ([`ScoredTokens`]): Values that TRL's loss was computed from.
        logged (`dict[str, list[float]]`): Gets the mean of each term per token.
    """
    logps, entropies, _ = scored
    if entropies is None:
        raise UpstreamError("TRL's loss computes no entropies, which loss terms rely on. Remove the loss terms.")
    tokens = loss_tokens(
        logps,
        entropies,
        inputs["advantages"],
        trained_mask(inputs),
        inputs.get("old_per_token_logps"),
        inputs.get("ref_per_token_logps"),
    )
    # TRL's divisor for `loss_type="dr_grpo"`: `B * L`, and the micro-batches of the step in training.
    divisor = len(tokens.mask) * cast(float, trainer.max_completion_length)
    if trainer.model.training:
        divisor = divisor * trainer.current_gradient_accumulation_steps
    loss = torch.zeros((), device=logps.device)
    for term in terms:
        # vLLM's correction weighs the policy's loss in TRL, and so what stands in its place.
        weights = inputs.get("importance_sampling_ratio") if term.replaces_policy_loss else None
        total = summed_term(term.name, term.per_token_loss(tokens), tokens, weights)
        # Judged over all ranks: an error on one alone would leave the others in their next exchange.
        sums = torch.stack([total.detach(), tokens.mask.sum().to(total.dtype)])
        sums = cast(torch.Tensor, trainer.accelerator.gather(sums))
        sum_of_ranks, tokens_of_ranks = sums.view(-1, 2).sum(dim=0).tolist()
        if not math.isfinite(sum_of_ranks):
            remedy = "Look for a division by zero, a logarithm of 0 or an overflow in it."
            raise InputError(term.name, f"a loss of {sum_of_ranks}", "finite numbers", remedy)
        logged[f"loss_term/{term.name}"].append(sum_of_ranks / max(tokens_of_ranks, 1.0))
        loss = loss + total / divisor
    return loss
