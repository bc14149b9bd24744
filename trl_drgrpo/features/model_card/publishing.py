"""Our card in the place of TRL's, and one line that names the model's folder when the Hub cannot be reached.

TRL writes its card at every checkpoint; ours takes its place there, after the training, and beside an adapter that
PEFT has saved with a card of its own. transformers does not report when an upload beside the training fails; and an
exception from the last upload looks as if the model was lost. Both get one line here.
"""

import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard as HubCard
from huggingface_hub import constants

from trl_drgrpo.common.errors import DivergedError, InputError, PushError
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES, is_unreachable
from trl_drgrpo.upstream.description import CARD
from trl_drgrpo.upstream.hooks import Feature
from trl_drgrpo.upstream.private_state import swapped

logger = logging.getLogger(__name__)


class ModelCard(Feature):
    """Card and upload of a run; `card.py` makes the card's text."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._arguments: dict[str, Any] | None = None  # of the newest card; the next ones keep them
        self._model_was_saved = False

    @contextmanager
    def around_train(self) -> Iterator[None]:
        """Write the card again after the training, if it was written while the run was going."""
        yield
        if self._arguments is not None:
            self.trainer.create_model_card()

    @contextmanager
    def writing_card(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        trainer = self.trainer
        default = {"model_name": Path(trainer.args.output_dir).absolute().name}
        self._arguments = default | (self._arguments or {})
        self._arguments |= {key: value for key, value in given.items() if value is not None}
        # TRL writes into another folder: an upload that runs beside the training may be reading the card.
        with tempfile.TemporaryDirectory() as folder, swapped(trainer.args, output_dir=folder):
            yield self._arguments
            metadata: Any = None
            if trainer.is_world_process_zero():
                metadata = HubCard.load(Path(folder) / "README.md").data
        if metadata is not None:
            from trl_drgrpo.features.model_card.card import write_card

            write_card(trainer, metadata, self._readme, self._arguments.get("dataset_name"))

    def on_model_saved(self, folder: Path) -> None:
        trainer = self.trainer
        self._model_was_saved = True
        if not trainer.is_world_process_zero():
            return
        if not hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            return
        with trainer.describing(CARD):  # PEFT has saved a card beside the adapter: ours replaces it
            trainer.create_model_card()
            if folder.absolute() != self._readme.parent.absolute() and folder.is_dir():
                shutil.copyfile(self._readme, folder / self._readme.name)
                picture = self._readme.parent / "card"
                if picture.is_dir() and not trainer.is_in_train:
                    shutil.copytree(picture, folder / "card", dirs_exist_ok=True)

    @contextmanager
    def opening_repository(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # from the network, the Hub's client, or a name that is not one of a repository
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
        except Exception as error:  # as above: no failed upload may cost the model
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
    """Return the class and the first line of an error."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0].rstrip('.:')}" if lines else kind
