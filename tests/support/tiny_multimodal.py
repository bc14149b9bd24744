"""Multimodal checkpoints whose language model is used for text: small, random, saved as their families save them."""

import families
from tiny import save_tiny
from transformers import CONFIG_MAPPING

from trl_drgrpo.check.small import small_model

# By model type. Qwen3.5 can be loaded as its language model alone; files of Gemma 3 and Mistral 3 have older names.
MULTIMODAL = tuple(families.CLASSES)


def save_multimodal(folder, tokenizer, model_type):
    """Writes a checkpoint and a tokenizer; the path."""
    config = CONFIG_MAPPING[model_type]()
    config.architectures = [families.CLASSES[model_type]]
    return save_tiny(folder, tokenizer, small_model(config, tokenizer))


def adapted_layers(model):
    """Names of the layers with an adapter."""
    return [name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
