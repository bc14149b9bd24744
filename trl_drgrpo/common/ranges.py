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


@dataclass(frozen=True)
class Range:
    """
    What a number may be.

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

    def allows(self, value: Any) -> bool:
        """Whether a value lies in the range; booleans and NaN never do."""
        if value is None:
            return self.optional
        if isinstance(value, str):
            return self.text
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        if number in self.also:
            return True
        if not -math.inf < number < math.inf:
            return False
        if self.lowest is not None and (number <= self.lowest if self.above else number < self.lowest):
            return False
        return self.highest is None or (number < self.highest if self.below else number <= self.highest)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        low = None if self.lowest is None else f"{'above' if self.above else 'at least'} {self.lowest}"
        high = None if self.highest is None else f"{'below' if self.below else 'at most'} {self.highest}"
        bounds = " and ".join(filter(None, (low, high)))
        others = "".join(f", or {value}" for value in self.also if value != math.inf)
        return (f"{kind}, {bounds}" if bounds else kind) + others


def whole(lowest: int | None, highest: int | None = None, **more: Any) -> Range:
    """A whole number."""
    return Range(lowest, highest, whole=True, **more)


def positive(**more: Any) -> Range:
    """A number above 0."""
    return Range(0, above=True, **more)


def share(**more: Any) -> Range:
    """A number from 0 to 1."""
    return Range(0, 1, **more)


_STEPS = "A number below 1 is a share of all steps."
_SEED = whole(0, 2**32 - 1, remedy="NumPy accepts no other seeds.")
_GROUP = "A group of one has no baseline, so its advantage is always 0. 8 is the usual size."
_MOMENT = Range(0, 1, below=True, remedy="It is the decay rate of a moving average.")

RANGES: dict[str, Range] = {
    # Dr. GRPO
    "loss_normalizer": whole(1, optional=True),
    "beta_warmup_steps": whole(0),
    "max_sampling_rounds": whole(1),
    "curriculum_q_min": Range(0, 1, above=True, remedy="It is a probability, and its inverse is used as a weight."),
    "forks": whole(1),
    "fork_depth": whole(1, 16),
    "fork_threshold": Range(optional=True),
    "record_groups": whole(-1),
    "outcome_weight": Range(),
    "process_weight": Range(),
    "correct_threshold": Range(optional=True),
    # GRPO: groups and batches
    "num_generations": whole(2, remedy=_GROUP),
    "num_generations_eval": whole(1, optional=True),
    "num_iterations": whole(1),
    "steps_per_generation": whole(1, optional=True),
    "generation_batch_size": whole(1, optional=True),
    # GRPO: sampling
    "max_completion_length": whole(1, optional=True),
    "temperature": positive(remedy="A group needs different completions: 1.0 samples the policy as it is."),
    "top_p": Range(0, 1, above=True, remedy="1.0 switches it off."),
    "top_k": whole(0, optional=True, remedy="0 switches it off."),
    "min_p": share(optional=True, remedy="Leave it out to switch it off."),
    "repetition_penalty": positive(remedy="1.0 switches it off."),
    "pad_to_multiple_of": whole(1, optional=True, text=True),
    "max_tool_calling_iterations": whole(0, optional=True),
    # GRPO: loss
    "beta": Range(0, remedy="A negative weight would reward drifting away from the reference."),
    "epsilon": Range(0),
    "epsilon_high": Range(0, optional=True),
    "delta": positive(optional=True, remedy="It caps the importance ratio: use more than 1 + epsilon."),
    "off_policy_mask_threshold": Range(optional=True),
    "top_entropy_quantile": share(remedy="1.0 trains on all tokens."),
    "router_aux_loss_coef": Range(0, optional=True),
    "entropy_coef": Range(),
    "entropy_coef_min": Range(),
    "entropy_coef_max": Range(),
    "entropy_coef_delta": Range(0),
    "entropy_target": Range(),
    "ref_model_mixup_alpha": share(),
    "ref_model_sync_steps": whole(1),
    # vLLM
    "vllm_server_port": whole(1, 65535),
    "vllm_group_port": whole(0, 65535),
    "vllm_server_timeout": Range(0, also=(math.inf,)),
    "vllm_gpu_memory_utilization": Range(0, 1, above=True, remedy="It is a share of the GPU's memory."),
    "vllm_max_model_length": whole(1, optional=True),
    "vllm_tensor_parallel_size": whole(1),
    "vllm_importance_sampling_clip_max": Range(0, optional=True, also=(math.inf,)),
    "vllm_importance_sampling_clip_min": Range(0, optional=True),
    "vllm_importance_sampling_cap": Range(0, optional=True, also=(math.inf,)),
    # Optimizer and schedule
    "learning_rate": Range(0),
    "weight_decay": Range(0),
    "adam_beta1": _MOMENT,
    "adam_beta2": _MOMENT,
    "adam_epsilon": Range(0),
    "max_grad_norm": Range(0, optional=True, also=(math.inf,), remedy="0 switches clipping off."),
    "label_smoothing_factor": share(),
    "neftune_noise_alpha": Range(0, optional=True),
    "num_train_epochs": positive(remedy="Training ends before its first step otherwise."),
    "max_steps": whole(1, also=(-1,), remedy="-1 trains for num_train_epochs."),
    "warmup_steps": Range(0, remedy=_STEPS),
    "warmup_ratio": Range(0, 1, below=True, optional=True, remedy="It is a share of all steps: set warmup_steps."),
    # Batches and data
    "per_device_train_batch_size": whole(1),
    "per_device_eval_batch_size": whole(1),
    "gradient_accumulation_steps": whole(1),
    "eval_accumulation_steps": whole(1, optional=True),
    "dataloader_num_workers": whole(0, remedy="0 loads the data in the main process."),
    "dataloader_prefetch_factor": whole(1, optional=True),
    "seed": _SEED,
    "data_seed": whole(0, 2**32 - 1, optional=True),
    # Logging, evaluation, checkpoints
    "logging_steps": Range(0, remedy=_STEPS),
    "eval_steps": Range(0, optional=True, remedy=_STEPS),
    "save_steps": Range(0, remedy=_STEPS),
    "eval_delay": Range(0),
    "early_stopping_patience": whole(1, optional=True),
    "save_total_limit": whole(0, optional=True, remedy="Leave it out to keep every checkpoint."),
    "num_completions_to_print": whole(0, optional=True),
    "torch_empty_cache_steps": whole(1, optional=True),
    # Processes
    "ddp_bucket_cap_mb": whole(1, optional=True),
    "ddp_timeout": whole(1),
    "local_rank": whole(-1),
    # Adapters, as recipes and flags spell them
    "lora_r": whole(1, remedy="An adapter of rank 0 would train nothing."),
    "lora_alpha": positive(remedy="It scales the adapter: 0 would remove its effect."),
    "lora_dropout": Range(0, 1, below=True, remedy="0 switches it off."),
}


# Fields of `peft.LoraConfig`, and what the table calls them.
_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def refuse_bad_adapter(values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses a number of a `peft` configuration that lies outside its range; `None` counts as left out. `prefix`:
    goes before the field in the message."""
    for name, key in _ADAPTER.items():
        if values.get(name) is not None:
            refuse_outside(f"{prefix}{name}", values[name], RANGES[key])


def refuse_out_of_range(values: Mapping[str, Any]) -> None:
    """Refuses the first number that lies outside its range. Leaves alone the fields that the table does not know."""
    for name, allowed in RANGES.items():
        if name in values:
            refuse_outside(name, values[name], allowed)


def refuse_outside(field: str, value: Any, allowed: Range) -> None:
    """Refuses a number that lies outside a range."""
    if not allowed.allows(value):
        raise InputError(field, shortened(value), str(allowed), allowed.remedy)


def finite_number(
    field: str, value: Any, expected: str = "a finite number", remedy: str = "Write it as a number, for example 0.5."
) -> float:
    """A number that was given as an option, numpy's included, as a float. Refuses a boolean, infinity and NaN."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise InputError(field, shortened(value), expected, remedy)
