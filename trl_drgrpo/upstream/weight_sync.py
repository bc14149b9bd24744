"""Weights on their way to vLLM: adapters, merged copies one layer at a time, and what vLLM cannot be sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl.import_utils import is_vllm_available

from trl_drgrpo.common.errors import InputError, UpstreamError
from trl_drgrpo.common.generation import VLLM_RANKS

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.argument_types import Policy

Quantization = QuantizationConfigMixin | dict[str, Any]  # as the trainer is given it, or as config.json holds it


@contextmanager
def merged_while_read(model: torch.nn.Module) -> Iterator[None]:
    """Give merged copies of the weights that carry an adapter, one layer at a time; the model itself stays unmerged.

    Inside the block, `model.named_parameters()` does so between `model.merge_adapter()` and `model.unmerge_adapter()`.
    Models without adapters are left alone.

    Raises:
        `UpstreamError`: No merged weight was read: the installed TRL reads them in another way, and would have sent
            the base model.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a check of the model does not load

    reader = _MergedReader(model)
    with swapped(
        model,
        merge_adapter=reader.merge_adapter,
        unmerge_adapter=reader.unmerge_adapter,
        named_parameters=reader.named_parameters,
    ):
        yield
    if reader.merged and reader.layers and not reader.read:
        raise UpstreamError(
            "Adapters were merged for vLLM, but no merged weight was read. Install the trl this version was tested "
            "with, or train without use_vllm."
        )


