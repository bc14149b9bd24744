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

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.host_proof.recording import (
    DEFAULTS,
    LONG_PROMPTS,
    PROMPTS,
    OptimizerStep,
    Recording,
    Rollouts,
    Row,
    Weights,
    build_policy,
    record,
    relative_difference,
)
from trl_drgrpo.host_proof.tiny import tiny_tokenizer
from trl_drgrpo.objective.advantages import group_advantages
from trl_drgrpo.objective.loss import dr_grpo_loss
from trl_drgrpo.trainer import DrGRPOTrainer

Settings = dict[str, Any]  # fields of a training configuration

# Relative. In float64 four orders above the differences seen, eight below any wrong weight.
TOLERANCE = 1e-10
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

    def training_settings(self, max_steps: int) -> Settings:
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
        if self.plain_head:
            return TOLERANCE
        return FLOAT32_TOLERANCE


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
    """Return the matrix. All passed = the trainer computes Dr. GRPO in this environment.

    Args:
        full (`bool`, *optional*, defaults to `False`): All combinations (about a minute) instead of one case per value
            of each setting, plus the ones that are easy to get wrong.

    Returns:
        `list[Case]`.
    """
    combinations = _one_of_each()
    if full:
        combinations = _all_combinations()
    return [*combinations, *_special(), *_controls()]


def _all_combinations() -> Iterator[Case]:
    for accumulation, reuse, iterations, beta, lora in product(
        (1, 2, 4),
        (1, 2),
        (1, 2),
        (0.0, 0.1),
        (False, True),
    ):
        micro_batch = 8 // accumulation  # always 8 rows per optimizer step
        steps_per_generation = accumulation * reuse
        yield Case("", micro_batch, accumulation, steps_per_generation, iterations, beta, lora)


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
    def case(
        name: str,
        steps_per_generation: int,
        num_iterations: int = 1,
        beta: float = 0.0,
        **settings: Any,
    ) -> Case:

        return Case(
            name,
            micro_batch=4,
            accumulation=2,
            steps_per_generation=steps_per_generation,
            num_iterations=num_iterations,
            beta=beta,
            settings=tuple(settings.items()),
        )

    yield case("L set on its own", 4, loss_normalizer=100)
    yield case("no length limit", 2, max_completion_length=None, loss_normalizer=64)
    yield case("leave-one-out", 2, advantage_baseline="leave_one_out")
    yield case("clip-higher", 4, num_iterations=2, epsilon=0.1, epsilon_high=0.28)
    yield case("KL warm-up", 2, beta=0.1, beta_warmup_steps=4)
    yield case("truncated rows masked", 2, mask_truncated_completions=True)
    # A generation of 12 rows, of which an optimizer step takes 8: steps straddle two generations.
    yield case("uneven generations", 3, num_generations=6)
    yield Case("shared prompts", 8, 1, 2, long_prompts=True)
    yield Case("shared prompts, KL, off-policy", 8, 1, 2, num_iterations=2, beta=0.1, long_prompts=True)
    yield case("TRL's micro-batches", 4, micro_batching="upstream")
    yield Case("TRL's float32 head", 4, 2, 4, num_iterations=2, beta=0.1, plain_head=False)


def _controls() -> Iterator[Case]:
    for loss_type, scale_rewards in (
        ("dr_grpo", "none"),  # both switches set: equal by construction
        ("dr_grpo", "group"),
        ("grpo", "group"),
        ("dapo", "group"),  # TRL's default
    ):
        yield Case(
            f"TRL, loss_type={loss_type!r}, scale_rewards={scale_rewards!r}",
            micro_batch=4,
            accumulation=2,
            steps_per_generation=2,
            settings=(("loss_type", loss_type), ("scale_rewards", scale_rewards)),
            stock=True,
            control=scale_rewards != "none",
        )


