"""Advantages of enumerated rows, as a real trainer computes them: token ids in, `compute_advantages` out."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.labs.check.enumeration import Trajectory
from trl_drgrpo.labs.check.record import DEFAULTS
from trl_drgrpo.labs.check.small_policies import GOOD, SEPARATOR
from trl_drgrpo.labs.check.tiny import tiny_model, tiny_tokenizer
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.hooks import RolloutBatch, ScoredBatch

Judge = Callable[[Sequence[str]], list[float]]  # the texts of a row's steps -> a reward, or a value, per step


def good_steps(steps: Sequence[str]) -> list[float]:
    """1 for a good step, 0 for a bad one."""
    return [float(step.startswith(GOOD)) for step in steps]


class TrainerCredit:
    """The credit of a `DrGRPOTrainer`, which is built at the first call.

    Rows with a text are cut into steps and scored as in training; of others the steps are taken as they are.

    Args:
        judge (`Callable`, *optional*): The step reward function; `None`: outcome rewards only.
        settings: Fields of the configuration.
    """

    def __init__(self, judge: Judge | None = good_steps, **settings: Any):
        self.judge = judge
        self.settings = settings
        self.tokenizer = tiny_tokenizer()
        self._trainer: Any = None
        self._as_scored: dict[Trajectory, Trajectory] = {}

    def __call__(self, rows: Sequence[Trajectory], num_generations: int) -> torch.Tensor:
        """Advantages `(B, T)` of one generation batch: rows in groups of `num_generations`."""
        rows = self._scored(rows)
        lengths = torch.tensor([len(row.log_probs) for row in rows])
        mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()  # (B, T)
        rewards = torch.tensor([row.outcome for row in rows], dtype=torch.float64)
        texts = [row.text or "" for row in rows]
        batch = RolloutBatch(
            scored=ScoredBatch(
                rewards_per_func=rewards.unsqueeze(1),
                inputs=[{"prompt": ""} for _ in rows],
                prompts=[""] * len(rows),
                completions=texts,
                completion_ids=[self._ids(row) for row in rows],
            ),
            rewards=rewards,
            completion_mask=mask,
            trained_mask=mask,
            num_generations=num_generations,
            own_rows=slice(0, len(rows)),
            step_rewards=[list(row.step_rewards[: len(row.step_rewards) - row.closing]) for row in rows],
            step_ends=[list(row.step_ends) for row in rows],
            state_keys=[list(row.state_keys) for row in rows] if rows[0].state_keys else None,
        )
        if self.judge is None:
            batch = replace(batch, step_rewards=None, step_ends=None)
        advantages = self.trainer.compute_advantages(batch)
        return advantages if advantages.dim() == 2 else advantages.unsqueeze(1) * mask

    @property
    def trainer(self) -> Any:
        if self._trainer is None:
            with tempfile.TemporaryDirectory() as output_dir:
                self._trainer = DrGRPOTrainer(
                    model=tiny_model(self.tokenizer),
                    reward_funcs=_no_reward,
                    args=DrGRPOConfig(output_dir=output_dir, **DEFAULTS, step_separator=[SEPARATOR], **self.settings),
                    train_dataset=Dataset.from_dict({"prompt": ["?"] * 8}),
                    processing_class=self.tokenizer,
                    step_reward_funcs=self._judge_all if self.judge else None,
                )
        return self._trainer

    def _ids(self, row: Trajectory) -> list[int]:
        """The row's tokens; where nobody reads them, any."""
        if row.text is None:
            return [0] * len(row.log_probs)
        return [*self.tokenizer.encode(row.text), *[self.tokenizer.eos_token_id] * row.closing]

    def _scored(self, rows: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The rows with the steps that the trainer's segmenter finds, and their rewards."""
        if self.judge is None or rows[0].text is None:
            return rows
        if new := [row for row in dict.fromkeys(rows) if row not in self._as_scored]:
            ids = [self._ids(row) for row in new]
            scores = self.trainer.step_scorer.score(ids, [None] * len(ids), self.tokenizer, lambda name, value: None)
            for row, steps, ends, rewards in zip(new, scores.steps, scores.ends, scores.rewards, strict=True):
                closing = steps.closing is not None
                paid = (*rewards, 0.0) if closing else tuple(rewards)
                self._as_scored[row] = replace(row, step_ends=tuple(ends), step_rewards=paid, closing=closing)
        return [self._as_scored[row] for row in rows]

    def _judge_all(self, steps: Sequence[Sequence[str]], **kwargs: Any) -> list[list[float]]:
        return [self.judge(texts) for texts in steps] if self.judge else []


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)
