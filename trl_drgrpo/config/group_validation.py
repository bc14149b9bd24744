"""Groups of completions that a configuration cannot make: batches that cut them in two, and forks that do not fit."""

import math
import os
from typing import Any

from trl_drgrpo.common.errors import InputError

# Fields of `generation_kwargs` by what a branch, which continues a prompt that ends at the cut, would make of them.
_SEE_THE_COMPLETION_ALONE = (
    *("min_new_tokens", "min_length", "min_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("presence_penalty", "frequency_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("structured_outputs", "guided_decoding", "stop", "bad_words"),
)
_LIMITS = ("max_new_tokens", "max_length", "max_tokens")


def validate_forks(config: Any) -> None:
    """Forks: groups have room for them, and credit is theirs."""
    if config.forks == 1:
        changed = [name for name, off in (("fork_depth", 1), ("fork_threshold", None)) if getattr(config, name) != off]
        if changed or config.fork_at != "drawn":
            name = (changed or ["fork_at"])[0]
            raise InputError(
                name, repr(getattr(config, name)), "the default with forks=1", "Set forks=2 or more, or remove it."
            )
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
    for name, allowed in (("process_role", ("reward",)), ("step_baseline", ("to_go",))):
        if getattr(config, name) not in allowed:
            remedy = "Forks compare the branches of a cut with each other: remove it."
            raise InputError(name, f"{getattr(config, name)!r} with forks", f"{allowed[0]!r}", remedy)
    if config.mask_truncated_completions:
        remedy = "A truncated branch stays in its siblings' means without a gradient, which biases it: remove it."
        raise InputError("mask_truncated_completions", "True with forks", "False", remedy)
    if config.importance_sampling_level != "token":
        remedy = "One ratio per row averages the rewards of the branches over the row: set 'token'."
        raise InputError("importance_sampling_level", "'sequence' with forks", "'token'", remedy)
    _validate_forked_generation(config)


def _validate_forked_generation(config: Any) -> None:
    """Settings under which a branch would be sampled from another distribution than the rest of its parent."""
    remedies = dict.fromkeys(_SEE_THE_COMPLETION_ALONE, "It would see only a branch's text after the cut: remove it.")
    remedies |= dict.fromkeys(_LIMITS, "Branches share their parent's token limit: set max_completion_length instead.")
    for name, remedy in remedies.items():
        if (config.generation_kwargs or {}).get(name):
            got = f"{config.generation_kwargs[name]!r} with forks"
            raise InputError(f"generation_kwargs: {name}", got, "nothing", remedy)
    if config.vllm_structured_outputs_regex is not None:
        got = f"{config.vllm_structured_outputs_regex!r} with forks"
        remedy = "It would match only a branch's text after the cut: remove it."
        raise InputError("vllm_structured_outputs_regex", got, "None", remedy)


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
