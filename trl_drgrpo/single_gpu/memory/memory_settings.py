"""The settings that decide a run's memory: plain numbers, from a trainer's arguments or from a recipe.

Defaults are those of TRL 1.16 and of this package, written out, so that a plan needs neither imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import refuse_out_of_range

LOADED_IN = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element


@dataclass(frozen=True)
class Adapter:
    """LoRA adapters.

    Args:
        rank (`int`): Of each.
        targets (`str`, `tuple[str, ...]`, *optional*): Names of layers, a pattern, or `"all-linear"`; `None`: PEFT's
            choice for the architecture.
        dropout (`float`): In front of each.
    """

    rank: int = 16
    targets: str | tuple[str, ...] | None = None
    dropout: float = 0.05


def _key(name: str, default: Any) -> Any:
    """A field that a key of the recipe gives as it is; one that is missing, or null, leaves the default."""
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True)
class Setup:
    """A run, as far as its memory goes. Lengths in tokens.

    Args:
        device (`str`): `"cuda"` or `"cpu"`: kernels differ in what they keep.
        dtype (`str`): Of the loaded weights: `"float32"` (TRL's default), `"bfloat16"` or `"float16"`.
        autocast (`str`, *optional*): Compute dtype of `bf16` or `fp16`; `None`: as the weights are.
        adapter ([`Adapter`], *optional*): `None`: all weights are trained.
        bits (`int`): 4 or 8 with bitsandbytes, 0 without.
        nested (`bool`): Whether the scales of 4-bit weights are quantized as well.
        prompt, completion (`int`): Longest prompt and completion.
        batch (`int`): `per_device_train_batch_size`.
        accumulation (`int`): `gradient_accumulation_steps`.
        steps_per_generation (`int`): Micro-batches that one generation serves.
        group (`int`): `num_generations`.
        iterations (`int`): `num_iterations`.
        checkpointing (`bool`): `gradient_checkpointing`.
        optimizer (`str`): `optim`.
        reference (`bool`): Whether `beta > 0`.
        exact, share_prompts, fast_generation (`bool`): The fast path.
        vllm (`bool`): Whether vLLM generates in this process (colocate).
        vllm_share (`float`): `vllm_gpu_memory_utilization`.
        vllm_sleeps (`bool`): `vllm_enable_sleep_mode`.
        generates_elsewhere (`bool`): Whether a vLLM server generates.
    """

    device: str = "cuda"
    dtype: str = "float32"
    autocast: str | None = "bfloat16"
    adapter: Adapter | None = None
    bits: int = 0
    nested: bool = _key("use_bnb_nested_quant", False)
    prompt: int = 512
    completion: int = _key("max_completion_length", 512)
    batch: int = _key("per_device_train_batch_size", 8)
    accumulation: int = _key("gradient_accumulation_steps", 1)
    steps_per_generation: int = _key("steps_per_generation", 1)
    group: int = _key("num_generations", 8)
    iterations: int = _key("num_iterations", 1)
    checkpointing: bool = _key("gradient_checkpointing", True)
    optimizer: str = _key("optim", "adamw_torch_fused")
    reference: bool = False
    exact: bool = True
    share_prompts: bool = _key("share_prompts", True)
    fast_generation: bool = _key("fast_generation", True)
    vllm: bool = False
    vllm_share: float = _key("vllm_gpu_memory_utilization", 0.3)
    vllm_sleeps: bool = _key("vllm_enable_sleep_mode", False)
    generates_elsewhere: bool = False

    @property
    def width(self) -> int:
        """Tokens of the widest row."""
        return self.prompt + self.completion

    @property
    def generated_rows(self) -> int:
        """Completions generated at once."""
        return self.batch * self.steps_per_generation

    @property
    def scores_old(self) -> bool:
        """Whether old log-probabilities are computed: where rows are trained on after the weights have moved."""
        moved = self.accumulation % (self.steps_per_generation * self.iterations) != 0
        return moved or self.vllm or self.generates_elsewhere

    @property
    def generates_mid_window(self) -> bool:
        """Whether a generation may fall between two micro-batches of an optimizer step, when gradients are there."""
        return self.steps_per_generation * self.iterations % self.accumulation != 0


KEYS = {each.name: each.metadata["key"] for each in fields(Setup) if each.metadata}


def from_keys(values: Mapping[str, Any], prompt: int, device: str = "cuda") -> Setup:
    """The setup that keys of `trl-drgrpo train`, typed, describe; what is not there is at its default. `prompt`: the
    longest one, in tokens. Refuses quantized weights without an adapter."""
    refuse_out_of_range(values)
    values = {key: value for key, value in values.items() if value is not None}
    bits = 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else 0
    if bits and not values.get("use_peft"):
        remedy = "Add use_peft: quantized weights cannot be trained."
        raise InputError("load_in_4bit", "a quantized model without an adapter", "use_peft with it", remedy)
    targets = values.get("lora_target_modules")
    if isinstance(targets, (list, tuple)):
        targets = targets[0] if len(targets) == 1 else tuple(targets)
    adapter = Adapter(values.get("lora_r", 16), targets, values.get("lora_dropout", 0.05))
    dtype = values.get("dtype") or (values.get("model_init_kwargs") or {}).get("dtype")
    reduced = "bfloat16" if values.get("bf16", device == "cuda") else None
    vllm, colocate = bool(values.get("use_vllm")), values.get("vllm_mode", "colocate") == "colocate"
    setup = Setup(
        device=device,
        dtype=_dtype(dtype),
        autocast="float16" if values.get("fp16") else reduced,
        adapter=adapter if values.get("use_peft") else None,
        bits=bits,
        prompt=prompt,
        reference=bool(values.get("beta")),
        exact=values.get("micro_batching", "exact") == "exact",
        vllm=vllm and colocate,
        generates_elsewhere=vllm and not colocate,
        **{name: values[key] for name, key in KEYS.items() if key in values},
    )
    steps = values.get("steps_per_generation", setup.accumulation)
    if values.get("generation_batch_size"):
        steps = max(1, values["generation_batch_size"] // setup.batch)
    return replace(setup, steps_per_generation=steps)


def _dtype(value: Any) -> str:
    name = str(value or "float32").removeprefix("torch.")
    if name == "auto":  # as the file says; nearly every published model is in bfloat16
        return "bfloat16"
    if name not in LOADED_IN:
        raise InputError("dtype", repr(value), f"one of {', '.join(LOADED_IN)} or auto", "Pick one of them.")
    return name
