"""One table of the numbers of a run: per field its kind and bounds, and what to do about a value beyond them.

A value beyond its range fails deep inside a run, or trains something nobody asked for without a word. The bounds leave
what transformers and TRL take on purpose: `max_steps=-1`, shares below 1 for steps, `top_k=0`, a learning rate of 0.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from trl_drgrpo.common.errors import InputError, shortened

# Options of checkpointing, by either name: the second one came with transformers 5.23.
CHECKPOINT_OPTIONS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")


@dataclass(frozen=True)
class Range:
    """
    Kind and bounds of a number.

    Args:
        lowest, highest (`float`, *optional*): The bounds; none by default.
        whole (`bool`): Whether it must be a whole number.
        above, below (`bool`): Whether the bound itself is excluded.
        optional (`bool`): Whether `None` is a value.
        also (`tuple`): Values outside the bounds that have a meaning.
        text (`bool`): Whether a text may stand in the place of the number; it is not looked at.
        remedy (`str`): Remedy, one sentence.
    """

    lowest: float | None = None
    highest: float | None = None
    whole: bool = False
    above: bool = False
    below: bool = False
    optional: bool = False
    also: tuple = ()
    text: bool = False
    remedy: str = "Leave it out for the default."

    def allows(self, value: object) -> bool:
        """Tell whether a value lies in the range; booleans and NaN never do."""
        if value is None:
            return self.optional
        if isinstance(value, str):
            return self.text
        # A boolean is an integer to Python; numpy's numbers are registered with these classes.
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        if number in self.also:
            return True
        if not -math.inf < number < math.inf:
            return False
        lowest = -math.inf if self.lowest is None else self.lowest
        highest = math.inf if self.highest is None else self.highest
        if (self.above and number == lowest) or (self.below and number == highest):
            return False
        return bool(lowest <= number <= highest)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        bounds = []
        if self.lowest is not None:
            bounds.append(f"{'above' if self.above else 'at least'} {self.lowest}")
        if self.highest is not None:
            bounds.append(f"{'below' if self.below else 'at most'} {self.highest}")
        if bounds:
            kind = f"{kind}, {' and '.join(bounds)}"
        return kind + "".join(f", or {value}" for value in self.also if value != math.inf)


@dataclass(frozen=True)
class Choice:
    """Values of which one may stand, with a remedy as in [`Range`]."""

    values: tuple
    remedy: str = "Pick one of them."

    def allows(self, value: object) -> bool:
        """Tell whether it is one of the values."""
        return value in self.values

    def __str__(self) -> str:
        *first_values, last = map(repr, self.values)
        return f"{', '.join(first_values)} or {last}"


def whole(lowest: int | None, highest: int | None = None, **more: Any) -> Range:
    """Return the range of whole numbers between two bounds."""
    return Range(lowest, highest, whole=True, **more)


def positive(**more: Any) -> Range:
    """Return the range of numbers above 0."""
    return Range(0, above=True, **more)


def share(**more: Any) -> Range:
    """Return the range of numbers from 0 to 1."""
    return Range(0, 1, **more)


_STEPS = "A number below 1 is a share of all steps."

# Fields of a run by what they may be: `DrGRPOConfig`'s, TRL's and transformers', and those of an adapter.
_FIELDS: tuple[tuple[Range, str], ...] = (
    # Whole numbers
    (
        whole(1),
        "max_sampling_rounds forks num_iterations ref_model_sync_steps vllm_tensor_parallel_size ddp_timeout "
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps",
    ),
    (
        whole(1, optional=True),
        "loss_normalizer num_generations_eval steps_per_generation generation_batch_size max_completion_length "
        "max_turn_length generation_rows vllm_max_model_length eval_accumulation_steps dataloader_prefetch_factor "
        "early_stopping_patience torch_empty_cache_steps ddp_bucket_cap_mb",
    ),
    (whole(0), "beta_warmup_steps"),
    (whole(0, optional=True), "max_tool_calling_iterations num_completions_to_print"),
    (whole(-1), "record_groups local_rank"),
    (whole(1, 16), "fork_depth"),
    (
        whole(2, remedy="A group of one has no baseline, so its advantage is always 0. 8 is the usual size."),
        "num_generations",
    ),
    (whole(0, optional=True, remedy="0 switches it off."), "top_k"),
    (whole(1, optional=True, text=True), "pad_to_multiple_of"),
    (whole(1, 65535), "vllm_server_port"),
    (whole(0, 65535), "vllm_group_port"),
    (whole(1, also=(-1,), remedy="-1 trains for num_train_epochs."), "max_steps"),
    (whole(0, remedy="0 loads the data in the main process."), "dataloader_num_workers"),
    (whole(0, 2**32 - 1, remedy="NumPy accepts no other seeds."), "seed"),
    (whole(0, 2**32 - 1, optional=True), "data_seed"),
    (whole(0, optional=True, remedy="Leave it out to keep every checkpoint."), "save_total_limit"),
    (whole(1, remedy="An adapter of rank 0 would train nothing."), "lora_r"),
    # Any number
    (Range(), "outcome_weight process_weight entropy_coef entropy_coef_min entropy_coef_max entropy_target"),
    (Range(optional=True), "fork_threshold correct_threshold off_policy_mask_threshold"),
    # From 0
    (Range(0), "epsilon entropy_coef_delta learning_rate weight_decay adam_epsilon eval_delay"),
    (
        Range(0, optional=True),
        "epsilon_high router_aux_loss_coef vllm_importance_sampling_clip_min neftune_noise_alpha",
    ),
    (Range(0, also=(math.inf,)), "vllm_server_timeout"),
    (Range(0, optional=True, also=(math.inf,)), "vllm_importance_sampling_clip_max vllm_importance_sampling_cap"),
    (Range(0, optional=True, also=(math.inf,), remedy="0 switches clipping off."), "max_grad_norm"),
    (Range(0, remedy="A negative weight would reward drifting away from the reference."), "beta"),
    (Range(0, remedy=_STEPS), "warmup_steps logging_steps save_steps"),
    (Range(0, optional=True, remedy=_STEPS), "eval_steps"),
    (positive(remedy="A group needs different completions: 1.0 samples the policy as it is."), "temperature"),
    (positive(remedy="1.0 switches it off."), "repetition_penalty"),
    (positive(optional=True, remedy="It caps the importance ratio: use more than 1 + epsilon."), "delta"),
    (positive(remedy="Training ends before its first step otherwise."), "num_train_epochs"),
    (positive(remedy="It scales the adapter: 0 would remove its effect."), "lora_alpha"),
    # Shares
    (share(), "ref_model_mixup_alpha label_smoothing_factor"),
    (share(optional=True, remedy="Leave it out to switch it off."), "min_p"),
    (share(remedy="1.0 trains on all tokens."), "top_entropy_quantile"),
    (share(above=True, remedy="1.0 switches it off."), "top_p"),
    (share(above=True, remedy="It is a share of the GPU's memory."), "vllm_gpu_memory_utilization"),
    (share(above=True, remedy="It is a probability, and its inverse is used as a weight."), "curriculum_q_min"),
    (share(below=True, remedy="It is the decay rate of a moving average."), "adam_beta1 adam_beta2"),
    (share(below=True, optional=True, remedy="It is a share of all steps: set warmup_steps."), "warmup_ratio"),
    (share(below=True, remedy="0 switches it off."), "lora_dropout"),
)
RANGES: dict[str, Range] = {name: allowed for allowed, names in _FIELDS for name in names.split()}


# Fields of `peft.LoraConfig`, and what the table calls them.
_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def refuse_bad_adapter(values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a number of a `peft` configuration that lies outside its range; `None` counts as left out.

    `prefix` goes before the field in the message.
    """
    for name, key in _ADAPTER.items():
        if values.get(name) is not None:
            refuse_outside(f"{prefix}{name}", values[name], RANGES[key])


def refuse_out_of_range(values: Mapping[str, Any]) -> None:
    """Refuse the first number that lies outside its range; fields that the table does not know pass."""
    for name, allowed in RANGES.items():
        if name in values:
            refuse_outside(name, values[name], allowed)


def refuse_outside(field: str, value: object, allowed: Range | Choice) -> None:
    """Refuse a number that lies outside a range, and a value that is none of a choice."""
    if not allowed.allows(value):
        raise InputError(field, shortened(value), str(allowed), allowed.remedy)


def finite_number(
    field: str,
    value: object,
    expected: str = "a finite number",
    remedy: str = "Write it as a number, for example 0.5.",
) -> float:
    """Return a number of an option, numpy's included, as a float; refuse booleans, infinity and NaN."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise InputError(field, shortened(value), expected, remedy)
