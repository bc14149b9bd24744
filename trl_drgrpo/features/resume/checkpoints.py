"""When a checkpoint folder is complete. Loads neither torch nor TRL: the command line asks before anything heavy does.

A process that is killed while it writes a checkpoint leaves a folder that looks like one. So three marks:

- `drgrpo_state.part` stands in the folder from the first moment of writing to the last;
- `drgrpo_state.json` takes its place in one step, after everything else and over all ranks;
- it lists the sizes of the files beside it: a power cut can lose the end of a file that was written before it.
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError

logger = logging.getLogger(__name__)

STATE_FILE = "drgrpo_state.json"
PART_FILE = "drgrpo_state.part"
_TRAINER_STATE = "trainer_state.json"
# Not in the list: the card may be edited, and rollouts that cannot be read are generated anew.
_NOT_LISTED = ("README.md", "drgrpo_rollouts_*", PART_FILE, STATE_FILE)


def begin_checkpoint(checkpoint: Path) -> None:
    """Mark a folder as being written, whatever an older run has left in it.

    Args:
        checkpoint (`Path`): The folder; made where it does not exist.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / PART_FILE).touch()
    (checkpoint / STATE_FILE).unlink(missing_ok=True)


def finish_checkpoint(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the state file, whole or not at all, and take the mark of `begin_checkpoint` away by it.

    Args:
        checkpoint (`Path`): The folder, with all its other files.
        state (`dict`): What the state file shall hold.
    """
    part = checkpoint / PART_FILE
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps(state, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(checkpoint / STATE_FILE)
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        folder = os.open(checkpoint, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def file_sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of each file that a resumed run reads, by its path inside the folder."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    listed = [path for path in files if not any(path.match(pattern) for pattern in _NOT_LISTED)]
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in sorted(listed)}


def why_incomplete(checkpoint: Path) -> str:
    """Why a folder is no complete checkpoint.

    Args:
        checkpoint (`Path`): A checkpoint folder, of this package or of plain TRL.

    Returns:
        `str`: The reason; empty when it is complete. A state file that cannot be read is no reason here: it is an
            error of its own when the run loads it.
    """
    if not checkpoint.is_dir():
        return "it does not exist"
    if (checkpoint / PART_FILE).exists():
        return "it was not written to its end: the run died while it was being saved"
    try:
        trainer_state = json.loads((checkpoint / _TRAINER_STATE).read_text(encoding="utf-8"))
        if not isinstance(trainer_state, dict):
            return f"{_TRAINER_STATE} holds no state"
    except FileNotFoundError:
        return f"it holds no {_TRAINER_STATE}"
    except (OSError, ValueError):
        return f"{_TRAINER_STATE} cannot be read"
    for name, size in _listed_sizes(checkpoint).items():
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return ""


def require_complete(checkpoint: Path) -> None:
    """Refuse to resume from a folder that was not written to its end.

    Args:
        checkpoint (`Path`): The folder that the user named.

    Raises:
        `InputError`: Says what is missing, and which way out there is.
    """
    reason = why_incomplete(checkpoint)
    if reason:
        remedy = "Name an older checkpoint-<step> folder, or say True for the newest complete one in output_dir."
        expected = "a complete checkpoint folder"
        raise InputError("resume_from_checkpoint", f"{checkpoint}, but {reason}", expected, remedy)


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, the newest first."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def newest_complete_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that was written to its end; newer ones that were not are named in the log.

    Args:
        output_dir (`Path`): Folder of a run.

    Returns:
        `Path` or `None`: Complete is one with our state file and files of the sizes that it lists, or, where no
        checkpoint has one (a plain TRL run), one with a readable `trainer_state.json`.
    """
    folders = checkpoint_folders(output_dir)
    ours = any((path / STATE_FILE).exists() for path in folders)
    for path in folders:
        reason = why_incomplete(path)
        if not reason and ours and not (path / STATE_FILE).exists():
            reason = f"it was not written to its end (no {STATE_FILE}), or plain TRL wrote it: then give its path"
        if not reason:
            return path
        logger.warning("%s is skipped: %s. Looking for an older one.", path, reason)
    return None


def _listed_sizes(checkpoint: Path) -> dict[str, int]:
    try:
        files = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")).get("files", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return files if isinstance(files, dict) else {}
