"""Rules of a configuration: each yields field, value, expected, and what to do.

`DrGRPOConfig` calls `validate` when it is built and, as its fields may be assigned to, when a trainer takes it.
Messages name the bias that a value would bring back and the class of TRL to use for the other objective. Kinds,
choices and keys of mappings are in `field_kinds.py`, ranges of numbers in `common/ranges.py`, rules on a trainer's
other inputs in `preflight.py`.
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError, did_you_mean, in_one
from trl_drgrpo.common.generation import that_do_something
from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS, Range, refuse_out_of_range
from trl_drgrpo.config.best_metric import best_metric_rules
from trl_drgrpo.config.field_kinds import check_choices, check_keys, check_kinds
from trl_drgrpo.features.diagnostics.run_warnings import warning_thresholds
from trl_drgrpo.objective import step_choices

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig

logger = logging.getLogger(__name__)

Rules = Iterator[InputError]


def refuse(errors: Iterable[InputError]) -> None:
    """Raise the first error, if any."""
    for error in errors:
        raise error


def validate(config: "DrGRPOConfig") -> None:
    """Raise on what makes a run something else than Dr. GRPO, and on values that do not fit each other. `config` has
    `scale_rewards` as TRL's string and `step_separator` as a list."""
    # Kinds come first: every later rule compares or adds. Whatever belongs to another objective is in one error, as
    # a script that was written for one may set several of these.
    check_kinds(config)
    other_objectives = list(_other_objectives(config))
    if other_objectives:
        raise in_one(other_objectives)
    _check_ranges(config)
    check_choices(config)
    warning_thresholds(config.run_warnings)
    if config.step_separator is not None:
        from trl_drgrpo.process_rewards.steps.segmenter import configured_segmenter

        configured_segmenter(config.step_separator)
    step_choices.check_choices(config.step_credit, config.step_baseline, config.deepseekmath_step_std, prefix="step_")
    for rules in (_values, _pairs, _forks, _generation, best_metric_rules):
        refuse(rules(config))
    check_keys(config)
    refuse(_groups(config))


# What each other loss of TRL would bring back, in the words of the error message.
_BIAS_OF_LOSS = {
    "grpo": "It divides each completion's loss by its own length: a long incorrect answer is punished less per token "
    "than a short one, so incorrect answers grow (length bias).",
    "bnpo": "It divides by the tokens of a micro-batch: the weight of a token depends on which rows share it.",
}
# The value that the objective needs of a field, how a message says it, and what any other value would do.
_OBJECTIVE = {
    "loss_type": ("dr_grpo", "'dr_grpo'", "Use trl.GRPOTrainer for that objective."),
    "scale_rewards": (
        "none",
        "'none' (or False)",
        "Dividing by the standard deviation makes very easy and very hard prompts weigh more than the others "
        "(difficulty bias). Use trl.GRPOTrainer for that, or scale_by_running_std=True for one scale over all "
        "prompts.",
    ),
    "multi_objective_aggregation": (
        "sum_then_normalize",
        "'sum_then_normalize' (here: a weighted sum, nothing is normalized)",
        "Normalizing each reward divides by a group's standard deviation (difficulty bias). Use trl.GRPOTrainer for "
        "that (GDPO).",
    ),
    "sync_ref_model": (
        False,
        "False",
        "Moving the reference towards the policy makes the KL term measure recent drift only: nothing holds the run "
        "to the model it started from. Use trl.GRPOTrainer for that (TR-DPO).",
    ),
}


def _other_objectives(config: "DrGRPOConfig") -> Rules:
    """Values under which the run would not be Dr. GRPO any more."""
    for name, (needed, expected, consequence) in _OBJECTIVE.items():
        value = getattr(config, name)
        if value == needed:
            continue
        remedy = f"Remove it: Dr. GRPO sets it. {consequence}"
        if name == "loss_type":
            bias = _BIAS_OF_LOSS.get(value, "It is not the objective of Dr. GRPO.")
            remedy = f"Remove it: Dr. GRPO sets it. {bias} {consequence}"
            # "dr-grpo" is meant for the right one.
            remedy = did_you_mean(str(value).lower(), ["dr_grpo"], remedy, cutoff=0.8, form="{!r}")
        yield InputError(name, repr(value), expected, remedy)


