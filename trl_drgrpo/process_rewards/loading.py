"""Load a process reward model from a path or Hub id, and refuse what would score with random weights.

`AutoModelForTokenClassification` loads any checkpoint: where the head is missing, it is made up at random with nothing
but a log line, and the scores are noise. Here that is an error, as is a head with an incorrect number of classes.
"""

import importlib
import os
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors

# Architectures of published checkpoints that `qwen2_prm` has without code from the Hub.
OWN_CLASSES = frozenset({"Qwen2ForProcessRewardModel", "Qwen2ForPrmModel"})


def load_tokenizer(model: Any, tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """The tokenizer as given, or that of the model's path.

    Args:
        model (`str` or `PreTrainedModel`): Model given to the scorer.
        tokenizer (`str`, `PreTrainedTokenizerBase` or `None`): Tokenizer given to the scorer.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.

    Returns:
        `PreTrainedTokenizerBase`: A fast tokenizer.

    Raises:
        `InputError`: A loaded model without a tokenizer, a path without one, or a slow tokenizer.
    """
    if tokenizer is None:
        if not isinstance(model, (str, os.PathLike)):
            remedy = "Pass the tokenizer of the process reward model; it need not be the policy's."
            raise InputError("tokenizer", "none for a model that is already loaded", "its tokenizer", remedy)
        tokenizer = model
    if isinstance(tokenizer, (str, os.PathLike)):
        from transformers import AutoTokenizer

        with hub_errors("tokenizer", str(tokenizer), "a folder or the id of a tokenizer on the Hub"):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        remedy = "Load it with `AutoTokenizer` and the `tokenizers` library installed."
        raise InputError("tokenizer", type(tokenizer).__name__, "a fast tokenizer, which knows offsets", remedy)
    return tokenizer


def load_model(
    model: Any,
    auto_class: str,
    *,
    dtype: Any = None,
    device: Any = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """The model as given, moved where asked, or loaded from a path or Hub id.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model.
        auto_class (`str`): Name of the class that loads it: one of `OWN_CLASSES`, or of `transformers`. A checkpoint
            that names one of `OWN_CLASSES` as its architecture is loaded by that.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights. By default that of the checkpoint or model.
        device (`torch.device` or `str`, *optional*): By default a loaded model stays where it is; from a path, this
            process's GPU if there is one, else the CPU.
        quantization_config (*optional*): For `from_pretrained`; only with a path.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.

    Returns:
        `PreTrainedModel`.

    Raises:
        `InputError`: Load failure, a checkpoint without the head, quantization of a loaded model.
    """
    if not isinstance(model, (str, os.PathLike)):
        if quantization_config is not None:
            remedy = "Quantize it when it is loaded, or pass its path instead."
            raise InputError("quantization_config", "a model that is already loaded", "a path or Hub id", remedy)
        options = {
            key: value for key, value in {"device": device, "dtype": _dtype(dtype)}.items() if value is not None
        }
        return model.to(**options) if options else model
    import transformers

    device = device or _default_device()
    options: dict[str, Any] = {
        "dtype": dtype or "auto",
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    if quantization_config is not None:
        options |= {"quantization_config": quantization_config, "device_map": {"": device}}
    with hub_errors("model", str(model), f"a folder or Hub id that {auto_class} loads"):
        with_head = auto_class != "AutoModelForCausalLM"
        if with_head and transformers.utils.find_adapter_config_file(str(model)) is not None:
            remedy = "Its base alone has a random head: merge the two first."
            raise InputError("model", f"{str(model)!r}, an adapter", "a whole checkpoint with its head", remedy)
        own = auto_class if auto_class in OWN_CLASSES else architecture(model)
        if own in OWN_CLASSES and not (trust_remote_code and auto_class not in OWN_CLASSES):
            loader: Any = getattr(importlib.import_module("trl_drgrpo.process_rewards.qwen2_prm"), own)
            del options["trust_remote_code"]
        else:
            loader = getattr(transformers, auto_class)
        loaded, info = loader.from_pretrained(model, **options)
    if missing := sorted(info["missing_keys"]):
        got = f"{str(model)!r}, a checkpoint without {', '.join(missing[:3])}"
        remedy = "The head would be random: pass a trained process reward model (`trl-drgrpo train-prm` makes one)."
        raise InputError("model", got, f"a checkpoint that holds every weight of {type(loaded).__name__}", remedy)
    return loaded if quantization_config is not None else loaded.to(device)


def architecture(model: Any) -> str:
    """Name of the first architecture that the configuration of a path or Hub id states; empty if it states none."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(model)
    return (config.get("architectures") or [""])[0]


def _dtype(dtype: Any) -> torch.dtype | None:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _default_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
