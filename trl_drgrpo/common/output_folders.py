"""The folder of a training: its checkpoints, what is deleted in it, and the folders that no training may write to."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import user_path


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return a run's checkpoint folders, the highest step first; `checkpoint-best` and the like are somebody's own."""
    folders = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]+", path.name)]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def delete(path: Path) -> None:
    """Delete a file, or a folder with all that it holds; of a link nothing but the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


_HUB_CACHE = re.compile(r"(models|datasets|spaces)--.+")
# What the end of a training replaces.
_SAVED = ("config.json", "adapter_config.json", "model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_SAVED += ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md")
_SAVED += ("training_args.bin",)
_OF_A_RUN = ("training_args.bin", "_drgrpo", "checkpoint-*")


def check_output_folder(field: str, name: str, inputs: Mapping[str, str]) -> None:
    """
    Refuse a folder in which a new training would overwrite what no training wrote.

    Args:
        field (`str`): The setting, for the message.
        name (`str`): The folder, which need not exist.
        inputs (`Mapping[str, str]`): What the training reads, by setting: names that may be local folders.

    Raises:
        [`InputError`]: The current directory or one above it, a place in the Hub's cache, the folder of an input, in
            any spelling and through links, or the run around a checkpoint that is an input, or a folder with a model
            or a card that is no run's.
    """
    # Links are followed here and below: two spellings of a folder are the same.
    folder = Path(os.path.realpath(user_path(name)))
    remedy = "Name a folder of its own."
    here = Path.cwd()
    if folder in (here, *here.parents):
        got = f"{name}, which is the current directory or above it"
        raise InputError(
            field, got, "a folder for this run alone", f"Name a folder in it, such as {here / 'runs' / 'first'}."
        )
    if any(_HUB_CACHE.fullmatch(part) for part in folder.parts):
        raise InputError(field, f"{name}, in the cache of the Hub", "a folder outside of it", remedy)
    for setting, input_name in inputs.items():
        path = Path(os.path.realpath(user_path(input_name)))
        if not input_name or not os.path.isdir(path):
            continue
        # A run that goes on from a checkpoint of another one must not overwrite that one's model.
        if path == folder:
            got = f"{name}, the folder of {setting}"
        elif path in checkpoint_folders(folder):
            got = f"{name}, the run that holds {setting}"
        else:
            continue
        raise InputError(field, got, "another folder", f"{remedy} Its model, card and settings would be overwritten.")
    for pattern in _OF_A_RUN:
        if any(folder.glob(pattern)):
            return
    model_files = _saved_files(folder)
    if model_files:
        got = f"{name}, which holds {model_files[0].name} that no run has written"
        raise InputError(field, got, "a new folder, or that of a run", f"{remedy} The files would be overwritten.")


def _saved_files(folder: Path) -> list[Path]:
    """Return the files in a folder that the end of a training replaces, by name."""
    return sorted(chain.from_iterable(map(folder.glob, _SAVED)))


def recorded_base(model: str) -> str | None:
    """Return the base model that an adapter's folder names; `None` for any other model."""
    try:
        return json.loads(Path(model, "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drop_saved_links(folder: Path) -> None:
    """Remove links where a model is about to be saved, which would be written through."""
    for path in _saved_files(folder):
        if path.is_symlink():
            path.unlink()
