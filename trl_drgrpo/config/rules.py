"""Rules that refuse configurations: under its condition each has field, value, expected, what to do.

`DrGRPOConfig` calls `validate` when it is built and, as its fields may be assigned to, when a trainer takes it and
when training starts. Messages name the bias that a value would bring back and the class of TRL to use for the other
objective. Kinds, choices and keys of mappings are in `field_kinds.py`, ranges of numbers in `common/ranges.py`, rules
on a trainer's other inputs in `preflight.py`.
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError, did_you_mean, in_one
from trl_drgrpo.common.generation import that_do_something
from trl_drgrpo.common.ranges import Range, refuse_out_of_range
from trl_drgrpo.config.best_metric import best_metric_rules
from trl_drgrpo.config.field_kinds import check_choices, check_keys, check_kinds
from trl_drgrpo.features.diagnostics.run_warnings import warning_thresholds
from trl_drgrpo.objective import step_choices

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig

logger = logging.getLogger(__name__)

Rules = Iterator[InputError]


def refuse(errors: Iterable[InputError]) -> None:
    """Raises the first."""
    for error in errors:
        raise error


def validate(config: "DrGRPOConfig") -> None:
    """Raise on what makes a run something else than Dr. GRPO, and on values that do not fit each other. `config` has
    `scale_rewards` as TRL's string and `step_separator` as a list."""
    check_kinds(config)
    if found := list(contradictions(config)):
        raise in_one(found)
    _check_ranges(config)
    check_choices(config)
    warning_thresholds(config.run_warnings)
    if config.step_separator is not None:
        from trl_drgrpo.process_rewards.steps.segmenter import configured_segmenter

        configured_segmenter(config.step_separator)
    credit = config.step_credit, config.step_baseline, config.deepseekmath_step_std
    step_choices.check_choices(*credit, prefix="step_")
    refuse(_values(config))
    refuse(_pairs(config))
    refuse(_forks(config))
    refuse(_generation(config))
    refuse(best_metric_rules(config))
    check_keys(config)
    refuse(_groups(config))


# What each other loss of TRL would bring back, in the words of the error message.
_BIAS_OF_LOSS = {
    "grpo": "It divides each completion's loss by its own length: a long incorrect answer is punished less per token "
    "than a short one, so incorrect answers grow (length bias).",
    "bnpo": "It divides by the tokens of a micro-batch: the weight of a token depends on which rows share it.",
}
_REMOVE = "Remove it: Dr. GRPO sets it."
OBJECTIVE = ("loss_type", "scale_rewards", "multi_objective_aggregation", "sync_ref_model")


def contradictions(c: "DrGRPOConfig | SimpleNamespace") -> Rules:
    """Values of [`OBJECTIVE`] under which the run would not be Dr. GRPO any more."""
    if c.loss_type != "dr_grpo":
        bias = _BIAS_OF_LOSS.get(c.loss_type, "It is not the objective of Dr. GRPO.")
        remedy = f"{_REMOVE} {bias} Use trl.GRPOTrainer for that objective."
        remedy = did_you_mean(str(c.loss_type).lower(), ["dr_grpo"], remedy, cutoff=0.8, form="{!r}")
        yield InputError("loss_type", repr(c.loss_type), "'dr_grpo'", remedy)
    if c.scale_rewards != "none":
        remedy = (
            f"{_REMOVE} Dividing by the standard deviation makes very easy and very hard prompts weigh more than the "
            "others (difficulty bias). Use trl.GRPOTrainer for that, or scale_by_running_std=True for one scale over "
            "all prompts."
        )
        yield InputError("scale_rewards", repr(c.scale_rewards), "'none' (or False)", remedy)
    if c.multi_objective_aggregation != "sum_then_normalize":
        expected = "'sum_then_normalize' (here: a weighted sum, nothing is normalized)"
        remedy = (
            f"{_REMOVE} Normalizing each reward divides by a group's standard deviation (difficulty bias). Use "
            "trl.GRPOTrainer for that (GDPO)."
        )
        yield InputError("multi_objective_aggregation", repr(c.multi_objective_aggregation), expected, remedy)
    if c.sync_ref_model:
        remedy = (
            f"{_REMOVE} Moving the reference towards the policy makes the KL term measure recent drift only: nothing "
            "holds the run to the model it started from. Use trl.GRPOTrainer for that (TR-DPO)."
        )
        yield InputError("sync_ref_model", "True", "False", remedy)


