"""Recorded trainings of a tiny model: its completions, their rewards, and the gradient of every optimizer step.

A recording knows nothing of the objective. Two recordings of one seed are compared with each other, or each step of
one is repeated without the trainer (`check/parity.py`).
"""

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from trl_drgrpo.features.fast_path.pack_layout import rows_of
from trl_drgrpo.features.fast_path.speed import Speed
from trl_drgrpo.host_proof.tiny import in_double_precision, tiny_model, tiny_tokenizer
from trl_drgrpo.upstream.batches import token_batch

Weights = dict[str, torch.Tensor]
Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, completion ids, both without padding

# LoRA's usual init leaves B at zero, so that A gets no gradient at first: random matrices make every gradient count.
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
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
class PlainHeadOutput:
    """Output of a fused forward, as TRL reads it. A dataclass, so that DDP finds the tensors in it."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    aux_loss: None = None


def use_plain_lm_head(model: torch.nn.Module) -> None:
    """Serve TRL's fused head by a plain log-softmax in the model's own dtype, for calculations in float64.

    TRL 1.16 computes per-token log-probabilities in a chunked kernel that is float32 whatever the model is. The
    contract is kept: `model(..., labels=labels, fused_lm_head=True)` returns `log_probs` and `entropy`, one column
    shorter than `labels`, zero where the next label is -100; with `shift_labels` instead, as many columns as those.

    Args:
        model ([`~transformers.PreTrainedModel`]): A model that a trainer has prepared (not its PEFT wrapper).
    """
    fused_forward = model.forward

    @functools.wraps(fused_forward)  # with its signature, from which transformers reads what a batch may hold
    def forward(
        *args,
        fused_lm_head=False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ):
        if not fused_lm_head:
            return fused_forward(*args, labels=labels, **kwargs)
        kwargs["use_cache"] = False
        logits = fused_forward(*args, **kwargs).logits
        if shift_labels is None:
            # The logits at a token predict the label of the next one.
            logits = logits[:, :-1]
            shift_labels = labels[:, 1:]  # type: ignore[index]  # TRL passes one of the two
        log_probs = logits.log_softmax(dim=-1)  # (B, T - 1, V)
        unscored = shift_labels == -100
        labels_in_range = shift_labels.clamp(min=0).unsqueeze(-1)  # -100 is no index
        token_log_probs = log_probs.gather(-1, labels_in_range).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return PlainHeadOutput(
            token_log_probs.masked_fill(unscored, 0.0),
            entropy.masked_fill(unscored, 0.0),
        )

    model.forward = forward


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

    @property
    def gradient(self) -> torch.Tensor:
        """All gradients in one vector, in float64."""
        parts = [gradient.double().flatten() for gradient in self.gradients.values()]
        return torch.cat(parts)


@dataclass
class Recording:
    """A whole run. `speed`: which parts of the fast path it used; `None` for stock TRL."""

    steps: list[OptimizerStep]
    initial_weights: Weights
    rollouts: list[Rollouts]
    speed: Speed | None

    @property
    def completions(self) -> list[tuple[int, ...]]:
        """Token ids of all completions, in the order in which they were scored."""
        completions = []
        for rollouts in self.rollouts:
            completions += rollouts.completions
        return completions


def build_policy(lora: bool) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return the tiny model in float64, with random adapters if asked for, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    model = in_double_precision(tiny_model(tokenizer))
    if not lora:
        return model, tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(**LORA), autocast_adapter_dtype=False)  # type: ignore[arg-type]
    return adapted, tokenizer


def completion_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward completions so that rewards vary, tie, and are sometimes missing: 0, 0.5 or 1 by the sum of the ids."""
    rewards = []
    for ids in completion_ids:
        total = sum(ids)
        reward = None
        if total % 11:
            reward = total % 3 / 2
        rewards.append(reward)
    return rewards


