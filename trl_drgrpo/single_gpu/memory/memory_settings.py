"""Settings that decide a run's memory, from a trainer's arguments or a recipe, and the size of the device.

Defaults are those of TRL 1.16 and of this package, written out, so that a plan needs neither imported.

`24GB` on a graphics card means 24 GiB: that is what its driver reports, so GB and GiB (and a bare number) are the same
here, powers of 1024. A card's number is what PyTorch gives as total capacity, in a card's properties and out-of-memory
messages: less than the vendor's number, and less than `nvidia-smi` shows, by what driver and error correction keep. It
is the lowest that such messages in public logs commonly say for a card of that size (November 2026), not our own
measurement; drivers differ by up to 0.2 GiB. Where `--memory` gives measured bytes, they win.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS, refuse_out_of_range
from trl_drgrpo.common.reading import reading

Default = TypeVar("Default")

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


def _key(name: str, default: Default) -> Default:
    """Declare a field that a key of the recipe gives as it is; one that is missing, or null, leaves the default."""
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
        checkpoint_every (`int`): Layers from one checkpoint to the next; `every_n_layers` of its options.
        offload (`bool`): Whether the inputs of checkpointed layers wait on the host; `offload` of its options.
        optimizer (`str`): `optim`.
        reference (`bool`): Whether `beta > 0`.
        goes_on (`bool`): Whether the adapter was there before, so that a copy of it is the reference.
        exact, share_prompts, fast_generation (`bool`): The fast path.
        generation_rows (`int`, *optional*): The same.
        vllm (`bool`): Whether vLLM generates in this process (colocate).
        vllm_share (`float`): `vllm_gpu_memory_utilization`.
        vllm_sleeps (`bool`): `vllm_enable_sleep_mode`.
        vllm_lora (`str`): The same.
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
    checkpoint_every: int = 1
    offload: bool = False
    optimizer: str = _key("optim", "adamw_torch_fused")
    reference: bool = False
    goes_on: bool = False
    exact: bool = True
    share_prompts: bool = _key("share_prompts", True)
    fast_generation: bool = _key("fast_generation", True)
    generation_rows: int | None = _key("generation_rows", None)
    vllm: bool = False
    vllm_share: float = _key("vllm_gpu_memory_utilization", 0.3)
    vllm_sleeps: bool = _key("vllm_enable_sleep_mode", False)
    vllm_lora: str = _key("vllm_lora", "auto")
    generates_elsewhere: bool = False

    @property
    def width(self) -> int:
        """Tokens of the widest row."""
        return self.prompt + self.completion

    @property
    def sends_adapters(self) -> bool:
        """Tell whether vLLM gets an adapter alone."""
        return self.adapter is not None and self.vllm_lora != "merged"

    @property
    def generated_rows(self) -> int:
        """Completions of a generation batch."""
        return self.batch * self.steps_per_generation

    @property
    def rows_at_once(self) -> int:
        """Completions whose keys and values are held at the same time."""
        return min(self.generated_rows, self.generation_rows or self.generated_rows)

    @property
    def scores_old(self) -> bool:
        """Tell whether old log-probabilities are computed: where rows are trained on after the weights have moved.

        vLLM's own kernels sample with other roundings than the policy is scored with, so its rows always are.
        """
        moved = self.accumulation % (self.steps_per_generation * self.iterations) != 0
        return moved or self.vllm or self.generates_elsewhere

    @property
    def generates_mid_window(self) -> bool:
        """Tell whether a generation may fall between two micro-batches of an optimizer step, while gradients wait."""
        return self.steps_per_generation * self.iterations % self.accumulation != 0


FIELD_KEYS = {field.name: field.metadata["key"] for field in fields(Setup) if field.metadata}


def of_adapter(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return path or Hub id of the base under the adapter of a folder, and the adapter as keys of a recipe.

    Refuses adapters other than LoRA.
    """
    file = folder / "adapter_config.json"
    with reading("--model", str(file), "an adapter's configuration", "Save the adapter again."):
        content = dict(json.loads(file.read_text("utf-8")))
        kind = content.get("peft_type")
        base = content.get("base_model_name_or_path")
        if not isinstance(base, str):
            raise TypeError("base_model_name_or_path is not a text")
    if kind != "LORA":
        raise InputError("--model", f"{folder}, an adapter of type {kind}", "a LoRA adapter", "Name another model.")
    return base, {
        "use_peft": True,
        "lora_target_modules": content.get("target_modules") or content.get("target_parameters"),
        "lora_r": content.get("r"),
        "lora_dropout": content.get("lora_dropout"),
    }


