"""What a checkpoint must hold besides TRL's own state, so that a resumed run is the same run.

Two files per checkpoint folder, written last, so that their presence means the rest is complete:

- `drgrpo_state.json`: the loss normaliser L, how many micro-batches were processed, the running reward scale;
- `drgrpo_rollouts_<rank>.pt`: the completions that were generated but not trained on yet. TRL forgets them, so a stock
  run that is interrupted between two generations resumes with other completions. Absent when the next step generates
  anyway.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trl_drgrpo.errors import InputError

STATE_FILE = "drgrpo_state.json"
FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """The small part of the state.

    Args:
        loss_normalizer (`int`): L of the run, in tokens.
        micro_step (`int`): Micro-batches processed since the start of the run, on each rank.
        reward_scale (`dict[str, float]`): State of [`RunningRewardScale`].
        format (`int`): Version of the file's layout.
    """

    loss_normalizer: int
    micro_step: int
    reward_scale: dict[str, float]
    format: int = FORMAT

    def save(self, checkpoint: Path) -> None:
        """Write the state into a checkpoint folder, whole or not at all."""
        target = checkpoint / STATE_FILE
        part = target.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(target)

    @classmethod
    def load(cls, checkpoint: Path) -> "RunState | None":
        """The state of a checkpoint folder; `None` when it was not written by this package (a plain TRL run).

        Raises:
            `InputError`: The file is damaged, or of a format this version does not know.
        """
        source = checkpoint / STATE_FILE
        if not source.exists():
            return None
        remedy = "Resume from an earlier checkpoint of the run."
        try:
            state = cls(**json.loads(source.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise InputError(str(source), f"unreadable content ({error})", "the state of a run", remedy) from error
        if state.format != FORMAT:
            remedy = "Resume with the trl-drgrpo version that wrote it."
            raise InputError(str(source), f"format {state.format}", f"format {FORMAT}", remedy)
        return state


def save_rollouts(checkpoint: Path, rank: int, micro_batches: list[dict[str, Any]]) -> None:
    """Write this rank's pending micro-batches (tensors, numbers, lists) into a checkpoint folder."""
    torch.save(micro_batches, _rollouts_file(checkpoint, rank))


def load_rollouts(checkpoint: Path, rank: int, device: torch.device) -> list[dict[str, Any]] | None:
    """This rank's pending micro-batches on `device`; `None` when the checkpoint holds none."""
    source = _rollouts_file(checkpoint, rank)
    return torch.load(source, map_location=device, weights_only=True) if source.exists() else None


def _rollouts_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"drgrpo_rollouts_{rank}.pt"
