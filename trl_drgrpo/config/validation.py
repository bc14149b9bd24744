"""Values of a configuration that contradict Dr. GRPO or each other: one error each, before a model loads.

`refuse` is called by `DrGRPOConfig` when it is built. Messages name the bias that a value would bring back and the
class of TRL to use for the other objective.
"""

import math
import os
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_warnings import warning_thresholds
from trl_drgrpo.objective.advantages import ADVANTAGE_BASELINES
from trl_drgrpo.objective.step_advantages import STEP_BASELINES, STEP_CREDITS, check_choices
from trl_drgrpo.process_rewards.steps import step_segmenter

REWARD_ERROR_POLICIES = ("raise", "unscorable")
MICRO_BATCHINGS = ("exact", "upstream")
ADAPTER_DTYPES = ("float32", "upstream")

# What each other loss of TRL would bring back, in the words of the error message.
_BIAS_OF_LOSS = {
    "grpo": "It divides each completion's loss by its own length: a long wrong answer is punished less per token than "
    "a short one, so wrong answers grow (length bias).",
    "bnpo": "It divides by the tokens of a micro-batch: the weight of a token depends on which rows share it.",
    "dapo": "It divides by the tokens of the batch: the weight of a row depends on how long the others are.",
}
_ANOTHER_OBJECTIVE = "It is another objective than Dr. GRPO."


def refuse(config: Any) -> None:
    """Refuse what makes a run something else than Dr. GRPO, and values that do not fit each other.

    Args:
        config ([`DrGRPOConfig`]): With `scale_rewards` spelt as TRL's string and `step_separator` as a list.

    Raises:
        `InputError`: Names the field, and what to do.
    """
    _refuse_other_objectives(config)
    _refuse_bad_numbers(config)
    _refuse_bad_fields(config)
    _refuse_contradictory_credit(config)


def _refuse_other_objectives(config: Any) -> None:
    """Values under which the run would not be Dr. GRPO any more."""
    if config.loss_type != "dr_grpo":
        bias = _BIAS_OF_LOSS.get(config.loss_type, _ANOTHER_OBJECTIVE)
        raise InputError(
            "loss_type", repr(config.loss_type), "'dr_grpo'", f"{bias} Use trl.GRPOTrainer for that objective."
        )
    if config.scale_rewards != "none":
        raise InputError(
            "scale_rewards",
            repr(config.scale_rewards),
            "'none' (or False)",
            "Dividing by the standard deviation makes very easy and very hard prompts weigh more than the others "
            "(difficulty bias). Use trl.GRPOTrainer for that, or scale_by_running_std=True for one scale over all "
            "prompts.",
        )
    if config.multi_objective_aggregation != "sum_then_normalize":
        raise InputError(
            "multi_objective_aggregation",
            repr(config.multi_objective_aggregation),
            "'sum_then_normalize' (here: a weighted sum, nothing is normalised)",
            "Normalising each reward divides by a group's standard deviation (difficulty bias). Use "
            "trl.GRPOTrainer for that (GDPO).",
        )
    if config.sync_ref_model:
        raise InputError(
            "sync_ref_model",
            "True",
            "False",
            "Moving the reference towards the policy makes the KL term measure recent drift only: nothing holds "
            "the run to the model it started from. Use trl.GRPOTrainer for that (TR-DPO).",
        )


# Whole numbers with the smallest that makes sense, and numbers with theirs (`None`: any finite one). Those in
# `_OPTIONAL` may be left `None`.
_WHOLE = {
    "num_generations": 2,
    "num_generations_eval": 1,
    "num_iterations": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 1,
    "loss_normalizer": 1,
    "beta_warmup_steps": 0,
    "record_groups": -1,
}
_NUMBERS: dict[str, float | None] = {
    "beta": 0.0,
    "epsilon": 0.0,
    "epsilon_high": 0.0,
    "temperature": 0.0,
    "outcome_weight": None,
    "process_weight": None,
    "right_threshold": None,
}
_OPTIONAL = (
    "num_generations_eval",
    "steps_per_generation",
    "generation_batch_size",
    "max_completion_length",
    "loss_normalizer",
    "epsilon_high",
    "right_threshold",
)
_SWITCHES = (
    "scale_by_running_std",
    "deepseekmath_step_std",
    "use_bias_correction_kl",
    "sync_ref_model",
    "share_prompts",
    "fast_generation",
    "run_log",
)
_REMEDIES = {
    "num_generations": "A group of one has no baseline, so its advantage is always 0. 8 is the usual size.",
    "beta": "A negative weight would reward drifting away from the reference.",
}


