"""Failures to load from the Hugging Face Hub: one reason in one line, without the client's log of its retries."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from trl_drgrpo.common.errors import InputError, causes
from trl_drgrpo.common.reading import reading, user_path

# For `hf upload`: checkpoints, and the run log with its prompts and completions, stay at home.
UPLOAD_EXCLUDES = "--exclude 'checkpoint-*' --exclude '_*'"

_RETRIES = "huggingface_hub.utils._http"
_PATH = re.compile(r"^(~|/|[A-Za-z]:[\\/]|\.{1,2}[\\/])")


def is_local_path(value: object) -> "TypeGuard[str]":
    """Tell whether a value is a path of somebody's machine, which says nothing to others."""
    return isinstance(value, str) and bool(_PATH.match(value))


def is_hub_id(name: object) -> bool:
    """Tell whether a name is that of a repository on the Hub, not a folder that is or was on this machine."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name:
        return False
    if is_local_path(name) or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_adapter(name: str) -> bool:
    """Tell whether a name is that of a local folder with an adapter and no whole model."""
    folder = os.path.expanduser(name)
    # `os.path.isfile` is false, and no error, for a name that is too long or holds a null character.
    if os.path.isfile(os.path.join(folder, "config.json")):
        return False
    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


def check_local(field: str, name: str) -> None:
    """Refuse the name of a folder that is not there, of a file, and of a folder that holds no model.

    Loads nothing. A name that could be a Hub id passes.
    """
    path = user_path(name)
    expected = "a model's folder or Hub id"
    remedy = "Name the folder that save_pretrained wrote."
    if not name:
        raise InputError(field, "an empty text", expected, remedy)
    if os.path.isfile(path):
        raise InputError(field, f"{name}, a file", expected, remedy)
    # Unlike `Path.is_dir`, it is false, and no error, for a name that is too long.
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                remedy = "It holds an adapter: name its base model, or merge the two first (`trl-drgrpo merge`)."
            raise InputError(field, f"{name}, a folder without config.json", expected, remedy)
        check_weights(field, path)
    # A Hub id has one slash at most, and no sign of a path in front.
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        remedy = "Check the path."
        if not path.is_absolute():
            remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError(field, f"{name}, which does not exist", expected, remedy)


def check_weights(field: str, folder: Path) -> None:
    """Refuse a folder with a safetensors file that was cut off, or with a pipe, which nobody may ever write to.

    Only the headers are read: they say how long a file is.
    """
    from safetensors import SafetensorError, safe_open

    if not os.path.isdir(folder):
        return
    # A pipe would be opened, and wait for a writer forever.
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise InputError(field, f"{entry}, a device or a pipe", "a folder of files", "Remove it.")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            if not file.is_file():  # a link to nowhere, a folder
                raise InputError(field, f"{file}, which is no file", "a safetensors file", "Copy it again.") from error
            got = f"{file} of {file.stat().st_size} bytes ({error})"
            remedy = "Copy or download it again: it was cut off."
            raise InputError(field, got, "a whole safetensors file", remedy) from error


def refuse_new_weights(field: str, name: str, model: object, info: Mapping[str, Any], remedy: str) -> None:
    """Refuse a model of which transformers had to make weights at random, a head as a rule: they are noise.

    `info` is what `from_pretrained(..., output_loading_info=True)` returns with the model.
    """
    missing = set(info["missing_keys"])
    # Weights of another shape than the model's are made anew, too.
    for key in info.get("mismatched_keys", ()):  # a name, or a name and two shapes
        missing.add(key if isinstance(key, str) else key[0])
    if missing:
        names = sorted(missing)
        and_others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        got = f"{name}, a checkpoint without {', '.join(names[:3])}{and_others}"
        raise InputError(field, got, f"one that holds every weight of {type(model).__name__}", remedy)


def refuse_empty_vocabulary(tokenizer: object) -> None:
    """Refuse a tokenizer that knows its special tokens only: transformers makes one where tokenizer.json is missing.

    A processor is judged by its tokenizer.
    """
    from transformers import PreTrainedTokenizerBase

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) <= len(tokenizer.all_special_tokens):
        got = f"{tokenizer.name_or_path}, whose tokenizer knows special tokens only"
        raise InputError("tokenizer", got, "a tokenizer with a vocabulary", "Add its tokenizer.json.")


@contextmanager
def hub_errors(field: str, name: str, expected: str) -> Iterator[None]:
    """Make one `InputError` of whatever loading a model, a tokenizer or a configuration raises inside the block.

    `name` is the folder or Hub id, `expected` says what would have loaded.
    """
    with reading(field, name, expected), quiet_retries():
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = hub_reason(error)
            if reason is None:
                raise
            got, remedy = reason
            raise InputError(field, f"{name}, {got}", expected, remedy) from error


@contextmanager
def quiet_retries() -> Iterator[None]:
    """Silence the warnings for every attempt at a network that does not answer: the error that follows says it."""
    logger = logging.getLogger(_RETRIES)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def is_unreachable(error: BaseException) -> bool:
    """Tell whether no answer came from the Hub, not one that refuses."""
    from huggingface_hub import errors

    # A refusal is an `OSError`, too (`HfHubHTTPError`), so it is looked for first.
    chain = list(causes(error))
    is_refusal = any(isinstance(cause, (errors.HfHubHTTPError, errors.LocalTokenNotFoundError)) for cause in chain)
    return not is_refusal and any(isinstance(cause, OSError) for cause in chain)


def hub_reason(error: BaseException) -> tuple[str, str] | None:
    """
    Find out why the Hub sent nothing, from the error or its causes; `None` for another problem.

    Returns the problem, to follow the name and a comma, and the remedy.
    """
    from huggingface_hub import constants, errors

    # The libraries wrap the Hub's error in others, so all causes are looked at.
    chain = list(causes(error))
    # In this order: a gated repository is also one that is not found.
    kinds = (
        (errors.GatedRepoError, "which is gated", "Ask for access on its page, and log in with `hf auth login`."),
        (errors.RevisionNotFoundError, "which has no such revision", "Correct the revision."),
        (
            errors.RepositoryNotFoundError,
            "which does not exist on the Hub, or is private",
            "Correct the id or the path; for a private one log in with `hf auth login`.",
        ),
    )
    for kind, got, remedy in kinds:
        if any(isinstance(cause, kind) for cause in chain):
            return got, remedy
    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    if any(isinstance(cause, unreachable) for cause in chain):
        if constants.HF_HUB_OFFLINE:
            got = "which is not in the local cache (offline mode, HF_HUB_OFFLINE=1)"
            return got, "Unset HF_HUB_OFFLINE to download it, or name a local folder."
        reason = str(chain[-1]).strip().rstrip(".")
        got = f"which is not in the local cache; the Hub, {constants.ENDPOINT}, cannot be reached ({reason:.100})"
        return got, "Check the network, or name a local folder."
    if any(isinstance(cause, errors.EntryNotFoundError) for cause in chain):
        return "a repository that lacks a required file", "Check that it holds a model that transformers can load."
    for cause in chain:
        if isinstance(cause, errors.HfHubHTTPError):
            status = getattr(cause.response, "status_code", "no status")
            return f"for which the Hub answered with status {status}", "Try again later, or name a local folder."
    return None