def from_keys(values: Mapping[str, Any], prompt: int, device: str = "cuda") -> Setup:
    """Build the setup from keys of `trl-drgrpo train`, typed; a missing key is at its default.

    `prompt`: the longest one, in tokens. Refuses quantized weights without an adapter.
    """
    refuse_out_of_range(values)
    values = {key: value for key, value in values.items() if value is not None}
    # How the weights are loaded, and which are trained.
    bits = 0
    if values.get("load_in_4bit"):
        bits = 4
    elif values.get("load_in_8bit"):
        bits = 8
    if bits and not values.get("use_peft"):
        remedy = "Add use_peft: quantized weights cannot be trained."
        raise InputError("load_in_4bit", "a quantized model without an adapter", "use_peft with it", remedy)
    adapter = _adapter(values) if values.get("use_peft") else None
    init = values.get("model_init_kwargs") or {}
    # What a step computes in: TRL's default is bfloat16, which a run on a CPU has to switch off.
    autocast = None
    if values.get("fp16"):
        autocast = "float16"
    elif values.get("bf16", device == "cuda"):
        autocast = "bfloat16"
    # Where completions are generated, and where the inputs of checkpointed layers wait.
    vllm = bool(values.get("use_vllm"))
    colocate = values.get("vllm_mode", "colocate") == "colocate"
    checkpoints: dict[str, Any] = {}
    for key in CHECKPOINT_OPTIONS:
        checkpoints |= values.get(key) or {}
    setup = Setup(
        device=device,
        dtype=_dtype(values.get("dtype") or init.get("dtype")),
        autocast=autocast,
        adapter=adapter,
        bits=bits,
        prompt=prompt,
        checkpoint_every=checkpoints.get("every_n_layers", 1),
        # On a CPU, the host is where they are.
        offload=bool(checkpoints.get("offload")) and device != "cpu",
        reference=bool(values.get("beta")),
        exact=values.get("micro_batching", "exact") == "exact",
        vllm=vllm and colocate,
        generates_elsewhere=vllm and not colocate,
        **{name: values[key] for name, key in FIELD_KEYS.items() if key in values},
    )
    # TRL takes the rows of a generation by either name; without one, a generation serves one optimizer step.
    steps = values.get("steps_per_generation", setup.accumulation)
    if values.get("generation_batch_size"):
        steps = max(1, values["generation_batch_size"] // setup.batch)
    return replace(setup, steps_per_generation=steps)


def _adapter(values: Mapping[str, Any]) -> Adapter:
    targets = values.get("lora_target_modules")
    # A list of one may be a pattern or `all-linear`, as TRL reads it.
    if isinstance(targets, (list, tuple)):
        targets = targets[0] if len(targets) == 1 else tuple(targets)
    return Adapter(values.get("lora_r", 16), targets, values.get("lora_dropout", 0.05))


def _dtype(value: object) -> str:
    name = str(value or "float32").removeprefix("torch.")
    if name == "auto":  # the file's own dtype; nearly every published model is in bfloat16
        return "bfloat16"
    if name not in LOADED_IN:
        raise InputError("dtype", repr(value), f"one of {', '.join(LOADED_IN)} or auto", "Pick one of them.")
    return name


# Devices -------------------------------------------------------------------------------------------------------------

# Left free by default: the larger of a share of the device and an amount. Both are a choice, not a measurement: a plan
# on an H100 was up to 2.2% below the measured peak of tensors (`recipes/studies/gpu.md`).
MARGIN_SHARE = 0.05
MARGIN_BYTES = int(0.7 * 2**30)

_POWERS = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}


def _bytes(text: str, whole: int = 0) -> int | None:
    """Return the bytes of an amount, or of a share of `whole` bytes; `None` for anything else."""
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(?:i?b)?)", text.strip().lower())
    if amount is None:
        return None
    number, percent, unit = amount.groups()
    size = float(number)  # infinite for 400 digits
    if percent:
        size = size / 100 * whole
    else:
        size *= 1024 ** _POWERS[unit]
    return int(size) if math.isfinite(size) else None


