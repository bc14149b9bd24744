"""From an amount of memory to batch sizes that fit: the largest micro-batch, the rest by accumulation.

What the user gave stays as it is. Otherwise, in this order: the rows of an optimizer step are kept (64 where nothing
says how many); the completion length is 1,024, or the longest below it that fits into the model's context, behind the
prompt, and with the smallest batch; the micro-batch is the largest that fits; one generation serves as many
micro-batches of the step as fit. Where nothing fits that way, the same again with what costs time alone: generation in
rounds of fewer rows, then checkpoints that wait on the host, too.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS
from trl_drgrpo.single_gpu.memory.estimate import Estimate, Planner
from trl_drgrpo.single_gpu.memory.memory_settings import FIELD_KEYS, Setup
from trl_drgrpo.single_gpu.vocabulary import context_length

ROWS_PER_STEP = 64  # 8 prompts at the usual 8 completions
LARGEST_BATCH = 64
LENGTHS = (1024, 768, 512, 384, 256, 128, 64)
PROPOSED = ("batch", "accumulation", "steps_per_generation", "group", "completion", "checkpointing")


@dataclass(frozen=True)
class Proposal:
    """Settings that fit, or the smallest there are.

    Args:
        estimate ([`Estimate`]): Of the settings.
        fits (`bool`): Whether they fit the memory.
    """

    estimate: Estimate
    fits: bool

    @property
    def keys(self) -> dict[str, Any]:
        """The settings as recipe keys."""
        setup = self.estimate.setup
        names = [*PROPOSED]
        if setup.generation_rows:
            names.append("generation_rows")
        keys = {FIELD_KEYS[name]: getattr(setup, name) for name in names}
        if setup.offload:
            keys[CHECKPOINT_OPTIONS[0]] = {"offload": True}
            if setup.checkpoint_every > 1:
                keys[CHECKPOINT_OPTIONS[0]] = {"every_n_layers": setup.checkpoint_every, "offload": True}
        return keys


def propose(
    planner: Planner, setup: Setup, memory: int, given: Collection[str] = (), rows: int | None = None
) -> Proposal:
    """Find the best settings that fit.

    Args:
        planner ([`Planner`]): Planner of the model.
        setup ([`Setup`]): Given values and defaults.
        memory (`int`): Bytes of the device.
        given (`Collection[str]`): Recipe keys that must stay unchanged.
        rows (`int`, *optional*): Rows of an optimizer step; by default those of the given batch sizes, or 64.

    Returns:
        [`Proposal`]: With `fits=False`, the settings that need least.
    """
    if rows is None:
        rows = ROWS_PER_STEP
        if {"per_device_train_batch_size", "gradient_accumulation_steps"} & set(given):
            rows = setup.batch * setup.accumulation
    rows = lcm(rows, setup.group)  # every prompt with all its completions
    lengths = [setup.completion]
    if "max_completion_length" not in given:
        context = context_length(planner.config)
        longest = LENGTHS[0] if context is None else max(1, context - setup.prompt)
        lengths = sorted({min(length, longest) for length in LENGTHS}, reverse=True)
    least = setup
    for in_rounds, way in _ways(setup, given):
        for completion in lengths:
            batches = _batches(replace(way, completion=completion), rows, given)
            # Where the smallest micro-batch does not train, no larger one does.
            least = min(_generations(batches[-1], given), key=lambda candidate: candidate.generated_rows)
            if in_rounds:
                least = _rounds(least)[-1]
            if planner.training(least) > memory:
                continue
            # A larger micro-batch needs more, so bisection finds the first that fits. `training` is a lower bound,
            # hence the candidates behind it are estimated in full, one by one.
            first = bisect_left(batches, True, key=lambda candidate: planner.training(candidate) <= memory)
            for candidate in _candidates(batches[first:], given, in_rounds):
                estimate = planner.estimate(candidate)
                if estimate.total <= memory:
                    return Proposal(estimate, True)
    return Proposal(planner.estimate(least), False)


def _ways(setup: Setup, given: Collection[str]) -> list[tuple[bool, Setup]]:
    """Return the ways to run, the fastest first: whether in rounds, and with checkpoints on the device or the host."""
    # Rounds cost less time than checkpoints on the host, so they come first, and then both.
    generates = not (setup.vllm or setup.generates_elsewhere)
    may_take_rounds = generates and FIELD_KEYS["generation_rows"] not in given
    ways = [(False, setup)]
    if may_take_rounds:
        ways.append((True, setup))
    is_checkpointed = setup.device == "cuda" and setup.checkpointing
    if is_checkpointed and not setup.offload and not set(CHECKPOINT_OPTIONS) & set(given):
        ways.append((may_take_rounds, replace(setup, offload=True)))
    return ways


def _candidates(batches: list[Setup], given: Collection[str], in_rounds: bool) -> Iterator[Setup]:
    """Yield the settings for some micro-batches, the fastest first."""
    for batch in batches:
        for generation in _generations(batch, given):
            if in_rounds:
                yield from _rounds(generation)
            else:
                yield generation


def _rounds(setup: Setup) -> list[Setup]:
    """Return the setup with rounds of equal size, the fewest rounds first."""
    _single_round, *sizes = _divisors(setup.generated_rows)
    return [replace(setup, generation_rows=size) for size in sizes] or [setup]


def _batches(setup: Setup, rows: int, given: Collection[str]) -> list[Setup]:
    """Return the micro-batches for so many rows per step, the largest first."""
    is_fixed = "gradient_accumulation_steps" in given
    if "per_device_train_batch_size" in given:
        sizes = [setup.batch]
    elif is_fixed:
        sizes = [max(1, rows // setup.accumulation)]
    else:
        sizes = [size for size in _divisors(rows) if size <= LARGEST_BATCH]
    # A micro-batch that does not divide the rows leaves some out: sizes that the user gave may.
    batches = []
    for size in sizes:
        accumulation = setup.accumulation if is_fixed else max(1, rows // size)
        batches.append(replace(setup, batch=size, accumulation=accumulation))
    return batches


def _generations(setup: Setup, given: Collection[str]) -> list[Setup]:
    """Return setups by micro-batches per generation, the most first: whole groups, and a divisor of the step."""
    if {"steps_per_generation", "generation_batch_size"} & set(given):
        return [setup]
    setups = []
    for steps in _divisors(setup.accumulation):
        if setup.batch * steps % setup.group == 0:
            setups.append(replace(setup, steps_per_generation=steps))
    return setups or [replace(setup, steps_per_generation=setup.accumulation)]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]