def _refuse_bad_numbers(config: Any) -> None:
    """Types and ranges that would otherwise fail deep inside, or train something nobody asked for."""
    for name in (*_WHOLE, *_NUMBERS):
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        lowest = _WHOLE.get(name, _NUMBERS.get(name))
        if not _is_finite(value, whole=name in _WHOLE, lowest=lowest):
            kind = "a whole number" if name in _WHOLE else "a finite number"
            expected = kind if lowest is None else f"{kind}, at least {lowest:g}"
            raise InputError(name, repr(value), expected, _REMEDIES.get(name, "Leave it out for the default."))
    for name in ("reward_weights", "step_reward_weights"):
        weights = getattr(config, name)
        if weights is not None and not (isinstance(weights, (list, tuple)) and all(map(_is_finite, weights))):
            raise InputError(name, repr(weights), "a list of finite numbers", "Give one number per function.")
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise InputError(
                name, repr(getattr(config, name)), "True or False", "A text such as 'false' counts as true."
            )


def _is_finite(value: Any, whole: bool = False, lowest: float | None = None) -> bool:
    if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return lowest is None or value >= lowest


def _refuse_bad_fields(config: Any) -> None:
    """Our own fields, and values that do not fit each other."""
    warning_thresholds(config.run_warnings)
    if config.right_reward is not None and not isinstance(config.right_reward, str):
        remedy = "Leave it out for the first reward."
        raise InputError("right_reward", repr(config.right_reward), "a reward function's name", remedy)
    choices = {
        "advantage_baseline": ADVANTAGE_BASELINES,
        "on_reward_error": REWARD_ERROR_POLICIES,
        "micro_batching": MICRO_BATCHINGS,
        "adapter_dtype": ADAPTER_DTYPES,
        "step_credit": STEP_CREDITS,
        "step_baseline": STEP_BASELINES,
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise InputError(name, repr(getattr(config, name)), f"one of {', '.join(allowed)}", "Pick one of them.")
    if config.max_completion_length is None and config.loss_normalizer is None:
        raise InputError(
            "loss_normalizer",
            "None together with max_completion_length=None",
            "a positive number of tokens",
            "Without a length limit there is no natural constant to divide by: set loss_normalizer, say to "
            "the length you expect at most.",
        )
    if config.beta_warmup_steps > 0 and config.beta == 0:
        raise InputError(
            "beta_warmup_steps",
            f"{config.beta_warmup_steps} with beta={config.beta}",
            "0, or a positive number of steps with beta > 0",
            "There is nothing to warm up without a KL term: set beta, or leave beta_warmup_steps out.",
        )


def _refuse_contradictory_credit(config: Any) -> None:
    """Process rewards: the choices must fit each other, and the separator must be one."""
    if not isinstance(config.step_separator, (list, tuple)):
        got = repr(config.step_separator)
        raise InputError("step_separator", got, "a list of separators", "Leave it out for the default, an empty line.")
    step_segmenter(config.step_spec)
    check_choices(config.step_credit, config.step_baseline, config.deepseekmath_step_std, prefix="step_")


def refuse_partial_groups(config: Any) -> None:
    """A generation batch that would cut a prompt's group in two."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    steps = config.steps_per_generation or config.gradient_accumulation_steps
    rows = config.generation_batch_size or config.per_device_train_batch_size * world_size * steps
    if rows % (config.num_generations or 1) != 0:
        raise InputError(
            "num_generations",
            f"{config.num_generations} for a generation batch of {rows} rows (generation_batch_size, or "
            f"per_device_train_batch_size {config.per_device_train_batch_size} x {world_size} processes x {steps})",
            "a divisor of the generation batch",
            "Every prompt needs all its completions in the batch: change gradient_accumulation_steps or "
            "per_device_train_batch_size so that the product is a multiple of num_generations.",
        )
