"""From an amount of memory to batch sizes that fit: the largest micro-batch, the rest by accumulation.

What the user gave stays as it is. Otherwise, in this order: the rows of an optimizer step are kept (64 where nothing
says how many); the completion length is 1,024, or the longest below it that fits with the smallest batch; the
micro-batch is the largest that fits; one generation serves as many micro-batches of the step as fit.
"""

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.memory.amounts import default_margin, readable
from trl_drgrpo.single_gpu.memory.estimate import Estimate, Planner
from trl_drgrpo.single_gpu.memory.setup import LOADED_IN, Setup, from_keys
from trl_drgrpo.upstream.description import DescribingCallback

ROWS_PER_STEP = 64
LENGTHS = (1024, 768, 512, 384, 256, 128, 64)


@dataclass(frozen=True)
class Proposal:
    """Settings that fit, or the smallest there are.

    Args:
        estimate ([`Estimate`]): Of the settings.
        fits (`bool`): Whether they fit the memory.
        keys (`dict[str, Any]`): The settings as recipe keys.
    """

    estimate: Estimate
    fits: bool
    keys: dict[str, Any]


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
    lengths = [setup.completion] if "max_completion_length" in given else list(LENGTHS)
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
                if planner.estimate(settled).total <= memory:
                    return Proposal(planner.estimate(settled), True, keys(settled))
    return Proposal(planner.estimate(least), False, keys(least))


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


def keys(setup: Setup) -> dict[str, Any]:
    """The batch geometry and lengths of a setup as recipe keys."""
    return {
        "per_device_train_batch_size": setup.batch,
        "gradient_accumulation_steps": setup.accumulation,
        "steps_per_generation": setup.steps_per_generation,
        "num_generations": setup.group,
        "max_completion_length": setup.completion,
        "gradient_checkpointing": setup.checkpointing,
    }


logger = logging.getLogger(__name__)

# Prompts are not tokenized yet when training starts; what a plan assumes without being told.
ASSUMED_PROMPT = 512


class MemoryWatch(DescribingCallback):
    """Warns when training begins.

    Args:
        memory (`int`, *optional*): Bytes of the device; asked from it by default, and then only on a GPU.
    """

    def __init__(self, memory: int | None = None):
        self.memory = memory

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        memory = self.memory if self.memory is not None else device_memory(args.device)
        try:
            message = what_does_not_fit(args, model, memory) if memory else None
        except (InputError, NotImplementedError) as error:
            logger.debug("No memory plan for this run: %s: %s", type(error).__name__, error)
            return
        if message and args.process_index == 0:
            logger.warning(message)


def device_memory(device: torch.device) -> int | None:
    """Bytes of an NVIDIA or AMD GPU; `None` for anything else, whose allocators are not planned."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def what_does_not_fit(args: Any, model: Any, memory: int) -> str | None:
    """The warning for a run on a device of `memory` bytes, two lines; `None` when the plan fits."""
    setup = setup_of(args, model)
    config = getattr(model, "base_model", model).config.get_text_config(decoder=True)
    planner = Planner(config, setup, memory)
    estimate: Estimate = planner.estimate(setup)
    if estimate.total <= memory:
        return None
    rows, room = setup.batch * setup.accumulation, memory - default_margin(memory)
    proposal = propose(planner, setup, room, given=("max_completion_length",), rows=rows)
    if not proposal.fits:
        proposal = propose(planner, setup, room, rows=rows)
    settings = ", ".join(f"{key}: {value}" for key, value in proposal.keys.items())
    advice = f"would fit: {settings}." if proposal.fits else f"nothing fits; the smallest tried: {settings}."
    peak, over = readable(estimate.total), readable(estimate.total - memory)
    return (
        f"The planned peak of {peak} ({estimate.peak.name}) is {over} "
        f"more than this device has ({readable(memory)}), with prompts of {setup.prompt} tokens.\n"
        f"`trl-drgrpo plan`: {advice}"
    )


def setup_of(args: Any, model: Any) -> Setup:
    """The setup of a trainer's run."""
    device = "cuda" if args.device.type == "cuda" else "cpu"
    values = {name: getattr(args, name) for name in vars(args)}
    values["optim"] = getattr(args.optim, "value", args.optim)
    values["dtype"] = _dtype_of(model)
    values["load_in_4bit"] = bool(getattr(model, "is_loaded_in_4bit", False))
    values["load_in_8bit"] = bool(getattr(model, "is_loaded_in_8bit", False))
    lora = getattr(model, "peft_config", {}).get("default")
    if lora is not None and lora.peft_type != "LORA":
        raise NotImplementedError(f"no plan for adapters of type {lora.peft_type}")
    if lora is not None:
        targets = lora.target_modules
        values |= {
            "use_peft": True,
            "lora_r": lora.r,
            "lora_dropout": lora.lora_dropout,
            "lora_target_modules": targets if isinstance(targets, str) else sorted(targets),
        }
    values["generation_batch_size"] = None  # per process it is what steps_per_generation says
    return from_keys(values, ASSUMED_PROMPT, device)


def _dtype_of(model: Any) -> str:
    names = (str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters() if "lora_" not in name)
    return next(name for name in names if name in LOADED_IN)
