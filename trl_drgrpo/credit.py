"""From the rewards of a generation batch to the advantages it is trained on, inside the trainer. Glue only.

Rewards are gathered over ranks, checked, and combined; `group_advantages` and, with step rewards, `step_advantages`
turn them into advantages; the divisor L and the KL weight go to TRL's loss. The mathematics is in `advantages.py`,
`step_credit.py` and `loss.py`.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import torch

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.diagnostics.steps import step_statistics
from trl_drgrpo.features.fast_path.feature import FastPathTrainer
from trl_drgrpo.objective.advantages import AdvantageBaseline, combine_rewards, group_advantages
from trl_drgrpo.objective.step_advantages import StepBaseline, StepCredit, spread_over_tokens, step_advantages
from trl_drgrpo.process_rewards.calling import StepScorer, StepScores
from trl_drgrpo.upstream.hooks import ScoredBatch


@dataclass(frozen=True)
class CreditedBatch:
    """A generation batch with its rewards and the advantages made of them.

    Args:
        scored ([`ScoredBatch`]): Rewards per function over all ranks `(B, F)`; this rank's rows of everything else.
        rewards (`torch.Tensor` of shape `(B,)`): Weighted sum over the functions, over all ranks, NaN = unscorable.
        outcome_advantages (`torch.Tensor` of shape `(B,)`): Of all ranks, without step rewards.
        advantages (`torch.Tensor` of shape `(b,)` or `(b, T)`): What this rank's rows are trained on.
        completion_mask (`torch.Tensor` of shape `(b, T)`): 1 for this rank's completion tokens.
        trained_mask (`torch.Tensor` of shape `(b, T)`): The same without tokens that a tool wrote.
        num_generations (`int`): G; rows `g * G` to `(g + 1) * G - 1` of all ranks are one group.
        steps ([`StepScores`], *optional*): This rank's steps and their rewards.
    """

    scored: ScoredBatch
    rewards: torch.Tensor
    outcome_advantages: torch.Tensor
    advantages: torch.Tensor
    completion_mask: torch.Tensor
    trained_mask: torch.Tensor
    num_generations: int
    steps: StepScores | None = None

    @property
    def token_advantages(self) -> torch.Tensor:
        """`advantages` for every token `(b, T)`, 0 where nothing is trained on."""
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages.unsqueeze(1)
        return advantages * self.trained_mask


class CreditTrainer(FastPathTrainer):
    """`FastPathTrainer` with the advantages of Dr. GRPO. A subclass sets `step_scorer`."""

    args: DrGRPOConfig
    step_scorer: StepScorer | None
    _batch: Any = None  # the newest ScoredBatch

    # Hooks, for subclasses.

    def on_credit(self, batch: CreditedBatch) -> None:
        """Sees each generation batch with its advantages, on every rank."""

    # Advantages

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Keep the batch. Infinite rewards are caught here, whoever gave them: a model, an environment, a function."""
        for i, name in enumerate(self.reward_func_names):
            self._refuse_infinite(batch.rewards_per_func[:, i], f"reward function '{name}'")
        self._batch = batch

    def _refuse_infinite(self, rewards: torch.Tensor, field: str) -> None:
        """An error, or NaN in place of the value (in place, `rewards` is a view) for those who opted in."""
        infinite = rewards.isinf()
        if not infinite.any():
            return
        if self.args.on_reward_error == "raise":
            row = int(infinite.nonzero()[0])
            got = f"{rewards[row].item()} in float32 for row {row} of the batch"
            raise RewardError(field, got, "numbers that float32 can hold", "Clip it, or return None.")
        rewards[infinite] = torch.nan

    def on_rollouts(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Replace the advantages of a scored generation batch by those of Dr. GRPO."""
        rewards = combine_rewards(self._batch.rewards_per_func, self.reward_weights)  # (B,) over all ranks
        self._refuse_infinite(rewards, "weighted sum of the rewards")
        num_generations = self._group_size
        advantages = group_advantages(rewards, num_generations, cast(AdvantageBaseline, self.args.advantage_baseline))
        if self.args.scale_by_running_std:
            if self.model.training:
                self.reward_scale.update(rewards)
            advantages = advantages / self.reward_scale.std
        mask = rollouts["completion_mask"]
        trained = mask * rollouts.get("tool_mask", 1)  # (b, T), this rank's rows
        rollouts["advantages"] = advantages[self._own_rows()]
        steps = self._score_steps(rollouts) if self.step_scorer else None
        if steps is not None:
            rollouts["advantages"] = self._with_step_rewards(rollouts["advantages"], rewards, steps, trained)  # (b, T)
        batch = CreditedBatch(
            self._batch, rewards, advantages, rollouts["advantages"], mask, trained, num_generations, steps
        )
        means = self.describing.value("The table of completions", lambda: _row_means(batch), otherwise=[])
        self.replace_logged_advantages(means)
        self.on_credit(batch)
        return super().on_rollouts(rollouts)

    @property
    def _group_size(self) -> int:
        """G of the generation batch at hand."""
        group_size: Any = self.num_generations if self.model.training else self.num_generations_eval
        return group_size

    def _own_rows(self) -> slice:
        """This rank's rows among those of all ranks."""
        rows = len(self._batch.prompts)
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _with_step_rewards(
        self, outcome: torch.Tensor, rewards: torch.Tensor, scores: StepScores, mask: torch.Tensor
    ) -> torch.Tensor:
        """`A_it = outcome_weight * A_i + process_weight * A_it(process)`, 0 on padding and masked tokens."""
        step_rewards = self.gathered(scores.rewards)  # all ranks: a group may straddle them
        credits = step_advantages(
            step_rewards,
            self._group_size,
            cast(StepCredit, self.args.step_credit),
            cast(StepBaseline, self.args.step_baseline),
            deepseekmath_std=self.args.deepseekmath_step_std,
        )
        process = spread_over_tokens(credits[self._own_rows()], [steps.ends for steps in scores.steps], mask)
        metrics = self.describing.value(
            "The statistics of the steps", lambda: step_statistics(step_rewards, rewards.tolist()), otherwise={}
        )
        self.log_batch({name: [value] for name, value in metrics.items()}, {})
        advantages = self.args.outcome_weight * outcome.unsqueeze(1) + self.args.process_weight * process
        return advantages.masked_fill(~mask.bool(), 0.0)

    def _score_steps(self, rollouts: dict[str, Any]) -> StepScores:
        """Call the step reward functions on this rank's rows, and log what they report."""
        scorer, batch = cast(StepScorer, self.step_scorer), self._batch
        tool_masks: list[Any] = [None] * len(batch.prompts)
        if "tool_mask" in rollouts:
            masks = rollouts["tool_mask"].tolist()
            tool_masks = [mask[: len(ids)] for mask, ids in zip(masks, batch.completion_ids, strict=True)]
        metrics: dict[str, list[float]] = defaultdict(list)
        columns: dict[str, list[Any]] = defaultdict(list)
        keys = [key for key in batch.inputs[0] if key not in ("prompt", "completion", "completion_ids")]
        with self.scoring():
            scores = scorer.score(
                [list(ids) for ids in batch.completion_ids],
                tool_masks,
                getattr(self.processing_class, "tokenizer", self.processing_class),  # a processor's, for images
                lambda name, value: metrics[name].append(value),
                log_extra=lambda column, values: columns[column].extend(values),
                prompts=batch.prompts,
                completions=batch.completions,
                trainer_state=self.state,
                **{key: [example[key] for example in batch.inputs] for key in keys},
            )
        for name, rewards in zip(scorer.names, scores.rewards_per_func, strict=True):
            if scored := [s for row in rewards for s in row if s is not None]:
                metrics[f"process_rewards/{name}/mean"].append(sum(scored) / len(scored))
        columns["steps"] = [list(steps.texts) for steps in scores.steps]
        columns["step_rewards"] = scores.rewards
        self.log_batch(metrics, columns)
        return scores

    # Loss

    def loss_constants(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """KL is weighed by `self.beta`: here the warmed-up one."""
        return {**super().loss_constants(inputs), "beta": self.beta_at(self.state.global_step)}

    def beta_at(self, step: int) -> float:
        """KL weight of an optimizer step, counted from 0: `beta * min(1, (step + 1) / beta_warmup_steps)`."""
        warmup_steps = self.args.beta_warmup_steps
        return self.beta * min(1.0, (step + 1) / warmup_steps) if warmup_steps else self.beta


def _row_means(batch: CreditedBatch) -> list[float]:
    """One advantage per row for the table of completions: the mean over the tokens that are trained on."""
    if batch.advantages.dim() == 1:
        return batch.advantages.tolist()
    return (batch.advantages.sum(dim=1) / batch.trained_mask.sum(dim=1).clamp(min=1)).tolist()
