"""Check that the weights of a checkpoint have a place in the model that is to go on, before they are loaded.

torch and PEFT say it in a hundred lines, once the model is in memory: one for each layer.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import reading

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

_ADAPTER = "adapter_model"  # how names of files begin
_WHOLE = "model"
_NEW_RUN = "or start a new run from its weights, with that folder as the model."
Shapes = dict[str, tuple[int, ...]]


def refuse_misfit(trainer: "TrainerProtocol", checkpoint: Path) -> None:
    """Refuse a whole model for an adapter, an adapter for a whole model, weights of other sizes, and what is damaged.

    Args:
        trainer ([`DrGRPOTrainer`]): With its model.
        checkpoint (`Path`): A complete checkpoint, of this package or of plain TRL.

    Raises:
        `InputError`: Names what differs.
    """
    if trainer.in_lockstep:  # checkpoints of another form, and parts of weights
        return
    # Read first: a damaged configuration would be a traceback of transformers or PEFT.
    for file in (checkpoint / "config.json", checkpoint / "adapter_config.json"):
        if file.is_file():
            with _reading(file):
                json.loads(file.read_text("utf-8"))
    model = trainer.unwrapped_model
    has_adapter = (checkpoint / "adapter_config.json").is_file()
    has_model = any(checkpoint.glob(f"{_WHOLE}*.safetensors")) or any(checkpoint.glob("pytorch_model*.bin"))
    if not isinstance(model, PeftModel):
        if has_adapter:
            remedy = "Pass the same peft_config (on the command line `preset`, `use_peft`)."
            raise InputError("peft_config", "none", f"that of the adapter in {checkpoint}", remedy)
        saved = _shapes(checkpoint, _WHOLE)
        _refuse_other_shapes("model", type(model).__name__, saved, model.state_dict(), checkpoint, both_ways=False)
    elif has_adapter:
        saved = _shapes(checkpoint, _ADAPTER)
        _refuse_other_shapes("peft_config", _kind(model), saved, _adapter_weights(model), checkpoint, both_ways=True)
    elif has_model:
        got = f"{_kind(model)}, but {checkpoint} holds a whole model"
        remedy = f"Remove it (on the command line `preset`, `use_peft`), {_NEW_RUN}"
        raise InputError("peft_config", got, "none", remedy)


def _adapter_weights(model: PeftModel) -> Mapping[str, torch.Tensor]:
    return get_peft_model_state_dict(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)


def _kind(model: PeftModel) -> str:
    config = model.peft_config[model.active_adapters[0]]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    rank = getattr(config, "r", None)
    if rank is None:  # of an adapter that is not low-rank
        return kind
    return f"{kind} with r={rank}"


def _shapes(checkpoint: Path, stem: str) -> Shapes:
    """Return the shape of each weight in a checkpoint, from headers; empty for files of another form."""
    shapes: Shapes = {}
    for file in checkpoint.glob(f"{stem}*.safetensors"):
        with _reading(file), safe_open(file, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


def _reading(file: Path) -> AbstractContextManager[None]:
    remedy = "Resume from another checkpoint."
    return reading("resume_from_checkpoint", str(file), "a complete checkpoint", remedy)


def _refuse_other_shapes(
    field: str,
    got: str,
    saved: Shapes,
    now: Mapping[str, torch.Tensor],
    checkpoint: Path,
    *,
    both_ways: bool,
) -> None:
    """Refuse weights of other shapes. `both_ways`: also a weight on one side only.

    The names in a whole model may be those of another version of transformers.
    """
    differing = []
    for name, weight in now.items():
        shape = tuple(weight.shape)
        if name in saved and saved[name] != shape:
            differing.append(f"{name} has shape {shape}, not {saved[name]}")
        elif name not in saved and both_ways:
            differing.append(f"{name} is not in the checkpoint")
    for name in sorted(saved.keys() - now.keys()):
        if both_ways and "lora_" in name:  # others are embeddings that PEFT saves along
            differing.append(f"{name} has no place in the model")
    # One line, with the first difference: they are usually the same in all layers.
    if saved and differing:
        and_others = f", and {len(differing) - 1} more weights differ" if len(differing) > 1 else ""
        remedy = f"Use the model and settings that it was trained with, {_NEW_RUN}"
        got = f"{got}: {differing[0]}{and_others}"
        raise InputError(field, got, f"what fits the weights in {checkpoint}", remedy)