def _check_ranges(config: "DrGRPOConfig") -> None:
    """Numbers out of range, also where `generation_kwargs` override the fields of the same names."""

    def readable(values: Mapping[str, Any]) -> Mapping[str, Any]:  # -1: vLLM's way to switch it off
        return {**values, "top_k": 0} if config.use_vllm and values.get("top_k") == -1 else values

    refuse_out_of_range(readable(vars(config)))
    try:
        refuse_out_of_range(readable(config.generation_kwargs or {}))
    except InputError as error:
        raise error.under(f"generation_kwargs: {error.field}") from None


def _values(c: "DrGRPOConfig") -> Rules:
    for name in ("reward_weights", "step_reward_weights"):
        weights = getattr(c, name)
        if weights is not None and not (isinstance(weights, (list, tuple)) and all(map(Range().allows, weights))):
            yield InputError(name, repr(weights), "a list of finite numbers", "Give one number per function.")
    if c.logging_strategy == "steps" and c.logging_steps == 0:
        remedy = "Set logging_strategy='no' to turn logging off."
        yield InputError("logging_steps", "0", "a number above 0 with logging_strategy 'steps'", remedy)
    longest = c.max_completion_length
    context = c.vllm_max_model_length
    if longest is None and c.loss_normalizer is None:
        remedy = (
            "Without a length limit there is no default constant to divide by: set loss_normalizer, for example to "
            "the longest length you expect."
        )
        got = "None together with max_completion_length=None"
        yield InputError("loss_normalizer", got, "a positive number of tokens", remedy)
    if c.use_vllm and longest is not None and context is not None and longest >= context:
        remedy = "Prompt and completion share that length: raise it, or lower max_completion_length."
        got = f"{longest} with vllm_max_model_length={context}"
        yield InputError("max_completion_length", got, f"less than {context}", remedy)
    if c.dynamic_sampling not in (False, True, "dapo"):
        remedy = "Use True to keep the objective, 'dapo' for the mean over the live groups."
        yield InputError("dynamic_sampling", repr(c.dynamic_sampling), "True, False or 'dapo'", remedy)


def _pairs(c: "DrGRPOConfig") -> Rules:
    """Fields that can have one value only beside another setting."""
    skipped = {"dynamic_sampling": False, "curriculum": False}
    no_forks = {"fork_depth": 1, "fork_threshold": None, "fork_at": "drawn"}
    paid = {"step_credit": "return_to_go", "step_baseline": "to_go", "process_weight": 1}
    forks, baseline = c.forks > 1, c.process_role == "baseline"
    table: list[tuple[Any, str, dict[str, Any], str]] = [
        (c.beta == 0, f"beta={c.beta}", {"beta_warmup_steps": 0}, _NO_KL),
        (c.beta != 0, f"beta={c.beta}", skipped, _IN_KL),
        (c.entropy_coef or c.use_adaptive_entropy, "an entropy bonus", skipped, _IN_BONUS),
        (not c.curriculum, "curriculum=False", {"prior_pass_rates": None}, "Set curriculum=True to use it."),
        (baseline, "process_role='baseline'", paid, "It only applies to process_role='reward': remove it."),
        (baseline, "process_role='baseline'", {"dynamic_sampling": False}, _STEPS_TRAIN),
        (c.dynamic_sampling is True, "dynamic_sampling=True", {"shuffle_dataset": True}, _IN_ORDER),
        (c.curriculum, "curriculum=True", {"shuffle_dataset": True}, _IN_ORDER),
        (not forks, "forks=1", no_forks, "Set forks=2 or more, or remove it."),
        (forks, "forks", {"process_role": "reward", "step_baseline": "to_go"}, _SIBLINGS),
        (forks, "forks", {"mask_truncated_completions": False}, _CUT_OFF),
        (forks, "forks", {"importance_sampling_level": "token"}, _ONE_RATIO),
        (forks, "forks", {"vllm_structured_outputs_regex": None}, _AFTER_THE_CUT),
    ]
    for applies, beside, values, remedy in table:
        for name, value in values.items():
            if applies and getattr(c, name) != value:
                yield InputError(name, f"{getattr(c, name)!r} with {beside}", repr(value), remedy)
    name = "dynamic_sampling" if c.dynamic_sampling else "curriculum"
    if getattr(c, name) and _rows(c) // (c.num_generations or 1) < 2:
        remedy = "Its weights need at least two prompts per batch: raise gradient_accumulation_steps."
        yield InputError(name, f"{getattr(c, name)!r} with one prompt per generation batch", "two or more", remedy)


