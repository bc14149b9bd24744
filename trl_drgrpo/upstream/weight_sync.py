"""Weights on their way: adapters to vLLM, merged one layer at a time, what vLLM cannot be sent, and checkpoints whose
file calls weights by other names than the model does.

When `from_pretrained` loads a model, transformers fuses the experts of a mixture and renames parts of vision-language
models; when it saves, it undoes that. `Trainer` knows nothing of it when it resumes (transformers 5.23): what it does
not find under the model's names stays as it was when the model was built.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from trl_drgrpo.common.errors import InputError, UpstreamError


def load_translated(model: Any, folder: Path) -> Any:
    """Load all weights of a checkpoint in place, the way `from_pretrained` does; returns what `load_state_dict`
    returns, `None` for a model that has no `from_pretrained`."""
    if not isinstance(model, PreTrainedModel):
        return None
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    return model.load_state_dict(loaded.state_dict(), strict=False)


def sync_merged_layers(generation: Any) -> None:
    """
    Let TRL's vLLM backend send merged copies of adapted layers instead of merging the model in place: replaces
    `sync_weights` of the trainer's `vllm_generation`.

    Models without adapters are synced as before. Not for sharded models: their parameters have to be gathered first.
    """
    as_trl = generation.sync_weights

    @wraps(as_trl)
    def sync_weights() -> None:
        with merged_while_read(generation.model):
            as_trl()

    generation.sync_weights = sync_weights


@contextmanager
def merged_while_read(model: Any) -> Iterator[None]:
    """
    Inside the block, between `model.merge_adapter()` and `model.unmerge_adapter()`, `model.named_parameters()` gives
    merged copies of the weights that carry an adapter, one layer at a time, and the model itself stays unmerged.

    `UpstreamError`: no merged weight was read, so the installed TRL reads them in another way, and would have sent the
    base model. Models without adapters are left alone.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    reader = _MergedReader(model)
    names = ("merge_adapter", "unmerge_adapter", "named_parameters")
    for name in names:
        setattr(model, name, getattr(reader, name))
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)  # the class has its own
    if reader.merged and reader.adapts and not reader.read:
        raise UpstreamError(
            "Adapters were merged for vLLM, but no merged weight was read. Install the trl this version was tested "
            "with, or train without use_vllm."
        )


class _MergedReader:
    """Stands in for three methods of a PEFT model, see [`merged_while_read`]."""

    def __init__(self, model: Any):
        self.merged = False  # whether the adapters were ever asked for
        self.read = 0  # merged tensors that were handed out
        self._merging = False
        self._named_parameters = model.named_parameters
        self._layers: dict[int, list[Any]] = {}  # by the parameters that they adapt; tied weights have several
        for layer in _tuner_layers(model):
            for param in layer.get_base_layer().parameters():
                self._layers.setdefault(id(param), []).append(layer)
        self._newest: dict[int, Tensor] = {}  # the layer read last: its weight is due, then its bias
        self.adapts = bool(self._layers)  # there may be nothing but modules that are saved in full

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.merged = self._merging = True

    def unmerge_adapter(self) -> None:
        self._merging, self._newest = False, {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, param in self._named_parameters(*args, **kwargs):
            if self._merging and id(param) in self._layers:
                self.read += 1
                yield name, self._merged_copy(param)
            else:
                yield name, param

    def _merged_copy(self, param: Any) -> Tensor:
        if id(param) not in self._newest:
            layers = self._layers[id(param)]
            params = {id(p): p for layer in layers for p in layer.get_base_layer().parameters()}
            own = {key: p.data for key, p in params.items()}
            merged_before = [(layer, list(layer.merged_adapters)) for root in layers for layer in _tuner_layers(root)]
            try:
                for p in params.values():
                    p.data = p.data.clone()  # PEFT adds the adapter to whatever lies here
                for layer in layers:
                    layer.merge()
                self._newest = {key: p.data for key, p in params.items()}
            finally:
                for key, p in params.items():
                    p.data = own[key]
                for layer, merged in merged_before:
                    layer.merged_adapters = merged
        return self._newest[id(param)]


def _tuner_layers(module: Any) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, BaseTunerLayer)]


def refuse_unsendable(args: Any, model: Any, quantization_config: Any = None, peft_config: Any = None) -> None:
    """
    Refuse vLLM for what it could not be sent, before a model loads: a quantized base, an adapter of virtual tokens.

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
    if getattr(adapter, "is_prompt_learning", False):
        remedy = "vLLM gets no virtual tokens: it would generate without the adapter. Remove use_vllm, or train LoRA."
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        raise InputError("use_vllm", f"True with an adapter of type {kind}", "one that changes weights", remedy)
    found = _quantization(args, model, quantization_config)
    if found:
        raise InputError(
            "use_vllm",
            f"True with a quantized base model ({found})",
            "a base in 16 or 32 bits",
            "vLLM would get the raw quantized storage and generate with incorrect weights. Either remove the "
            "quantization and train LoRA on the base in bfloat16, or remove use_vllm: this package's own generation "
            "also runs each prompt only once.",
        )


def _quantization(args: Any, model: Any, asked: Any) -> str | None:
    """How the base is quantized, or will be, in words; `None`: it is not, or its weights are dequantized."""
    if not isinstance(model, str):
        named = [f"loaded in {bits} bits" for bits in (4, 8) if getattr(model, f"is_loaded_in_{bits}bit", False)]
        named += ["loaded quantized"] if getattr(model, "is_quantized", False) else []
        return named[0] if named else None
    loading, stored_as = args.model_init_kwargs or {}, ""
    asked = asked or loading.get("quantization_config")
    if asked is None and any(loading.get(f"load_in_{bits}bit") for bits in (4, 8)):
        asked = loading
    if asked is None:
        asked, stored_as = _stored_quantization(args, model, loading), f"{model} is stored so, "
    if asked is None or _read(asked, "dequantize"):
        return None
    method = _read(asked, "quant_method")
    named = [f"load_in_{bits}bit" for bits in (4, 8) if _read(asked, f"load_in_{bits}bit")]
    return stored_as + str([*named, getattr(method, "value", method) or type(asked).__name__][0])


def _stored_quantization(args: Any, name: str, loading: dict[str, Any]) -> Any:
    """`quantization_config` of a model's config.json; `None` also where there is no such file: loading will say so."""
    from transformers import AutoConfig

    trust = loading.get("trust_remote_code", args.trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(name, revision=loading.get("revision"), trust_remote_code=trust)
    except (OSError, ValueError):
        return None
    return getattr(config, "quantization_config", None)


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
