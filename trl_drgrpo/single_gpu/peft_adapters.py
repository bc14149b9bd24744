"""Adapters that train: refused at start where they would not, and kept in float32 on a quantized base.

TRL casts the adapters on a quantized base to bfloat16. Next to a weight of 0.01 bfloat16 has steps of 6e-5; an update
of 1e-6 rounds to nothing, and most of the training is lost in silence (figures in `DrGRPOConfig.adapter_dtype`). So
what TRL cast is given its own values back, from before the cast.

Also here: bitsandbytes repacks 4-bit weights for CPUs with avx512_bf16 at the first forward in evaluation. A packed
layer loses its input gradient (or raises, with a bias), and merges and dequantizes to garbage: it is switched off.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_drgrpo.common.errors import InputError, require_for_quantization
from trl_drgrpo.common.hub_errors import is_adapter
from trl_drgrpo.common.ranges import refuse_bad_adapter
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.upstream.checkpoint_weights import REFERENCE

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from trl_drgrpo.upstream.argument_types import Policy

ADAPTER_TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")  # those that put no other head onto the model
ALL_LINEAR = "all-linear"
HEAD = "lm_head"


def choose_quantization(
    model: "Policy",
    peft_config: PeftConfig | None,
    quantization_config: "QuantizationConfigMixin | None",
    init: Mapping[str, Any] | None,
) -> "QuantizationConfigMixin | None":
    """Return the quantization that a model is loaded with, beside what `init` (`model_init_kwargs`) says.

    That is the argument, else the one that [`lora_preset`] has put on `peft_config`, unless `init` has its own. The
    preset's is refused for a model that was loaded without quantization.
    """
    of_preset = getattr(peft_config, "quantization_config", None)
    if quantization_config is not None or of_preset is None:
        return quantization_config
    if (init or {}).get("quantization_config") is not None:  # TRL refuses two
        return None
    if isinstance(model, str):
        return of_preset
    if not getattr(model, "is_quantized", False):
        remedy = "Load it with quantization_config=lora_preset('qlora').quantization_config, or pass its name."
        raise InputError("model", "a loaded model that is not quantized", "one in 4 bit, for 'qlora'", remedy)
    return None


_LANGUAGE_MODEL_ONLY = "language_model_only"


def adapt_language_model_only(config: PeftConfig) -> None:
    """Mark a configuration as one that a preset made, for the language model alone.

    The mark is an attribute and no field, so it is not saved.
    """
    setattr(config, _LANGUAGE_MODEL_ONLY, True)


def limit_to_language_model(config: PeftConfig | None, model: object) -> None:
    """Leave the other parts of a model without an adapter, where the configuration is marked."""
    if config is None or not isinstance(model, PreTrainedModel):
        return
    if getattr(config, _LANGUAGE_MODEL_ONLY, False):
        from trl_drgrpo.single_gpu.unfit_layers import exclude_unfit_layers

        exclude_unfit_layers(config, model)


def check_adapter(
    model: "Policy",
    peft_config: PeftConfig | None,
    quantization_config: "QuantizationConfigMixin | None",
    init: Mapping[str, Any] | None,
) -> None:
    """
    Refuse, before anything loads, what would train nothing, and a quantization whose package is missing.

    That is: an adapter that is frozen, of rank 0, for another task or on the output head; a second adapter on top of
    one; a quantized model without an adapter; a model in which nothing requires a gradient. Arguments as for
    [`choose_quantization`].
    """
    quantization = quantization_config
    if quantization is None:
        quantization = (init or {}).get("quantization_config")
    require_for_quantization(quantization)
    has_adapter = isinstance(model, PeftModel)
    if isinstance(model, str):
        has_adapter = is_adapter(model)
    if peft_config is not None:
        if has_adapter:
            remedy = (
                "Leave peft_config out (in a recipe use_peft and the lora_ keys) to train that adapter further; for a "
                "new one on top of it, merge it first (`trl-drgrpo merge`)."
            )
            raise InputError("peft_config", "a new adapter for a model that has one", "none", remedy)
        _check_config(peft_config)
        return
    if isinstance(model, str):
        if has_adapter:
            saved = PeftConfig.from_pretrained(str(user_path(model)))
            saved.inference_mode = False  # it is True in every saved adapter
            _check_config(saved)
        elif quantization is not None:
            raise _no_adapter("quantization_config without an adapter")
        return
    if isinstance(model, PeftModel):
        if not _trains(model):
            remedy = "Load it with PeftModel.from_pretrained(..., is_trainable=True)."
            raise InputError("model", "an adapter in which every parameter is frozen", "a trainable adapter", remedy)
    # A quantized model trains where transformers has put an adapter into it, or its weights stay trainable.
    elif getattr(model, "is_quantized", False) and not getattr(model, "_hf_peft_config_loaded", False):
        if not getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False):
            raise _no_adapter("a quantized model without an adapter")
    elif isinstance(model, nn.Module) and not _trains(model):
        remedy = "Call model.requires_grad_(True), or pass a peft_config."
        raise InputError("model", "a model in which every parameter is frozen", "something to train", remedy)


def _check_config(config: Any) -> None:
    if not isinstance(config, PeftConfig):
        remedy = "Pass a peft.LoraConfig, or trl_drgrpo.lora_preset()."
        raise InputError("peft_config", type(config).__name__, "a peft configuration", remedy)
    if config.inference_mode:
        remedy = "Pass inference_mode=False; it is True in adapters read from disk."
        raise InputError("peft_config.inference_mode", "True", "False", f"It freezes the adapter. {remedy}")
    refuse_bad_adapter(vars(config), "peft_config.")
    task = getattr(config.task_type, "value", config.task_type)
    if task is not None and task not in ADAPTER_TASKS:
        raise InputError("peft_config.task_type", str(task), "CAUSAL_LM", "The policy is a causal language model.")
    # Of a pattern, too, the part behind the last dot is looked at.
    targets = getattr(config, "target_modules", None)
    names = [targets] if isinstance(targets, str) else list(targets or [])
    if any(name.rpartition(".")[2] == HEAD for name in names):
        remedy = "TRL multiplies by lm_head.weight itself, so an adapter there is never trained: leave it out."
        raise InputError("peft_config.target_modules", f"{HEAD} among them", "other layers", remedy)


def check_reference(model: "Policy", peft_config: PeftConfig | None, beta: float) -> None:
    """Refuse adapters beside which no reference can be had, before anything is built."""
    if not beta:
        return
    if peft_config is not None:
        _refuse_trained_biases("peft_config", peft_config)
    if not isinstance(model, PeftModel):
        return
    # The reference is a frozen copy of the active adapter under TRL's name for it (`add_reference_adapter`).
    active = list(model.active_adapters)
    if len(active) > 1:
        remedy = "Activate one with model.set_adapter(name), or merge them with model.add_weighted_adapter."
        raise InputError("model", f"{len(active)} active adapters with beta > 0", "one", remedy)
    if active == [REFERENCE]:
        remedy = "Load it under another name: TRL takes this one for the reference of KL."
        raise InputError("model", f"an adapter of the name {REFERENCE!r} with beta > 0", "another name", remedy)
    _refuse_trained_biases("model", model.peft_config[active[0]])


def _refuse_trained_biases(field: str, config: PeftConfig) -> None:
    bias = getattr(config, "bias", "none")
    # Biases are the base's own, and stay trained where the adapter is switched off.
    if bias != "none":
        remedy = "The reference would have the biases that are trained: set bias='none', or beta=0."
        raise InputError(field, f"an adapter with bias={bias!r} and beta > 0", "bias='none'", remedy)


def _no_adapter(got: str) -> InputError:
    remedy = "Quantized weights cannot be trained: pass peft_config, for example trl_drgrpo.lora_preset('qlora')."
    return InputError("peft_config", got, "an adapter to train", remedy)


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _trains(model: nn.Module) -> bool:
    return any(map(_is_trained, model.parameters()))


def prepare_adapters(model: nn.Module, created: Mapping[str, Tensor], adapter_dtype: str) -> None:
    """
    Put a model that TRL has set up for training in order, in place; refuse one without a trainable parameter.

    `created`: values of trainable parameters by name, from before TRL cast them. `adapter_dtype="float32"`: cast
    values are restored and half-precision adapter weights become float32, if the base is quantized; `"upstream"`:
    dtypes stay as TRL makes them.
    """
    if not _trains(model):
        remedy = "Compare the adapter's target_modules and exclude_modules with model.named_modules()."
        raise InputError("model", "no trainable parameter", "something to train", remedy)
    keep_4bit_layout(model)
    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper) and isinstance(module.original_module, nn.Linear):
            # Around an output head. TRL reads its weight, which PEFT gives with the trained rows in it, and its bias,
            # which PEFT does not pass on. Past nn.Module, for which it would be a second parameter.
            object.__setattr__(module, "bias", module.original_module.bias)
    if adapter_dtype == "float32" and is_quantized(model):
        # The values from before the cast, not the rounded ones in a wider type.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name in created and created[name].dtype != parameter.dtype:
                parameter.data = created[name].to(parameter.device)
        for parameter in _adapter_parameters(model):
            # An adapter that came in half precision.
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def note_base_revision(model: nn.Module, revision: str | None) -> None:
    """Note in an adapter's configuration which revision of its base it was trained on.

    TRL does not, and peft would load another one under it.
    """
    configs: Mapping[str, PeftConfig] = getattr(model, "peft_config", None) or {}
    for config in configs.values():
        config.revision = config.revision or revision


def is_quantized(model: nn.Module) -> bool:
    """Tell whether TRL would cast the adapters of this model: its base was loaded in 4 or 8 bit by bitsandbytes."""
    return any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))


def _adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters of adapter layers."""
    # A layer of PEFT keeps each kind of weight (lora_A, lora_B) of all adapters in one container.
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        for name in module.adapter_layer_names:
            layers = getattr(module, name, None)
            if isinstance(layers, nn.Module):
                yield from filter(_is_trained, layers.parameters())


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on CPU, and unpack those that it has packed already.

    On other devices bitsandbytes does not look at the switch.
    """
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            # Saving a packed layer unpacks it in place: the public way back.
            module.state_dict()
        module.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]
