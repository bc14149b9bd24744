"""Advantages of enumerated rows, as a real trainer computes them: token ids in, `compute_advantages` out."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.labs.check.enumeration import Trajectory
from trl_drgrpo.labs.check.record import DEFAULTS
from trl_drgrpo.labs.check.small_policies import BAD, GOOD, SEPARATOR
from trl_drgrpo.labs.check.tiny import tiny_model, tiny_tokenizer
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import RolloutBatch, ScoredBatch

Judge = Callable[
    [Sequence[str]], Sequence[float | None]
]  # the texts of a row's steps -> a reward, or a value, per step


def good_steps(steps: Sequence[str]) -> list[float]:
    """1 for a good step, 0 for a bad one."""
    return [float(step.startswith(GOOD)) for step in steps]


def seen_steps(steps: Sequence[str]) -> list[float | None]:
    """The same, with no score for a step that holds no mark: an EOS alone, as process reward models have it."""
    return [float(step[0] == GOOD) if step[0] in (GOOD, BAD) else None for step in steps]


class TrainerCredit:
    """The credit of a `DrGRPOTrainer`, which is built at the first call.

    Rows with a text are cut into steps and scored as in training; of others the steps are taken as they are.

    Args:
        judge (`Callable`, *optional*): The step reward function; `None`: outcome rewards only.
        fitted (`float`, *optional*): Coefficient of a value baseline, as earlier batches have fitted it.
        settings: Fields of the configuration.
    """

    def __init__(self, judge: Judge | None = good_steps, *, fitted: float | None = None, **settings: Any):
        self.judge = judge
        self.fitted = fitted
        self.settings = {"step_separator": [SEPARATOR], **DEFAULTS, **settings}
        self.tokenizer = tiny_tokenizer()
        self._ids: dict[Trajectory, list[int]] = {}
        self._scored: dict[Trajectory, Trajectory] = {}

    def __call__(self, rows: Sequence[Trajectory], num_generations: int, forks: Forks | None = None) -> torch.Tensor:
        """Advantages `(B, T)` of one generation batch: rows in groups of `num_generations`, which may be forked."""
        self._read([row for row in dict.fromkeys(rows) if row not in self._scored])
        ids, rows = [self._ids[row] for row in rows], [self._scored[row] for row in rows]
        lengths = torch.tensor([len(row.log_probs) for row in rows])
        mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()  # (B, T)
        if self.settings.get("mask_truncated_completions"):
            mask = mask * torch.tensor([[row.closing] for row in rows])  # as TRL does
        rewards = torch.tensor([row.outcome for row in rows], dtype=torch.float64)
        batch = RolloutBatch(
            scored=ScoredBatch(
                rewards_per_func=rewards.unsqueeze(1),
                inputs=[{"prompt": ""} for _ in rows],
                prompts=[""] * len(rows),
                completions=[row.text or "" for row in rows],
                completion_ids=ids,
            ),
            rewards=rewards,
            completion_mask=mask,
            trained_mask=mask,
            num_generations=num_generations,
            own_rows=slice(0, len(rows)),
            training=False,  # nothing is remembered: in an enumeration the batch before is not an independent one
            step_rewards=[list(row.step_rewards[: len(row.step_rewards) - row.closing]) for row in rows],
            step_ends=[list(row.step_ends) for row in rows],
            state_keys=[list(row.state_keys) for row in rows] if rows[0].state_keys else None,
            forks=forks,
        )
        if self.judge is None:
            batch = replace(batch, step_rewards=None, step_ends=None)
        trainer = self.trainer
        with _float64():
            advantages = trainer.compute_advantages(batch)
        return advantages if advantages.dim() == 2 else advantages.unsqueeze(1) * mask

    @cached_property
    def trainer(self) -> Any:
        """A trainer of the tiny model; it never trains."""
        with tempfile.TemporaryDirectory() as output_dir:
            trainer = DrGRPOTrainer(
                model=tiny_model(self.tokenizer),
                reward_funcs=_no_reward,
                args=DrGRPOConfig(output_dir=output_dir, **self.settings),
                train_dataset=Dataset.from_dict({"prompt": ["?"] * 8}),
                processing_class=self.tokenizer,
                step_reward_funcs=self._judge_all if self.judge else None,
            )
        if self.fitted is not None:
            trainer.value_baseline.load_state_dict({"squares": 1024.0, "products": 1024.0 * self.fitted})
        return trainer

    def _read(self, rows: Sequence[Trajectory]) -> None:
        """Tokenize rows, and let the trainer cut them into steps and score those."""
        for row in rows:
            ids: Any = [0] * len(row.log_probs)
            if row.text is not None:
                ids = [*self.tokenizer.encode(row.text), *[self.tokenizer.eos_token_id] * row.closing]
            self._ids[row], self._scored[row] = ids, row
        rows = [row for row in rows if row.text is not None and self.judge]
        if not rows:
            return
        ids = [self._ids[row] for row in rows]
        scores = self.trainer.step_scorer.score(ids, [None] * len(rows), self.tokenizer, lambda name, value: None)
        for row, steps, ends, rewards in zip(rows, scores.steps, scores.ends, scores.rewards, strict=True):
            closing = steps.closing is not None
            paid: Any = (*rewards, 0.0) if closing else tuple(rewards)
            self._scored[row] = replace(row, step_ends=tuple(ends), step_rewards=paid, closing=closing)

    def _judge_all(self, steps: Sequence[Sequence[str]], **kwargs: Any) -> list[list[float | None]]:
        return [list(self.judge(texts)) for texts in steps] if self.judge else []


@contextmanager
def _float64() -> Iterator[None]:
    """Advantages of tokens are made in the default dtype: float32, as TRL's loss takes them, would blur a fitted c."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)
