"""The hooks through which this package steps into `GRPOTrainer`, and what they are handed.

Nothing of TRL is named here: `upstream.py` calls the hooks, the trainers of this package define them. As they stand
they change nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ScoredBatch:
    """A generation batch as TRL hands it to the reward functions, and what they gave.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Over all ranks, NaN where a function did not apply.
        inputs (`list[dict]`), prompts, completions (`list`), completion_ids (`list[list[int]]`): This rank's rows.
    """

    rewards_per_func: torch.Tensor
    inputs: list[dict[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]


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


class Hooks:
    """What a trainer may define; each does nothing until it is."""

    def on_built(self, trainable_values: dict[str, torch.Tensor]) -> None:
        """Called at the end of TRL's constructor with the values of trainable parameters from before TRL cast them."""

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Sees a generation batch right after the reward functions did."""

    def on_rollouts(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """May edit a scored generation batch (this rank's rows) before it is split into micro-batches."""
        return rollouts

    def on_micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """May replace the micro-batch that is due in training, and those behind it in `buffered_rollouts`."""
        return inputs

    def loss_without_forward(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The loss of a micro-batch that needs no forward; `None` for all others."""
        return None

    def loss_constants(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Attributes of the trainer that `_compute_loss` shall read with another value for this micro-batch."""
        return {}

    def loss_metrics(self, inputs: dict[str, Any], metrics: dict[str, list[float]]) -> dict[str, list[float]]:
        """May edit what `_compute_loss` logged for a micro-batch."""
        return metrics

    def generating(self) -> AbstractContextManager[Any]:
        """Entered around each generation with the policy."""
        return nullcontext()

    def rolling_out(self) -> AbstractContextManager[Any]:
        """Entered around the making of a batch's completions: generation, turns with tools, custom rollouts."""
        return nullcontext()

    def scoring(self) -> AbstractContextManager[Any]:
        """Entered around each call of the reward functions."""
        return nullcontext()

    def writing(self, folder: Path) -> AbstractContextManager[Any]:
        """Entered around all that is written into a checkpoint, on every rank."""
        return nullcontext()

    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        """Called on every rank before anything of a checkpoint is written."""

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        """Called on every rank after a checkpoint was written, before it is uploaded and older ones are deleted."""

    def on_failed_uploads(self, errors: list[BaseException]) -> None:
        """Called on the main process with what went wrong in uploads that ran beside the training."""

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        """Called on every rank after optimizer and scheduler were restored, before the first step."""