def _check_ranges(config: "DrGRPOConfig") -> None:
    """Refuse numbers out of range, also where `generation_kwargs` override the fields of the same names."""
    options: Any = config.generation_kwargs or {}  # a mapping by now

    def readable(values: Mapping[str, Any]) -> Mapping[str, Any]:
        # vLLM switches top-k off with -1, transformers with 0.
        if config.use_vllm and values.get("top_k") == -1:
            return {**values, "top_k": 0}
        return values

    refuse_out_of_range(readable(vars(config)))
    try:
        refuse_out_of_range(readable(options))
    except InputError as error:
        raise error.under(f"generation_kwargs: {error.field}") from None


def _values(config: "DrGRPOConfig") -> Rules:
    """Values of one field that cannot be."""
    for name in ("reward_weights", "step_reward_weights"):
        weights = getattr(config, name)
        # A range without bounds allows every finite number.
        is_list = isinstance(weights, list | tuple) and all(map(Range().allows, weights))
        if weights is not None and not is_list:
            yield InputError(name, repr(weights), "a list of finite numbers", "Give one number per function.")
    # Checkpoints and logs.
    if config.enable_jit_checkpoint:
        remedy = "Remove it: on SIGTERM a checkpoint is saved anyway, and behind a whole optimizer step."
        yield InputError("enable_jit_checkpoint", "True", "False", remedy)
    if config.logging_strategy == "steps" and config.logging_steps == 0:
        remedy = "Set logging_strategy='no' to turn logging off."
        yield InputError("logging_steps", "0", "a number above 0 with logging_strategy 'steps'", remedy)
    for name in CHECKPOINT_OPTIONS:
        options = getattr(config, name, None) or {}
        if options.get("every_n_layers", 1) < 1:
            remedy = "1 checkpoints every layer."
            yield InputError(f"{name}: every_n_layers", f"{options['every_n_layers']}", "1 or more", remedy)
        if options.get("offload") and not _checkpoints(config):
            remedy = "Only checkpoints go to the host: switch checkpointing on, or remove it."
            yield InputError(f"{name}: offload", "True without gradient_checkpointing", "False", remedy)
    # Lengths.
    longest = config.max_completion_length
    context = config.vllm_max_model_length
    if longest is None and config.loss_normalizer is None:
        remedy = (
            "Without a length limit there is no default constant to divide by: set loss_normalizer, for example to "
            "the longest length you expect."
        )
        got = "None together with max_completion_length=None"
        yield InputError("loss_normalizer", got, "a positive number of tokens", remedy)
    if config.use_vllm and context is not None and longest is not None and longest >= context:
        remedy = "Prompt and completion share that length: raise it, or lower max_completion_length."
        got = f"{longest} with vllm_max_model_length={context}"
        yield InputError("max_completion_length", got, f"less than {context}", remedy)
    if config.dynamic_sampling not in (False, True, "dapo"):
        remedy = "Use True to keep the objective, 'dapo' for the mean over the live groups."
        yield InputError("dynamic_sampling", repr(config.dynamic_sampling), "True, False or 'dapo'", remedy)


def _checkpoints(config: "DrGRPOConfig") -> bool:
    """Tell whether layers are checkpointed. The newer name wins where it is set."""
    newer = getattr(config, "activation_checkpointing", None)
    if newer is None:
        return config.gradient_checkpointing
    return bool(newer)