class _MergedReader:
    """Stands in for three methods of a PEFT model, see [`merged_while_read`]."""

    def __init__(self, model: PeftModel):
        self.merged = False  # whether the adapters were ever asked for
        self.read = 0  # merged tensors that were handed out
        self._merging = False
        self._named_parameters = model.named_parameters
        # By the parameters that they adapt; tied weights have several. None where all modules are saved in full.
        self.layers: dict[int, list[BaseTunerLayer]] = {}
        for layer in _tuner_layers(model):
            for param in layer.get_base_layer().parameters():
                self.layers.setdefault(id(param), []).append(layer)
        self._newest: dict[int, Tensor] = {}  # the layer read last: its weight is due, then its bias

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.merged = self._merging = True

    def unmerge_adapter(self) -> None:
        self._merging = False
        self._newest = {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        # Under PEFT's names, which TRL turns into the base's, and leaves out weights of adapters by.
        for name, param in self._named_parameters(*args, **kwargs):
            if self._merging and id(param) in self.layers:
                self.read += 1
                yield name, self._merged_copy(param)
            else:
                yield name, param

    def _merged_copy(self, param: Tensor) -> Tensor:
        if id(param) in self._newest:
            return self._newest[id(param)]
        layers = self.layers[id(param)]
        params: dict[int, Tensor] = {}
        merged_before: list[tuple[BaseTunerLayer, list[str]]] = []
        for layer in layers:
            for param_of_layer in layer.get_base_layer().parameters():
                params[id(param_of_layer)] = param_of_layer
            # A layer of PEFT may wrap others, one for each of several parameters: merging marks them, too.
            for inner in _tuner_layers(cast(torch.nn.Module, layer)):
                merged_before.append((inner, list(inner.merged_adapters)))
        unmerged = {}
        try:
            for key, p in params.items():
                unmerged[key] = p.data
                p.data = p.data.clone()  # PEFT adds the adapter to whatever lies here
            for layer in layers:
                layer.merge()
            self._newest = {key: p.data for key, p in params.items()}
        finally:
            # The old memory comes back, not a subtraction: the weights are bit for bit what they were.
            for key, weight in unmerged.items():
                params[key].data = weight
            for layer, merged in merged_before:
                layer.merged_adapters = merged
        return self._newest[id(param)]


def _tuner_layers(module: torch.nn.Module) -> list[BaseTunerLayer]:
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


# Fields of a LoRA configuration that vLLM reads, or that no longer matter when the adapter is there. Where any other
# one is not at PEFT's default, it is of a kind that vLLM does not know.
_KNOWN = {
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
    *("inference_mode", "r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "init_lora_weights", "eva_config", "runtime_config"),
}
_LEAVE_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")  # `init_lora_weights`: others change its weights


def why_merged(adapter: PeftConfig | None) -> str | None:
    """Return why vLLM cannot take an adapter, by its configuration; `None`: it can."""
    if not isinstance(adapter, LoraConfig) or type(adapter) is not LoraConfig:  # a subclass is another kind
        kind = getattr(adapter, "peft_type", None)
        return f"{getattr(kind, 'value', type(adapter).__name__)} is not LoRA"
    if adapter.init_lora_weights not in _LEAVE_THE_BASE:
        return f"init_lora_weights={adapter.init_lora_weights!r} changes the base's weights"
    if adapter.r > VLLM_RANKS[-1]:
        return f"its rank of {adapter.r} is above {VLLM_RANKS[-1]}"
    for name, default in vars(LoraConfig()).items():
        value = getattr(adapter, name)
        # `None`, `False` and an empty list all mean nothing.
        if name not in _KNOWN and (value or None) != (default or None):
            return f"{name}={value!r}"
    return None


def refuse_unsendable(
    args: "DrGRPOConfig",
    model: "Policy",
    quantization_config: Quantization | None = None,
    peft_config: PeftConfig | None = None,
) -> None:
    """Refuse vLLM for what it could not be sent, before a model loads.

    Refused are an adapter of virtual tokens, and a quantized base but for one in 4 bits, beside which a LoRA adapter
    travels alone.

    Args:
        args ([`DrGRPOConfig`]): The configuration; nothing is refused without `use_vllm`.
        model (`str` or model): A path or Hub id, whose `config.json` is looked at, or a loaded model.
        quantization_config (*optional*): As given to the trainer. One that asks for dequantized weights is accepted.
        peft_config (`PeftConfig`, *optional*): As given to the trainer.

    Raises:
        `InputError`: What cannot be sent, and the ways out.
    """
    if not args.use_vllm:
        return
    adapter = model.active_peft_config if isinstance(model, PeftModel) else peft_config
    if adapter is not None and adapter.is_prompt_learning:
        remedy = "vLLM gets no virtual tokens: it would generate without the adapter. Remove use_vllm, or train LoRA."
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        raise InputError("use_vllm", f"True with an adapter of type {kind}", "one that changes weights", remedy)
    # Full weights, merged or trained whole, travel as they are: only a quantized base is a problem from here on.
    quantization = _quantization(args, model, quantization_config)
    if not quantization:
        return
    # Merged weights of a quantized base would be sent as they are stored, so only an adapter can travel.
    reason = "vllm_lora is 'merged'" if args.vllm_lora == "merged" else why_merged(adapter)
    if not quantization.endswith(("load_in_4bit", "loaded in 4 bits")):
        reason = "vLLM loads none but 4-bit weights of bitsandbytes beside it"
    if reason:
        raise InputError(
            "use_vllm",
            f"True with a quantized base model ({quantization}) whose adapter cannot travel alone: {reason}",
            "plain LoRA on a base in 4, 16 or 32 bits",
            "Merged weights would reach vLLM as raw quantized storage. Train plain LoRA on the base in 4 bits or in "
            "bfloat16, or remove use_vllm: this package's own generation also runs each prompt only once.",
        )
    colocate = args.vllm_mode == "colocate"
    if colocate and is_vllm_available(min_version="0.28.0") and find_spec("vllm_bnb_plugin") is None:
        remedy = "From 0.28 on, vLLM loads 4-bit weights with it: pip install vllm-bnb-plugin."
        raise InputError("use_vllm", "True with a base in 4 bits", "the package vllm-bnb-plugin", remedy)


def _quantization(args: "DrGRPOConfig", model: "Policy", config: Quantization | None) -> str | None:
    """Say how the base is quantized, or will be; `None`: it is not, or its weights are dequantized."""
    if not isinstance(model, str):
        for bits in (4, 8):
            if getattr(model, f"is_loaded_in_{bits}bit", False):
                return f"loaded in {bits} bits"
        return "loaded quantized" if getattr(model, "is_quantized", False) else None
    # A model by name: the argument, else its keywords, else its own config.json says how it will be loaded.
    loading = args.model_init_kwargs or {}
    stored_as = ""
    config = config or loading.get("quantization_config")
    if config is None and (loading.get("load_in_4bit") or loading.get("load_in_8bit")):
        config = loading
    if config is None:
        config = _stored_quantization(args, model, loading)
        stored_as = f"{model} is stored so, "
    if config is None or _read(config, "dequantize"):
        return None
    for bits in (4, 8):
        if _read(config, f"load_in_{bits}bit"):
            return f"{stored_as}load_in_{bits}bit"
    method = _read(config, "quant_method")  # an enumeration, or a text from config.json
    return f"{stored_as}{getattr(method, 'value', method) or type(config).__name__}"


def _stored_quantization(args: "DrGRPOConfig", name: str, loading: dict[str, Any]) -> Quantization | None:
    """Read `quantization_config` of a model's config.json; `None` also without such a file: loading will say so."""
    from transformers import AutoConfig

    trust = loading.get("trust_remote_code", args.trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(name, revision=loading.get("revision"), trust_remote_code=trust)
    except (OSError, ValueError):
        return None
    return getattr(config, "quantization_config", None)


def _read(config: Quantization, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
