"""What a checkpoint holds beside TRL's own state, so that a resumed run is the same run, and what a resumed run keeps
of its checkpoint, takes anew, or refuses: one table, which the guide shows. Every difference is said, none is silent.

- `drgrpo_rollouts_<rank>.pt`: the completions that were generated but not trained on yet. TRL forgets them, so a stock
  run that is interrupted between two generations resumes with other completions. Absent when the next step generates;
- `drgrpo_features.json`: the `state_dict` of each feature;
- `drgrpo_state.json`: L, the count of micro-batches, the batch geometry (which decides on pending completions), the
  running reward scale, and what tells this run from others: its id, objective and settings. It comes last: with it the
  checkpoint is complete, see `checkpoints.py`.
"""

import contextlib
import json
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.features.diagnostics.run_facts import adapter_facts, fields_of
from trl_drgrpo.features.resume.checkpoints import (
    STATE_FILE,
    checkpoint_folders,
    file_marks,
    finish_checkpoint,
    read_state,
    states_in,
    why_changed,
)
from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.objective.value_baseline import ValueBaseline
from trl_drgrpo.upstream.hooks import Feature

logger = logging.getLogger(__name__)

FORMAT = 2
FEATURES_FILE = "drgrpo_features.json"  # in every checkpoint
ON_RESUME = {
    # With the optimizer's state: torch restores them from there, whatever the arguments say.
    "kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "refused": ("optim", "loss_normalizer"),
    "anew": (
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
        *("max_grad_norm", "max_completion_length", "generation_kwargs", "chat_template_kwargs", "use_vllm"),
        *("max_tool_calling_iterations", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("curriculum", "curriculum_q_min", "max_sampling_rounds", "on_reward_error"),
        *("seed", "data_seed", "shuffle_dataset", "bf16", "fp16", "dataset", "adapter"),
    ),
}
_ROWS = 64


def resume_facts(trainer: Any) -> dict[str, Any]:
    """The settings of the table, as a checkpoint records them; JSON-ready."""
    args, optimizer = trainer.args, trainer.given_optimizers[0]
    facts = fields_of(args, (*ON_RESUME["kept"], *ON_RESUME["anew"]))
    optim = type(optimizer).__name__ if optimizer else str(getattr(args.optim, "value", args.optim))
    facts["optim"] = optim.removesuffix("_fused")  # another implementation, the same state
    facts["adapter"] = adapter_facts(trainer.accelerator.unwrap_model(trainer.model))
    facts["dataset"] = dataset_mark(trainer.train_dataset)
    return json.loads(json.dumps(facts, default=str))


def dataset_mark(dataset: Any) -> str | None:
    """Number of rows, columns, and a checksum of at most 64 rows, evenly spaced; `None` for streamed data.

    Example:

    ```python
    >>> dataset_mark(Dataset.from_dict({"prompt": ["1+1=", "2+2="]}))
    '2 rows of prompt (e1c28b4b)'

    ```
    """
    if not isinstance(dataset, Dataset):
        return None
    plain = dataset.with_format(None)  # a transform may draw random numbers
    rows = [plain[i] for i in range(0, len(plain), len(plain) // _ROWS + 1)]
    text = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)
    columns = ", ".join(sorted(dataset.column_names))
    return f"{len(dataset)} rows of {columns} ({xxhash.xxh3_64(text.encode()).hexdigest()[:8]})"


def refuse_changes(before: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuses another optimizer: it cannot read the state."""
    was, optim = before.get("optim"), now.get("optim")
    if was and optim and was != optim:
        remedy = "Keep it, or start a new run from the checkpoint's weights."
        raise InputError("optim", optim, f"{was}, whose state is in {checkpoint}", remedy)


def changes(before: dict[str, Any], now: dict[str, Any], has_optimizer: bool) -> tuple[list[str], list[str]]:
    """Settings that differ, in words: those that are kept as they were (none without the optimizer's state), and those
    that are taken anew."""
    differ = {name: value for name, value in now.items() if name in before and before[name] != value}
    is_kept = {name: has_optimizer and name in ON_RESUME["kept"] for name in differ}
    kept = [f"{name} {shortened(before[name])}, not {shortened(differ[name])}" for name in differ if is_kept[name]]
    anew = [f"{name} {shortened(before[name])} -> {shortened(differ[name])}" for name in differ if not is_kept[name]]
    return kept, anew


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The small part of the state.

    Args:
        loss_normalizer (`int`): L of the run, in tokens.
        micro_step (`int`): Micro-batches processed since the start of the run, on each rank.
        reward_scale, value_baseline (`dict[str, float]`): State of [`RunningRewardScale`] and of [`ValueBaseline`].
        geometry (`dict[str, int]`): Batch sizes and process count, by which `micro_step` and rollouts make sense.
        has_rollouts (`bool`): Whether every rank left a file of pending rollouts.
        run_id (`str`): Of the run, the same from its beginning on.
        objective (`dict`): What it optimizes, see [`objective_facts`].
        settings (`dict`): More that a resumed run compares, see [`resume_facts`].
        files (`dict[str, dict]`): Size and checksum of the other files of the checkpoint, filled in by `save`.
        saved_at (`float`): Unix time, later than that of every checkpoint beside it; filled in by `save`.
        format (`int`): Version of the file's layout.
    """

    loss_normalizer: int
    micro_step: int
    reward_scale: dict[str, float]
    value_baseline: dict[str, float]
    geometry: dict[str, int]
    has_rollouts: bool
    run_id: str
    objective: dict[str, Any]
    settings: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict, compare=False)
    saved_at: float = field(default=0.0, compare=False)
    format: int = FORMAT

    def save(self, checkpoint: Path) -> None:
        """Write the state into a checkpoint folder, whole or not at all, as the last of its files."""
        others = states_in(checkpoint.parent).values()
        now = max([time.time(), *(state["saved_at"] + 1 for state in others)])  # clocks differ, and may be put back
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
            if content.get("format") != FORMAT:
                remedy = "Resume with the trl-drgrpo version that wrote it."
                raise InputError(str(source), f"format {content.get('format')}", f"format {FORMAT}", remedy)
            state = cls(**content)
            RunningRewardScale().load_state_dict(state.reward_scale)
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


def save_features(checkpoint: Path, features: Sequence[Feature]) -> None:
    """Write what the features keep into a checkpoint folder, by the names of their classes."""
    states = {type(feature).__name__: feature.state_dict() for feature in features}
    kept = {name: state for name, state in states.items() if state is not None}
    (checkpoint / FEATURES_FILE).write_text(json.dumps(kept) + "\n", encoding="utf-8")


def load_features(checkpoint: Path, features: Sequence[Feature]) -> None:
    """Give each feature what the checkpoint keeps of it; `None` where that is nothing."""
    file = checkpoint / FEATURES_FILE
    states = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for feature in features:
        feature.load_state_dict(states.get(type(feature).__name__))


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
