"""A warning before training when the plan of the run does not fit the device, with settings that would.

It never stops a run: one that cannot be planned is noted in the debug log and left alone.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.memory.estimate import Planner
from trl_drgrpo.single_gpu.memory.memory_settings import LOADED_IN, Setup, default_margin, from_keys, readable
from trl_drgrpo.single_gpu.memory.proposal import propose
from trl_drgrpo.upstream.checkpoint_weights import REFERENCE
from trl_drgrpo.upstream.description import DescribingCallback

logger = logging.getLogger(__name__)

# Length of a prompt that a plan assumes: prompts are not tokenized yet when training starts.
ASSUMED_PROMPT = 512


class MemoryWatch(DescribingCallback):
    """Warns when training begins, on a GPU."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        memory = device_memory(args.device)
        if not memory:
            return
        try:
            message = what_does_not_fit(args, kwargs["model"], memory)
        except (InputError, NotImplementedError) as error:
            logger.debug("No memory plan for this run: %s: %s", type(error).__name__, error)
            return
        if message and args.process_index == 0:
            logger.warning(message)


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of an NVIDIA or AMD GPU; `None` for other devices, whose allocators are not planned."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[1]


def what_does_not_fit(args: TrainingArguments, model: PreTrainedModel, memory: int) -> str | None:
    """Return the warning for a run on a device of `memory` bytes, in two lines; `None` when the plan fits."""
    setup = setup_of(args, model)
    planner = Planner(getattr(model, "base_model", model).config, setup, memory)
    estimate = planner.estimate(setup)
    if estimate.total <= memory:
        return None
    # As many rows per optimizer step as now: the proposal changes memory and time, not what is learned.
    rows = setup.batch * setup.accumulation
    room = memory - default_margin(memory)
    # Shorter completions change what is learned: they are proposed only where no smaller micro-batch fits.
    proposal = propose(planner, setup, room, given=("max_completion_length",), rows=rows)
    if not proposal.fits:
        proposal = propose(planner, setup, room, rows=rows)
    settings = ", ".join(f"{key}: {value}" for key, value in proposal.keys.items())
    advice = f"would fit: {settings}." if proposal.fits else f"nothing fits; the smallest tried: {settings}."
    peak = readable(estimate.total)
    over = readable(estimate.total - memory)
    return (
        f"The planned peak of {peak} ({estimate.peak}) is {over} "
        f"more than this device has ({readable(memory)}), with prompts of {setup.prompt} tokens.\n"
        f"`trl-drgrpo plan`: {advice}"
    )


def setup_of(args: TrainingArguments, model: PreTrainedModel) -> Setup:
    """Return the setup of a trainer's run."""
    device = "cuda" if args.device.type == "cuda" else "cpu"
    values = {name: getattr(args, name) for name in vars(args)}
    values["optim"] = getattr(args.optim, "value", args.optim)
    values["dtype"] = _dtype(model)
    values["load_in_4bit"] = bool(getattr(model, "is_loaded_in_4bit", False))
    values["load_in_8bit"] = bool(getattr(model, "is_loaded_in_8bit", False))
    adapters = getattr(model, "peft_config", {})
    lora = adapters.get(model.active_adapter) if adapters else None
    if lora is not None:
        if lora.peft_type != "LORA":
            raise NotImplementedError(f"no plan for adapters of type {lora.peft_type}")
        values["use_peft"] = True
        values["lora_r"] = lora.r
        values["lora_dropout"] = lora.lora_dropout
        targets = lora.target_modules
        values["lora_target_modules"] = targets if isinstance(targets, str) else sorted(targets)
    # TRL has filled it in for all processes; `steps_per_generation` says the same for one.
    values["generation_batch_size"] = None
    return replace(from_keys(values, ASSUMED_PROMPT, device), goes_on=REFERENCE in adapters)


def _dtype(model: PreTrainedModel) -> str:
    """Return the dtype of the model's weights: not that of adapters, nor the bytes of quantized layers."""
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if "lora_" not in name and dtype in LOADED_IN:
            return dtype
    raise NotImplementedError("no plan for a model without weights of its own")
