"""Is my denominator right? The trainer's loss and gradient against `loss.py`, in float64, over a matrix of settings.

Each case trains a tiny model for a few optimizer steps (`record`) and then repeats every step without the trainer:
each row alone and unpadded through a plain forward, log-softmax, `group_advantages`, `dr_grpo_loss` over all rows of
the step at once, backward. Micro-batching, accumulation, padding, shuffling, reuse of rollouts and importance ratios
must all cancel out. A recording knows nothing of the objective: it holds the completions with the weights that sampled
them, their rewards, the rows of each optimizer step, and the resulting gradient. A row without tokens was masked, or
fills up a micro-batch: it adds nothing either way.

Stock TRL is part of every check. With both switches set (`loss_type="dr_grpo"`, `scale_rewards="none"`) its gradient
is the same, by construction. With the std left on, with `grpo` and with its default it must *differ*, even after
the best rescaling, since under Adam a constant factor cancels; a check that cannot see them would prove nothing.
"""

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.check.tiny import in_double_precision, tiny_model, tiny_tokenizer
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.fast_path.pack_layout import rows_of
from trl_drgrpo.objective.advantages import group_advantages
from trl_drgrpo.objective.loss import dr_grpo_loss
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import token_batch


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

    @functools.wraps(fused_forward)
    def forward(
        *args,
        fused_lm_head=False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ):
        if not fused_lm_head:
            return fused_forward(*args, labels=labels, **kwargs)
        kwargs.update(use_cache=False)
        logits = fused_forward(*args, **kwargs).logits
        if shift_labels is None:
            logits = logits[:, :-1]
            shift_labels = cast(torch.Tensor, labels)[:, 1:]
        log_probs = logits.log_softmax(dim=-1)  # (B, T - 1, V)
        unscored = shift_labels == -100
        token_log_probs = log_probs.gather(-1, shift_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return PlainHeadOutput(token_log_probs.masked_fill(unscored, 0.0), entropy.masked_fill(unscored, 0.0))

    model.forward = forward


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


def build_policy(lora: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
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
        rows: list[Row] = [(row.prompt, row.completion) for row in rows_of(token_batch(inputs))]  # type: ignore
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
    with tempfile.TemporaryDirectory() as folder:
        if not lora:
            model.save_pretrained(f"{folder}/base")  # stock TRL loads the reference from there
            model.config._name_or_path = f"{folder}/base"
        args = config_class(output_dir=f"{folder}/run", **settings)
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
        if trainer.ref_model is not None and not isinstance(trainer, DrGRPOTrainer):
            in_double_precision(trainer.ref_model)  # loaded from disk, so without what the policy was given
        if plain_head:
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            for served in (base, trainer.ref_model):
                if served is not None:
                    use_plain_lm_head(cast(torch.nn.Module, served))
        # So that micro-batches stay planned, unless the loss that is watched is somebody's own.
        vars(recorded_loss)["watches_only"] = "compute_loss" not in getattr(trainer, "own_losses", ())
        compute_loss, trainer.compute_loss = trainer.compute_loss, recorded_loss
        trainer.train()
    return Recording(recorded, initial_weights, rollouts)


TOLERANCE = 1e-10  # relative, float64: four orders above the differences seen, eight below any wrong weight
FLOAT32_TOLERANCE = 1e-5  # where TRL's own head computes the log-probabilities, in float32
CONTROL_FLOOR = 1e-2  # a control must be off by at least one percent


@dataclass(frozen=True)
class Case:
    """One setting of the matrix.

    Args:
        name (`str`): The feature that sets it apart.
        micro_batch (`int`): Rows per forward (`per_device_train_batch_size`).
        accumulation (`int`): Micro-batches per optimizer step.
        steps_per_generation (`int`): Micro-batches per generation.
        num_iterations (`int`): Passes over each generation batch.
        beta (`float`): KL weight.
        lora (`bool`): Adapters instead of all weights.
        settings (`tuple`): Further config fields, as pairs.
        plain_head (`bool`): Log-probabilities in float64; `False` = TRL's own float32 head, with its tolerance.
        long_prompts (`bool`): Prompts long enough for completions to share their forward.
        stock (`bool`): A run of stock TRL.
        control (`bool`): One that must differ.
    """

    name: str
    micro_batch: int = 8
    accumulation: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1
    beta: float = 0.0
    lora: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    plain_head: bool = True
    long_prompts: bool = False
    stock: bool = False
    control: bool = False

    def training_settings(self, max_steps: int) -> dict[str, Any]:
        """Fields of the training configuration; `settings` win over the rest."""
        return {
            **DEFAULTS,
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_generation": self.steps_per_generation,
            "num_iterations": self.num_iterations,
            "beta": self.beta,
            "max_steps": max_steps,
            **dict(self.settings),
        }

    @property
    def tolerance(self) -> float:
        """Largest difference that still counts as equal."""
        return TOLERANCE if self.plain_head else FLOAT32_TOLERANCE


@dataclass(frozen=True)
class CaseResult:
    """Result of a case. Differences are the worst over its optimizer steps.

    Args:
        case ([`Case`]): The setting.
        steps (`int`): Optimizer steps compared.
        loss_difference (`float`): `|loss - spec|`, absolute.
        gradient_difference (`float`): `|g - spec| / |spec|`, over all trained weights.
        passed (`bool`): Equal to tolerance; for a control, different at every scale.
        cosine (`float`): Of g and the specified gradient, the mean over the steps.
        residual (`float`): Rest of `gradient_difference` after the best rescaling of g: `sqrt(1 - cosine^2)`,
            the mean over the steps.
    """

    case: Case
    steps: int
    loss_difference: float
    gradient_difference: float
    passed: bool
    cosine: float = 1.0
    residual: float = 0.0

    @property
    def control(self) -> bool:
        """Tell whether it must differ."""
        return self.case.control


def cases(full: bool = False) -> list[Case]:
    """The matrix. All passed = the trainer computes Dr. GRPO in this environment.

    Args:
        full (`bool`, *optional*, defaults to `False`): All combinations (about a minute) instead of one case per value
            of each setting, plus the ones that are easy to get wrong.

    Returns:
        `list[Case]`.
    """
    return [*(_all_combinations() if full else _one_of_each()), *_special(), *_controls()]


def _all_combinations() -> Iterator[Case]:
    for (micro, accum), reuse, iterations, beta, lora in product(
        ((8, 1), (4, 2), (2, 4)), (1, 2), (1, 2), (0.0, 0.1), (False, True)
    ):
        yield Case("", micro, accum, accum * reuse, iterations, beta, lora)


def _one_of_each() -> Iterator[Case]:
    yield Case("one batch", 8, 1, 1)
    yield Case("accumulation", 2, 4, 4)
    yield Case("rows cut from groups", 1, 8, 8)
    yield Case("two steps per generation", 4, 2, 4)
    yield Case("two iterations", 4, 2, 2, num_iterations=2)
    yield Case("two of both", 2, 4, 8, num_iterations=2)
    yield Case("KL", 4, 2, 2, beta=0.1)
    yield Case("KL, off-policy", 4, 2, 4, num_iterations=2, beta=0.1)
    yield Case("LoRA", 4, 2, 2, lora=True)
    yield Case("LoRA, KL, off-policy", 4, 2, 4, num_iterations=2, beta=0.1, lora=True)


def _special() -> Iterator[Case]:
    yield Case("L set on its own", 4, 2, 4, settings=(("loss_normalizer", 100),))
    yield Case("no length limit", 4, 2, 2, settings=(("max_completion_length", None), ("loss_normalizer", 64)))
    yield Case("leave-one-out", 4, 2, 2, settings=(("advantage_baseline", "leave_one_out"),))
    yield Case("clip-higher", 4, 2, 4, 2, settings=(("epsilon", 0.1), ("epsilon_high", 0.28)))
    yield Case("KL warm-up", 4, 2, 2, beta=0.1, settings=(("beta_warmup_steps", 4),))
    yield Case("truncated rows masked", 4, 2, 2, settings=(("mask_truncated_completions", True),))
    yield Case("uneven generations", 4, 2, 3, settings=(("num_generations", 6),))
    yield Case("shared prompts", 8, 1, 2, long_prompts=True)
    yield Case("shared prompts, KL, off-policy", 8, 1, 2, num_iterations=2, beta=0.1, long_prompts=True)
    yield Case("TRL's micro-batches", 4, 2, 4, settings=(("micro_batching", "upstream"),))
    yield Case("TRL's float32 head", 4, 2, 4, num_iterations=2, beta=0.1, plain_head=False)


def _controls() -> Iterator[Case]:
    def stock(loss_type: str, scale_rewards: str, control: bool = True) -> Case:
        settings = (("loss_type", loss_type), ("scale_rewards", scale_rewards))
        name = f"TRL, loss_type={loss_type!r}, scale_rewards={scale_rewards!r}"
        return Case(name, 4, 2, 2, settings=settings, stock=True, control=control)

    yield stock("dr_grpo", "none", control=False)
    yield stock("dr_grpo", "group")
    yield stock("grpo", "group")
    yield stock("dapo", "group")  # TRL's default


def run_case(case: Case, trainer_class: type | None = None) -> CaseResult:
    """Train one case and compare every optimizer step with the specification.

    Args:
        case ([`Case`]): The setting.
        trainer_class (`type`, *optional*): Trainer to check; `DrGRPOTrainer`, or stock TRL's, by default.

    Returns:
        [`CaseResult`].
    """
    config_class = GRPOConfig if case.stock else DrGRPOConfig
    updates_per_generation = max(1, case.steps_per_generation * case.num_iterations // case.accumulation)
    settings = case.training_settings(max_steps=updates_per_generation + 2)
    trainer_class = trainer_class or (GRPOTrainer if case.stock else DrGRPOTrainer)
    recording = record(
        trainer_class,
        config_class,
        lora=case.lora,
        plain_head=case.plain_head,
        prompts=LONG_PROMPTS if case.long_prompts else PROMPTS,
        **settings,
    )
    losses, gradients, cosines = [], [], []
    for index, step in enumerate(recording.steps):
        loss, gradient = _specification(case, settings, recording, step, index)
        got, exact = (
            torch.cat([each[name].double().flatten() for name in gradient]) for each in (step.gradients, gradient)
        )
        losses.append(abs(sum(step.losses) - loss))
        gradients.append(relative_difference(got, exact))
        cosines.append(torch.nn.functional.cosine_similarity(got, exact, dim=0).item())
    worst = max(gradients) if _all_were_trained(case, settings, recording) else math.inf
    loss_difference = torch.tensor(losses, dtype=torch.float64).max().item()  # NaN, if one is
    equal = worst <= case.tolerance and loss_difference <= case.tolerance
    cosine = math.fsum(cosines) / len(cosines)
    residual = math.fsum(math.sqrt(max(0.0, 1 - each**2)) for each in cosines) / len(cosines)
    passed = residual > CONTROL_FLOOR and worst < math.inf if case.control else equal
    return CaseResult(case, len(recording.steps), loss_difference, worst, passed, cosine, residual)


def _specification(
    case: Case, settings: dict[str, Any], recording: Recording, step: OptimizerStep, index: int
) -> tuple[float, Weights]:
    """Loss and gradient of one optimizer step by the written-down objective, without the trainer."""
    policy, tokenizer = build_policy(case.lora)
    scored = [_scored_row(row, rollouts, tokenizer, settings) for row, rollouts in step.rows]
    rows = [row for row, _ in scored]
    old_logps = [_logps(policy, r.weights, [row])[0].detach() for row, (_, r) in zip(rows, step.rows, strict=True)]
    ref_logps = [logps.detach() for logps in _logps(policy, recording.initial_weights, rows)]
    logps = _logps(policy, step.weights, rows)
    lengths = torch.tensor([len(completion) for (_, completion), _ in step.rows])  # 0 for a row that was masked
    warmup_steps = settings.get("beta_warmup_steps", 0)
    nominal_rows = case.micro_batch * case.accumulation  # also rows without advantage, which may have been skipped
    loss = dr_grpo_loss(
        _padded(logps),
        _padded(old_logps),
        torch.tensor([advantage for _, advantage in scored], dtype=torch.float64),
        torch.arange(max(len(row_logps) for row_logps in logps)) < lengths.unsqueeze(1),  # (B, T)
        settings.get("loss_normalizer") or settings["max_completion_length"],
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high"),
        beta=case.beta * (min(1.0, (index + 1) / warmup_steps) if warmup_steps else 1.0),
        ref_per_token_logps=_padded(ref_logps),
    )
    loss = loss * len(rows) / nominal_rows
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return loss.item(), dict(zip(trained, gradients, strict=True))


def _all_were_trained(case: Case, settings: dict[str, Any], recording: Recording) -> bool:
    """Tell whether every row that has a gradient was part of as many losses as there are iterations."""
    for rollouts in recording.rollouts:
        if rollouts.micro_batches < case.steps_per_generation * case.num_iterations:
            continue  # the run ended in the middle of it
        expected = Counter()
        for row, advantage in _scored_rows(rollouts, build_policy(False)[1], settings):
            if row[1] and (advantage != 0 or case.beta):
                expected[row] += case.num_iterations
        if settings.get("mask_truncated_completions"):
            expected = Counter({row: count for row, count in expected.items() if row in rollouts.trained})
        if any(rollouts.trained[row] < count for row, count in expected.items()):
            return False
    return True


def _scored_row(
    row: Row, rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> tuple[Row, float]:
    """A row with its advantage. One without tokens adds nothing: one of its group stands in for it."""
    candidates = _scored_rows(rollouts, tokenizer, settings)
    return next(c for c in candidates if c[0] == row or (not row[1] and c[0][0] == row[0]))


def _scored_rows(
    rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> list[tuple[Row, float]]:
    """Every row of a generation batch with its advantage."""
    # float32, as TRL stores rewards: the difference to float64 is not this check's subject
    rewards = torch.tensor([torch.nan if r is None else r for r in rollouts.rewards], dtype=torch.float32)
    baseline = settings.get("advantage_baseline", "group_mean")
    advantages = group_advantages(rewards, settings["num_generations"], baseline).tolist()
    prompts = [tuple(ids) for ids in tokenizer(rollouts.prompts)["input_ids"]]
    return list(zip(zip(prompts, rollouts.completions, strict=True), advantages, strict=True))


def _logps(policy, weights: Weights, rows: list[Row]) -> list[torch.Tensor]:
    """Log-probabilities of each completion, row by row, without padding. List of (T_i,) tensors with gradient."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(weights[name])
    logps = []
    for prompt, completion in rows:
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(completion).unsqueeze(1)
        logps.append(logits.log_softmax(dim=-1).gather(1, targets).squeeze(1))
    return logps


def _padded(logps: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(logps, batch_first=True)


def relative_difference(got: torch.Tensor, exact: torch.Tensor) -> float:
    """`|got - exact| / |exact|`; infinite where it is NaN, and without a gradient to compare: that proves nothing."""
    scale = exact.norm().item()
    difference = (got - exact).norm().item() / scale if scale > 0 else math.inf
    return math.inf if math.isnan(difference) else difference