def _pairs(config: "DrGRPOConfig") -> Rules:
    """Fields that can have one value only beside another setting."""
    beta = config.beta
    is_baseline = config.process_role == "baseline"
    checkpointing: Any = config.gradient_checkpointing_kwargs or {}
    reenters = config.gradient_checkpointing and bool(checkpointing.get("use_reentrant"))
    forks = config.forks > 1
    skipped = {"dynamic_sampling": False, "curriculum": False}
    no_forks = {"fork_depth": 1, "fork_threshold": None, "fork_at": "drawn"}
    paid = {"step_credit": "return_to_go", "step_baseline": "to_go", "process_weight": 1}
    # Whether the setting applies, how a message calls it, the fields that it leaves a single value, and the remedy.
    table: list[tuple[object, str, dict[str, Any], str]] = [
        (
            beta == 0,
            f"beta={beta}",
            {"beta_warmup_steps": 0},
            "There is nothing to warm up without a KL term: set beta, or leave beta_warmup_steps out.",
        ),
        (
            beta != 0,
            f"beta={beta}",
            skipped,
            "Skipped groups would be missing from the KL term: set beta=0, or turn it off.",
        ),
        (
            config.entropy_coef or config.use_adaptive_entropy,
            "an entropy bonus",
            skipped,
            "Skipped groups would be missing from the entropy bonus: turn one of them off.",
        ),
        (
            config.router_aux_loss_coef == 0,
            "router_aux_loss_coef=0",
            {"router_aux_scope": "micro_batch"},
            "There is no load-balancing loss: remove it.",
        ),
        (
            reenters,
            "use_reentrant=True",
            {"router_aux_scope": "micro_batch"},
            "Reentrant checkpointing keeps no gradient of the router's probabilities: remove use_reentrant.",
        ),
        (not config.curriculum, "curriculum=False", {"prior_pass_rates": None}, "Set curriculum=True to use it."),
        (is_baseline, "process_role='baseline'", paid, "It only applies to process_role='reward': remove it."),
        (
            is_baseline,
            "process_role='baseline'",
            {"dynamic_sampling": False},
            "With a baseline per step, groups of equal rewards train, too: use curriculum, or 'reward'.",
        ),
        (config.dynamic_sampling is True, "dynamic_sampling=True", {"shuffle_dataset": True}, _IN_ORDER),
        (config.curriculum, "curriculum=True", {"shuffle_dataset": True}, _IN_ORDER),
        (not forks, "forks=1", no_forks, "Set forks=2 or more, or remove it."),
        (
            forks,
            "forks",
            {"process_role": "reward", "step_baseline": "to_go"},
            "Forks compare the branches of a cut with each other: remove it.",
        ),
        (
            forks,
            "forks",
            {"mask_truncated_completions": False},
            "A truncated branch stays in its siblings' means without a gradient, which biases it: remove it.",
        ),
        (
            forks,
            "forks",
            {"importance_sampling_level": "token"},
            "One ratio per row averages the rewards of the branches over the row: set 'token'.",
        ),
        (
            forks,
            "forks",
            {"vllm_structured_outputs_regex": None},
            "It would match only a branch's text after the cut: remove it.",
        ),
        (config.use_vllm, "use_vllm", {"generation_rows": None}, _OWN_CACHE),
        (
            config.use_transformers_continuous_batching,
            "use_transformers_continuous_batching",
            {"generation_rows": None},
            _OWN_CACHE,
        ),
    ]
    for applies, beside, values, remedy in table:
        for name, allowed in values.items():
            value = getattr(config, name)
            if applies and value != allowed:
                yield InputError(name, f"{value!r} with {beside}", repr(allowed), remedy)
    prompts = _rows(config) // (config.num_generations or 1)
    name = "dynamic_sampling" if config.dynamic_sampling else "curriculum"
    value = getattr(config, name)
    if value and prompts < 2:
        remedy = "Its weights need at least two prompts per batch: raise gradient_accumulation_steps."
        yield InputError(name, f"{value!r} with one prompt per generation batch", "two or more", remedy)


_IN_ORDER = "In a fixed order, prompts behind skipped ones would weigh more: remove it."
_OWN_CACHE = "It keeps as many rows in its cache as fit, by its own settings: remove it."


def _forks(config: "DrGRPOConfig") -> Rules:
    """Groups without room for forks, and fields of forks that do not fit each other."""
    if config.forks == 1:
        return
    # With forks=2 and fork_depth=2 a parent becomes 4 completions, so that 8 are two parents.
    leaves = config.forks**config.fork_depth
    size = config.num_generations or 1
    if size % leaves or size < 2 * leaves:
        got = f"{config.forks} (fork_depth={config.fork_depth}) with num_generations={size}"
        expected = "at least two parents per prompt, each with forks ** fork_depth completions"
        remedy = f"Set num_generations to a multiple of forks ** fork_depth = {leaves}, for example {2 * leaves}."
        yield InputError("forks", got, expected, remedy)
    got = f"{config.fork_threshold} with fork_at={config.fork_at!r}"
    if config.fork_at == "drawn" and config.fork_threshold is not None:
        yield InputError("fork_threshold", got, "None", "It is for 'entropy' and 'doubt' only: remove it.")
    if config.fork_at != "drawn" and config.fork_threshold is None:
        yield InputError("fork_threshold", got, "a number", "Set it in nats of entropy per token, or as 1 - score.")
    if list(config.step_separator or ()) == ["turn"]:
        remedy = "Without tools a completion has a single turn: set a separator for its steps."
        yield InputError("step_separator", "'turn' with forks", "separators, 're:<pattern>' or 'tokens:<n>'", remedy)


