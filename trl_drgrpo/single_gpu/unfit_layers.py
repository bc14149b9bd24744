"""Linear layers of a model, and those that a preset leaves without an adapter, though it names all."""

import re
from collections.abc import Iterable

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from trl_drgrpo.upstream.checkpoint_weights import language_model_name
from trl_drgrpo.upstream.lora_layers import peft_refuses


def last_names(names: Iterable[str]) -> list[str]:
    """Return the different last parts of modules' names, sorted; the model itself has none."""
    return sorted({name.rpartition(".")[2] for name in names} - {""})


def linear_layer_names(model: nn.Module) -> list[str]:
    """Return the different names of a model's linear layers, without the path to them: `k_proj`, `q_proj`."""
    return last_names(name for name, module in model.named_modules() if isinstance(module, nn.Linear))


def exclude_unfit_layers(config: PeftConfig, model: PreTrainedModel) -> None:
    """Leave out the layers of a vision tower, and those that PEFT refuses in this model.

    Text never reaches a tower: its adapters would take memory and learn nothing. Kernels of Mamba layers read the
    weight of `out_proj` by themselves, past an adapter.
    """
    patterns = []
    language_model = re.escape(language_model_name(model))
    if language_model:  # every name that does not begin with it
        patterns.append(f"(?!{language_model}).+")
    refused = [re.escape(name) for name in linear_layer_names(model) if peft_refuses(config, model, name)]
    if refused:
        patterns.append(rf"(?:.+\.)?(?:{'|'.join(refused)})")
    if patterns:
        # PEFT matches this pattern against the whole name of a layer.
        config.exclude_modules = "|".join(patterns)  # type: ignore[attr-defined]
