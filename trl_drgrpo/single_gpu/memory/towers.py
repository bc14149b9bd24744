"""Weights of a multimodal model beside its language model: towers for images and sound, and what projects them.

A run on text loads them, quantized as the language model is, and neither runs nor trains them.
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from trl_drgrpo.single_gpu.memory.memory_settings import Setup
from trl_drgrpo.single_gpu.memory.meta_layers import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Towers(NamedTuple):
    """Number of their weights, and bytes of these and of buffers as they are loaded."""

    parameters: int = 0
    nbytes: int = 0


def towers_of(config: "PreTrainedConfig", setup: Setup) -> Towers:
    """Return the weights beside the language model, in the class that a checkpoint names.

    There are none where that class is the language model, or where transformers does not know it.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of the whole model.
        setup ([`Setup`]): Its dtype and bits.
    """
    name = next(iter(config.architectures or ()), "")
    model_class = getattr(transformers, name, None)
    if model_class is None or getattr(model_class, "config_class", None) is not type(config):
        return Towers()
    # The class may load less than the checkpoint holds, so it is asked, and not the list of files.
    with torch.device("meta"):
        model: Any = model_class(copy.deepcopy(config)).to(getattr(torch, setup.dtype))
    planned: set[Tensor] = set()  # tied weights are in two of these parts
    for part in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        planned.update(part.parameters(), part.buffers())
    parameters = 0
    nbytes = 0
    # The layer's own tensors: those of the layers inside it come in their turn.
    for layer in model.modules():
        weights = set(layer.parameters(recurse=False)) - planned
        tensors = weights.union(layer.buffers(recurse=False)) - planned
        parameters += sum(weight.numel() for weight in weights)
        if setup.bits and weights and type(layer) is nn.Linear:
            rows, columns = layer.weight.shape
            quantized = QuantizedLinear(rows, columns, layer.bias, layer.weight.dtype, setup)
            tensors = {*quantized.parameters(), *quantized.buffers()}
        nbytes += sum(tensor.nbytes for tensor in tensors)
    return Towers(parameters, nbytes)
