"""Tiny base models for adapters: wide enough for bitsandbytes to quantize, and to repack on some CPUs."""

import torch
from tiny import random_weights, save_tiny, sizes
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen3Config


def save_base(folder, tokenizer, *, bias=False, dtype=torch.float32, **changes):
    """A random Qwen3 (Qwen2 with `bias`, which its attention then has) with its tokenizer. Returns the path."""
    width = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
    options = {"max_position_embeddings": 256, "initializer_range": 0.1, "tie_word_embeddings": False}
    config = (Qwen2Config if bias else Qwen3Config)(**sizes(tokenizer, **{**width, **options, **changes}))
    return save_tiny(folder, tokenizer, random_weights(AutoModelForCausalLM.from_config, config).to(dtype))


def nf4():
    """4 bit as the `qlora` preset has it, on CPU."""
    options = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)


def load(path, **loading):
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **loading})
