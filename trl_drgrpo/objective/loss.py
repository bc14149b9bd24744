"""Specification of the Dr. GRPO loss. Training does not run this file: it runs TRL's loss under two constants.

TRL divides the sum of a micro-batch by its rows times `max_completion_length`. `DrGRPOTrainer.loss_constants` (in
`trainer.py`) puts `L * nominal rows / rows` in the place of the latter, and so makes the divisor `B * L` for any split
of the batch; the other constant is the weight of KL. The tests and `trl-drgrpo check` compare TRL's loss under these
constants, and its gradient, with this file.

Deltas from GRPO:

- token losses are *summed*, and divided by a constant `B * L`: not by a row's length (which punishes a long incorrect
  answer less per token) and not by the number of tokens in a batch (which makes a row's weight depend on its
  neighbors);
- so the gradient is a plain sum over rows and tokens, and any split of the rows gives the same sum.

Pure tensors, no trl and no transformers. Shapes: `B` rows, `T` completion tokens (padded).
"""

import torch

from trl_drgrpo.common.errors import InputError


def k3_divergence(per_token_logps: torch.Tensor, ref_per_token_logps: torch.Tensor) -> torch.Tensor:
    """Estimate `KL[pi_theta || pi_ref]` per token by k3: `exp(ref - logp) - (ref - logp) - 1`, never negative.

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the policy, in nats.
        ref_per_token_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the frozen reference.

    Returns:
        `torch.Tensor` of shape `(B, T)`.

    Source: Schulman, "Approximating KL divergence"; arXiv 2402.03300, equation 4.
    """
    log_ratio = ref_per_token_logps - per_token_logps
    return torch.exp(log_ratio) - log_ratio - 1


def dr_grpo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    loss_normalizer: float,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    ref_per_token_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the Dr. GRPO loss of a batch of rows.

    With `rho = exp(logp - old_logp)`:

        l_it = -min(rho_it * A_it, clip(rho_it, 1 - epsilon_low, 1 + epsilon_high) * A_it) + beta * k3_it
        loss = (1 / (B * L)) * sum_i sum_{t in mask} l_it

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the policy, in nats; carries gradient.
        old_per_token_logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probabilities of the policy that sampled the completions. `None` = the same policy (ratio 1).
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`): One advantage per row, or one per token.
        completion_mask (`torch.Tensor` of shape `(B, T)`): 1 or True on tokens that are trained on, else 0 or False.
        loss_normalizer (`float`): `L`, a positive constant in tokens. Never a tensor width.
        epsilon_low (`float`, *optional*, defaults to `0.2`): Lower clip distance of the ratio.
        epsilon_high (`float`, *optional*): Upper clip distance; `epsilon_low` when not given.
        beta (`float`, *optional*, defaults to `0.0`): Weight of the KL term, not negative.
        ref_per_token_logps (`torch.Tensor` of shape `(B, T)`, *optional*): Needed when `beta > 0`.

    Returns:
        `torch.Tensor`, scalar. Whatever stands in masked slots, NaN included, reaches neither loss nor gradient.

    Raises:
        `InputError`: Shapes that do not fit, `loss_normalizer <= 0`, `beta < 0`, or `beta > 0` without a reference.

    Source: arXiv 2503.20783, equation 2 with both corrections; clipping from arXiv 2402.03300, equation 3; separate
    clip distances from arXiv 2503.14476. Equal to TRL's `dr_grpo` with `scale_rewards="none"` and
    `use_bias_correction_kl=False`.

    Example: rewards (1, 0, 0, 1), lengths (2, 4, 3, 6), L = 8, ratio 1. The token sum is
    0.5 * 2 - 0.5 * 4 - 0.5 * 3 + 0.5 * 6 = 0.5, so the loss is -0.5 / (4 * 8) = -0.015625.

    ```python
    >>> from trl_drgrpo import group_advantages
    >>> advantages = group_advantages([1.0, 0.0, 0.0, 1.0], num_generations=4)
    >>> mask = torch.arange(6) < torch.tensor([[2], [4], [3], [6]])
    >>> logps = torch.full((4, 6), -1.5)
    >>> dr_grpo_loss(logps, logps, advantages, mask, loss_normalizer=8).item()
    -0.015625

    ```
    """
    mask = completion_mask.bool()
    _check_inputs(per_token_logps, old_per_token_logps, advantages, mask, loss_normalizer, beta, ref_per_token_logps)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)  # (B, 1): every token of a row carries the row's advantage
    if epsilon_high is None:
        epsilon_high = epsilon_low

    # Inputs are masked, not the result: 0 * NaN is NaN, and the gradient of a masked NaN would be NaN as well.
    token_advantages = advantages.expand_as(mask).masked_fill(~mask, 0.0)  # (B, T)
    logps = per_token_logps.masked_fill(~mask, 0.0)
    old_logps = logps.detach()
    if old_per_token_logps is not None:
        old_logps = old_per_token_logps.masked_fill(~mask, 0.0)

    ratio = torch.exp(logps - old_logps)
    clipped_ratio = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    # The smaller one: clipping may take away gain, and never hides a loss.
    per_token_gain = torch.min(ratio * token_advantages, clipped_ratio * token_advantages)
    per_token_loss = -per_token_gain
    if beta > 0 and ref_per_token_logps is not None:
        ref_logps = ref_per_token_logps.masked_fill(~mask, 0.0)
        per_token_loss = per_token_loss + beta * k3_divergence(logps, ref_logps)

    # The divisor counts rows, not tokens: nothing that a model writes can change the weight of another token.
    return per_token_loss.sum() / (mask.size(0) * loss_normalizer)


def _check_inputs(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    loss_normalizer: float,
    beta: float,
    ref_logps: torch.Tensor | None,
) -> None:
    """Refuse shapes that would broadcast silently, and a divisor or weight without a meaning."""
    tensors = {"old_per_token_logps": old_logps, "completion_mask": mask, "ref_per_token_logps": ref_logps}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != logps.shape:
            remedy = "All (B, T) tensors share one shape."
            raise InputError(name, f"shape {tuple(tensor.shape)}", f"{tuple(logps.shape)}", remedy)
    if logps.dim() != 2 or mask.size(0) == 0:
        remedy = "Pass a batch of rows."
        raise InputError("per_token_logps", f"shape {tuple(logps.shape)}", "(B, T) with B >= 1", remedy)
    if advantages.shape not in (logps.shape, logps.shape[:1]):
        expected = f"{tuple(logps.shape[:1])} or {tuple(logps.shape)}"
        raise InputError("advantages", f"shape {tuple(advantages.shape)}", expected, "One per row, or one per token.")
    if not loss_normalizer > 0:
        raise InputError("loss_normalizer", f"{loss_normalizer}", "a positive constant", "Use max_completion_length.")
    if beta < 0 or (beta > 0 and ref_logps is None):
        reference = "without" if ref_logps is None else "with"
        got = f"{beta} {reference} ref_per_token_logps"
        expected = "0, or a positive weight together with ref_per_token_logps"
        raise InputError("beta", got, expected, "Pass the reference's log-probabilities, or set beta to 0.")