def parse_memory(text: str) -> int:
    """Return the bytes of an amount such as `24GB`, `24 GiB`, `24g`, `16384MB` or `24` (gigabytes).

    Args:
        text (`str`): The amount.

    Returns:
        `int`: Bytes, positive.

    Raises:
        `InputError`: No amount, or none above zero.

    Example:

    ```python
    >>> parse_memory("24GB") == parse_memory("24") == 24 * 2**30
    True

    ```
    """
    size = _bytes(text)
    if not size:
        remedy = "Write the memory of one device; a number alone is in GB."
        raise InputError("--memory", shortened(text), "an amount above zero, such as 24GB", remedy)
    return size


def default_margin(memory: int) -> int:
    """Return the bytes to leave free on a device: 5% of it or 0.7 GB, whichever is more."""
    return max(int(MARGIN_SHARE * memory), MARGIN_BYTES)


def parse_margin(text: str | None, memory: int) -> int:
    """Return the bytes to leave free on a device of `memory` bytes.

    Args:
        text (`str`, *optional*): An amount as [`parse_memory`] takes it, a share such as `8%`, or `0`. `None`:
            [`default_margin`].
        memory (`int`): Bytes of the device.

    Raises:
        `InputError`: Neither of them, or a margin that leaves nothing.

    Example:

    ```python
    >>> parse_margin("10%", 20 * 2**30) == parse_margin("2GB", 20 * 2**30) == 2 * 2**30
    True

    ```
    """
    default = default_margin(memory)
    margin = default if text is None else _bytes(text, memory)
    if margin is None:
        remedy = f"Leave it out for the default, here {readable(default)}."
        expected = "an amount or a share to leave free, such as 1GB, 5% or 0"
        raise InputError("--margin", shortened(str(text)), expected, remedy)
    if margin >= memory:
        got = f"{readable(margin)}, which leaves nothing of {readable(memory)}"
        raise InputError("--margin", got, "less than the memory", "Give a smaller margin, or more memory.")
    return margin


def readable(size: float) -> str:
    """Write an amount in GB or MB of 1024.

    Example:

    ```python
    >>> readable(24 * 2**30), readable(5 * 2**20)
    ('24.0 GB', '5.0 MB')

    ```
    """
    return f"{size / 2**30:.1f} GB" if abs(size) >= 2**29 else f"{size / 2**20:.1f} MB"


# Total that PyTorch shows, in GiB.
CARDS = {
    "T4": 14.56,
    "L4": 22.03,
    "A10G": 22.03,
    "RTX-3060-12GB": 11.62,
    "RTX-3090": 23.52,
    "RTX-4080": 15.57,
    "RTX-4090": 23.52,
    "RTX-5090": 31.36,
    "L40S": 44.34,
    "A100-40GB": 39.38,
    "A100-80GB": 79.14,
    "H100-80GB": 79.10,
    "H200": 139.72,
}
# Words of a card's full name that tell no two apart.
_FILLERS = r"nvidia|tesla|geforce|rtx|gb|[-_ ]"


def find_card(name: str) -> tuple[str, int]:
    """Find the card of a name such as `T4`, `RTX 4090`, `4090` or `NVIDIA A100-80GB`, and the bytes it offers.

    Args:
        name (`str`): Upper or lower case, with or without the vendor's words.

    Raises:
        `InputError`: An unknown name, or one that several cards share; names the nearest.

    Example:

    ```python
    >>> find_card("NVIDIA GeForce RTX 4090")[0], find_card("a100 80gb")[0]
    ('RTX-4090', 'A100-80GB')

    ```
    """
    short = re.sub(_FILLERS, "", name.lower())
    matching_cards = []
    for card, gibibytes in CARDS.items():
        short_card = re.sub(_FILLERS, "", card.lower())
        if short == short_card:  # a full name, which may begin another one
            return card, int(gibibytes * 2**30)
        if short and short_card.startswith(short):  # the beginning of a name: H100, RTX 3060
            matching_cards.append(card)
    if len(matching_cards) == 1:
        return matching_cards[0], int(CARDS[matching_cards[0]] * 2**30)
    if matching_cards:
        remedy = f"Did you mean {' or '.join(matching_cards)}?"
        raise InputError("--device", f"{name!r}, which matches several cards", "one of them", remedy)
    otherwise = f"Known cards: {', '.join(CARDS)}. For another one pass --memory."
    near = did_you_mean(name.upper(), CARDS, otherwise, most=2, cutoff=0.6)
    raise InputError("--device", shortened(name), "cuda, cpu, or the name of a card", near)
