"""Real runs on a CPU whose memory is measured: every allocation and release of PyTorch's CPU allocator, in order."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from runs import build, short_run
from torch.profiler import ProfilerActivity, profile, record_function

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.upstream.trl_overrides import swapped


@dataclass(frozen=True)
class Measured:
    """Most bytes alive at once, weights included: over the whole run, and per phase."""

    total: int
    phases: dict[str, int]


def varied(completion_ids, **kwargs):
    """A reward that differs within every group."""
    return [float(i % 4) for i in range(len(completion_ids))]


def no_signal_from(length: int):
    """As `varied`, but equal for all completions of prompts that are so long."""

    def reward(prompts, completion_ids, **kwargs):
        values = varied(completion_ids)
        return [1.0 if len(prompt) == length else value for prompt, value in zip(prompts, values, strict=True)]

    return reward


def trainer_of(model, tokenizer, folder, prompt: int, peft_config=None, short: int = 0, **settings) -> DrGRPOTrainer:
    """A run on prompts of `prompt` tokens whose completions all reach their limit. With `short` only every so
    many-th prompt is that long, and has no signal; the others are a quarter as long."""
    lengths = [prompt // 4 if short and i % short else prompt for i in range(64)]
    dataset = Dataset.from_dict({"prompt": [chr(97 + i % 26) * length for i, length in enumerate(lengths)]})
    model.generation_config.eos_token_id = None
    fields = {**short_run(folder), "max_steps": 2, "learning_rate": 1e-3, "gradient_checkpointing": True}
    if short:
        fields["shuffle_dataset"] = False  # one long prompt in every generation
    reward = no_signal_from(prompt) if short else varied
    settings = {**fields, "use_cpu": True, **settings}
    return build(DrGRPOTrainer, settings, dataset, tokenizer, reward, model, peft_config=peft_config)


def cut_at_random(trainer: DrGRPOTrainer, seed: int = 0) -> None:
    """Completions end anywhere, as if the model had drawn its end-of-sequence token there."""
    generator = torch.Generator().manual_seed(seed)
    generate = trainer._generate_single_turn

    def cut(*args, **kwargs):
        completions, *rest = generate(*args, **kwargs)
        lengths = [int(torch.randint(1, len(ids) + 1, (1,), generator=generator)) for ids in completions]
        return [ids[:length] for ids, length in zip(completions, lengths, strict=True)], *rest

    trainer._generate_single_turn = cut


def measure(trainer: DrGRPOTrainer) -> Measured:
    """Train, and read from the profiler what the allocator did."""
    gc.collect()  # what earlier runs left behind would count as freed by this one
    before = resident([trainer.model, trainer.ref_model])
    with _named_phases(trainer), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train()
    events = list(profiler.profiler.kineto_results.events())
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix("phase:"))
        for event in events
        if event.name().startswith("phase:")
    ]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live, total, phases = before, before, {}
    for moment, change in changes:
        live += change
        total = max(total, live)
        for start, end, name in spans:
            if start <= moment <= end:
                phases[name] = max(phases.get(name, 0), live)
    return Measured(total, phases)


def resident(models: list[Any]) -> int:
    """Bytes of the storages that hold weights and buffers; shared ones count once."""
    tensors = [t for model in models if model is not None for t in [*model.parameters(), *model.buffers()]]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@contextmanager
def _named_phases(trainer: Any):
    def named(name, function):
        def run(*args, **kwargs):
            with record_function(f"phase:{name}"):
                return function(*args, **kwargs)

        vars(run)["watches_only"] = True
        return run

    with swapped(
        trainer,
        _generate_single_turn=named("generate", trainer._generate_single_turn),
        compute_loss=named("forward", trainer.compute_loss),
    ):
        yield
