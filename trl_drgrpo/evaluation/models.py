"""Models to generate with (a whole model, or an adapter on its base): checks, loading and sampling settings."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError, require_for_quantization
from trl_drgrpo.common.file_states import file_states
from trl_drgrpo.common.hub_errors import check_local, check_weights, hub_errors, is_adapter
from trl_drgrpo.common.output_folders import checkpoint_folders
from trl_drgrpo.common.ranges import RANGES, Range, refuse_outside, whole
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.upstream.versions import brief_bars

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedTokenizerBase

_ADAPTER_FILE = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*config.json")  # the files that decide what a model writes


@dataclass(frozen=True)
class Loading:
    """Model loading.

    Args:
        base (`str`, *optional*): Base model of an adapter, where the adapter names another one.
        dtype (`str`, *optional*): Dtype of the weights; by default that of the checkpoint.
        trust_remote_code (`bool`): Whether code of the repository may run.
        bits (`int`, *optional*): 4 or 8: the weights are quantized with bitsandbytes.
    """

    base: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    bits: int | None = None


@dataclass(frozen=True)
class Decoding:
    """Sampling settings; names and meanings as in the training configuration.

    Args:
        max_completion_length (`int`): A completion is cut here.
        temperature (`float`, *optional*, defaults to `1.0`): 0 takes the likeliest token.
        top_p, top_k, min_p, repetition_penalty: As in `DrGRPOConfig`; off by default.

    Raises:
        `InputError`: A number outside its range.
    """

    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        refuse_outside("temperature", self.temperature, Range(0, remedy="0 takes the likeliest token."))
        refuse_outside("max_completion_length", self.max_completion_length, whole(1, remedy="Give tokens."))
        for field in ("top_p", "top_k", "min_p", "repetition_penalty"):
            refuse_outside(field, getattr(self, field), RANGES[field])

    def for_transformers(self) -> dict[str, Any]:
        """Return all fields of a generation configuration: a missing one would be taken from the model's own."""
        if self.temperature == 0:
            # transformers warns of settings of sampling beside greedy decoding.
            return {"repetition_penalty": self.repetition_penalty, "do_sample": False}
        return self.for_vllm() | {"do_sample": True, "min_p": self.min_p}

    def for_vllm(self) -> dict[str, Any]:
        """Return all fields of a request: a server takes a missing one from the model's own configuration."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
        }


def check_model(field: str, name: str, base: str | None = None) -> None:
    """Refuse a folder that is not there or holds neither a model nor an adapter with its base; load no weights."""
    path = user_path(name)
    if not is_adapter(name):
        # A run that was killed has checkpoints and no model: the nearest thing to what was meant is named.
        checkpoints = checkpoint_folders(path)
        if checkpoints and not holds_model(path):
            got = f"{name}, a run without a saved model"
            raise InputError(field, got, "a model's folder", f"Name one of its checkpoints: {checkpoints[0]}.")
        check_local(field, name)
        return
    from trl_drgrpo.single_gpu.merging import base_of

    check_weights(field, path)
    try:
        base_of(path, base)
    except InputError as error:
        # `merging` calls this field an adapter; its other fields have the names of the command line.
        if error.field != "adapter":
            raise
        raise error.under(field) from error


def holds_model(folder: Path) -> bool:
    """Tell whether a folder holds a model or an adapter."""
    return any((folder / name).is_file() for name in ("config.json", _ADAPTER_FILE))


def base_name(name: str, base: str | None = None) -> str | None:
    """Return the path or Hub id of the model under an adapter; `None` for a whole model."""
    if not is_adapter(name):
        return None
    from trl_drgrpo.single_gpu.merging import base_of

    return base_of(user_path(name), base)[0]


def load_config(name: str, loading: Loading) -> "PreTrainedConfig":
    """Load the configuration of a model, or of an adapter's base; no weights."""
    from transformers import AutoConfig

    # An adapter has no configuration of a model; that of its base fits.
    name = base_name(name, loading.base) or name
    with hub_errors("model", name, "a folder or Hub id of a model"):
        return AutoConfig.from_pretrained(name, trust_remote_code=loading.trust_remote_code)


def load_tokenizer(name: str, loading: Loading) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model, or of an adapter's folder; of its base, where the folder has none."""
    from trl_drgrpo.process_rewards.loading import load_tokenizer as load

    path = user_path(name)
    # PEFT alone saves an adapter without its tokenizer.
    if is_adapter(name) and not (path / "tokenizer_config.json").is_file():
        name = base_name(name, loading.base) or name
    return load(name, None, loading.trust_remote_code)


@brief_bars()
def load_model(name: str, loading: Loading) -> Any:
    """Load a model for generation, on this machine's accelerator where it has one.

    Raises:
        `InputError`: It does not load, or an adapter does not fit its base.
    """
    from trl_drgrpo.process_rewards.loading import load_model as load

    causal = "AutoModelForCausalLM"
    options: dict[str, Any] = {"dtype": loading.dtype, "trust_remote_code": loading.trust_remote_code}
    if loading.bits is not None:
        options["quantization_config"] = _quantization(loading.bits, loading.dtype)
    base = base_name(name, loading.base)
    if base is None:  # a whole model
        return load(name, causal, **options).eval()
    from trl_drgrpo.single_gpu.merging import attach, fit_vocabulary, model_class_of

    # The class that the adapter was trained on: its layers may have other names in another one.
    adapter = user_path(name)
    trained_class = model_class_of(load_config(name, loading), adapter)
    classes = {causal: trained_class} if trained_class.__name__ != causal else None
    model = load(base, causal, classes, **options)
    fit_vocabulary(model, adapter)  # before the adapter, which may hold rows of new tokens
    return attach(model, adapter)


def _quantization(bits: int, dtype: str | None) -> "BitsAndBytesConfig":
    import torch
    from transformers import BitsAndBytesConfig

    require_for_quantization({f"load_in_{bits}bit": True})
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    compute: Any = torch.bfloat16
    if dtype not in (None, "auto"):
        compute = getattr(torch, dtype, None)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def weights_mark(name: str) -> str:
    """Return a mark that tells weights in a folder from earlier ones, by their files' sizes and times.

    A Hub id is its own mark.
    """
    path = user_path(name)
    if not path.is_dir():
        return name
    # Sizes and times, not contents: reading the weights of a large model takes minutes.
    states = repr(file_states(path, _WEIGHTS))
    return hashlib.blake2b(states.encode(), digest_size=8).hexdigest()
