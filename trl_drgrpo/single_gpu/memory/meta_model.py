"""A model from its configuration alone, on the meta device: sizes without memory.

The real classes of transformers are built, so that every architecture they know can be planned; a multi-modal one by
its text part. Adapters and quantized layers are stand-ins (`meta_layers.py`), because PEFT and bitsandbytes take
seconds to import and want real tensors.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.single_gpu.memory.memory_settings import Adapter, Setup
from trl_drgrpo.single_gpu.memory.meta_layers import AdaptedLinear, Precision, QuantizedLinear

ATTENTION = "trl_drgrpo_planned"


def read_config(name: str) -> tuple[Any, bool]:
    """The configuration of a model: of its text part where it has several.

    Args:
        name (`str`): A local folder with `config.json`, or a Hub id.

    Returns:
        `tuple[PretrainedConfig, bool]`: And whether it is one part of several.

    Raises:
        `InputError`: No such folder, no `config.json` in it, or an architecture that transformers does not know.
    """
    check_local("--model", name)
    path = Path(name).expanduser()
    from transformers import AutoConfig

    with hub_errors("--model", name, "a model that transformers knows"):
        config = AutoConfig.from_pretrained(str(path) if path.is_dir() else name)
    text = config.get_text_config(decoder=True)
    return text, text is not config


def context_length(config: Any) -> int | None:
    """The tokens that a model has positions for, prompt and completion together, with what a scaling of its rotary
    positions adds; `None` where positions have no end."""
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or getattr(text, "alibi", False):
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for scaling in (rope, *rope.values()):  # newer configurations have one mapping per kind of layer
        if isinstance(scaling, Mapping) and isinstance(factor := scaling.get("factor"), (int, float)):
            original = scaling.get("original_max_position_embeddings") or text.max_position_embeddings
            length = max(length, int(factor * original))
    return length


@dataclass(frozen=True)
class Skeleton:
    """A model to run steps on.

    Args:
        model (`nn.Module`): The causal language model, on the meta device.
        config: Its configuration.
        precision ([`Precision`]): The mode to run it in.
        parameters (`int`): Of the model, before adapters and quantization.
    """

    model: Any
    config: Any
    precision: Precision
    parameters: int = 0

    @property
    def head(self) -> nn.Module:
        """The layer that makes logits."""
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> Any:
        """The decoder's layers."""
        return next(
            each
            for each in self.model.modules()
            if isinstance(each, nn.ModuleList) and len(each) == self.config.num_hidden_layers
        )

    def adapters(self, enabled: bool) -> None:
        """Switch adapters on or off, as for the reference pass."""
        for module in self.model.modules():
            if isinstance(module, AdaptedLinear):
                module.enabled = enabled


def build(config: Any, setup: Setup, layers: int | None = None, plain: bool = False) -> Skeleton:
    """Build a model: `setup` says dtype, bits and adapters, `layers` how many layers, `plain` that it has no adapters.
    Refuses an architecture without a causal language model, and targets that name no layer."""
    _register_attention()
    config = copy.deepcopy(config)
    if layers is not None:
        config.num_hidden_layers = layers
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None):
                setattr(config, name, list(getattr(config, name))[:layers])
    dtype = getattr(torch, setup.dtype)
    try:
        with torch.device("meta"):
            model = _language_model(config, dtype)
    except (ValueError, KeyError, AttributeError, ImportError, RuntimeError, TypeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}."
        got = f"{config.model_type}, which cannot be built as a causal language model"
        raise InputError("--model", got, "a decoder that transformers knows", reason) from error
    autocast = getattr(torch, setup.autocast) if setup.autocast else None
    parameters = sum(p.numel() for p in model.parameters())
    skeleton = Skeleton(model, config, Precision(autocast, setup.device), parameters)
    if setup.bits:
        _quantize(skeleton, setup)
    if setup.adapter is not None and not plain:
        _adapt(skeleton, setup.adapter)
    if plain:
        model.requires_grad_(False)
    model.train()
    return skeleton


def _language_model(config: Any, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION}
    if config.model_type.endswith("_text") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return _WithHead(AutoModel.from_config(config, **options), config, dtype)
    return AutoModelForCausalLM.from_config(config, **options)


class _WithHead(nn.Module):
    """The text part of a model of several parts, where transformers has no class for it with its head (Qwen-VL)."""

    def __init__(self, text: Any, config: Any, dtype: torch.dtype):
        super().__init__()
        self.base_model = text
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = text.get_input_embeddings().weight

    def get_input_embeddings(self) -> Any:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> Any:
        out = self.base_model(**inputs)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return SimpleNamespace(logits=logits, past_key_values=out.past_key_values)


def _register_attention() -> None:
    from transformers import AttentionInterface

    # Under a name of its own masks are taken as they are given; what sdpa does around its kernel happens as always.
    AttentionInterface.register(ATTENTION, _attention)


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if options.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    # No fused kernel caps scores: all of them are there at once, as in transformers' eager attention.
    groups = getattr(module, "num_key_value_groups", 1)
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (options.get("scaling") or 1.0)
    scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if attention_mask is not None:
        scores = scores + torch.empty_like(attention_mask, dtype=scores.dtype)
    chances = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (chances @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), chances


def _linears(skeleton: Skeleton) -> list[tuple[str, nn.Module, int, int]]:
    """Name, layer, inputs and outputs of every linear layer but the head."""
    found = []
    for name, module in skeleton.model.named_modules():
        if module is skeleton.head:
            continue
        if isinstance(module, (nn.Linear, QuantizedLinear)):
            found.append((name, module, module.in_features, module.out_features))
        elif type(module).__name__ == "Conv1D":  # GPT-2's, stored the other way round
            weight: Any = module.weight
            found.append((name, module, weight.size(0), weight.size(1)))
    return found


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _quantize(skeleton: Skeleton, setup: Setup) -> None:
    compute = getattr(torch, setup.dtype)
    for name, module, columns, rows in _linears(skeleton):
        bias: Any = module.bias
        packed = setup.device == "cpu"
        quantized = QuantizedLinear(rows, columns, bias, compute, setup.bits, setup.nested, packed)
        _replace(skeleton.model, name, quantized)


def _adapt(skeleton: Skeleton, adapter: Adapter) -> None:
    skeleton.model.requires_grad_(False)
    targets = adapter.targets if adapter.targets is not None else _default_targets(skeleton.config.model_type)
    chosen = [each for each in _linears(skeleton) if _is_target(each[0], targets)]
    if not chosen:
        raise InputError(
            "lora_target_modules",
            repr(targets),
            f"names of layers of {skeleton.config.model_type}, or all-linear",
            "Use all-linear for every linear layer but the head.",
        )
    for name, module, columns, rows in chosen:
        wrapped = AdaptedLinear(module, columns, rows, adapter.rank, adapter.dropout, skeleton.precision)
        _replace(skeleton.model, name, wrapped)


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """As PEFT reads `target_modules`: a text is a pattern for the whole name, a list names ends."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None or name.rpartition(".")[2] == targets
    return any(name == each or name.endswith(f".{each}") for each in targets)


def _default_targets(model_type: str) -> str | tuple[str, ...]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    if model_type not in known:
        remedy = "PEFT has no default for it: set lora_target_modules, for example all-linear."
        raise InputError("lora_target_modules", f"none for {model_type}", "names of layers", remedy)
    found = known[model_type]
    return found if isinstance(found, str) else tuple(found)
