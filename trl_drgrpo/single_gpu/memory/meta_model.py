"""A model from its configuration alone, on the meta device: sizes without memory.

The real classes of transformers are built, so that every architecture they know can be planned; a multi-modal one by
its text part. Adapters and quantized layers are stand-ins (`meta_layers.py`), because PEFT and bitsandbytes take
seconds to import and want real tensors.
"""

import copy
import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.single_gpu.memory.memory_settings import Setup
from trl_drgrpo.single_gpu.memory.meta_layers import AdaptedLinear, Precision, QuantizedLinear
from trl_drgrpo.upstream.kv_cache import CACHE, cache_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "trl_drgrpo_planned"
# Errors of a model that cannot be built, or run, without weights.
NOT_PLANNED = (ValueError, LookupError, AttributeError, ImportError, RuntimeError, TypeError, AssertionError)

# Forms of masks: pairs of queries and keys, where the fast path makes such a mask or always; a row's tokens; none.
MASKS = ("pairs", "all pairs", "padding", "none")


def reason(error: BaseException) -> str:
    """Return the first line of an error as a sentence."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200].rstrip('.')}."


def read_config(name: str) -> "PreTrainedConfig":
    """Read the configuration of a model.

    Args:
        name (`str`): A local folder with `config.json`, or a Hub id.

    Raises:
        `InputError`: No such folder, no `config.json` in it, or an architecture that transformers does not know.
    """
    check_local("--model", name)
    path = user_path(name)
    from transformers import AutoConfig

    source = str(path) if path.is_dir() else name
    with hub_errors("--model", name, "a model that transformers knows"):
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def text_part(config: "PreTrainedConfig") -> tuple["PreTrainedConfig", bool]:
    """Return the configuration of a model's language model.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of the whole model; left as it is.

    Returns:
        `tuple[PretrainedConfig, bool]`: And whether it is one part of several.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config, False
    text = copy.deepcopy(text)
    # Whether head and embeddings are one is a matter of the whole model, whose head it is.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    return text, True


