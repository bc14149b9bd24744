"""Inputs of the hooks: a generation batch on its way from rewards to advantages, and tokens to be scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils.logging import get_logger

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.process_rewards.step_fields import StepFields
from trl_drgrpo.rewards.texts import Text

if TYPE_CHECKING:
    from trl_drgrpo.objective.fork_advantages import Forks

logger = get_logger(__name__)

DatasetRow = dict[str, Any]  # `prompt`, and the columns that reward functions read


class Rollouts(TypedDict):
    """Rows as TRL trains on them: this rank's generation batch, or a micro-batch of it. `b` rows; prompts of `P`
    tokens are padded on the left, completions of `T` tokens on the right. Images and what a newer TRL may add come
    under further keys."""

    prompt_ids: torch.Tensor  # (b, P)
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor  # (b, T)
    completion_mask: torch.Tensor
    advantages: torch.Tensor  # (b,) or (b, T)
    tool_mask: NotRequired[torch.Tensor]  # (b, T), 0 on tokens that a tool wrote
    old_per_token_logps: NotRequired[torch.Tensor]  # (b, T)
    ref_per_token_logps: NotRequired[torch.Tensor]
    sampling_per_token_logps: NotRequired[torch.Tensor]
    importance_sampling_ratio: NotRequired[torch.Tensor]  # (b, 1) or (b, T)
    num_items_in_batch: NotRequired[torch.Tensor]  # scalar


def trained_mask(rollouts: Rollouts) -> torch.Tensor:
    """`(b, T)`: 1 for completion tokens of the policy, 0 for padding and for tokens that a tool wrote."""
    mask = rollouts["completion_mask"]
    return mask * rollouts["tool_mask"] if "tool_mask" in rollouts else mask


def tensors_of(rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """The tensors of some rows, by key."""
    return {key: value for key, value in rollouts.items() if isinstance(value, torch.Tensor)}


Metrics = dict[str, list[float]]  # logged values by name


@dataclass(frozen=True)
class ScoredBatch:
    """A generation batch as TRL hands it to the reward functions, and what they gave.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Over all ranks, NaN where a function did not apply.
        inputs (`list[dict]`), prompts, completions (`list`), completion_ids (`list[list[int]]`): This rank's rows.
        environments (`list`, *optional*): The environment of each of them, where there are environments.
    """

    rewards_per_func: torch.Tensor
    inputs: list[DatasetRow]
    prompts: list[Text]
    completions: list[Text]
    completion_ids: list[list[int]]
    environments: list[object] | None = None

    def rows_of_rank(self, rank: int) -> slice:
        """A rank's rows among those of all ranks: each has as many."""
        rows = len(self.prompts)
        return slice(rank * rows, (rank + 1) * rows)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(StepFields):
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
        steps, step_rewards, step_ends, state_keys: As in [`StepFields`].
        forks ([`Forks`], *optional*): Where rows of all ranks forked; `None`: they did not.
    """

    scored: ScoredBatch
    rewards: torch.Tensor
    completion_mask: torch.Tensor
    trained_mask: torch.Tensor
    num_generations: int
    own_rows: slice
    training: bool = True
    forks: "Forks | None" = None


@dataclass(frozen=True, kw_only=True)
class CreditedBatch(RolloutBatch):
    """A generation batch with the advantages made of its rewards.

    Args:
        advantages (`torch.Tensor` of shape `(b,)` or `(b, T)`): What this rank's rows are trained on.
        sampling_ratios (`torch.Tensor` of shape `(b, 1)` or `(b, T)`, *optional*):
            Factors of the token losses that correct for the probabilities of the engine that sampled.
        scored, rewards, completion_mask, trained_mask, num_generations, own_rows, training, forks, steps,
            step_rewards, step_ends, state_keys: As in [`RolloutBatch`].
    """

    advantages: torch.Tensor
    sampling_ratios: torch.Tensor | None = None

    @property
    def token_advantages(self) -> torch.Tensor:
        """`advantages` for every token `(b, T)`, 0 where nothing is trained on."""
        advantages = self.advantages
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return advantages * self.trained_mask

    @property
    def row_weights(self) -> torch.Tensor | None:
        """Mean of the sampling ratios over the tokens of each row `(b,)`; NaN where no token is trained on."""
        if self.sampling_ratios is None:
            return None
        # A ratio of `(b, 1)` becomes one per token here; a row without trained tokens is 0 / 0.
        sums = (self.sampling_ratios * self.trained_mask).sum(dim=1)
        return sums / self.trained_mask.sum(dim=1)

    @property
    def row_advantages(self) -> torch.Tensor:
        """One advantage per row of this rank `(b,)`: its own, or the mean over the tokens that are trained on."""
        if self.advantages.dim() == 1:
            return self.advantages
        tokens = self.trained_mask.sum(dim=1).clamp(min=1)
        return self.advantages.sum(dim=1) / tokens


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
        """Tell whether nothing but tokens goes into the forward, and nothing but their values is wanted from it."""
        return all(value is None or value is False for value in self.options.values())


ScoredTokens = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # (B, T), (B, T), MoE auxiliary loss


def refuse_infinite(rewards: torch.Tensor, field: str, on_error: str) -> None:
    """Raise where a reward is beyond float32; with `on_error="unscorable"` put NaN in its place, in `rewards`."""
    infinite = rewards.isinf()
    if not infinite.any():
        return
    if on_error == "raise":
        row = int(infinite.nonzero()[0])
        got = f"{rewards[row].item()} in float32 for row {row} of the batch"
        raise RewardError(field, got, "numbers that float32 can hold", "Clip it, or return None.")
    logger.warning_once(f"{field}: values beyond float32 count as None (on_reward_error='unscorable').")
    rewards[infinite] = torch.nan


def checked_advantages(advantages: object, batch: RolloutBatch, source: str) -> torch.Tensor:
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
    if advantages.dim() == 2:  # whatever stands on padding, NaN included, has no part in the loss
        advantages = torch.where(trained, advantages, 0.0)
    invalid = (~advantages.isfinite()).nonzero()
    if len(invalid):
        row, *token = invalid[0].tolist()
        where = f"row {row}"
        if token:
            where += f", token {token[0]}{_step_at(batch, row, token[0])}"
        value = advantages[tuple(invalid[0])]
        remedy = "Return 0 for a row without a reward."
        if value.isinf():
            remedy = "Rewards, or their weights, are too large for float32: scale or clip them."
        raise RewardError(source, f"{value.item()} for {where}", "finite numbers", remedy)
    return advantages


def _step_at(batch: RolloutBatch, row: int, token: int) -> str:
    if batch.step_ends is None:
        return ""
    ends = batch.step_ends[batch.own_rows][row]  # inclusive
    return f" (step {sum(end < token for end in ends)})"


OF_PROMPTS = ("prompt_ids", "prompt_mask")  # (B, P), padded on the left
OF_COMPLETIONS = (  # (B, T), padded on the right
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)
OF_EITHER = ("advantages", "importance_sampling_ratio")  # (B,), (B, 1) or (B, T)
EXPERT_WEIGHTS = "expert_weights"  # (N,), the loss of a token's probability of each expert (`router_balance.py`)
OF_THE_BATCH = ("num_items_in_batch", EXPERT_WEIGHTS)
KNOWN = frozenset((*OF_PROMPTS, *OF_COMPLETIONS, *OF_EITHER, *OF_THE_BATCH))


def unknown_keys(inputs: Mapping[str, object]) -> list[str]:
    """Keys whose rows cannot be cut out: images and whatever a newer TRL may add."""
    return sorted(key for key, value in inputs.items() if key not in KNOWN and value is not None)


def row_of(inputs: Rollouts, index: int) -> dict[str, torch.Tensor]:
    """One row, its prompt without padding, on the CPU."""
    is_prompt = inputs["prompt_mask"][index].bool().cpu()
    width = inputs["completion_mask"].size(1)
    row = {}
    for key, rows in tensors_of(inputs).items():
        if key in OF_THE_BATCH:
            continue
        value = rows[index].cpu()
        # Completions keep their padding: `joined_rows` adds to it on the same side.
        if key in OF_PROMPTS:
            value = value[is_prompt]
        elif key not in OF_COMPLETIONS and value.dim() and value.size(0) not in (1, width):
            raise ValueError(f"{key}: a row of {tuple(value.shape)} is neither per row nor per token")
        row[key] = value
    return row


def whole_row(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """A row of nothing but tokens, as [`row_of`] gives one."""
    row = {}
    for name, ids in (("prompt", prompt_ids), ("completion", completion_ids)):
        row[f"{name}_ids"] = torch.tensor(ids, dtype=torch.long)
        row[f"{name}_mask"] = torch.ones_like(row[f"{name}_ids"])
    return row


def token_batch(inputs: Rollouts, batch_size: int | None = None, compute_entropy: bool = False) -> TokenBatch:
    """The tokens of a micro-batch, to be scored; further arguments as in [`TokenBatch`]."""
    return TokenBatch(
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
        batch_size,
        compute_entropy,
    )


def joined_rows(rows: Sequence[dict[str, torch.Tensor]], pad_token_id: int, device: torch.device | None) -> Rollouts:
    """Rows as one batch: prompts padded on the left, completions on the right.

    Args:
        rows (`Sequence[dict[str, torch.Tensor]]`): From [`row_of`], not empty.
        pad_token_id (`int`): For token ids; everything else is padded with 0.
        device (`torch.device`): Where the batch goes.
    """
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if values[0].dim():
            side = "left" if key in OF_PROMPTS else "right"
            pad = pad_token_id if key.endswith("_ids") else 0
            joined = pad_sequence(values, batch_first=True, padding_value=pad, padding_side=side)
        else:
            joined = torch.stack(values)
        batch[key] = joined.to(device)
    return Rollouts(**batch)
