"""Selects the `model.generate` calls for this package's loop. Transformers serves all others."""

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_OTHER_WAYS = (  # of decoding, and results of another form
    "return_dict_in_generate",
    "prefill_chunk_size",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)
# What `generate` may be called with: anything else (images, an assistant, ...) is left to transformers.
_ARGUMENTS = {"input_ids", "attention_mask", "generation_config"}


def can_decode(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `model.generate(**kwargs)` samples, or takes the likeliest token, with a cache of keys and values."""
    given, default = kwargs.get("generation_config"), model.generation_config
    if given is None or not set(kwargs) <= _ARGUMENTS or model.config.is_encoder_decoder:
        return False
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and peft.is_prompt_learning:
        return False

    def option(name: str) -> Any:  # as `generate` reads it: what the call leaves out comes from the model
        value = getattr(given, name, None)
        return getattr(default, name, None) if value is None else value

    return (
        (option("num_beams") or 1) == 1
        and (option("num_return_sequences") or 1) == 1
        and option("use_cache") is not False
        and option("cache_implementation") in (None, "dynamic")
        and not any(option(name) for name in _OTHER_WAYS)
        and _has_plain_cache(model)
    )


def _has_plain_cache(model: Any) -> bool:
    """Whether rows of the model's cache can be selected: keys and values of every token, and no running state."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a cache of its own
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