def run_case(case: Case, trainer_class: type | None = None) -> CaseResult:
    """Train one case and compare every optimizer step with the specification.

    Args:
        case ([`Case`]): The setting.
        trainer_class (`type`, *optional*): Trainer to check; `DrGRPOTrainer`, or stock TRL's, by default.

    Returns:
        [`CaseResult`].
    """
    config_class: type = DrGRPOConfig
    stock_or_ours: type = DrGRPOTrainer
    if case.stock:
        config_class = GRPOConfig
        stock_or_ours = GRPOTrainer
    prompts = PROMPTS
    if case.long_prompts:
        prompts = LONG_PROMPTS
    # Two steps more than one generation batch lasts, so that a second batch is sampled by other weights.
    updates_per_generation = max(1, case.steps_per_generation * case.num_iterations // case.accumulation)
    settings = case.training_settings(max_steps=updates_per_generation + 2)
    recording = record(
        trainer_class or stock_or_ours,
        config_class,
        lora=case.lora,
        plain_head=case.plain_head,
        prompts=prompts,
        **settings,
    )
    loss_differences = []
    gradient_differences = []
    cosines = []
    residuals = []
    for index, step in enumerate(recording.steps):
        exact_loss, exact = _specification(case, settings, recording, step, index)
        loss_differences.append(abs(sum(step.losses) - exact_loss))
        gradient_differences.append(relative_difference(step.gradient, exact))
        cosine = torch.cosine_similarity(step.gradient, exact, dim=0).item()
        cosines.append(cosine)
        # Rounding may take a cosine above 1.
        squared_residual = max(0.0, 1 - cosine**2)
        residuals.append(math.sqrt(squared_residual))
    # torch's maximum is NaN if one difference is; Python's depends on the order.
    loss_difference = torch.tensor(loss_differences, dtype=torch.float64).max().item()
    gradient_difference = max(gradient_differences)  # none is NaN: `relative_difference` makes it infinite
    if not _all_were_trained(case, settings, recording):
        gradient_difference = math.inf
    residual = statistics.fmean(residuals)
    if case.control:
        # A gradient that could not be compared is no proof of a difference.
        passed = residual > CONTROL_FLOOR and gradient_difference < math.inf
    else:
        # Written so that a NaN fails.
        passed = gradient_difference <= case.tolerance and loss_difference <= case.tolerance
    return CaseResult(
        case,
        len(recording.steps),
        loss_difference,
        gradient_difference,
        passed,
        cosine=statistics.fmean(cosines),
        residual=residual,
    )


def _specification(
    case: Case,
    settings: Settings,
    recording: Recording,
    step: OptimizerStep,
    index: int,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimizer step by the written-down objective, without the trainer."""
    policy, _ = build_policy(case.lora)
    rows = []
    advantages = []
    lengths = []  # 0 for a row that was masked
    old_logps = []
    for recorded_row, rollouts in step.rows:
        row, advantage = _scored_row(recorded_row, rollouts, settings)
        rows.append(row)
        advantages.append(advantage)
        lengths.append(len(recorded_row[1]))
        # The rows of one step may come from several generations, each sampled by other weights.
        old_logps += _logps(policy, rollouts.weights, [row])
    ref_logps = _padded(_logps(policy, recording.initial_weights, rows)).detach()
    # Last, because each call loads its weights into the policy, and the gradient is taken at the step's.
    logps = _padded(_logps(policy, step.weights, rows))  # (B, T)
    beta = case.beta
    warmup_steps = settings.get("beta_warmup_steps", 0)
    if warmup_steps:
        beta *= min(1.0, (index + 1) / warmup_steps)
    columns = torch.arange(logps.size(1))
    mask = columns < torch.tensor(lengths).unsqueeze(1)  # (B, T)
    loss = dr_grpo_loss(
        logps,
        _padded(old_logps).detach(),
        torch.tensor(advantages, dtype=torch.float64),
        mask,
        settings.get("loss_normalizer") or settings["max_completion_length"],
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high"),
        beta=beta,
        ref_per_token_logps=ref_logps,
    )
    # The nominal rows are the divisor, also of a step from which rows without advantage were skipped.
    loss = loss * len(rows) / (case.micro_batch * case.accumulation)
    # In the order of the recorded gradients.
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def _all_were_trained(case: Case, settings: Settings, recording: Recording) -> bool:
    """Tell whether every row that has a gradient was part of as many losses as there are iterations."""
    for rollouts in recording.rollouts:
        if rollouts.micro_batches < case.steps_per_generation * case.num_iterations:
            continue  # the run ended in the middle of it
        # Counted by content: two rows of a group may hold the same tokens.
        losses = Counter()
        for row, advantage in _scored_rows(rollouts, settings):
            # Without an advantage a row may be skipped, unless a KL term trains it.
            if row[1] and (advantage != 0 or case.beta):
                losses[row] += case.num_iterations
        for row, count in losses.items():
            # A masked row is recorded without its tokens, so it is not among the trained ones under its name.
            was_masked = settings.get("mask_truncated_completions") and row not in rollouts.trained
            if rollouts.trained[row] < count and not was_masked:
                return False
    return True


def _scored_row(row: Row, rollouts: Rollouts, settings: Settings) -> tuple[Row, float]:
    """A row with its advantage. One without tokens adds nothing: one of its group stands in for it."""
    prompt, completion = row
    for candidate, advantage in _scored_rows(rollouts, settings):
        if candidate == row or (not completion and candidate[0] == prompt):
            return candidate, advantage
    raise LookupError(f"a row that was trained but never generated: {row}")


def _scored_rows(rollouts: Rollouts, settings: Settings) -> Iterator[tuple[Row, float]]:
    """Yield every row of a generation batch with its advantage."""
    # float32, as TRL stores rewards: the difference to float64 is not this check's subject. numpy reads None as NaN.
    rewards = torch.from_numpy(np.array(rollouts.rewards, dtype=np.float32))
    baseline = settings.get("advantage_baseline", "group_mean")
    advantages = group_advantages(rewards, settings["num_generations"], baseline).tolist()
    prompts = tiny_tokenizer()(rollouts.prompts)["input_ids"]
    for prompt, completion, advantage in zip(prompts, rollouts.completions, advantages, strict=True):
        yield (tuple(prompt), completion), advantage


def _logps(policy: torch.nn.Module, weights: Weights, rows: list[Row]) -> list[torch.Tensor]:
    """Log-probabilities of each completion, row by row, without padding. List of (T_i,) tensors with gradient."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(weights[name])
    logps = []
    for prompt, completion in rows:
        row = torch.tensor([prompt + completion])  # (1, P + T)
        # The logits at a token predict the next one, so the completion's begin at the prompt's last token.
        logits = policy(row).logits[0, len(prompt) - 1 : -1]  # (T, V)
        targets = torch.tensor(completion).unsqueeze(1)
        log_probs = logits.log_softmax(dim=-1)
        logps.append(log_probs.gather(1, targets).squeeze(1))
    return logps


def _padded(logps: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(logps, batch_first=True)
