"""Runs a trainer on a tiny model and records its rows, weights, losses and gradients of every step.

A row without tokens was masked, or fills up a micro-batch: it adds nothing either way.

Nothing here knows the objective. The recording holds all inputs of an independent calculation: the completions with
the weights that sampled them, their rewards, the rows of each optimizer step, and the resulting gradient.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PrinterCallback, TrainerCallback

from trl_drgrpo.labs.check.plain_head import use_plain_lm_head
from trl_drgrpo.labs.check.tiny import in_double_precision, tiny_model, tiny_tokenizer

Weights = dict[str, torch.Tensor]
Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, completion ids, both without padding

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
# LoRA's usual init leaves B at zero, so that A gets no gradient at first: random matrices make every gradient count.


# SGD without clipping, so that a recorded gradient is the gradient; a rate large enough for ratios to leave 1.
DEFAULTS: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 0.5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


PROMPTS = [f"{i}+{i * i}=" for i in range(16)]
LONG_PROMPTS = [f"What is {i} plus {i * i}? Think about it step by step, then say it: " for i in range(16)]


@dataclass
class Rollouts:
    """One generation batch: its rows in groups, their rewards, and the weights that sampled them.

    `trained` counts how often each row was part of a loss, `micro_batches` how many of the batch's were due.
    """

    prompts: list[str]
    completions: list[tuple[int, ...]]
    rewards: list[float | None]
    weights: Weights
    trained: Counter[Row] = field(default_factory=Counter)
    micro_batches: int = 0


@dataclass
class OptimizerStep:
    """One optimizer step: the rows behind its gradient, with their generation batch, and its micro-batches' losses."""

    rows: list[tuple[Row, Rollouts]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    gradients: Weights = field(default_factory=dict)


@dataclass
class Recording:
    """A whole run."""

    steps: list[OptimizerStep]
    initial_weights: Weights
    rollouts: list[Rollouts]


def build_policy(lora: bool) -> tuple[Any, Any]:
    """The tiny model in float64, with random adapters if asked for, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    model = in_double_precision(tiny_model(tokenizer))
    if not lora:
        return model, tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(**LORA), autocast_adapter_dtype=False), tokenizer  # type: ignore


def completion_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """A reward that varies, ties, and is sometimes missing: 0, 0.5 or 1 by the sum of the ids, `None` for some."""
    return [None if sum(ids) % 11 == 0 else (sum(ids) % 3) / 2 for ids in completion_ids]


def record(
    trainer_class: type,
    config_class: type,
    *,
    lora: bool,
    plain_head: bool,
    reward: Callable[[list[list[int]]], list[float | None]] | None = None,
    prompts: Sequence[str] = PROMPTS,
    trainer_arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Recording:
    """Train the tiny model and record every optimizer step.

    Args:
        trainer_class (`type`): `DrGRPOTrainer`, or `trl.GRPOTrainer` as a control.
        config_class (`type`): The configuration that goes with it.
        lora (`bool`): Train adapters instead of all weights.
        plain_head (`bool`): Replace TRL's float32 head by a float64 log-softmax.
        reward (`Callable`, *optional*): Rewards from completion ids; [`completion_reward`] by default.
        prompts (`Sequence[str]`, *optional*): The training data.
        trainer_arguments (`dict`, *optional*): Further arguments of the trainer.
        settings: Passed to the configuration, over [`DEFAULTS`].

    Returns:
        [`Recording`].
    """
    recorded: list[OptimizerStep] = []
    rollouts: list[Rollouts] = []
    model, tokenizer = build_policy(lora)

    def snapshot() -> Weights:
        return {name: p.detach().clone() for name, p in model.named_parameters() if "ref" not in name.split(".")}

    def recorded_reward(prompts, completion_ids, **kwargs):
        rewards = (reward or completion_reward)(completion_ids)
        rollouts.append(Rollouts(list(prompts), [tuple(ids) for ids in completion_ids], rewards, snapshot()))
        return rewards

    def recorded_loss(model, inputs, *args, **kwargs):
        loss = compute_loss(model, inputs, *args, **kwargs)
        recorded[-1].losses.append(loss.item())
        rows = _rows(inputs)
        recorded[-1].rows.extend((row, rollouts[-1]) for row in rows)
        rollouts[-1].trained.update(rows)
        rollouts[-1].micro_batches += 1
        return loss

    class StepRecorder(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            recorded.append(OptimizerStep())

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            recorded[-1].weights = snapshot()
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            recorded[-1].gradients = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()
            }

    initial_weights = snapshot()
    with tempfile.TemporaryDirectory() as output_dir:
        if not lora:
            model.save_pretrained(output_dir)  # the reference of a full fine-tuning run is loaded from disk
            model.config._name_or_path = output_dir
        args = config_class(output_dir=output_dir, **settings)
        trainer = trainer_class(
            model=model,
            reward_funcs=recorded_reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
            callbacks=[StepRecorder()],
            **(trainer_arguments or {}),
        )
        trainer.remove_callback(PrinterCallback)
        if trainer.ref_model is not None:
            in_double_precision(trainer.ref_model)  # loaded from disk, so without what the policy was given
        if plain_head:
            for served in (model.get_base_model() if lora else model, trainer.ref_model):
                if served is not None:
                    use_plain_lm_head(served)
        # on the instance: a subclass that overrides it gets TRL's micro-batches
        compute_loss, trainer.compute_loss = trainer.compute_loss, recorded_loss
        trainer.train()
    return Recording(recorded, initial_weights, rollouts)


def _rows(inputs: dict[str, torch.Tensor]) -> list[Row]:
    """The rows of a micro-batch without their padding."""
    rows = []
    for i in range(inputs["prompt_ids"].size(0)):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        completion = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()]
        rows.append((tuple(prompt.tolist()), tuple(completion.tolist())))
    return rows