class Skeleton:
    """A model to run steps on.

    Args:
        config: Of the text model.
        setup ([`Setup`]): Its dtype, bits and adapters.
        layers (`int`, *optional*): How many; by default all.

    Attributes:
        model (`nn.Module`): The causal language model, on the meta device.
        precision ([`Precision`]): The mode to run it in.
        parameters (`int`): Of the model, before adapters and quantization.
        head (`nn.Module`): The layer that makes logits.
        layers (`nn.ModuleList`): The decoder's.
        backbone (`nn.Module`): The model without its head.
        masks (`str`): The form of mask that it takes, one of `MASKS`.

    Raises:
        `InputError`: An architecture without a causal language model, or targets that name no layer.
    """

    def __init__(self, config: "PreTrainedConfig", setup: Setup, layers: int | None = None):
        config = copy.deepcopy(config)
        self.config = config
        if layers is not None:
            config.num_hidden_layers = layers
            if hasattr(config, "num_blocks"):  # xLSTM has the number twice
                config.num_blocks = layers
            # Lists of a type per layer must fit. Where they are no attribute, they follow from the number of layers.
            for name in ("layer_types", "mlp_layer_types"):
                if getattr(config, name, None) and name in vars(config):
                    setattr(config, name, list(getattr(config, name))[:layers])
        try:
            with torch.device("meta"):
                model = _language_model(config, getattr(torch, setup.dtype))
        except Exception as error:
            got = f"{config.model_type}, which cannot be built as a causal language model"
            raise InputError("--model", got, "a decoder that transformers knows", reason(error)) from error
        self.model = model
        compute = getattr(torch, setup.autocast) if setup.autocast else None
        self.precision = Precision(compute, setup.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.head: nn.Linear = model.get_output_embeddings()
        self.backbone = model.base_model
        # Llama 4 has the prefix of its multi-modal class, so transformers finds no base.
        if self.backbone is model:
            self.backbone = model.model
        self.masks = MASKS[0]
        # The decoder's layers: the list with as many entries as there are layers, else the first one.
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        decoders = [candidate for candidate in lists if len(candidate) == config.num_hidden_layers]
        self.layers: nn.ModuleList = (decoders or lists)[0]
        if setup.bits or setup.adapter:
            self._change_layers(setup)
        model.train()

    def _change_layers(self, setup: Setup) -> None:
        """Quantize and adapt linear layers, all but the head."""
        adapter = setup.adapter
        is_adapted = setup.adapter is None
        targets: str | tuple[str, ...] = ()
        if adapter is not None:
            self.model.requires_grad_(False)
            if adapter.targets is None:
                targets = _default_targets(self.config.model_type)
            else:
                targets = adapter.targets
        # A list, as layers are replaced on the way.
        for name, layer in list(self.model.named_modules()):
            is_turned = type(layer).__name__ == "Conv1D"  # GPT-2's, stored the other way round
            if layer is self.head or not (is_turned or isinstance(layer, nn.Linear)):
                continue
            weight: Tensor = layer.weight
            rows, columns = weight.shape
            if is_turned:
                columns, rows = weight.shape
            if setup.bits:
                layer = QuantizedLinear(rows, columns, layer.bias, weight.dtype, setup)
            # The adapter goes around the quantized layer, as with PEFT.
            if adapter is not None and _is_target(name, targets):
                layer = AdaptedLinear(layer, columns, rows, adapter, self.precision)
                is_adapted = True
            self.model.set_submodule(name, layer)
        if not is_adapted:
            expected = f"names of layers of {self.config.model_type}, or all-linear"
            remedy = "Use all-linear for every linear layer but the head."
            raise InputError("lora_target_modules", repr(targets), expected, remedy)


def _language_model(config: "PreTrainedConfig", dtype: torch.dtype) -> Any:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
        AttentionInterface,
        AutoModel,
        AutoModelForCausalLM,
    )

    # Under a name that transformers does not know, it passes masks on as they come. The rest is as with sdpa.
    AttentionInterface.register(ATTENTION, _attention)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION, "trust_remote_code": False}
    if type(config) in MODEL_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return _WithHead(AutoModel.from_config(config, **options), config, dtype)
    try:
        return AutoModelForCausalLM.from_config(config, **options)
    except (KeyError, ValueError):
        # A class of its own for each attention (Falcon). With sdpa, transformers turns some masks into none.
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


class _WithHead(nn.Module):
    """The text part of a model of several parts, where transformers has no class for it with its head (Qwen-VL)."""

    def __init__(self, text: "PreTrainedModel", config: "PreTrainedConfig", dtype: torch.dtype):
        super().__init__()
        self.base_model = text
        self.get_input_embeddings = text.get_input_embeddings
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.get_output_embeddings = lambda: self.lm_head
        embeddings = text.get_input_embeddings()
        if getattr(config, "tie_word_embeddings", False) and isinstance(embeddings, nn.Embedding):
            self.lm_head.weight = embeddings.weight

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> Any:
        out = self.base_model(**inputs)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return SimpleNamespace(logits=logits, **{CACHE: cache_of(out)})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers does under sdpa, whose kernel [`Precision`] replaces."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attend = sdpa_attention_forward
    # No fused kernel caps scores: all of them are there at once.
    if options.get("softcap") is not None:
        attend = sys.modules[type(module).__module__].eager_attention_forward
    return attend(module, query, key, value, attention_mask, **options)


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """Match a name as PEFT does: a text is a pattern for the whole name, a list holds ends of names."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None or name.rpartition(".")[2] == targets
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _default_targets(model_type: str) -> str | tuple[str, ...]:
    """Return the layers that PEFT adapts in this architecture where nobody names any."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as default_targets

    if model_type not in default_targets:
        remedy = "PEFT has no default for it: set lora_target_modules, for example all-linear."
        raise InputError("lora_target_modules", f"none for {model_type}", "names of layers", remedy)
    targets = default_targets[model_type]
    return targets if isinstance(targets, str) else tuple(targets)