_NO_KL = "There is nothing to warm up without a KL term: set beta, or leave beta_warmup_steps out."
_IN_KL = "Skipped groups would be missing from the KL term: set beta=0, or turn it off."
_IN_BONUS = "Skipped groups would be missing from the entropy bonus: turn one of them off."
_STEPS_TRAIN = "With a baseline per step, groups of equal rewards train, too: use curriculum, or 'reward'."
_IN_ORDER = "In a fixed order, prompts behind skipped ones would weigh more: remove it."
_SIBLINGS = "Forks compare the branches of a cut with each other: remove it."
_CUT_OFF = "A truncated branch stays in its siblings' means without a gradient, which biases it: remove it."
_ONE_RATIO = "One ratio per row averages the rewards of the branches over the row: set 'token'."
_AFTER_THE_CUT = "It would match only a branch's text after the cut: remove it."


def _forks(c: "DrGRPOConfig") -> Rules:
    """Groups have room for forks, and credit is theirs."""
    if c.forks == 1:
        return
    leaves, size = c.forks**c.fork_depth, c.num_generations or 1
    if size % leaves or size < 2 * leaves:
        got = f"{c.forks} (fork_depth={c.fork_depth}) with num_generations={size}"
        expected = "at least two parents per prompt, each with forks ** fork_depth completions"
        remedy = f"Set num_generations to a multiple of forks ** fork_depth = {leaves}, for example {2 * leaves}."
        yield InputError("forks", got, expected, remedy)
    got = f"{c.fork_threshold} with fork_at={c.fork_at!r}"
    if c.fork_at == "drawn" and c.fork_threshold is not None:
        yield InputError("fork_threshold", got, "None", "It is for 'entropy' and 'doubt' only: remove it.")
    if c.fork_at != "drawn" and c.fork_threshold is None:
        yield InputError("fork_threshold", got, "a number", "Set it in nats of entropy per token, or as 1 - score.")
    if list(c.step_separator or ()) == ["turn"]:
        remedy = "Without tools a completion has a single turn: set a separator for its steps."
        yield InputError("step_separator", "'turn' with forks", "separators, 're:<pattern>' or 'tokens:<n>'", remedy)


def distorted(config: "DrGRPOConfig") -> Iterator[tuple[str, Any, Any]]:
    """Fields that let completions be sampled from another distribution than the policy, as a message names them:
    field, value, and the value that switches it off. `generation_kwargs` override the fields of the same names."""
    given = config.generation_kwargs or {}
    for name, value, off in that_do_something({**vars(config), **given}):
        yield f"generation_kwargs: {name}" if name in given else name, value, off


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
    """Says once per run what such a setting makes of the gradient, where nothing corrects for it."""
    if found := [f"{field}={value}" for field, value, _ in distorted(config)]:
        logger.warning(
            "%s: completions come from another distribution than the one whose log-probabilities are trained, and no "
            "ratio corrects for it, so the gradient is not that of the expected reward. Remove it to sample the "
            "policy as it is.",
            ", ".join(found),
        )