def distorted(config: "DrGRPOConfig") -> Iterator[tuple[str, Any, Any]]:
    """Fields that let completions be sampled from another distribution than the policy, as a message names them:
    field, value, and the value that switches it off. `generation_kwargs` override the fields of the same names."""
    options: Any = config.generation_kwargs or {}
    for name, value, off in that_do_something({**vars(config), **options}):
        field = f"generation_kwargs: {name}" if name in options else name
        yield field, value, off


def refuse_distorted_sampling(config: "DrGRPOConfig", remedy: str, beside: str = "") -> None:
    """Refuse `top_p`, `repetition_penalty` and the like, wherever they are set.

    Args:
        config ([`DrGRPOConfig`]): The configuration.
        remedy (`str`): Why, and what to do.
        beside (`str`, *optional*): The conflicting setting.

    Raises:
        `InputError`: Names the field.
    """
    for field, value, off in distorted(config):
        raise InputError(field, f"{value}{beside}", f"{off}, so that the policy is sampled as it is", remedy)


def warn_of_distorted_sampling(config: "DrGRPOConfig") -> None:
    """Say once per run what such a setting makes of the gradient, where nothing corrects for it."""
    settings = [f"{field}={value}" for field, value, _ in distorted(config)]
    if settings:
        logger.warning(
            "%s: completions come from another distribution than the one whose log-probabilities are trained, and no "
            "ratio corrects for it, so the gradient is not that of the expected reward. Remove it to sample the "
            "policy as it is.",
            ", ".join(settings),
        )


# Keys of `generation_kwargs` that see the tokens of a branch, which continues a prompt that ends at the cut, in the
# place of the completion's.
_SEE_THE_COMPLETION_ALONE = (
    "min_new_tokens min_length min_tokens exponential_decay_length_penalty begin_suppress_tokens "
    "presence_penalty frequency_penalty encoder_repetition_penalty encoder_no_repeat_ngram_size "
    "structured_outputs guided_decoding stop stop_strings bad_words"
)
_LIMITS = ("max_new_tokens", "max_tokens", "max_time", "max_length")
_IN_PLACE = "Set temperature in its place: log-probabilities are those at that temperature."
_ONE_ROW = "transformers drafts tokens for a single row only, and a batch has several: remove it."
# Keys under which rows are not what the trainer takes them for.
_UNSOUND = {
    "pad_token_id": "Rows are padded with the tokenizer's: set tokenizer.pad_token.",
    "token_healing": "It would write the end of the prompt anew, and the completion would be cut at the wrong place.",
    "ignore_eos": "What stands behind the end of a completion would be trained.",
    "truncate_prompt_tokens": "The policy would be trained behind another prompt than the completion was written for.",
    "seed": "Every completion of a prompt would be the same: set seed of the run.",
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant"), _ONE_ROW),
}


