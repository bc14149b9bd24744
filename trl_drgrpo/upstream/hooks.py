"""The hooks through which this package steps into `GRPOTrainer`. `batches.py` has what they are handed.

Nothing of TRL is named here. `host.py` calls the hooks of the trainer ([`Hooks`]). The trainer defines those that have
one owner, and asks that owner; the others go to every [`Feature`]. As they stand they change nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from trl_drgrpo.upstream.batches import CreditedBatch, ScoredBatch

Completions = tuple[list[list[int]], list[list[float]] | None]  # token ids, and log-probabilities where known


class Generate(Protocol):
    """Samples completions: of each prompt one, equal prompts being consecutive, `num_generations` of each.

    `limits`: tokens that each may have at most; those of the run by default. A backend may exceed them.
    """

    def __call__(
        self, prompt_ids: list[list[int]], num_generations: int, limits: Sequence[int] | None = None
    ) -> Completions: ...


class Hooks:
    """The interface that `host.py` calls. By default a hook goes to every feature, or leaves TRL's way."""

    features: Sequence["Feature"] = ()

    def on_built(self, trainable_values: dict[str, torch.Tensor]) -> None:
        """Called at the end of TRL's constructor with the values of trainable parameters from before TRL cast them."""

    # A generation batch

    def generating(self, limits: Sequence[int] | None = None) -> AbstractContextManager[Any]:
        """Entered around each generation with the policy; `limits` as in [`Generate`]."""
        return nullcontext()

    def rolling_out(self) -> AbstractContextManager[Any]:
        """Entered around the making of a batch's completions: generation, turns with tools, custom rollouts."""
        return _entered(feature.rolling_out() for feature in self.features)

    def completing(self, prompt_ids: list[list[int]], num_generations: int, generate: Generate) -> Completions:
        """Makes the first completions of a batch's rows, where prompts are text; may call `generate` for other rows,
        and more often."""
        return generate(prompt_ids, num_generations)

    def on_turns_begin(self, rows: Sequence[int]) -> None:
        """Called when rows of this rank begin a turn of the model: first all, then those that got a tool's result."""
        for feature in self.features:
            feature.on_turns_begin(rows)

    def scoring(self) -> AbstractContextManager[Any]:
        """Entered around each call of the reward functions."""
        return _entered(feature.scoring() for feature in self.features)

    def collecting(
        self, inputs: list[dict[str, Any]], generate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Makes a scored generation batch of this rank's rows; may call `generate` for other rows, and more often."""
        return generate(inputs)

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Sees a generation batch right after the reward functions did."""

    def on_rollouts(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """May edit a scored generation batch (this rank's rows) before it is split into micro-batches."""
        return rollouts

    def on_credit(self, batch: CreditedBatch) -> None:
        """Sees each generation batch with its advantages, on every rank."""
        for feature in self.features:
            feature.on_credit(batch)

    # A micro-batch

    def on_micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """May replace the micro-batch that is due in training, and those behind it in `buffered_rollouts`."""
        return inputs

    def computing_loss(self, inputs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Entered around the loss of a micro-batch."""
        return nullcontext()

    def loss_without_forward(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The loss of a micro-batch that needs no forward; `None` for all others."""
        return None

    def loss_constants(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Attributes of the trainer that `_compute_loss` shall read with another value for this micro-batch."""
        return {}

    def loss_metrics(self, inputs: dict[str, Any], metrics: dict[str, list[float]]) -> dict[str, list[float]]:
        """May edit what `_compute_loss` logged for a micro-batch."""
        return metrics

    # Logs, checkpoints and the Hub

    def writing(self, folder: Path) -> AbstractContextManager[Any]:
        """Entered around all that is written into a folder, a checkpoint's or the model's, on every rank."""
        return nullcontext()

    def add_to_log(self, logs: dict[str, Any]) -> None:
        """May add to what is about to be logged."""
        for feature in self.features:
            feature.add_to_log(logs)

    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        """Called on every rank before anything of a checkpoint is written."""
        for feature in self.features:
            feature.on_checkpoint_begun(checkpoint)

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        """Called on every rank after a checkpoint was written, before it is uploaded and older ones are deleted."""
        for feature in self.features:
            feature.on_checkpoint_saved(checkpoint)

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        """Called on every rank after optimizer and scheduler were restored, before the first step."""
        for feature in self.features:
            feature.on_checkpoint_loaded(checkpoint)

    def on_model_saved(self, folder: Path) -> None:
        """Called on every rank after the model, or its adapter, was saved."""

    def writing_card(self, given: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Entered around TRL's writing of a card; gives the arguments that TRL shall get."""
        return nullcontext(given)

    def opening_repository(self) -> AbstractContextManager[Any]:
        """Entered around the opening of the repository on the Hub."""
        return nullcontext()

    def pushing(self) -> AbstractContextManager[Any]:
        """Entered around an upload that the run waits for."""
        return nullcontext()

    def on_failed_uploads(self, errors: list[BaseException]) -> None:
        """Called on the main process with what went wrong in uploads that ran beside the training."""


class Feature(TrainerCallback):
    """Something that plugs into the trainer: a transformers callback with more events.

    A feature owns its state. The trainer builds it, lists it in `trainer.features` and adds it to its callbacks, so
    it hears of steps, logs and evaluations as any callback does. It reads `trainer.args` and never imports the
    configuration.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.

    Attributes:
        takes (`tuple[str, ...]`): Arguments read once, when the trainer is built: assigned later they come too late.
    """

    takes: tuple[str, ...] = ()

    def __init__(self, trainer: Any = None):
        self.trainer = trainer

    def on_trainer_built(self) -> None:
        """The trainer is built: its model, its rewards and their names are known."""

    def around_train(self) -> AbstractContextManager[Any]:
        """Entered around `train()`; the features that are listed first are the outer ones."""
        return nullcontext()

    def rolling_out(self) -> AbstractContextManager[Any]:
        """As in [`Hooks`]."""
        return nullcontext()

    def on_turns_begin(self, rows: Sequence[int]) -> None:
        """As in [`Hooks`]."""

    def scoring(self) -> AbstractContextManager[Any]:
        """As in [`Hooks`]."""
        return nullcontext()

    def on_credit(self, batch: CreditedBatch) -> None:
        """As in [`Hooks`]."""

    def add_to_log(self, logs: dict[str, Any]) -> None:
        """As in [`Hooks`]."""

    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        """As in [`Hooks`]."""

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        """As in [`Hooks`]. Whatever it writes is part of the checkpoint: the state file comes last."""

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        """As in [`Hooks`]."""


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
