"""Identifies the run in an output folder and checks whether another may start there. Loads neither torch nor TRL.

TRL trains into any folder: a second run deletes the checkpoints of the first (`save_total_limit`), replaces its
model, or leaves its own checkpoints between the others. Here a folder is its run's until the user says otherwise.
"""

import logging
import shutil
from pathlib import Path

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_log import FOLDER
from trl_drgrpo.features.resume.checkpoints import (
    PART_FILE,
    STATE_FILE,
    TRAINER_STATE,
    begin_checkpoint,
    checkpoint_folders,
    newest_complete_checkpoint,
    require_complete,
    saved_at,
    state_or_none,
)

logger = logging.getLogger(__name__)

_MARK = "training_args.bin"  # beside the weights that a trainer saved: others are a base model, and no run
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_GO_ON = "To continue it: trainer.train(resume_from_checkpoint=True), or --resume_from_checkpoint true."
_NO_CHECKPOINT = "It left no checkpoint to resume from; to start from its weights, name it as the model."
_REPLACE = (
    "To replace it: DrGRPOConfig(overwrite_output_dir=True), or --overwrite_output_dir true, which deletes its "
    "checkpoints and run log when training begins."
)


def choose_start(output_dir: Path, resume: str | bool | None, overwrite: bool, checksums: bool = True) -> Path | None:
    """
    The checkpoint that a run goes on from; `None` for a run that begins anew.

    `resume`: a checkpoint, or `True` for the newest complete one in `output_dir`. `overwrite`: the run may replace
    another one there; else that is refused, like an incomplete checkpoint. `checksums`: as in [`why_incomplete`].
    """
    if resume and overwrite:
        remedy = "One keeps the run in output_dir, the other deletes it: leave one of them out."
        got = f"true beside resume_from_checkpoint {str(resume).lower() if resume is True else resume}"
        raise InputError("overwrite_output_dir", got, "one of the two", remedy)
    checkpoint = newest_complete_checkpoint(output_dir) if resume is True else Path(resume) if resume else None
    if checkpoint is not None and resume is not True:
        require_complete(checkpoint, checksums)
    if not overwrite and not (checkpoint and _is_of_the_run_in(output_dir, checkpoint)):
        _refuse_another_run(output_dir)
    return checkpoint


def run_in(output_dir: Path) -> str:
    """Run files in a folder, in words: checkpoints or a saved model; empty when another run may start there.

    Unrelated files do not count, nor does what a run leaves that died before its first checkpoint was complete.
    """
    checkpoints = [path.name for path in checkpoint_folders(output_dir) if _was_completed(path)]
    if checkpoints:
        more = len(checkpoints) - 1
        return checkpoints[0] + (f" and {more} more checkpoint{'s' * (more > 1)}" if more else "")
    if not (output_dir / _MARK).exists():
        return ""
    weights = sorted(path.name for pattern in _WEIGHTS for path in output_dir.glob(pattern))
    return f"a saved model, {weights[0]}" if weights else ""


def delete_run(output_dir: Path) -> None:
    """Delete the checkpoints and the run log in a folder; a saved model stays until the new one takes its place."""
    checkpoints = checkpoint_folders(output_dir)
    for path in checkpoints:
        begin_checkpoint(path)  # whenever this is killed, none of them is resumed from any more
    deleted = [path for path in (*checkpoints, output_dir / FOLDER) if path.exists()]
    for path in deleted:
        shutil.rmtree(path)
    if deleted:
        logger.warning("overwrite_output_dir: deleted %s.", ", ".join(map(str, deleted)))


def _refuse_another_run(output_dir: Path) -> None:
    found = run_in(output_dir)
    if found:
        first = _GO_ON if any(map(_was_completed, checkpoint_folders(output_dir))) else _NO_CHECKPOINT
        got = f"{output_dir}, which holds another run ({found})"
        raise InputError(
            "output_dir", got, "a folder without a run", f"{_REPLACE} {first} Or choose another output_dir."
        )


def _was_completed(checkpoint: Path) -> bool:
    """Whether it was written to its end, by anyone; it may be damaged since."""
    if (checkpoint / PART_FILE).exists():
        return False
    return (checkpoint / STATE_FILE).exists() or (checkpoint / TRAINER_STATE).exists()


def _is_of_the_run_in(output_dir: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint lies in the folder, or is a copy of one of the run that wrote there last."""
    if checkpoint.resolve().parent == output_dir.resolve():
        return True
    run_id = (state_or_none(checkpoint) or {}).get("run_id")
    states = [state for path in checkpoint_folders(output_dir) if (state := state_or_none(path))]
    return bool(run_id and states) and max(states, key=saved_at).get("run_id") == run_id
