"""The numbers that TRL collects between two logs: read by optimizer step, carried over an interruption."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch

if TYPE_CHECKING:
    from trl_drgrpo.upstream.private_state import PrivateState


class Unlogged(TypedDict):
    """Numbers of finished optimizer steps that no log has shown, JSON-ready."""

    loss: float  # sum over the steps, mean over the ranks
    since: int  # optimizer step of the last log
    metrics: dict[str, list[float]]


class LoggedMetrics:
    """Metrics of a trainer since its last log.

    Args:
        trainer ([`PrivateState`]): The trainer; not built yet.
    """

    def __init__(self, trainer: "PrivateState"):
        self.trainer = trainer
        self._boundary: tuple[torch.Tensor, dict[str, int]] | None = None
        self._before_step: dict[str, tuple[list[float], int]] = {}

    @property
    def _of_training(self) -> dict[str, list[float]]:
        return self.trainer._metrics["train"]

    def begin_step(self) -> None:
        """Note that an optimizer step begins: `of_step` counts from here."""
        self._before_step = {}
        for name, values in self._of_training.items():
            self._before_step[name] = (values, len(values))

    def of_step(self) -> dict[str, float]:
        """Metrics of the optimizer step that ends, averaged as TRL averages them over a logging interval."""
        result = {}
        for name, values in self._of_training.items():
            before, count = self._before_step.get(name, (None, 0))
            # TRL appends to most lists and replaces some, such as that of num_tokens.
            if values is before:
                values = values[count:]
            mean = _mean_of_numbers(values)
            if mean is not None:
                result[name] = mean
        return result

    def take(self, is_chosen: Callable[[str], object]) -> dict[str, float | None]:
        """Remove metrics by name, so that they are not logged, and return their means as TRL takes them."""
        mode = "train" if self.trainer.model.training else "eval"
        prefix = "" if mode == "train" else "eval_"  # as in TRL's `log`
        metrics = self.trainer._metrics[mode]
        means = {}
        for name in list(filter(is_chosen, metrics)):
            means[prefix + name] = _mean_of_numbers(metrics.pop(name))
        return means

    def mark_boundary(self) -> None:
        """Note the boundary between two steps: `unlogged` stops there, also in the middle of the next step."""
        counts = {name: len(values) for name, values in self._of_training.items()}
        self._boundary = self.trainer._tr_loss.clone(), counts

    def unlogged(self) -> Unlogged | None:
        """Numbers of the steps up to the boundary; `None`: all are logged. Called by every rank."""
        since = self.trainer._globalstep_last_logged
        if self._boundary is None or since >= self.trainer.state.global_step:
            return None
        loss, counts = self._boundary
        losses = self.trainer.gathered([loss.item()])
        # A checkpoint may be written in the middle of the next step, whose numbers stand behind the counts.
        metrics = {name: self._of_training[name][:count] for name, count in counts.items()}
        return {"loss": sum(losses) / len(losses), "since": since, "metrics": metrics}

    def restore(self, unlogged: Unlogged) -> None:
        """Go on with the log of an interrupted run; called when training begins, once transformers has reset it."""
        # transformers logs `_tr_loss / (global_step - _globalstep_last_logged)`: a sum over steps, and their number.
        self.trainer._tr_loss += unlogged["loss"]
        self.trainer._globalstep_last_logged = unlogged["since"]
        for name, values in unlogged["metrics"].items():
            self._of_training[name][:] = values


def _mean_of_numbers(values: Sequence[float]) -> float | None:
    """The mean as TRL takes it over a logging interval: without NaN; `None` where nothing else is there."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else None
