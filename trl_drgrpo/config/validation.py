"""Values of a configuration that contradict Dr. GRPO or each other: one error each, before a model loads.

`DrGRPOConfig` calls `validate` when it is built and, as its fields may be assigned to, when a trainer takes it and
when training starts. Messages name the bias that a value would bring back and the class of TRL to use for the other
objective.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean, in_one, shortened
from trl_drgrpo.common.ranges import Range, refuse_out_of_range
from trl_drgrpo.config.field_kinds import check_keys, check_kinds
from trl_drgrpo.features.diagnostics.run_warnings import warning_thresholds
from trl_drgrpo.features.forks import FORK_AT
from trl_drgrpo.objective.advantages import ADVANTAGE_BASELINES
from trl_drgrpo.objective.step_advantages import STEP_BASELINES, STEP_CREDITS, check_choices
from trl_drgrpo.process_rewards.steps.separators import configured_segmenter
from trl_drgrpo.rewards.contract import ON_ERROR

MICRO_BATCHINGS = ("exact", "upstream")
ADAPTER_DTYPES = ("float32", "upstream")
PROCESS_ROLES = ("reward", "baseline")
SAMPLING_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# What each other loss of TRL would bring back, in the words of the error message.
_BIAS_OF_LOSS = {
    "grpo": "It divides each completion's loss by its own length: a long incorrect answer is punished less per token "
    "than a short one, so incorrect answers grow (length bias).",
    "bnpo": "It divides by the tokens of a micro-batch: the weight of a token depends on which rows share it.",
}
_ANOTHER_OBJECTIVE = "It is not the objective of Dr. GRPO."
_REMOVE = "Remove it: Dr. GRPO sets it."


def validate(config: Any) -> None:
    """Raise on what makes a run something else than Dr. GRPO, and on values that do not fit each other. `config` has
    `scale_rewards` as TRL's string and `step_separator` as a list."""
    check_kinds(config)
    _validate_objective(config)
    _validate_values(config)
    _validate_fields(config)
    _validate_credit(config)
    _validate_pairs(config)
    _validate_sampling(config)
    _validate_forks(config)
    check_keys(config)
    if config.use_vllm and config.vllm_importance_sampling_correction:
        _validate_correction(config)


def _validate_objective(config: Any) -> None:
    """Values under which the run would not be Dr. GRPO any more, all in one error."""
    found = []
    if config.loss_type != "dr_grpo":
        bias = _BIAS_OF_LOSS.get(config.loss_type, _ANOTHER_OBJECTIVE)
        remedy = f"{_REMOVE} {bias} Use trl.GRPOTrainer for that objective."
        remedy = did_you_mean(str(config.loss_type).lower(), ["dr_grpo"], remedy, cutoff=0.8, form="{!r}")
        found.append(InputError("loss_type", repr(config.loss_type), "'dr_grpo'", remedy))
    if config.scale_rewards != "none":
        remedy = (
            f"{_REMOVE} Dividing by the standard deviation makes very easy and very hard prompts weigh more than the "
            "others (difficulty bias). Use trl.GRPOTrainer for that, or scale_by_running_std=True for one scale over "
            "all prompts."
        )
        found.append(InputError("scale_rewards", repr(config.scale_rewards), "'none' (or False)", remedy))
    if config.multi_objective_aggregation != "sum_then_normalize":
        got = repr(config.multi_objective_aggregation)
        expected = "'sum_then_normalize' (here: a weighted sum, nothing is normalized)"
        remedy = (
            f"{_REMOVE} Normalizing each reward divides by a group's standard deviation (difficulty bias). Use "
            "trl.GRPOTrainer for that (GDPO)."
        )
        found.append(InputError("multi_objective_aggregation", got, expected, remedy))
    if config.sync_ref_model:
        remedy = (
            f"{_REMOVE} Moving the reference towards the policy makes the KL term measure recent drift only: nothing "
            "holds the run to the model it started from. Use trl.GRPOTrainer for that (TR-DPO)."
        )
        found.append(InputError("sync_ref_model", "True", "False", remedy))
    if found:
        raise in_one(found)


