"""The tiny model and its tokenizer: where tests import them from, wherever the package keeps them."""

import torch

from trl_drgrpo.host_proof.tiny import CHAT_TEMPLATE, in_double_precision, tiny_model, tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "in_double_precision", "tiny_model", "tiny_tokenizer"]


def save_tiny(folder, tokenizer, model=None):
    """Writes a model, the tiny one by default, and its tokenizer where `from_pretrained` finds both; the path."""
    (model or tiny_model(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sizes(tokenizer, **changes):
    """Fields of a small configuration for a tokenizer; one byte in nine ends a completion, too."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": [tokenizer.eos_token_id, *range(len(tokenizer) // 9)],
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


def random_weights(build, configuration, seed=0):
    """What `build` makes of a configuration; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(configuration)
