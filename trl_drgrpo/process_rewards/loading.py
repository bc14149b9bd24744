"""Load a process reward model from a path or Hub id, and refuse what would score with random weights.

`AutoModelForTokenClassification` loads any checkpoint. If the head is missing, it is made up at random with only a log
line, and the scores are noise. Here that is an error. The models of searches and evaluations load here, too.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.finite import refuse_not_finite
from trl_drgrpo.common.generation import refuse_bad_ends
from trl_drgrpo.common.hub_errors import hub_errors, refuse_empty_vocabulary, refuse_new_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
    from transformers.utils.quantization_config import QuantizationConfigMixin

# Each may be a path or Hub id.
Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
Tokenizer: TypeAlias = "str | os.PathLike[str] | PreTrainedTokenizerBase"
_NO_LIMIT = 10**9  # tokenizers without a limit say 1e30


def load_tokenizer(
    model: Model, tokenizer: "Tokenizer | None", trust_remote_code: bool = False
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer that was passed, or load the one of the model's path.

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
        refuse_empty_vocabulary(tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        remedy = "Load it with `AutoTokenizer` and the `tokenizers` library installed."
        raise InputError("tokenizer", type(tokenizer).__name__, "a fast tokenizer, which knows offsets", remedy)
    return tokenizer  # type: ignore[return-value]


def load_model(
    model: Model,
    auto_class: str,
    own_classes: Mapping[str, type] | None = None,
    *,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    quantization_config: "QuantizationConfigMixin | None" = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the model that was passed, moved to `device` and `dtype`, or load it from a path or Hub id.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model.
        auto_class (`str`): Name of the class that loads it: one of `own_classes`, or of `transformers`.
        own_classes (`Mapping[str, type]`, *optional*): Architectures that load without code from the Hub: a checkpoint
            that names one of them is loaded by it.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights. By default that of the checkpoint or model.
        device (`torch.device` or `str`, *optional*): By default a loaded model stays where it is; from a path, this
            process's GPU if there is one, else the CPU.
        quantization_config (*optional*): For `from_pretrained`; only with a path.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.

    Returns:
        `PreTrainedModel`.

    Raises:
        `InputError`: Load failure, a checkpoint without the head or with weights that are not finite, quantization of
            a loaded model.
    """
    import torch

    if not isinstance(model, (str, os.PathLike)):
        if quantization_config is not None:
            remedy = "Quantize it when it is loaded, or pass its path instead."
            raise InputError("quantization_config", "a model that is already loaded", "a path or Hub id", remedy)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        if device is dtype is None:
            return model
        return model.to(device=device, dtype=dtype)  # type: ignore[call-overload]
    import transformers

    if device is None:
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # of this process, as a launcher sets it
    options: dict[str, Any] = {
        "dtype": dtype or "auto",
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,  # names the weights that a checkpoint lacks
    }
    # Quantized weights cannot be moved afterwards, so they are loaded to their device.
    if quantization_config is not None:
        options |= {"quantization_config": quantization_config, "device_map": {"": device}}
    with hub_errors("model", str(model), f"a folder or Hub id that {auto_class} loads"):
        with_head = auto_class != "AutoModelForCausalLM"
        # transformers would load the adapter's base, and make up the head that it lacks.
        if with_head and transformers.utils.find_adapter_config_file(str(model)) is not None:
            remedy = "Its base alone has a random head: merge the two first."
            raise InputError("model", f"{str(model)!r}, an adapter", "a whole checkpoint with its head", remedy)
        own_class: Any = None
        if own_classes:
            class_name = auto_class
            # With trust_remote_code the class of the repository loads, unless one of ours is asked for by name.
            if not trust_remote_code and auto_class not in own_classes:
                class_name = architecture(model)
            own_class = own_classes.get(class_name)
        if own_class is not None:
            del options["trust_remote_code"]  # auto classes alone take it
        elif not with_head:
            own_class = _multimodal_class(model, trust_remote_code)
        model_class = own_class or getattr(transformers, auto_class)
        loaded, info = model_class.from_pretrained(model, **options)
    remedy = "They would be random: pass a checkpoint that was trained as a language model."
    if with_head:
        remedy = "They would be random: pass a trained process reward model (`trl-drgrpo train-prm` makes one)."
    refuse_new_weights("model", repr(str(model)), loaded, info, remedy)
    refuse_bad_ends("model", str(model), loaded)
    if quantization_config is None:
        loaded = loaded.to(device)
    refuse_not_finite(loaded, "model", str(model))
    return loaded


def _multimodal_class(model: str | os.PathLike[str], trust_remote_code: bool) -> Any:
    """Return the class that a checkpoint names, where no class for its language model alone exists; else `None`."""
    import transformers

    if transformers.utils.find_adapter_config_file(str(model)) is not None:
        return None  # the auto class loads the adapter's base
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    is_multimodal = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not is_multimodal or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    return getattr(transformers, (config.architectures or [""])[0], None)


def architecture(model: str | os.PathLike[str]) -> str:
    """Return the first architecture that the configuration of a path or Hub id states; empty if it states none."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(model)
    return (config.get("architectures") or [""])[0]


def is_causal(model: Model) -> bool | None:
    """Tell whether no token of a model attends to later ones; `None` if its architecture does not say.

    A token classifier that is not loaded may be given as its path or Hub id. `None` if its configuration cannot be
    read.
    """
    if isinstance(model, str):
        import torch
        from transformers import AutoConfig, AutoModelForTokenClassification

        try:
            # Built without memory for its weights: the modules alone tell how they attend.
            with torch.device("meta"):
                # Without a value transformers would ask on stdin.
                config = AutoConfig.from_pretrained(model, trust_remote_code=False)
                model = AutoModelForTokenClassification.from_config(config, trust_remote_code=False)
        except (OSError, ValueError):
            return None
    loaded: Any = model
    attends = [module.is_causal for module in loaded.modules() if hasattr(module, "is_causal")]
    if not attends:
        return None
    return all(attends)


def longest_input(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of tokens that both model and tokenizer say they can read."""
    config = model.config
    # Of a multimodal model, the part that reads text.
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
    return int(min(positions, tokenizer.model_max_length, _NO_LIMIT))
