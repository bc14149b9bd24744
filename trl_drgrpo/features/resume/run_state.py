"""State that a checkpoint holds beside TRL's own, so that a resumed run is the same run.

Two kinds of file per checkpoint folder:

- `drgrpo_rollouts_<rank>.pt`: the completions that were generated but not trained on yet. TRL forgets them, so a stock
  run that is interrupted between two generations resumes with other completions. Absent when the next step generates;
- `drgrpo_state.json`: L, the count of micro-batches, the batch geometry, the running reward scale, and what tells this
  run from others: its id and objective. Written after everything else and over all ranks: with it the checkpoint is
  complete, see `checkpoints.py`.
"""

import contextlib
import logging
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume.checkpoints import (
    STATE_FILE,
    checkpoint_folders,
    file_marks,
    finish_checkpoint,
    read_state,
    saved_at,
    state_or_none,
    why_changed,
)
from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.objective.value_baseline import ValueBaseline

logger = logging.getLogger(__name__)

FORMAT = 2
_READABLE = (1, 2)  # 1: of release 0.1.0, without run, objective, time and checksums


@dataclass(frozen=True)
class RunState:
    """The small part of the state.

    Args:
        loss_normalizer (`int`): L of the run, in tokens.
        micro_step (`int`): Micro-batches processed since the start of the run, on each rank.
        reward_scale (`dict[str, float]`): State of [`RunningRewardScale`].
        value_baseline (`dict[str, float]`, *optional*): State of [`ValueBaseline`].
        geometry (`dict[str, int]`): Batch sizes and process count, by which `micro_step` and rollouts make sense.
        has_rollouts (`bool`): Whether every rank left a file of pending rollouts.
        run_id (`str`, *optional*): Of the run, the same from its beginning on.
        objective (`dict`, *optional*): What it optimizes, see
            [`objective_facts`].
        settings (`dict`, *optional*): More that a resumed run compares, see [`resume_facts`].
        keeps_old_credit (`bool`): Whether release 0.1.0 began the run, and its default step credit goes on.
        files (`dict[str, dict]`): Size and checksum of the other files of the checkpoint, filled in by `save`.
        saved_at (`float`): Unix time, later than that of every checkpoint beside it; filled in by `save`.
        format (`int`): Version of the file's layout.
    """

    loss_normalizer: int
    micro_step: int
    reward_scale: dict[str, float]
    geometry: dict[str, int]
    has_rollouts: bool = False
    run_id: str | None = None
    objective: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    value_baseline: dict[str, float] | None = None
    keeps_old_credit: bool = False
    files: dict[str, Any] = field(default_factory=dict, compare=False)
    saved_at: float = field(default=0.0, compare=False)
    format: int = FORMAT

    def save(self, checkpoint: Path) -> None:
        """Write the state into a checkpoint folder, whole or not at all, as the last of its files."""
        others = [saved_at(state_or_none(path) or {}) for path in checkpoint_folders(checkpoint.parent)]
        now = max([time.time(), *(moment + 1 for moment in others)])  # clocks differ, and may be put back
        finish_checkpoint(checkpoint, {**asdict(self), "files": file_marks(checkpoint), "saved_at": now})

    @classmethod
    def load(cls, checkpoint: Path) -> "RunState | None":
        """The state of a checkpoint folder; `None` when it was not written by this package (a plain TRL run). Refuses
        a damaged file and a format that this version does not know."""
        source = checkpoint / STATE_FILE
        try:
            content = read_state(checkpoint)
            if content is None:
                return None
            if content.get("format") not in _READABLE:
                remedy = "Resume with the trl-drgrpo version that wrote it."
                raise InputError(str(source), f"format {content.get('format')}", f"format {FORMAT}", remedy)
            state = cls(**content)
            RunningRewardScale().load_state_dict(state.reward_scale)
            if state.value_baseline:
                ValueBaseline().load_state_dict(state.value_baseline)
            if not all(isinstance(value, int) for value in (state.loss_normalizer, state.micro_step)):
                raise TypeError("numbers expected")
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            got = f"unreadable content ({type(error).__name__}: {error})"
            remedy = "Resume from an earlier checkpoint of the run."
            raise InputError(str(source), got, "the state of a run", remedy) from error
        return state


def newest_loss_normalizer(output_dir: Path) -> int | None:
    """L of the newest checkpoint in a run's folder that this package has written; `None` where there is none. Passes
    over what is damaged."""
    for path in checkpoint_folders(output_dir):
        with contextlib.suppress(InputError):
            if state := RunState.load(path):
                return state.loss_normalizer
    return None


def save_rollouts(checkpoint: Path, rank: int, micro_batches: list[dict[str, Any]] | None) -> None:
    """Write this rank's pending micro-batches into a checkpoint folder, whole or not at all; `None`: leave no file."""
    target = _rollouts_file(checkpoint, rank)
    if micro_batches is None:
        target.unlink(missing_ok=True)  # an older run may have left one
        return
    checkpoint.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(micro_batches, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)


def load_rollouts(
    checkpoint: Path, rank: int, device: torch.device, files: dict[str, Any] | None = None
) -> list[dict[str, Any]] | None:
    """This rank's pending micro-batches on `device`; `None`, and the reason in the log, when they cannot be read.
    `files`: sizes and checksums, as the checkpoint's [`RunState`] lists them."""
    source = _rollouts_file(checkpoint, rank)
    if (mark := (files or {}).get(source.name)) and (reason := why_changed(checkpoint, source.name, mark)):
        logger.warning("Completions not trained on yet in %s are not used: %s.", checkpoint, reason)
        return None
    try:
        micro_batches = torch.load(source, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        logger.warning("%s cannot be read (%s: %s).", source, type(error).__name__, error)
        return None
    return [
        {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        for batch in micro_batches
    ]


def _rollouts_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"drgrpo_rollouts_{rank}.pt"


class RandomState:
    """The random generators of Python, numpy and torch at one moment."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore(self) -> None:
        """Go back to that moment."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
