"""From an amount of memory to batch sizes that fit: the largest micro-batch, the rest by accumulation.

What the user gave stays as it is. Otherwise, in this order: the rows of an optimizer step are kept (64 where nothing
says how many); the completion length is 1,024, or the longest below it that fits into the model's context, behind the
prompt, and with the smallest batch; the micro-batch is the largest that fits; one generation serves as many
micro-batches of the step as fit.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from trl_drgrpo.single_gpu.memory.estimate import Estimate, Planner
from trl_drgrpo.single_gpu.memory.memory_settings import KEYS, Setup
from trl_drgrpo.single_gpu.memory.meta_model import context_length

ROWS_PER_STEP = 64
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
        return {KEYS[name]: getattr(self.estimate.setup, name) for name in PROPOSED}


def propose(planner: Planner, setup: Setup, memory: int, given: Any = (), rows: int | None = None) -> Proposal:
    """The best settings that fit.

    Args:
        planner ([`Planner`]): Of the model.
        setup ([`Setup`]): Given values and defaults.
        memory (`int`): Bytes of the device.
        given (`Collection[str]`): Recipe keys that must stay as they are.
        rows (`int`, *optional*): Of an optimizer step; by default what the given batch sizes say, or 64.

    Returns:
        [`Proposal`]: With `fits=False`, the settings that need least.
    """
    if rows is None:
        says = {"per_device_train_batch_size", "gradient_accumulation_steps"} & set(given)
        rows = setup.batch * setup.accumulation if says else ROWS_PER_STEP
    rows = lcm(rows, setup.group)  # every prompt with all its completions
    lengths = [setup.completion]
    if "max_completion_length" not in given:
        context = context_length(planner.config)
        longest = LENGTHS[0] if context is None else max(1, context - setup.prompt)
        lengths = sorted({min(length, longest) for length in LENGTHS}, reverse=True)
    least = setup
    for completion in lengths:
        batches = _batches(replace(setup, completion=completion), rows, given)
        least = min(_generations(batches[-1], given), key=lambda each: each.generated_rows)
        if planner.training(least) > memory:
            continue
        # What a micro-batch needs grows with it: the first that fits is found by halving.
        first = bisect_left(batches, True, key=lambda each: planner.training(each) <= memory)
        for candidate in batches[first:]:
            for settled in _generations(candidate, given):
                estimate = planner.estimate(settled)
                if estimate.total <= memory:
                    return Proposal(estimate, True)
    return Proposal(planner.estimate(least), False)


def _batches(setup: Setup, rows: int, given: Any) -> list[Setup]:
    """Micro-batches for so many rows per step, the largest first."""
    sizes = [n for n in range(min(rows, 64), 0, -1) if rows % n == 0]
    if "per_device_train_batch_size" in given:
        sizes = [setup.batch]
    elif "gradient_accumulation_steps" in given:
        sizes = [max(1, rows // setup.accumulation)]
    fixed = "gradient_accumulation_steps" in given
    return [replace(setup, batch=n, accumulation=setup.accumulation if fixed else max(1, rows // n)) for n in sizes]


def _generations(setup: Setup, given: Any) -> list[Setup]:
    """Micro-batches per generation, the most first: whole groups, and a divisor of the step."""
    if {"steps_per_generation", "generation_batch_size"} & set(given):
        return [setup]
    steps = [n for n in range(setup.accumulation, 0, -1) if setup.accumulation % n == 0]
    whole = [n for n in steps if setup.batch * n % setup.group == 0]
    return [replace(setup, steps_per_generation=n) for n in whole or [setup.accumulation]]