def _generation(config: "DrGRPOConfig") -> Rules:
    """Ways to generate that train something else than the configuration says."""
    options: Any = config.generation_kwargs or {}

    def nothing(name: str, remedy: str, beside: str = "") -> InputError:
        return InputError(f"generation_kwargs: {name}", f"{options[name]!r}{beside}", "nothing", remedy)

    limits = list(_LIMITS)
    # Without a limit of completions, the limit of the whole context is another one.
    if config.max_completion_length is None:
        limits.remove("max_length")
    for name in limits:
        if options.get(name):
            yield nothing(name, "Set max_completion_length in its place, which is L, the loss's divisor, by default.")
    # The loss divides logits by the field's temperature.
    if options.get("temperature") not in (None, config.temperature):
        got = f"{options['temperature']!r} with temperature={config.temperature}"
        yield InputError("generation_kwargs: temperature", got, f"{config.temperature}", _IN_PLACE)
    for name, remedy in _UNSOUND.items():
        if options.get(name) not in (None, False):
            yield nothing(name, remedy)
    if options.get("stop_strings") and config.use_transformers_continuous_batching:
        remedy = "Continuous batching knows end tokens alone: switch it off."
        yield nothing("stop_strings", remedy, " with use_transformers_continuous_batching")
    for name in _SEE_THE_COMPLETION_ALONE.split():
        if config.forks > 1 and options.get(name):
            yield nothing(name, "It would see only a branch's text after the cut: remove it.", " with forks")
    # What follows is about the ratio of the policy's probabilities to vLLM's.
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return
    remedy = (
        "vLLM's probabilities would be of that distribution, the policy's of its own, so every ratio would be off. "
        "Remove it, or set vllm_importance_sampling_correction=False."
    )
    refuse_distorted_sampling(config, remedy, " with vllm_importance_sampling_correction=True")
    bounds = {config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max}
    # Truncation without a bound truncates nothing.
    if config.vllm_importance_sampling_mode.endswith("_truncate") and bounds == {None}:
        got = f"None with vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r}"
        remedy = "Set it (TRL's default is 3.0), or use 'sequence_mask' for the unclipped ratio of a row."
        yield InputError("vllm_importance_sampling_clip_max", got, "a number", remedy)


def _rows(config: "DrGRPOConfig") -> int:
    """Return the rows of a generation batch over all processes, also before TRL's constructor has filled them in."""
    steps = config.steps_per_generation or config.gradient_accumulation_steps
    return config.generation_batch_size or config.per_device_train_batch_size * _processes() * steps


def _processes() -> int:
    # The launcher's variable: `config.world_size` sets devices up, and these rules come before that.
    return int(os.environ.get("WORLD_SIZE", "1"))


def _groups(config: "DrGRPOConfig") -> Rules:
    """A generation batch that would cut a prompt's group in two."""
    rows = _rows(config)
    if rows % (config.num_generations or 1):
        steps = config.steps_per_generation or config.gradient_accumulation_steps
        got = (
            f"{config.num_generations} for a generation batch of {rows} rows (generation_batch_size, or "
            f"per_device_train_batch_size {config.per_device_train_batch_size} x {_processes()} processes x {steps})"
        )
        remedy = (
            "Every prompt needs all its completions in the batch: change gradient_accumulation_steps or "
            "per_device_train_batch_size so that the product is a multiple of num_generations."
        )
        yield InputError("num_generations", got, "a divisor of the generation batch", remedy)


def validate_batch(config: "DrGRPOConfig") -> None:
    """Refuse a generation batch that was worked out before a field behind it was assigned to, and one whose groups
    cannot fork on these processes."""
    batch = config.per_device_train_batch_size
    steps = config.steps_per_generation or 1
    processes = config.world_size
    rows = batch * steps
    if config.generation_batch_size != rows * processes:
        got = f"{config.generation_batch_size}, computed when the configuration was built"
        sizes = f"per_device_train_batch_size {batch} x {processes} processes x steps_per_generation {steps}"
        remedy = (
            "Pass batch sizes to DrGRPOConfig(...), or assign generation_batch_size and steps_per_generation, too."
        )
        raise InputError("generation_batch_size", got, f"{rows * processes}: {sizes}", remedy)
    # The branches of a parent must not be spread over processes.
    size = config.num_generations or 1
    leaves = config.forks**config.fork_depth
    # Their rounds may be as small as the fewest groups that divide evenly among the processes. That is
    # size / gcd(processes, size) rows each: 4 rows for 2 processes and groups of 8.
    if config.dynamic_sampling or config.curriculum:
        rows = math.gcd(rows, size // math.gcd(processes, size))
    if processes > 1 and rows % leaves:
        got = f"{config.forks} (fork_depth={config.fork_depth}) with {rows} rows per process"
        remedy = "The branches of a parent stay on one process: raise per_device_train_batch_size."
        raise InputError("forks", got, f"a multiple of {leaves} rows", remedy)
