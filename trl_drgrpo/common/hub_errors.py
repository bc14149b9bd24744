"""Failures to load from the Hugging Face Hub: one reason in one line, without the client's log of its retries."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError, causes
from trl_drgrpo.common.reading import reading, user_path

# For `hf upload`: checkpoints, and the run log with its prompts and completions, stay at home.
UPLOAD_EXCLUDES = "--exclude 'checkpoint-*' --exclude '_*'"

_RETRIES = "huggingface_hub.utils._http"
_PATH = re.compile(r"^(~|/|[A-Za-z]:[\\/]|\.{1,2}[\\/])")


def is_local_path(value: Any) -> bool:
    """Tell whether a value is a path of somebody's machine, which says nothing to others."""
    return isinstance(value, str) and bool(_PATH.match(value))


def is_hub_id(name: Any) -> bool:
    """Tell whether a name is that of a repository on the Hub, not a folder that is or was on this machine."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name or is_local_path(name) or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_adapter(name: str) -> bool:
    """Tell whether a name is that of a local folder with an adapter and no whole model."""
    folder = os.path.expanduser(name)
    holds = [os.path.isfile(os.path.join(folder, file)) for file in ("adapter_config.json", "config.json")]
    return holds == [True, False]


def check_local(field: str, name: str) -> None:
    """Refuses the name of a folder that is not there, of a file, and of a folder that holds no model. Loads nothing. A
    name that could be a Hub id passes."""
    path, expected = user_path(name), "a model's folder or Hub id"
    remedy = "Name the folder that save_pretrained wrote."
    if os.path.isfile(path):
        raise InputError(field, f"{name}, a file", expected, remedy)
    if os.path.isdir(path):  # unlike Path.is_dir false, and no error, for a name that is too long
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                remedy = "It holds an adapter: name its base model, or merge the two first (`trl-drgrpo merge`)."
            raise InputError(field, f"{name}, a folder without config.json", expected, remedy)
        check_weights(field, path)
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        remedy = "Check the path." if path.is_absolute() else remedy
        raise InputError(field, f"{name}, which does not exist", expected, remedy)


def check_weights(field: str, folder: Path) -> None:
    """Refuses a folder with a safetensors file that is not as long as its header says: a copy that was cut off, which
    ends in a traceback when it is loaded; and one with a pipe, which nobody may ever write to. Reads the headers
    only."""
    from safetensors import SafetensorError, safe_open

    for entry in folder.iterdir() if os.path.isdir(folder) else ():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise InputError(field, f"{entry}, a device or a pipe", "a folder of files", "Remove it.")
    for file in sorted(folder.glob("*.safetensors")) if os.path.isdir(folder) else ():
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            if not file.is_file():  # a link to nowhere, a folder
                raise InputError(field, f"{file}, which is no file", "a safetensors file", "Copy it again.") from error
            got = f"{file} of {file.stat().st_size} bytes ({error})"
            remedy = "Copy or download it again: it was cut off."
            raise InputError(field, got, "a whole safetensors file", remedy) from error


def refuse_new_weights(field: str, name: str, model: Any, info: Mapping[str, Any], remedy: str) -> None:
    """Refuses a model of which transformers had to make weights at random, a head as a rule: noise, and nothing but a
    line in the log says so. `info`: what `from_pretrained(..., output_loading_info=True)` returns with the model."""
    # Of a weight that has another shape it is the name, and both shapes.
    mismatched = [key if isinstance(key, str) else key[0] for key in info.get("mismatched_keys", ())]
    if missing := sorted({*info["missing_keys"], *mismatched}):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        got = f"{name}, a checkpoint without {', '.join(missing[:3])}{more}"
        raise InputError(field, got, f"one that holds every weight of {type(model).__name__}", remedy)


def refuse_empty_vocabulary(tokenizer: Any) -> None:
    """Refuses a tokenizer that knows its special tokens only: transformers makes one where tokenizer.json is missing.
    A processor is judged by its tokenizer."""
    from transformers import PreTrainedTokenizerBase

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) <= len(tokenizer.all_special_tokens):
        got = f"{tokenizer.name_or_path}, whose tokenizer knows special tokens only"
        raise InputError("tokenizer", got, "a tokenizer with a vocabulary", "Add its tokenizer.json.")


@contextmanager
def hub_errors(field: str, name: str, expected: str) -> Iterator[None]:
    """Makes one `InputError` of whatever loading a model, a tokenizer or a configuration raises inside the block.
    `name`: the folder or Hub id; `expected`: what would have loaded."""
    with reading(field, name, expected), quiet_retries():
        try:
            yield
        except Exception as error:
            if isinstance(error, InputError) or (reason := hub_reason(error)) is None:
                raise
            got, remedy = reason
            raise InputError(field, f"{name}, {got}", expected, remedy) from error


@contextmanager
def quiet_retries() -> Iterator[None]:
    """Without a warning for every attempt at a network that does not answer: the error that follows says it once."""
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

    found = list(causes(error))
    answered = (errors.HfHubHTTPError, errors.LocalTokenNotFoundError)
    return any(isinstance(cause, OSError) for cause in found) and not any(isinstance(c, answered) for c in found)


def hub_reason(error: BaseException) -> tuple[str, str] | None:
    """
    Why the Hub did not give what was asked for, from the error or its causes; `None` for another problem.

    Returns the problem, to follow the name and a comma, and the remedy.
    """
    from huggingface_hub import constants, errors

    found = list(causes(error))
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
        if any(isinstance(cause, kind) for cause in found):
            return got, remedy
    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    if any(isinstance(cause, unreachable) for cause in found):
        if constants.HF_HUB_OFFLINE:
            got = "which is not in the local cache (offline mode, HF_HUB_OFFLINE=1)"
            return got, "Unset HF_HUB_OFFLINE to download it, or name a local folder."
        reason = str(found[-1]).strip().rstrip(".")
        got = f"which is not in the local cache; the Hub, {constants.ENDPOINT}, cannot be reached ({reason:.100})"
        return got, "Check the network, or name a local folder."
    if any(isinstance(cause, errors.EntryNotFoundError) for cause in found):
        return "a repository that lacks a required file", "Check that it holds a model that transformers can load."
    for cause in found:
        if isinstance(cause, errors.HfHubHTTPError):
            status = getattr(cause.response, "status_code", "no status")
            return f"for which the Hub answered with status {status}", "Try again later, or name a local folder."
    return None
