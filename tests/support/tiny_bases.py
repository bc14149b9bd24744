"""Tiny base models for adapters: wide enough for bitsandbytes to quantize, and to repack on some CPUs."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen3Config


def save_base(folder, tokenizer, *, bias=False, dtype=torch.float32, **changes):
    """A random Qwen3 (Qwen2 with `bias`, which its attention then has) with its tokenizer. Returns the path."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": [tokenizer.eos_token_id, *range(len(tokenizer) // 9)],
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config((Qwen2Config if bias else Qwen3Config)(**settings))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def nf4():
    """4 bit as the `qlora` preset has it, on CPU."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def load(path, **loading):
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **loading})
