"""Complete and incomplete checkpoints, and the run in an output folder. Loads neither torch nor TRL: the command line
asks before they load.

A process that is killed while it writes a checkpoint leaves a folder that looks like one, and a bad disk or copy
leaves files of the correct size. So three marks:

- `drgrpo_state.part` stands in the folder from the first moment of writing to the last;
- `drgrpo_state.json` takes its place in one step, after everything else and over all ranks;
- it lists the size and the checksum (XXH3, 128 bits) of the files beside it, and of itself.

TRL trains into any folder: a second run deletes the checkpoints of the first (`save_total_limit`), replaces its model,
or leaves its own checkpoints between the others. Here a folder is its run's until the user says otherwise
(`choose_start`).
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.output_folders import check_output_folder, checkpoint_folders, delete, step_of
from trl_drgrpo.features.diagnostics.run_log import FOLDER

if TYPE_CHECKING:
    from trl_drgrpo.upstream.hooks import Feature

logger = logging.getLogger(__name__)

FORMAT = 3  # of the state file
STATE_FILE = "drgrpo_state.json"
FEATURES_FILE = "drgrpo_features.json"  # in every checkpoint
PART_FILE = "drgrpo_state.part"
TRAINER_STATE = "trainer_state.json"
# The card may be edited; the last is transformers' own mark while `enable_jit_checkpoint` saves.
_NOT_LISTED = ("README.md", PART_FILE, STATE_FILE, "checkpoint-is-incomplete.txt")
_NOT_NEEDED = "drgrpo_rollouts_"  # rollouts that cannot be read are generated anew
_SUM = "xxh3_128"


def begin_checkpoint(checkpoint: Path) -> None:
    """Mark a folder as being written, whatever an older run has left in it; make it where it does not exist.

    Links are removed, the folder itself and those in it: their targets belong to others.
    """
    # Writing through a link would change somebody else's files.
    if checkpoint.is_symlink():
        logger.warning("%s was a link to %s, which stays as it is.", checkpoint, os.readlink(checkpoint))
        checkpoint.unlink()
    checkpoint.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.rglob("*"):
        if path.is_symlink():
            path.unlink()
    (checkpoint / PART_FILE).touch()
    (checkpoint / STATE_FILE).unlink(missing_ok=True)


def finish_checkpoint(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the state file, whole or not at all, behind all other files; this removes the mark of `begin_checkpoint`.

    To `state` come the marks of the other files, and the time, which is later than that of every checkpoint beside it.
    """
    now = time.time()
    for earlier in states_in(checkpoint.parent).values():  # clocks differ, and may be put back
        now = max(now, earlier["saved_at"] + 1)
    state = {"format": FORMAT, "files": file_marks(checkpoint), "saved_at": now, **state}
    part = checkpoint / PART_FILE
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps({**state, _SUM: _sum_of_state(state)}, indent=2) + "\n")
        # Onto the disk before the name changes: after a power cut, the file must not be there and empty.
        file.flush()
        os.fsync(file.fileno())
    part.replace(checkpoint / STATE_FILE)
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        folder = os.open(checkpoint, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint's state file; `None` where there is none (a plain TRL run).

    Raises `ValueError` for a damaged one.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(state, dict):
        raise ValueError("no mapping")
    if state.pop(_SUM, None) != _sum_of_state(state):
        raise ValueError("its checksum differs")
    return state


def file_marks(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return size in bytes and checksum of each file that a resumed run reads, by its path inside the folder."""
    marks = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name not in _NOT_LISTED:
            stat = path.stat()
            mark = {"bytes": stat.st_size, _SUM: _checksum(path, stat.st_mtime_ns, stat.st_ctime_ns)}
            marks[path.relative_to(checkpoint).as_posix()] = mark
    return marks


def why_incomplete(checkpoint: Path, checksums: bool = True) -> str:
    """Return the reason why a folder is no complete checkpoint, of this package or of plain TRL; empty when it is one.

    `checksums`: read every file and compare its checksum, else only sizes.
    """
    if not os.path.isdir(checkpoint):
        return "it does not exist"
    if (checkpoint / PART_FILE).exists():
        return "it is incomplete: the run died while saving it"
    try:
        trainer_state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
        if not isinstance(trainer_state, dict):
            return f"{TRAINER_STATE} holds no state"
    except FileNotFoundError:
        return f"it holds no {TRAINER_STATE}"
    except (OSError, ValueError):
        return f"{TRAINER_STATE} cannot be read"
    try:
        marks = (read_state(checkpoint) or {"files": {}})["files"]
    except (OSError, ValueError) as error:
        return f"{STATE_FILE} cannot be read ({error})"
    # All sizes first: they cost nothing, and a missing file must not wait for the checksums of gigabytes.
    for reads in (False, True) if checksums else (False,):
        for name, mark in marks.items():
            if name.startswith(_NOT_NEEDED):
                continue
            reason = why_changed(checkpoint, name, mark, reads)
            if reason:
                return reason
    return ""


def why_changed(
    checkpoint: Path,
    name: str,
    mark: dict[str, Any],
    checksum: bool = True,
) -> str:
    """Return the reason why a file of a checkpoint is not the one that was written; empty when it is.

    `mark` is its entry in [`file_marks`].
    """
    path = checkpoint / name
    try:
        # The size first: it costs nothing.
        stat = path.stat()
        if stat.st_size != mark["bytes"]:
            return f"{name} has {stat.st_size} bytes instead of {mark['bytes']}"
        if checksum and mark[_SUM] != _checksum(path, stat.st_mtime_ns, stat.st_ctime_ns):
            return f"{name} was changed after it was written (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def has_optimizer(checkpoint: Path) -> bool:
    """Tell whether a checkpoint holds the state of an optimizer: of transformers, FSDP or DeepSpeed."""
    return any(checkpoint.rglob("*optim*"))


def newest_complete_checkpoint(output_dir: Path) -> Path | None:
    """Find the newest complete checkpoint of the run that wrote last; the log says why others are passed over.

    A folder may hold checkpoints of several runs, and of steps behind which a run went back. The checkpoint written
    last decides which run is meant and how far it has come: checkpoints of other runs, and of higher steps, do not
    count. A checkpoint is complete with our state file and files as it lists them, or, where no checkpoint has one (a
    plain TRL run), with a readable `trainer_state.json`.
    """
    folders = checkpoint_folders(output_dir)
    is_ours = any((path / STATE_FILE).exists() for path in folders)
    states = states_in(output_dir)
    last = next(reversed(states), None)
    for path in folders:
        reason = why_incomplete(path, checksums=False)
        if not reason and is_ours and path not in states:
            reason = (
                f"it has no {STATE_FILE}, so plain TRL wrote it, and it may be incomplete. To continue from it, "
                f"set resume_from_checkpoint={path}"
            )
        if not reason and last is not None:
            run = states[path]["run_id"]
            newest_run = states[last]["run_id"]
            if run != newest_run:
                reason = f"it belongs to run {run}, but the last run to save here is {newest_run} ({last.name})"
            elif step_of(path) > step_of(last):
                reason = f"the run was resumed from an earlier step: {last.name} was written later"
        # Checksums last: they read all of the checkpoint, which only the one that is taken is worth.
        reason = reason or why_incomplete(path)
        if not reason:
            return path
        logger.warning("%s is skipped: %s. Looking for an older one.", path, reason)
    return None


def state_or_none(checkpoint: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint, `None` for one that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_state(checkpoint)


def states_in(output_dir: Path) -> dict[Path, dict[str, Any]]:
    """Return the readable states of a run's checkpoints; the one written last comes last."""
    states = {}
    for path in checkpoint_folders(output_dir):
        state = state_or_none(path)
        if state:
            states[path] = state
    # By the time in the file, not of it: a copy has new time stamps.
    return dict(sorted(states.items(), key=lambda item: (item[1]["saved_at"], step_of(item[0]))))


# The command line and the trainer ask for the same file; the two times, in nanoseconds, tell when it was written to.
@functools.cache
def _checksum(path: Path, modified: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sum_of_state(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(state, sort_keys=True).encode()).hexdigest()


_MARK = "training_args.bin"  # beside the weights that a trainer saved: others are a base model, and no run
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_GO_ON = "To continue it: trainer.train(resume_from_checkpoint=True), or --resume_from_checkpoint true."
_NO_CHECKPOINT = "It left no checkpoint to resume from; to start from its weights, name it as the model."
_REPLACE = (
    "To replace it: DrGRPOConfig(overwrite_output_dir=True), or --overwrite_output_dir true, which deletes its "
    "checkpoints and run log when training begins."
)


def choose_start(
    output_dir: Path,
    resume: str | bool | None,
    overwrite: bool,
    checksums: bool = True,
) -> Path | None:
    """Choose the checkpoint that a run goes on from; `None` for a run that begins anew.

    `resume`: a checkpoint, or `True` for the newest complete one in `output_dir`. `overwrite`: the run may replace
    another one there; else that is refused, like an incomplete checkpoint. `checksums`: as in [`why_incomplete`].
    """
    if resume and overwrite:
        remedy = "One keeps the run in output_dir, the other deletes it: leave one of them out."
        got = f"true beside resume_from_checkpoint {'true' if resume is True else resume}"
        raise InputError("overwrite_output_dir", got, "one of the two", remedy)
    checkpoint = None
    if resume is True:
        checkpoint = newest_complete_checkpoint(output_dir)
    elif resume:
        checkpoint = Path(resume)
        reason = why_incomplete(checkpoint, checksums)
        if reason:
            remedy = (
                "Name an older checkpoint-<step> folder, or set it to True for the newest complete one in output_dir."
            )
            expected = "a complete checkpoint folder"
            raise InputError("resume_from_checkpoint", f"{checkpoint}, but {reason}", expected, remedy)
    if overwrite or (checkpoint is not None and _is_of_the_run_in(output_dir, checkpoint)):
        return checkpoint
    # A run that begins anew, or goes on from a checkpoint elsewhere, needs a folder without another run.
    another_run = run_in(output_dir)
    if another_run:
        way_on = _GO_ON if any(map(_was_completed, checkpoint_folders(output_dir))) else _NO_CHECKPOINT
        remedy = f"{_REPLACE} {way_on} Or choose another output_dir."
        got = f"{output_dir}, which holds another run ({another_run})"
        raise InputError("output_dir", got, "a folder without a run", remedy)
    return checkpoint


def check_output_of_run(output_dir: Path, resume: str | bool | None, inputs: Mapping[str, str]) -> None:
    """Check the output folder with [`check_output_folder`]; a run of ours that goes on may write where it did."""
    if not (resume and states_in(output_dir)):
        check_output_folder("output_dir", str(output_dir), inputs)


def run_in(output_dir: Path) -> str:
    """Name the run files in a folder, checkpoints or a saved model; empty when another run may start there.

    Unrelated files do not count, nor does what a run leaves that died before its first checkpoint was complete.
    """
    checkpoints = [path.name for path in checkpoint_folders(output_dir) if _was_completed(path)]
    if checkpoints:
        further = len(checkpoints) - 1
        and_further = ("", " and 1 more checkpoint", f" and {further} more checkpoints")
        return checkpoints[0] + and_further[min(further, 2)]
    weights = sorted(chain.from_iterable(map(output_dir.glob, _WEIGHTS)))
    if weights and (output_dir / _MARK).exists():
        return f"a saved model, {weights[0].name}"
    return ""


def delete_run(output_dir: Path) -> None:
    """Delete the checkpoints and the run log in a folder; a saved model stays until the new one takes its place.

    Of a link only the link is deleted.
    """
    checkpoints = checkpoint_folders(output_dir)
    for path in checkpoints:
        if not path.is_symlink():
            begin_checkpoint(path)  # whenever this is killed, none of them is resumed from any more
    deleted = [path for path in (*checkpoints, output_dir / FOLDER) if os.path.lexists(path)]
    for path in deleted:
        delete(path)
    if deleted:
        logger.warning("overwrite_output_dir: deleted %s.", ", ".join(map(str, deleted)))


def delete_old_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete the checkpoints that were written first, beyond `save_total_limit`.

    transformers goes by the time stamps of the folders: with a clock that was put back it deletes the new ones. Here
    the order is that in which they were finished, which the state files say. A checkpoint without one (of plain TRL,
    or of a run that died) goes before all others, the lowest step first.

    Args:
        newest (`Path`): The checkpoint that was just written, which stays.
        limit (`int`, *optional*): Checkpoints to leave; `None` or 0 leaves all.
        best (`str`, *optional*): The best checkpoint, which stays, too.
    """
    if not limit or limit < 0:
        return
    # Checkpoints without a readable state first, the lowest step first, then the others in the order of writing.
    states = states_in(newest.parent)
    folders = [path for path in reversed(checkpoint_folders(newest.parent)) if path not in states]
    folders += states
    protected = {newest.resolve()}
    if best:
        protected.add(Path(best).resolve())
    # A link to a protected checkpoint may go: its target stays.
    removable = [path for path in folders if path.is_symlink() or path.resolve() not in protected]
    excess = len(folders) - max(limit, len(protected))
    for path in removable[: max(excess, 0)]:
        logger.info("Deleting the checkpoint %s: save_total_limit is %d.", path, limit)
        delete(path)


def _was_completed(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was written to its end, by anyone; it may be damaged since."""
    if (checkpoint / PART_FILE).exists():
        return False
    return (checkpoint / STATE_FILE).exists() or (checkpoint / TRAINER_STATE).exists()


def _is_of_the_run_in(output_dir: Path, checkpoint: Path) -> bool:
    """Tell whether a checkpoint lies in the folder, or is a copy of one of the run that wrote there last."""
    if checkpoint.resolve().parent == output_dir.resolve():
        return True
    state = state_or_none(checkpoint)
    states = list(states_in(output_dir).values())
    return state is not None and bool(states) and states[-1]["run_id"] == state["run_id"]


def rollouts_file(checkpoint: Path, rank: int) -> Path:
    """Return the file of a rank's completions that are not trained on yet."""
    return checkpoint / f"drgrpo_rollouts_{rank}.pt"


def features_by_name(features: Iterable["Feature"]) -> dict[str, "Feature"]:
    """Return features by the name that a checkpoint holds their state under; others of a class are numbered."""
    # The first of a class has its plain name, so that a second one does not change it.
    counts: Counter[str] = Counter()
    named_features = {}
    for feature in features:
        name = type(feature).__name__
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name} {counts[name]}"
        named_features[name] = feature
    return named_features