def record(
    trainer_class: Callable[..., Any],
    config_class: Callable[..., Any],
    *,
    lora: bool = False,
    plain_head: bool = False,
    model: PreTrainedModel | None = None,
    reward: Callable[[list[list[int]]], Sequence[float | None]] | None = None,
    prompts: Sequence[str] = PROMPTS,
    trainer_arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Recording:
    """Train a tiny model and record every optimizer step.

    Args:
        trainer_class (`type`): `DrGRPOTrainer`, or `trl.GRPOTrainer` as a control.
        config_class (`type`): The configuration that goes with it.
        lora (`bool`, *optional*, defaults to `False`): Train adapters instead of all weights.
        plain_head (`bool`, *optional*, defaults to `False`): Replace TRL's float32 head by a float64 log-softmax.
        model ([`~transformers.PreTrainedModel`], *optional*): Is trained; that of [`build_policy`] by default.
        reward (`Callable`, *optional*): Rewards from completion ids; [`completion_reward`] by default.
        prompts (`Sequence[str]`, *optional*): The training data.
        trainer_arguments (`dict`, *optional*): Further arguments of the trainer.
        settings: Passed to the configuration.

    Returns:
        [`Recording`].
    """
    steps = []
    rollouts = []
    tokenizer = tiny_tokenizer()
    policy: Any = model  # or PEFT's wrapper of one
    if policy is None:
        policy = build_policy(lora)[0]

    # Three places of a run are watched: rewards, the loss of a micro-batch, and the moment before an optimizer step.

    def snapshot() -> Weights:
        weights = {}
        for name, weight in policy.named_parameters():
            # Without the adapter "ref", TRL's copy of the one that is trained: it never changes.
            if "ref" not in name.split("."):
                weights[name] = weight.detach().clone()
        return weights

    def recorded_reward(prompts, completion_ids, **kwargs):
        # Rewards are asked for before anything is trained on: the weights are those that sampled the batch.
        rewards = list((reward or completion_reward)(completion_ids))
        completions = list(map(tuple, completion_ids))
        rollouts.append(Rollouts(list(prompts), completions, rewards, snapshot()))
        return rewards

    def recorded_loss(model, inputs, *args, **kwargs):
        loss = compute_loss(model, inputs, *args, **kwargs)
        # A micro-batch belongs to the step that has begun, and its rows are of the newest generation.
        step = steps[-1]
        batch = rollouts[-1]
        step.losses.append(loss.item())
        for tokens in rows_of(token_batch(inputs)):
            row: Any = (tokens.prompt, tokens.completion)
            step.rows.append((row, batch))
            batch.trained[row] += 1
        batch.micro_batches += 1
        return loss

    class StepRecorder(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append(OptimizerStep())

        # Here, because the gradients are complete, and the optimizer has not moved the weights yet.
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            steps[-1].weights = snapshot()
            for name, parameter in policy.named_parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad
                    if gradient is None:  # no row of the step had an advantage
                        gradient = torch.zeros_like(parameter)
                    steps[-1].gradients[name] = gradient.clone()

    initial_weights = snapshot()
    with tempfile.TemporaryDirectory() as folder:
        # Stock TRL loads the reference from the path that the configuration names. With LoRA it is the base.
        if settings.get("beta") and not lora:
            policy.save_pretrained(f"{folder}/base")
            policy.config._name_or_path = f"{folder}/base"
        trainer = trainer_class(
            model=policy,
            reward_funcs=recorded_reward,
            args=config_class(output_dir=f"{folder}/run", **settings),
            train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
            callbacks=[StepRecorder()],
            **(trainer_arguments or {}),
        )
        trainer.remove_callback(PrinterCallback)
        fast_path = getattr(trainer, "fast_path", None)  # stock TRL has none
        # Loaded from disk, so without what `in_double_precision` has changed in the policy.
        if trainer.ref_model is not None and fast_path is None and policy.dtype == torch.float64:
            in_double_precision(trainer.ref_model)
        if plain_head:
            network = policy
            if lora:
                network = policy.get_base_model()
            use_plain_lm_head(network)
            if trainer.ref_model is not None:
                use_plain_lm_head(trainer.ref_model)
        # So that micro-batches stay planned, unless the loss that is watched is somebody's own.
        own_losses = getattr(trainer, "own_losses", ())
        vars(recorded_loss)["watches_only"] = "compute_loss" not in own_losses
        compute_loss = trainer.compute_loss
        trainer.compute_loss = recorded_loss
        trainer.train()
    return Recording(steps, initial_weights, rollouts, speed=getattr(fast_path, "speed", None))


def relative_difference(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return `|got - exact| / |exact|`; infinite where it is NaN, and without a gradient to compare: that proves
    nothing."""
    scale = exact.norm().item()
    if not scale > 0:  # also where it is NaN
        return math.inf
    difference = (got - exact).norm().item() / scale
    if math.isnan(difference):
        return math.inf
    return difference


def largest_difference(recording: Recording, expected: Recording, factor: float = 1.0) -> float:
    """Relative difference between a recording's gradients times `factor` and the expected ones, the worst of the
    optimizer steps."""
    differences = []
    for step, expected_step in zip(recording.steps, expected.steps, strict=True):
        gradient = factor * step.gradient
        differences.append(relative_difference(gradient, expected_step.gradient))
    return max(differences, default=math.inf)  # without a step nothing was compared
