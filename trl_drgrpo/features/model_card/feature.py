"""A trainer that leaves a true card, and that tells the user where the model is when the Hub cannot be reached.

TRL writes its card at every checkpoint; ours takes its place there, after the training, and beside an adapter that
PEFT has saved with a card of its own. Uploads that run beside the training end without a word in transformers, also
when they failed; and an exception from the last one looks as if the night was lost. Both are said here in one line.
"""

import logging
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from trl_drgrpo.common.errors import InputError, PushError
from trl_drgrpo.features.model_card.card import write_card
from trl_drgrpo.upstream.host import GRPOSeams, swapped

logger = logging.getLogger(__name__)

_CARD = "The model card"


class PublishingTrainer(GRPOSeams):
    """`GRPOSeams` with model card and upload. A subclass sets what the card states, see `publishing/card.py`."""

    given_optimizers: tuple[Any, Any] = (None, None)  # optimizer and schedule, where not made from the arguments
    _card: dict[str, Any] | None = None  # arguments of the newest card, for those that follow
    _model_was_saved = False

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """As [`trl.GRPOTrainer.create_model_card`], with a text that states the objective, data, rewards and results.

        Args:
            model_name, dataset_name, tags:
                As in TRL. What is left out is what an earlier call gave.
        """
        given = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        given = {key: value for key, value in given.items() if value is not None}
        default = {"model_name": Path(self.args.output_dir).absolute().name}
        self._card = {**default, **(self._card or {}), **given}
        with self.describing(_CARD):
            # TRL writes elsewhere: an upload that runs beside the training may be reading the card.
            with tempfile.TemporaryDirectory() as folder, swapped(self.args, output_dir=folder):
                super().create_model_card(**self._card)
                is_main = self.is_world_process_zero()
                metadata: Any = ModelCard.load(Path(folder) / "README.md").data if is_main else None
            if metadata is not None:
                write_card(self, metadata, self._readme, self._card.get("dataset_name"))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; a card that was written while the run was going is brought up to date."""
        output = super().train(*args, **kwargs)
        if self._card is not None:
            self.create_model_card()
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers, with the run's card beside an adapter, in the place of PEFT's."""
        super().save_model(output_dir, _internal_call)
        self._model_was_saved = True
        if self.is_world_process_zero() and hasattr(self.accelerator.unwrap_model(self.model), "peft_config"):
            with self.describing(_CARD):
                self._put_card_into(Path(output_dir or self.args.output_dir))

    def _put_card_into(self, folder: Path) -> None:
        self.create_model_card()
        if folder.absolute() != self._readme.parent.absolute() and folder.is_dir():
            shutil.copyfile(self._readme, folder / self._readme.name)
            picture = self._readme.parent / "card"
            if picture.is_dir() and not self.is_in_train:
                shutil.copytree(picture, folder / "card", dirs_exist_ok=True)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; a Hub that cannot be reached, or refuses, is one clear error.

        Raises:
            `InputError`: Before anything was trained.
        """
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # of the network, of the Hub's client, of a name that is none
            name = self.args.hub_model_id or "a repository named after output_dir"
            got = f"{name}, which cannot be opened ({_short(error)})"
            remedy = "Log in with `hf auth login` or set HF_TOKEN, check hub_model_id, or leave push_to_hub out."
            raise InputError("push_to_hub", got, "a repository on the Hub that can be written to", remedy) from error

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; whatever goes wrong, the model is saved locally.

        Raises:
            `PushError`: Says where the model is and how to push it later.
        """
        self._model_was_saved = False
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:  # as above: none of them may cost the model
            if not self._model_was_saved:
                self.save_model(_internal_call=True)
                self.create_model_card()
            raise PushError(self._not_pushed(error)) from error

    def on_failed_uploads(self, errors: list[BaseException]) -> None:
        logger.warning("An upload beside the training failed. %s", self._not_pushed(errors[0]))

    @property
    def _readme(self) -> Path:
        return Path(self.args.output_dir) / "README.md"

    def _not_pushed(self, error: BaseException) -> str:
        folder = self.args.output_dir
        target = self.hub_model_id or self.args.hub_model_id or "<user>/<name>"
        command = f"hf upload {target} {shlex.quote(str(folder))} --exclude 'checkpoint-*' --exclude '_*'"
        return (
            f"push_to_hub: {target} did not take the upload ({_short(error)}). The model is saved in {folder}: push "
            f"it later with `{command}`."
        )


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__
