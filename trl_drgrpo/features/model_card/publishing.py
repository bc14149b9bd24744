"""The card in the place of TRL's, and one line that says where the model is when the Hub cannot be reached.

TRL writes its card at every checkpoint; ours takes its place there, after the training, and beside an adapter that
PEFT has saved with a card of its own. transformers does not report uploads that failed beside the training, and an
exception from the last upload looks as if the night was lost. Both get one line in the log here.
"""

import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from huggingface_hub import ModelCard as HubCard
from huggingface_hub import ModelCardData, constants

from trl_drgrpo.common.errors import DivergedError, InputError, PushError
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES, is_unreachable
from trl_drgrpo.upstream.batches import CreditedBatch, ScoredBatch
from trl_drgrpo.upstream.description import CARD
from trl_drgrpo.upstream.hooks import CardArguments, Feature
from trl_drgrpo.upstream.private_state import swapped

if TYPE_CHECKING:
    from trl_drgrpo.upstream.argument_types import Optimizers
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)


class ModelCard(Feature):
    """Card and upload. `card.py` reads the run off the trainer.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        optimizers (`tuple`, *optional*): Optimizer and scheduler that the trainer was given.
    """

    def __init__(self, trainer: "TrainerProtocol", optimizers: "Optimizers" = (None, None)):
        super().__init__(trainer)
        self._optimizers = optimizers
        self._newest: ScoredBatch | None = None
        self._arguments: CardArguments | None = None  # of the newest card, for those that follow
        self._model_was_saved = False

    @contextmanager
    def around_train(self) -> Iterator[None]:
        """Bring a card that was written during the run up to date."""
        yield
        if self._arguments is not None:
            self.trainer.create_model_card()

    def on_credit(self, batch: CreditedBatch) -> None:
        self._newest = batch.scored

    @contextmanager
    def writing_card(self, arguments: CardArguments) -> Iterator[CardArguments]:
        trainer = self.trainer
        # An argument that a call leaves out is that of the card before: TRL's own calls name the model alone.
        completed = CardArguments(model_name=self._readme.absolute().parent.name)
        completed.update(self._arguments or {})
        for name, value in arguments.items():
            if value is not None:
                completed[name] = value
        self._arguments = completed
        # TRL writes elsewhere: an upload that runs beside the training may be reading the card.
        with tempfile.TemporaryDirectory() as folder, swapped(trainer.args, output_dir=folder):
            yield completed
            metadata = None
            if trainer.is_world_process_zero():
                metadata = cast(ModelCardData, HubCard.load(Path(folder) / "README.md").data)
        if metadata is not None:
            from trl_drgrpo.features.model_card.card import write_card

            write_card(trainer, metadata, self._readme, completed.get("dataset_name"), self._optimizers, self._newest)

    def on_model_saved(self, folder: Path) -> None:
        trainer = self.trainer
        self._model_was_saved = True
        if not trainer.is_world_process_zero() or not hasattr(trainer.unwrapped_model, "peft_config"):
            return
        with trainer.describing(CARD):  # PEFT has just written a card of its own into the folder
            trainer.create_model_card()
            if folder.absolute() != self._readme.parent.absolute() and folder.is_dir():
                shutil.copyfile(self._readme, folder / self._readme.name)
                # The card refers to its picture by a path beside it.
                picture = self._readme.parent / "card"
                if picture.is_dir() and not trainer.is_in_train:
                    shutil.copytree(picture, folder / "card", dirs_exist_ok=True)

    @contextmanager
    def opening_repository(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the network, the Hub's client, or a name that the Hub refuses
            name = self.trainer.args.hub_model_id or "a repository named after output_dir"
            got = f"{name}, which cannot be opened at {constants.ENDPOINT} ({_short(error)})"
            remedy = "Log in with `hf auth login` or set HF_TOKEN, check hub_model_id, or leave push_to_hub out."
            if is_unreachable(error):
                remedy = "Check the network and HF_ENDPOINT, or leave push_to_hub out."
            raise InputError("push_to_hub", got, "a repository on the Hub that can be written to", remedy) from error

    @contextmanager
    def pushing(self) -> Iterator[None]:
        self._model_was_saved = False
        try:
            yield
        except DivergedError:  # there is no model to save
            raise
        except Exception as error:
            # As above. transformers saves the model in here before it uploads; none of its errors may cost the model.
            if not self._model_was_saved:
                self.trainer.save_model(_internal_call=True)
                self.trainer.create_model_card()
            raise PushError(self._not_pushed(error)) from error

    def on_failed_uploads(self, errors: list[BaseException]) -> None:
        logger.warning("An upload during training failed. %s", self._not_pushed(errors[0]))

    @property
    def _readme(self) -> Path:
        return Path(self.trainer.args.output_dir) / "README.md"

    def _not_pushed(self, error: BaseException) -> str:
        folder = self.trainer.args.output_dir
        target = self.trainer.hub_model_id or self.trainer.args.hub_model_id or "<user>/<name>"
        command = f"hf upload {target} {shlex.quote(str(folder))} {UPLOAD_EXCLUDES}"
        return (
            f"push_to_hub: the upload to {target} at {constants.ENDPOINT} failed ({_short(error)}). The model is "
            f"saved in {folder}: push it later with `{command}`."
        )


def _short(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}"
