"""Layers that a preset leaves without an adapter, though "all linear layers" are named."""

import re

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from trl_drgrpo.upstream.checkpoint_weights import language_model_name
from trl_drgrpo.upstream.lora_layers import peft_refuses


def exclude_unfit_layers(config: PeftConfig, model: PreTrainedModel) -> None:
    """Leave out the layers of a vision tower, and those that PEFT refuses in this model.

    Text never reaches a tower: its adapters would take memory and learn nothing. Kernels of Mamba layers read the
    weight of `out_proj` by themselves, past an adapter.
    """
    patterns = []
    language_model = re.escape(language_model_name(model))
    if language_model:
        patterns.append(f"(?!{language_model}).+")
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    refused = [re.escape(name) for name in sorted(layers) if peft_refuses(config, model, name)]
    if refused:
        patterns.append(rf"(?:.+\.)?(?:{'|'.join(refused)})")
    if patterns:
        # PEFT matches this pattern against the whole name of a layer.
        config.exclude_modules = "|".join(patterns)  # type: ignore[attr-defined]
