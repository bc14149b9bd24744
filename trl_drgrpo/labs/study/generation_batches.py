"""Generation batches of a trainer that takes no step."""

from collections.abc import Iterator
from typing import Any

from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import CreditedBatch
from trl_drgrpo.upstream.swapping import swapped


def sampled_batches(trainer: DrGRPOTrainer) -> Iterator[tuple[CreditedBatch, dict[str, Any]]]:
    """Generation batches as the training loop would see them, with the tensors that TRL trains on; without end.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer; its model does not change.
    """
    caught: list[CreditedBatch] = []
    while True:
        for inputs in trainer.get_train_dataloader():
            with swapped(trainer, on_credit=caught.append):
                rollouts = trainer.sample_rollouts(inputs)
            yield caught.pop(), rollouts