def _validate_values(config: Any) -> None:
    """Types and ranges that would otherwise fail deep inside, or train something nobody asked for."""
    refuse_out_of_range(_as_zero(vars(config), config.use_vllm))
    if isinstance(config.generation_kwargs, dict):  # what overrides the fields of the same names
        try:
            refuse_out_of_range(_as_zero(config.generation_kwargs, config.use_vllm))
        except InputError as error:
            raise error.under(f"generation_kwargs: {error.field}") from None
    for name in ("reward_weights", "step_reward_weights"):
        weights = getattr(config, name)
        if weights is not None and not (isinstance(weights, (list, tuple)) and all(map(Range().allows, weights))):
            raise InputError(name, repr(weights), "a list of finite numbers", "Give one number per function.")
    listed = {field.name: field.metadata["choices"] for field in fields(config) if field.metadata.get("choices")}
    for name, allowed in {**listed, **_choices()}.items():
        value = getattr(config, name)
        if value not in allowed and value is not None and not isinstance(value, bool):
            remedy = did_you_mean(value, allowed, "Pick one of them.", cutoff=0.6, form="{!r}")
            raise InputError(name, shortened(value), f"one of {', '.join(allowed)}", remedy)


def _as_zero(values: Mapping[str, Any], use_vllm: bool) -> Mapping[str, Any]:
    """`top_k=-1`, vLLM's way to switch it off, as the 0 that is everybody's."""
    return {**values, "top_k": 0} if use_vllm and values.get("top_k") == -1 else values


def _choices() -> dict[str, tuple[str, ...]]:
    """The values of fields that take one of a few texts. What transformers names itself is asked there."""
    from accelerate.utils import DynamoBackend
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
    from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames, trainer_log_levels

    enumerations: dict[str, Any] = {
        "lr_scheduler_type": SchedulerType,
        "optim": OptimizerNames,
        "logging_strategy": IntervalStrategy,
        "eval_strategy": IntervalStrategy,
        "save_strategy": SaveStrategy,
        "hub_strategy": HubStrategy,
    }
    return {
        "advantage_baseline": ADVANTAGE_BASELINES,
        "on_reward_error": ON_ERROR,
        "micro_batching": MICRO_BATCHINGS,
        "adapter_dtype": ADAPTER_DTYPES,
        "process_role": PROCESS_ROLES,
        "fork_at": FORK_AT,
        "step_credit": STEP_CREDITS,
        "step_baseline": STEP_BASELINES,
        "importance_sampling_level": ("token", "sequence"),
        "log_level": tuple(trainer_log_levels),
        "log_level_replica": tuple(trainer_log_levels),
        "vllm_mode": ("server", "colocate"),
        "cache_implementation": (*ALL_CACHE_IMPLEMENTATIONS, "paged"),
        "include_num_input_tokens_seen": ("all", "non_padding", "no"),
        "torch_compile_backend": tuple(backend.value.lower() for backend in DynamoBackend),
        "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "vllm_importance_sampling_mode": SAMPLING_CORRECTIONS,
        **{name: tuple(str(member.value) for member in values) for name, values in enumerations.items()},
    }


def _validate_fields(config: Any) -> None:
    """Our own fields, and values that do not fit each other."""
    warning_thresholds(config.run_warnings)
    if config.logging_strategy == "steps" and config.logging_steps == 0:
        remedy = "Set logging_strategy='no' to turn logging off."
        raise InputError("logging_steps", "0", "a number above 0 with logging_strategy 'steps'", remedy)
    if config.max_completion_length is None and config.loss_normalizer is None:
        raise InputError(
            "loss_normalizer",
            "None together with max_completion_length=None",
            "a positive number of tokens",
            "Without a length limit there is no default constant to divide by: set loss_normalizer, for example to "
            "the longest length you expect.",
        )
    context, longest = config.vllm_max_model_length, config.max_completion_length
    if config.use_vllm and context is not None and longest is not None and longest >= context:
        remedy = "Prompt and completion share that length: raise it, or lower max_completion_length."
        got = f"{longest} with vllm_max_model_length={context}"
        raise InputError("max_completion_length", got, f"less than {context}", remedy)
    if config.dynamic_sampling not in (False, True, "dapo"):
        remedy = "Use True to keep the objective, 'dapo' for the mean over the groups with a signal."
        raise InputError("dynamic_sampling", repr(config.dynamic_sampling), "True, False or 'dapo'", remedy)


def _validate_credit(config: Any) -> None:
    """Process rewards: the choices must fit each other, and the separator must be one."""
    if config.step_separator is not None:
        configured_segmenter(config.step_separator)
    check_choices(config.step_credit, config.step_baseline, config.deepseekmath_step_std, prefix="step_")


