"""What `trl-drgrpo check --model` says: parts of the fast path, whether gradient and tokens are right, the plan.

A small random model of the configuration trains for two optimizer steps on the fast path, and once more in TRL's
micro-batches with transformers' generation. The same seed must give the same completions and the same gradients.
"""

import copy
import inspect
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, PrinterCallback, TrainerCallback

from trl_drgrpo.check.parity import DEFAULTS, LONG_PROMPTS, PROMPTS, relative_difference
from trl_drgrpo.check.small import small_model
from trl_drgrpo.check.tiny import tiny_tokenizer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.fast_path.speed import SpeedPart
from trl_drgrpo.single_gpu.memory import Adapter, Planner, Setup, Skeleton, text_part
from trl_drgrpo.trainer import DrGRPOTrainer

# float32: sums in another order. A wrong mask, position or state is off by a thousandth at least.
TOLERANCE = 1e-3
# What other sums make of it, at most; between the two, TRL's own padding may be what differs.
ROUNDING = 1e-4
# Short and long ones, so that rows of one batch are padded by different amounts.
PROMPTS_OF_A_RUN = [*PROMPTS[:4], *LONG_PROMPTS[:4]]
COMPLETION = 24
_SETTINGS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_completion_length": COMPLETION,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "run_log": False,
}
_LIKE_TRL: dict[str, Any] = {"micro_batching": "upstream"}
# A mixture of experts trains in TRL's micro-batches because of this loss. Without it, its gradient can be compared.
_WITHOUT_BALANCE: dict[str, Any] = {"router_aux_loss_coef": 0.0}


@dataclass(frozen=True)
class ModelResult:
    """Result of a model.

    Args:
        architecture (`str`): Class of the small model.
        parts (`dict[str, str]`): `"yes"`, or why not, by the name of each part of the fast path.
        gradient_difference (`float`): `|g - g'| / |g'|` from TRL's micro-batches, the worst of the optimizer steps.
        equal_tokens (`float`): Share of the completions that transformers' own loop samples from the same seed.
        plan (`str`): `"yes"`, or why `plan` cannot plan the model.
        parameters (`int`, *optional*): Weights of the whole model as `plan` counts them: of its text part where it
            has several parts. `None`: it cannot build the model.
    """

    architecture: str
    parts: dict[str, str]
    gradient_difference: float
    equal_tokens: float
    plan: str
    parameters: int | None

    @property
    def passed(self) -> bool:
        """Tell whether gradients and completions are those of TRL and transformers."""
        return self.gradient_difference <= TOLERANCE and self.equal_tokens == 1


@dataclass(frozen=True)
class Comparison:
    """Training of one model on the fast path, beside training as TRL does it. Fields as in [`ModelResult`]."""

    parts: dict[str, str]
    gradient_difference: float
    equal_tokens: float

    @property
    def is_equal(self) -> bool:
        """Tell whether gradients and completions are the same."""
        return self.gradient_difference <= TOLERANCE and self.equal_tokens == 1


@dataclass(frozen=True)
class _Run:
    completions: list[tuple[int, ...]]
    gradients: list[torch.Tensor]  # one vector for each optimizer step
    parts: dict[str, str]


def check_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> ModelResult:
    """Train a small random model of a configuration on the fast path, and as TRL does; then plan it.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of a decoder, or of a model that has one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run the code that comes with it.

    Returns:
        [`ModelResult`].

    Raises:
        `InputError`: No small model of the configuration can be built, or TRL cannot train it.
    """
    model = small_model(config, tiny_tokenizer(), trust_remote_code)
    comparison = compare_with_trl(model)
    plan, parameters = _plan(config, model)
    return ModelResult(type(model).__name__, **vars(comparison), plan=plan, parameters=parameters)