# Keys of `generation_kwargs` that see the tokens of a branch, which continues a prompt that ends at the cut, in the
# place of the completion's.
_SEE_THE_COMPLETION_ALONE = (
    *("min_new_tokens", "min_length", "min_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("presence_penalty", "frequency_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("structured_outputs", "guided_decoding", "stop", "stop_strings", "bad_words"),
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


def _generation(c: "DrGRPOConfig") -> Rules:
    """Ways to generate that train something else than the configuration says."""
    given = c.generation_kwargs or {}
    # Without a limit of completions, that of the whole context is none of them.
    for name in _LIMITS[:-1] if c.max_completion_length is None else _LIMITS:
        if given.get(name):
            remedy = "Set max_completion_length in its place, which is L, the loss's divisor, by default."
            yield InputError(f"generation_kwargs: {name}", repr(given[name]), "nothing", remedy)
    if given.get("temperature") not in (None, c.temperature):
        got = f"{given['temperature']!r} with temperature={c.temperature}"
        yield InputError("generation_kwargs: temperature", got, f"{c.temperature}", _IN_PLACE)
    for name, remedy in _UNSOUND.items():
        if given.get(name) not in (None, False):
            yield InputError(f"generation_kwargs: {name}", repr(given[name]), "nothing", remedy)
    if given.get("stop_strings") and c.use_transformers_continuous_batching:
        got = f"{given['stop_strings']!r} with use_transformers_continuous_batching"
        remedy = "Continuous batching knows end tokens alone: switch it off."
        yield InputError("generation_kwargs: stop_strings", got, "nothing", remedy)
    for name in _SEE_THE_COMPLETION_ALONE if c.forks > 1 else ():
        if given.get(name):
            remedy = "It would see only a branch's text after the cut: remove it."
            yield InputError(f"generation_kwargs: {name}", f"{given[name]!r} with forks", "nothing", remedy)
    if not (c.use_vllm and c.vllm_importance_sampling_correction):
        return
    refuse_distorted_sampling(
        c,
        "vLLM's probabilities would be of that distribution, the policy's of its own, so every ratio would be off. "
        "Remove it, or set vllm_importance_sampling_correction=False.",
        beside=" with vllm_importance_sampling_correction=True",
    )
    bounds = c.vllm_importance_sampling_clip_min, c.vllm_importance_sampling_clip_max
    if c.vllm_importance_sampling_mode.endswith("_truncate") and bounds == (None, None):
        got = f"None with vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r}"
        remedy = "Set it (TRL's default is 3.0), or use 'sequence_mask' for the unclipped ratio of a row."
        yield InputError("vllm_importance_sampling_clip_max", got, "a number", remedy)


def _rows(c: "DrGRPOConfig") -> int:
    """Rows of a generation batch over all processes, also before TRL's constructor has filled them in."""
    steps = c.steps_per_generation or c.gradient_accumulation_steps
    return c.generation_batch_size or c.per_device_train_batch_size * _processes() * steps


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _groups(c: "DrGRPOConfig") -> Rules:
    """A generation batch that would cut a prompt's group in two."""
    if _rows(c) % (c.num_generations or 1):
        got = (
            f"{c.num_generations} for a generation batch of {_rows(c)} rows (generation_batch_size, or "
            f"per_device_train_batch_size {c.per_device_train_batch_size} x {_processes()} processes x "
            f"{c.steps_per_generation or c.gradient_accumulation_steps})"
        )
        remedy = (
            "Every prompt needs all its completions in the batch: change gradient_accumulation_steps or "
            "per_device_train_batch_size so that the product is a multiple of num_generations."
        )
        yield InputError("num_generations", got, "a divisor of the generation batch", remedy)


def validate_batch(config: "DrGRPOConfig") -> None:
    """Refuse a generation batch that was worked out before a field behind it was assigned to, and one whose groups
    cannot fork on these processes."""
    refuse(_batch(config))


def _batch(c: "DrGRPOConfig") -> Rules:
    batch, steps, processes = c.per_device_train_batch_size, c.steps_per_generation or 1, c.world_size
    rows = batch * steps
    if c.generation_batch_size != rows * processes:
        got = f"{c.generation_batch_size}, computed when the configuration was built"
        sizes = f"per_device_train_batch_size {batch} x {processes} processes x steps_per_generation {steps}"
        remedy = (
            "Pass batch sizes to DrGRPOConfig(...), or assign generation_batch_size and steps_per_generation, too."
        )
        yield InputError("generation_batch_size", got, f"{rows * processes}: {sizes}", remedy)
    size, leaves = c.num_generations or 1, c.forks**c.fork_depth
    if c.dynamic_sampling or c.curriculum:  # rounds may be smaller
        rows = math.gcd(rows, size // math.gcd(processes, size))
    if processes > 1 and rows % leaves:
        got = f"{c.forks} (fork_depth={c.fork_depth}) with {rows} rows per process"
        remedy = "The branches of a parent stay on one process: raise per_device_train_batch_size."
        yield InputError("forks", got, f"a multiple of {leaves} rows", remedy)