def _validate_pairs(config: Any) -> None:
    """Fields that can have one value only beside another setting."""

    def only(beside: str, why: str, **fields: Any) -> None:
        for name, value in fields.items():
            if getattr(config, name) != value:
                raise InputError(name, f"{getattr(config, name)!r} with {beside}", repr(value), why)

    if config.beta == 0:
        why = "There is nothing to warm up without a KL term: set beta, or leave beta_warmup_steps out."
        only(f"beta={config.beta}", why, beta_warmup_steps=0)
    else:
        why = "Skipped groups would be missing from the KL term: set beta=0, or turn it off."
        only(f"beta={config.beta}", why, dynamic_sampling=False, curriculum=False)
    if config.entropy_coef or config.use_adaptive_entropy:
        why = "Skipped groups would be missing from the entropy bonus: turn one of them off."
        only("an entropy bonus", why, dynamic_sampling=False, curriculum=False)
    if not config.curriculum:
        only("curriculum=False", "Set curriculum=True to use it.", prior_pass_rates=None)
    if config.process_role == "baseline":
        why = "It only applies to process_role='reward': remove it."
        only("process_role='baseline'", why, step_credit="return_to_go", step_baseline="to_go", process_weight=1)
        why = "With a baseline per step, groups of equal rewards have a signal, too: use curriculum, or 'reward'."
        only("process_role='baseline'", why, dynamic_sampling=False)
    if config.forks == 1:
        only("forks=1", "Set forks=2 or more, or remove it.", fork_depth=1, fork_threshold=None, fork_at="drawn")
        return
    why = "Forks compare the branches of a cut with each other: remove it."
    only("forks", why, process_role="reward", step_baseline="to_go")
    why = "A truncated branch stays in its siblings' means without a gradient, which biases it: remove it."
    only("forks", why, mask_truncated_completions=False)
    why = "One ratio per row averages the rewards of the branches over the row: set 'token'."
    only("forks", why, importance_sampling_level="token")
    why = "It would match only a branch's text after the cut: remove it."
    only("forks", why, vllm_structured_outputs_regex=None)


_ALL_TOKENS: dict[str, tuple[Any, ...]] = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}


def refuse_truncated_sampling(config: Any, remedy: str, beside: str = "") -> None:
    """Refuse `top_p`, `top_k` and `min_p`, wherever they are set: sampling from all tokens is the policy itself.

    Args:
        config ([`DrGRPOConfig`]): Its `generation_kwargs` override the fields of the same names.
        remedy (`str`): Why, and what to do.
        beside (`str`, *optional*): The conflicting setting.

    Raises:
        `InputError`: Names the field.
    """
    overrides = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    for name, off in _ALL_TOKENS.items():
        value = overrides.get(name, getattr(config, name))
        if value not in off:
            field = f"generation_kwargs: {name}" if name in overrides else name
            raise InputError(field, f"{value}{beside}", f"{off[1]}, so that all tokens can be sampled", remedy)


def _validate_correction(config: Any) -> None:
    """The correction for vLLM's probabilities: they must be of the distribution that the policy's are of."""
    refuse_truncated_sampling(
        config,
        "vLLM's probabilities would cover only the remaining tokens, the policy's all of them, so every ratio would "
        "be off. Remove it, or set vllm_importance_sampling_correction=False.",
        beside=" with vllm_importance_sampling_correction=True",
    )
    bounds = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if config.vllm_importance_sampling_mode.endswith("_truncate") and bounds == (None, None):
        got = f"None with vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r}"
        remedy = "Set it (TRL's default is 3.0), or use 'sequence_mask' for the unclipped ratio of a row."
        raise InputError("vllm_importance_sampling_clip_max", got, "a number", remedy)


def _validate_sampling(config: Any) -> None:
    """Sampling that weights groups: one group alone has no weight."""
    name = "dynamic_sampling" if config.dynamic_sampling else "curriculum"
    if getattr(config, name) and generation_rows(config) // (config.num_generations or 1) < 2:
        got = f"{getattr(config, name)!r} with one prompt per generation batch"
        remedy = "Its weights need at least two prompts per batch: raise gradient_accumulation_steps."
        raise InputError(name, got, "two or more", remedy)


