"""Inputs of the hooks: a generation batch on its way from rewards to advantages, and tokens to be scored."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.calling import RaggedRewards, StepScores


@dataclass(frozen=True)
class ScoredBatch:
    """A generation batch as TRL hands it to the reward functions, and what they gave.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Over all ranks, NaN where a function did not apply.
        inputs (`list[dict]`), prompts, completions (`list`), completion_ids (`list[list[int]]`): This rank's rows.
        environments (`list`, *optional*): The environment of each of them, where there are environments.
    """

    rewards_per_func: torch.Tensor
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    environments: list[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """A generation batch with its rewards: what advantages are computed from.

    Groups may straddle ranks, so rewards are those of all ranks (`B` rows); tokens are this rank's (`b` rows).

    Args:
        scored ([`ScoredBatch`]): Rewards per function over all ranks `(B, F)`; this rank's rows of everything else.
        rewards (`torch.Tensor` of shape `(B,)`): Weighted sum over the functions, over all ranks, NaN = unscorable.
        completion_mask (`torch.Tensor` of shape `(b, T)`): 1 for this rank's completion tokens.
        trained_mask (`torch.Tensor` of shape `(b, T)`): The same without tokens that a tool wrote.
        num_generations (`int`): G; rows `g * G` to `(g + 1) * G - 1` of all ranks are one group.
        own_rows (`slice`): This rank's rows among those of all ranks.
        training (`bool`): Whether it is trained on; `False` in an evaluation.
        steps ([`StepScores`], *optional*): This rank's steps and their rewards.
        step_rewards (`B` lists of `K_i` floats, *optional*): Reward of each step, over all ranks; `None` = unscorable.
        step_ends (`B` lists of ints, *optional*):
            Inclusive last token of each step, over all ranks. One more than there are rewards where a closing follows:
            the tokens behind the last separator, EOS as a rule.
        state_keys (`B` lists of hashables, *optional*):
            The state of the environment that each turn begins in, over all ranks; `None` = unknown.
        forks ([`Forks`], *optional*): Where rows of all ranks forked; `None`: they did not.
    """

    scored: ScoredBatch
    rewards: torch.Tensor
    completion_mask: torch.Tensor
    trained_mask: torch.Tensor
    num_generations: int
    own_rows: slice
    training: bool = True
    steps: StepScores | None = None
    step_rewards: RaggedRewards | None = None
    step_ends: list[list[int]] | None = None
    state_keys: list[list[Hashable | None]] | None = None
    forks: Forks | None = None


@dataclass(frozen=True, kw_only=True)
class CreditedBatch(RolloutBatch):
    """A generation batch with the advantages made of its rewards.

    Args:
        advantages (`torch.Tensor` of shape `(b,)` or `(b, T)`): What this rank's rows are trained on.
        sampling_ratios (`torch.Tensor` of shape `(b, 1)` or `(b, T)`, *optional*):
            What the token losses are multiplied by to correct for the probabilities of the engine that sampled.
    """

    advantages: torch.Tensor
    sampling_ratios: torch.Tensor | None = None

    @property
    def token_advantages(self) -> torch.Tensor:
        """`advantages` for every token `(b, T)`, 0 where nothing is trained on."""
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages.unsqueeze(1)
        return advantages * self.trained_mask

    @property
    def row_weights(self) -> torch.Tensor | None:
        """Mean of the sampling ratios over the tokens of each row `(b,)`; NaN where no token is trained on."""
        if self.sampling_ratios is None:
            return None
        return (self.sampling_ratios * self.trained_mask).sum(dim=1) / self.trained_mask.sum(dim=1)

    @property
    def row_advantages(self) -> torch.Tensor:
        """One advantage per row of this rank `(b,)`: its own, or the mean over the tokens that are trained on."""
        if self.advantages.dim() == 1:
            return self.advantages
        return self.advantages.sum(dim=1) / self.trained_mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class TokenBatch:
    """Rows whose completion tokens are to be scored.

    Args:
        input_ids (`torch.Tensor` of shape `(B, P + T)`): Prompts padded left, completions padded right.
        attention_mask (`torch.Tensor` of shape `(B, P + T)`): 1 for tokens, 0 for padding.
        completion_width (`int`): T.
        batch_size (`int`, *optional*): Rows per forward; `None`: all at once.
        compute_entropy (`bool`): Whether entropies are wanted too.
        options (`dict`): TRL's further arguments: images and the like, `compute_aux_loss`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_width: int
    batch_size: int | None = None
    compute_entropy: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_text_only(self) -> bool:
        """Whether nothing but tokens goes into the forward, and nothing but their values is wanted from it."""
        return all(value is None or value is False for value in self.options.values())


ScoredTokens = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # (B, T), (B, T), MoE auxiliary loss


def checked_advantages(advantages: Any, batch: RolloutBatch, source: str) -> torch.Tensor:
    """Advantages of this rank's rows, as somebody's function gave them for a batch.

    Args:
        advantages: A tensor of shape `(b,)`, `(B,)` or `(b, T)`, whatever its dtype and device.
        batch ([`RolloutBatch`]): What they were computed from.
        source (`str`): The function's name, for messages.

    Returns:
        `torch.Tensor` of shape `(b,)` or `(b, T)`, float32, 0 on tokens that are not trained on.

    Raises:
        `RewardError`: Another shape, or a value that is not finite; names the row, and the token and step.
    """
    rows, width = batch.trained_mask.shape
    shapes = f"({rows},) for the rows of this rank or ({rows}, {width}) for their tokens"
    if not isinstance(advantages, torch.Tensor):
        raise RewardError(source, type(advantages).__name__, f"a tensor of shape {shapes}", "Return a tensor.")
    if advantages.shape == batch.rewards.shape:
        advantages = advantages[batch.own_rows]
    if advantages.shape not in ((rows,), (rows, width)):
        raise RewardError(source, f"shape {tuple(advantages.shape)}", f"shape {shapes}", "Return one number for each.")
    trained = batch.trained_mask.bool()
    advantages = advantages.detach().to(trained.device, torch.float32)
    if advantages.dim() == 2:
        advantages = torch.where(trained, advantages, 0.0)
    if len(invalid := (~advantages.isfinite()).nonzero()):
        row, *token = invalid[0].tolist()
        where = f"row {row}" + (f", token {token[0]}{_step_at(batch, row, token[0])}" if token else "")
        got = f"{advantages[tuple(invalid[0])].item()} for {where}"
        raise RewardError(source, got, "finite numbers", "Return 0 for a row without a reward.")
    return advantages


def _step_at(batch: RolloutBatch, row: int, token: int) -> str:
    if batch.step_ends is None:
        return ""
    ends = batch.step_ends[batch.own_rows][row]
    return f" (step {sum(end < token for end in ends)})"