def compare_with_trl(model: PreTrainedModel) -> Comparison:
    """Train copies of a small model on the fast path, and as TRL does."""
    stock = _run_or_refuse(model, _LIKE_TRL, "without the fast path", "TRL cannot train it here.")
    fast = _run_or_refuse(model, {}, "on the fast path", "Set micro_batching='upstream', and report it.")
    parts = fast.parts
    if parts[SpeedPart.PLANNED] != "yes":
        planned = _run(copy.deepcopy(model), _WITHOUT_BALANCE)
        if planned.parts[SpeedPart.PLANNED] == "yes":
            fast = planned
            stock = _run(copy.deepcopy(model), _LIKE_TRL | _WITHOUT_BALANCE)
    comparison = _compare(model, parts, fast, stock)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    is_close = comparison.is_equal and comparison.gradient_difference <= ROUNDING
    if not is_close and fast.parts[SpeedPart.PLANNED] == "yes" and takes_positions:
        # TRL leaves positions to the model. Absolute ones (GPT-2), and scales of attention that grow with them, count
        # its padding. Generation does not.
        reference = copy.deepcopy(model)
        reference.register_forward_pre_hook(_count_without_padding, with_kwargs=True)
        comparison = _compare(model, parts, fast, _run(reference, _LIKE_TRL | _WITHOUT_BALANCE))
    return comparison


def _compare(model: PreTrainedModel, parts: dict[str, str], fast: _Run, stock: _Run) -> Comparison:
    matches = [ours == theirs for ours, theirs in zip(fast.completions, stock.completions, strict=True)]
    gradients = fast.gradients
    if not all(matches):
        # Gradients can only be compared on the same completions, so transformers' loop samples them for both.
        settings = _WITHOUT_BALANCE | {"fast_generation": False}
        gradients = _run(copy.deepcopy(model), settings).gradients
    differences = [relative_difference(*pair) for pair in zip(gradients, stock.gradients, strict=True)]
    return Comparison(parts, max(differences), sum(matches) / len(matches))


def _run_or_refuse(model: PreTrainedModel, settings: dict[str, Any], how: str, remedy: str) -> _Run:
    """Train a copy, and raise what ends the training as an `InputError`."""
    try:
        return _run(copy.deepcopy(model), settings)
    except Exception as error:  # a model may raise anything
        message = " ".join(str(error).split())[:300]
        got = f"{type(model).__name__}, which ends in {type(error).__name__}: {message}"
        raise InputError("--model", got, f"a model that trains {how}", remedy) from error


def _count_without_padding(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or kwargs.get("position_ids") is not None:
        return args, kwargs
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return args, {**kwargs, "position_ids": positions}


def fast_path_of(model: PreTrainedModel) -> dict[str, str]:
    """Return `"yes"`, or why not, for each part of the fast path, by a training of two steps."""
    return _run(model, {}).parts


def _run(model: PreTrainedModel, settings: dict[str, Any]) -> _Run:
    """Train a model in place, and record what it wrote and every gradient."""
    completions: list[tuple[int, ...]] = []
    gradients: list[torch.Tensor] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        completions.extend(tuple(ids) for ids in completion_ids)
        return [(sum(ids) % 3) / 2 for ids in completion_ids]

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            vectors = []
            for parameter in model.parameters():
                if parameter.requires_grad:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    vectors.append(gradient.detach().flatten().double())
            gradients.append(torch.cat(vectors))

    with tempfile.TemporaryDirectory() as output_dir:
        trainer = DrGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=DrGRPOConfig(output_dir=output_dir, **{**_SETTINGS, **settings}),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS_OF_A_RUN}),
            processing_class=tiny_tokenizer(),
            callbacks=[Recorder()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _Run(completions, gradients, trainer.fast_path.speed.facts())


def _plan(config: PreTrainedConfig, model: PreTrainedModel) -> tuple[str, int | None]:
    """Return `"yes"`, or why a model cannot be planned, and the weights of its text part at full size.

    All phases are planned for the small model, which has every kind of layer and takes a second.
    """
    adapted = Setup(
        device="cpu", autocast=None, prompt=64, completion=COMPLETION, adapter=Adapter(targets="all-linear")
    )
    small_config, is_part = text_part(model.config)
    parameters = None
    try:
        full_size = Skeleton(text_part(config)[0], Setup(device="cpu"))
        parameters = full_size.parameters
        planner = Planner(small_config, adapted)
        planner.estimate(adapted)
    except Exception as error:  # a model may raise anything; what only describes it ends nothing
        return str(error), parameters
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not is_part and planner.parameters != weights:
        return f"it counts {planner.parameters:,} of the {weights:,} weights of the small model", parameters
    return "yes", parameters
