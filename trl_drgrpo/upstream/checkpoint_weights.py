"""Weights of checkpoints whose file calls them by other names than the model does, and the name of KL's reference.

When `from_pretrained` loads a model, transformers fuses the experts of a mixture and renames parts of vision-language
models; when it saves, it undoes that. `Trainer` knows nothing of it when it resumes (transformers 5.23): what it does
not find under the model's names stays as it was when the model was built.
"""

from pathlib import Path
from typing import NamedTuple, cast

import torch
from peft import set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel

from trl_drgrpo.common.errors import UpstreamError


class LoadResult(NamedTuple):
    """Result of `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


REFERENCE = "ref"  # where a model has an adapter of this name, TRL takes it for the reference of KL


def load_translated(model: torch.nn.Module, folder: Path) -> LoadResult | None:
    """Load all weights of a checkpoint in place, the way `from_pretrained` does.

    Returns the result of `load_state_dict`; `None` for a model that has no `from_pretrained`.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    # A second model for a moment: `from_pretrained` is transformers' only public way through its conversions.
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    return LoadResult(*model.load_state_dict(loaded.state_dict(), strict=False))


def language_model_name(model: PreTrainedModel) -> str:
    """Return the name of the language model in a multimodal model, with a dot behind it; empty for other models."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        return ""
    # The outermost module of that configuration: `named_modules` yields a module before those inside it.
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(text_config):
            return f"{name}."
    return ""


def stored_name(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> str | None:
    """
    Return the name under which a model's checkpoint stores one of its weights.

    The text part of a multimodal checkpoint, loaded by itself, calls its layers otherwise; so do checkpoints that are
    older than the model's code.

    Args:
        model ([`~transformers.PreTrainedModel`]): As `from_pretrained` has loaded it, without adapters' names.
        name (`str`), shape (`tuple[int, ...]`): Of the weight in the model.

    Returns:
        `str`, *optional*: `None` where it is stored in another form, in several weights or as a part of one.
    """
    try:
        from transformers.core_model_loading import (
            revert_weight_conversion,  # by which `save_pretrained` names weights
        )
    except ImportError as error:
        raise UpstreamError(f"transformers has moved revert_weight_conversion ({error}).") from error
    weight = torch.empty(shape, device="meta")
    stored = revert_weight_conversion(cast(PreTrainedModel, model), {name: weight})
    # A weight that is merely renamed comes back as the same object.
    for name_in_file, tensor in stored.items():
        if len(stored) == 1 and tensor is weight:
            return name_in_file
    return None


def load_default_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Load the adapter in the root of a checkpoint that has others in folders of their own.

    transformers 5.17 then loads those alone, and the trained adapter stays as it was when the run began.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    adapters = getattr(model, "peft_config", {})
    if len(adapters) > 1 and "default" in adapters and file.is_file():
        set_peft_model_state_dict(model, load_file(file), adapter_name="default")


def without_tied(model: torch.nn.Module, load_result: LoadResult) -> LoadResult:
    """Return a result of `load_state_dict` without missing keys that are tied to a loaded weight."""
    sources = getattr(model, "all_tied_weights_keys", None) or {}
    missing = load_result.missing_keys
    untied = [key for key in missing if key not in sources or sources[key] in missing]
    return LoadResult(untied, load_result.unexpected_keys)