# Fields of `generation_kwargs` by what a branch, which continues a prompt that ends at the cut, would make of them.
_SEE_THE_COMPLETION_ALONE = (
    *("min_new_tokens", "min_length", "min_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("presence_penalty", "frequency_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("structured_outputs", "guided_decoding", "stop", "bad_words"),
)
_LIMITS = ("max_new_tokens", "max_length", "max_tokens")


def _validate_forks(config: Any) -> None:
    """Forks: groups have room for them, and credit is theirs."""
    if config.forks == 1:
        return
    leaves, size = config.forks**config.fork_depth, config.num_generations or 1
    if size % leaves or size < 2 * leaves:
        got = f"{config.forks} (fork_depth={config.fork_depth}) with num_generations={size}"
        remedy = f"Set num_generations to a multiple of forks ** fork_depth = {leaves}, for example {2 * leaves}."
        raise InputError(
            "forks", got, "at least two parents per prompt, each with forks ** fork_depth completions", remedy
        )
    if (config.fork_at == "drawn") != (config.fork_threshold is None):
        needed = config.fork_at != "drawn"
        got = f"{config.fork_threshold} with fork_at={config.fork_at!r}"
        remedy = (
            "Set it in nats of entropy per token, or as 1 - score."
            if needed
            else "It is for 'entropy' and 'doubt' only: remove it."
        )
        raise InputError("fork_threshold", got, "a number" if needed else "None", remedy)
    if config.step_separator is not None and list(config.step_separator) == ["turn"]:
        remedy = "Without tools a completion has a single turn: set a separator for its steps."
        raise InputError("step_separator", "'turn' with forks", "separators, 're:<pattern>' or 'tokens:<n>'", remedy)
    _validate_forked_generation(config)


def _validate_forked_generation(config: Any) -> None:
    """Settings under which a branch would be sampled from another distribution than the rest of its parent."""
    remedies = dict.fromkeys(_SEE_THE_COMPLETION_ALONE, "It would see only a branch's text after the cut: remove it.")
    remedies |= dict.fromkeys(_LIMITS, "Branches share their parent's token limit: set max_completion_length instead.")
    for name, remedy in remedies.items():
        if (config.generation_kwargs or {}).get(name):
            got = f"{config.generation_kwargs[name]!r} with forks"
            raise InputError(f"generation_kwargs: {name}", got, "nothing", remedy)


def validate_groups(config: Any) -> None:
    """A generation batch that would cut a prompt's group in two."""
    rows = generation_rows(config)
    if rows % (config.num_generations or 1) != 0:
        steps = config.steps_per_generation or config.gradient_accumulation_steps
        raise InputError(
            "num_generations",
            f"{config.num_generations} for a generation batch of {rows} rows (generation_batch_size, or "
            f"per_device_train_batch_size {config.per_device_train_batch_size} x {_processes()} processes x {steps})",
            "a divisor of the generation batch",
            "Every prompt needs all its completions in the batch: change gradient_accumulation_steps or "
            "per_device_train_batch_size so that the product is a multiple of num_generations.",
        )


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def generation_rows(config: Any) -> int:
    """Rows of a generation batch over all processes, also before TRL's constructor has filled them in."""
    steps = config.steps_per_generation or config.gradient_accumulation_steps
    return config.generation_batch_size or config.per_device_train_batch_size * _processes() * steps


def validate_batch(config: Any) -> None:
    """Refuse a generation batch that was worked out before a field behind it was assigned to: groups would be cut in
    two."""
    batch, steps = config.per_device_train_batch_size, config.steps_per_generation or 1
    rows = batch * config.world_size * steps
    if config.generation_batch_size != rows:
        raise InputError(
            "generation_batch_size",
            f"{config.generation_batch_size}, computed when the configuration was built",
            f"{rows}: per_device_train_batch_size {batch} x {config.world_size} processes x steps_per_generation "
            f"{steps}",
            "Pass batch sizes to DrGRPOConfig(...), or assign generation_batch_size and steps_per_generation, too.",
        )
    _validate_forked_rows(config, batch * steps)


def _validate_forked_rows(config: Any, rows: int) -> None:
    """A parent's leaves that would lie on several processes. `rows`: of one process."""
    size, processes, leaves = config.num_generations or 1, config.world_size, config.forks**config.fork_depth
    if config.dynamic_sampling or config.curriculum:  # rounds may be smaller
        rows = math.gcd(rows, size // math.gcd(processes, size))
    if processes > 1 and rows % leaves:
        got = f"{config.forks} (fork_depth={config.fork_depth}) with {rows} rows per process"
        remedy = "The branches of a parent stay on one process: raise per_device_train_batch_size."
        raise InputError("forks", got, f"a multiple of {leaves} rows", remedy)
