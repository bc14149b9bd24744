"""Statistics of earlier batches that the credit of a batch uses: its own would bias it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.upstream.batches import RolloutBatch
from trl_drgrpo.upstream.hooks import Feature

if TYPE_CHECKING:
    from trl_drgrpo.objective.value_baseline import ValueBaseline
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


class EarlierBatches(Feature):
    """Statistics of earlier generation batches. All rounds of a batch see the same ones.

    Attributes:
        reward_scale ([`RunningRewardScale`]): Of the rewards of all ranks, with `scale_by_running_std`.
        value_baseline ([`ValueBaseline`]): The coefficient of step scores that are subtracted.
    """

    def __init__(self, trainer: "TrainerProtocol | None" = None):
        super().__init__(trainer)
        self.reward_scale = RunningRewardScale()
        self._rewards: list[torch.Tensor] = []  # of all ranks, by round of the batch at hand

    @cached_property
    def value_baseline(self) -> "ValueBaseline":
        """Built when it is first asked for."""
        from trl_drgrpo.objective.value_baseline import ValueBaseline

        return ValueBaseline()

    def divisor(self, batch: RolloutBatch) -> float:
        """Divisor of the outcome advantages; 1 in the first batch."""
        if not self.trainer.args.scale_by_running_std:
            return 1.0
        # Noted here, and added behind the batch: a divisor that saw a row's reward would bias its gradient.
        if batch.training:
            self._rewards.append(batch.rewards)
        return self.reward_scale.std

    @contextmanager
    def making_batch(self) -> Iterator[None]:
        self._rewards = []
        yield
        for rewards in self._rewards:
            self.reward_scale.update(rewards)

    def add_to_log(self, logs: dict[str, float]) -> None:
        if self.trainer.args.scale_by_running_std and self.trainer.model.training:
            logs["drgrpo/reward_scale"] = self.reward_scale.std

    def state_dict(self) -> dict[str, Any]:
        state = {"reward_scale": self.reward_scale.state_dict()}
        # A cached property is in the instance once somebody has asked for it.
        if "value_baseline" in vars(self):
            state["value_baseline"] = self.value_baseline.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.reward_scale.load_state_dict(state["reward_scale"])
            if "value_baseline" in state:
                self.value_baseline.load_state_dict(state["value_baseline"])
