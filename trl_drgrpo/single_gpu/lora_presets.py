"""The `lora` and `qlora` presets: what to adapt, how large, how fast, in one word.

- Every linear layer but the output head: attention alone learns less at the same number of parameters. Of a multimodal
  model, those of the language model: text reaches no others.
- Rank 16, `lora_alpha` 32: a policy gradient carries about one bit per completion, so a low rank holds all of it
  (rank 1 equalled full fine-tuning). With alpha fixed at 32 and scaling `alpha / r` the best rate hardly depends on r.
- Learning rate 1e-5: ten times the 1e-6 of full fine-tuning. The Dr. GRPO authors' own LoRA runs took 5e-5.
- No dropout: it makes the log-probabilities of the loss differ from those that sampled, in the importance ratio too.

Sources: "LoRA Without Regret" (Schulman et al., thinkingmachines.ai, 2025), QLoRA (arXiv 2305.14314: NF4, double
quantization, paged optimizers, all linear layers), the recipe of arXiv 2503.20783.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from trl_drgrpo.common.errors import InputError, did_you_mean, require_package
from trl_drgrpo.common.hub_errors import is_adapter
from trl_drgrpo.common.ranges import refuse_bad_adapter

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


Preset = Literal["lora", "qlora"]
PRESETS: tuple[str, ...] = get_args(Preset)
LEARNING_RATE = 1e-5
_ADAPTER = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
_4BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Beside a preset, these values would make it another one.
_CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": False, "load_in_4bit": True, "load_in_8bit": True},
    "qlora": {"use_peft": False, "load_in_4bit": False, "load_in_8bit": True},
}


def lora_preset(name: Preset = "lora", **overrides: Any) -> "LoraConfig":
    """
    Return an adapter configuration for reinforcement learning, to be passed as `peft_config=` of [`DrGRPOTrainer`].

    Args:
        name (`str`, *optional*, defaults to `"lora"`):
            `"lora"`, or `"qlora"`, which also brings the 4-bit quantization of the base model: the result has an
            attribute `quantization_config`, which the trainer applies unless it is given one itself. To
            [`trl.GRPOTrainer`] both are plain LoRA.
        overrides:
            Fields of [`~peft.LoraConfig`] in the place of the preset's, for example `r=32`. With `target_modules` or
            `exclude_modules`, these alone decide which layers of a multimodal model are adapted; without them, those
            of its language model.

    Returns:
        [`~peft.LoraConfig`]: Saved as plain LoRA, which any peft loads.

    Raises:
        `InputError`: An unknown preset or field, a rank below 1, or `"qlora"` without bitsandbytes.
    """
    check_preset(name)
    from peft import LoraConfig

    from trl_drgrpo.single_gpu.peft_adapters import adapt_language_model_only

    fields = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
    for key in overrides:
        if key not in fields:
            remedy = did_you_mean(key, fields, "Training arguments go into preset_arguments(...).", cutoff=0.6)
            raise InputError(key, "an unknown field", "a field of peft.LoraConfig", remedy)
    refuse_bad_adapter(overrides)
    config = LoraConfig(**{**_ADAPTER, **overrides})
    # An attribute, not a field: it is no part of what peft writes into adapter_config.json.
    quantization = _quantization() if name == "qlora" else None
    config.quantization_config = quantization  # pyright: ignore[reportAttributeAccessIssue]
    if not {"target_modules", "exclude_modules"} & overrides.keys():
        adapt_language_model_only(config)
    return config


def preset_arguments(name: Preset = "lora", **overrides: Any) -> dict[str, Any]:
    """
    Return the training arguments that belong to a preset, to be passed on as `DrGRPOConfig(**preset_arguments(...))`.

    Args:
        name (`str`, *optional*, defaults to `"lora"`): `"lora"` or `"qlora"`.
        overrides: Fields of [`DrGRPOConfig`], which win; `model_init_kwargs` is merged key by key.

    Returns:
        `dict[str, Any]`: `learning_rate`, `gradient_checkpointing` and `model_init_kwargs` (the frozen base in
        bfloat16 where the device computes in it); `optim` for `"qlora"` on a CUDA device.

    Raises:
        `InputError`: An unknown preset.

    Example:

    ```python
    >>> preset_arguments("lora", output_dir="out", learning_rate=5e-5, use_cpu=True)["learning_rate"]
    5e-05

    ```
    """
    check_preset(name)
    on_cpu = bool(overrides.get("use_cpu"))
    # Of the frozen base: TRL's own default, float32, would take twice the memory.
    dtype = "bfloat16" if computes_in_bfloat16(on_cpu) else "float32"
    init = {"dtype": dtype, **(overrides.get("model_init_kwargs") or {})}
    return {**_training(name, on_cpu), **overrides, "model_init_kwargs": init}


def preset_values(name: str, settings: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """
    Return a preset in the keys of recipes and flags, without those that `settings` has.

    Keys of a new adapter are left out where the model is an adapter's folder. A setting that contradicts the preset is
    refused, and `"qlora"` without bitsandbytes.

    `device`: `"cuda"` or `"cpu"`, to plan for a device that need not be here, with bfloat16 and bitsandbytes where it
    is a GPU. By default the one that is here.
    """
    check_preset(name, settings, is_planned=device is not None)
    on_cpu = bool(settings.get("use_cpu"))
    takes_bfloat16 = device == "cuda"
    if device is None:
        takes_bfloat16 = computes_in_bfloat16(on_cpu)
    values: dict[str, Any] = {}
    if not is_adapter(str(settings.get("model_name_or_path"))):  # which brings its own rank and layers
        values["use_peft"] = True
        # The keys of `trl grpo`, in which recipes and flags are written, are PEFT's behind `lora_`.
        for field, value in _ADAPTER.items():
            values[f"lora_{field.removeprefix('lora_')}"] = value
        values["lora_target_modules"] = [_ADAPTER["target_modules"]]
    if name == "qlora":
        values |= {**_4BIT, "use_bnb_nested_quant": True}
    # In TRL's keys this is also the dtype in which 4-bit layers compute.
    chosen_dtype = (settings.get("model_init_kwargs") or {}).get("dtype")
    values["dtype"] = chosen_dtype or ("bfloat16" if takes_bfloat16 else "float32")
    values |= _training(name, on_cpu, device)
    return {key: value for key, value in values.items() if key not in settings}


def check_preset(name: object, settings: Mapping[str, Any] | None = None, is_planned: bool = False) -> None:
    """Refuse a preset that does not exist or cannot be had, and settings that contradict it.

    `is_planned`: nothing will run here, so no package is asked for.
    """
    if name not in PRESETS:
        remedy = did_you_mean(str(name).lower(), PRESETS, "Pick one of them.", form="{!r}")
        raise InputError("preset", repr(name), f"one of {', '.join(PRESETS)}", remedy)
    for key, value in _CONTRADICTIONS[str(name)].items():
        if settings is not None and settings.get(key) is value:
            remedy = f"Remove {key}, or the preset."
            if key == "load_in_4bit" and value:
                remedy = "A 4-bit base is the preset 'qlora'."
            raise InputError(key, f"{value} with the preset {name!r}", f"{key} as the preset sets it", remedy)
    if name == "qlora" and not is_planned:
        require_package("bitsandbytes", "preset", repr(name), "qlora")


def computes_in_bfloat16(on_cpu: bool = False) -> bool:
    """Tell whether training runs on an accelerator that computes in bfloat16. On CPU training is in float32."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if on_cpu or accelerator is None or accelerator.type == "mps":
        return False
    if accelerator.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def _quantization() -> "BitsAndBytesConfig":
    """Return NF4 with double quantization; the layers compute in bfloat16 where the device does."""
    import torch
    from transformers import BitsAndBytesConfig

    compute_dtype = torch.bfloat16 if computes_in_bfloat16() else torch.float32
    return BitsAndBytesConfig(**_4BIT, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute_dtype)


def _training(name: str, on_cpu: bool, device: str | None = None) -> dict[str, Any]:
    """Return the training arguments of a preset."""
    import torch

    values: dict[str, Any] = {"learning_rate": LEARNING_RATE, "gradient_checkpointing": True}
    is_cuda = device == "cuda"
    if device is None:
        is_cuda = torch.cuda.is_available() and not on_cpu
    if name == "qlora" and is_cuda:
        # Elsewhere bitsandbytes has no paged memory.
        values["optim"] = "paged_adamw_8bit"
    return values
