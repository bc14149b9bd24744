"""The tiny model and its tokenizer: where tests import them from, wherever the package keeps them."""

import torch
from torch.overrides import TorchFunctionMode

from trl_drgrpo.host_proof.tiny import CHAT_TEMPLATE, in_double_precision, tiny_model, tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "in_double_precision", "tiny_model", "tiny_tokenizer"]


class InDouble(TorchFunctionMode):
    """Inside this context, what a float64 model casts to float32 stays float64: norms, angles, softmax of routers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


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
