"""Parts of the fast path that a model gets, and a test of its gradient and tokens: `trl-drgrpo check --model`.

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
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trl_drgrpo.check.parity import DEFAULTS, LONG_PROMPTS, PROMPTS, relative_difference
from trl_drgrpo.check.small import small_model
from trl_drgrpo.check.tiny import tiny_tokenizer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.fast_path.speed import SpeedPart
from trl_drgrpo.trainer import DrGRPOTrainer

# float32: sums in another order. A wrong mask, position or state is off by a thousandth at least.
TOLERANCE = 1e-3
PROMPTS_OF_A_RUN = [*PROMPTS[:4], *LONG_PROMPTS[:4]]  # short and long ones, padded on the left beside each other
_SETTINGS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_completion_length": 24,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "run_log": False,
}


@dataclass(frozen=True)
class ModelResult:
    """Result of a model.

    Args:
        architecture (`str`): Class of the small model.
        parts (`dict[str, str]`): `"yes"`, or why not, by the name of each part of the fast path.
        gradient_difference (`float`): `|g - g'| / |g'|` from TRL's micro-batches, the worst of the optimizer steps.
        equal_tokens (`float`): Share of the completions that transformers' own loop samples from the same seed.
    """

    architecture: str
    parts: dict[str, str]
    gradient_difference: float
    equal_tokens: float

    @property
    def passed(self) -> bool:
        """Tell whether gradients and completions are those of TRL and transformers."""
        return self.gradient_difference <= TOLERANCE and self.equal_tokens == 1


@dataclass
class _Run:
    completions: list[tuple[int, ...]]
    gradients: list[torch.Tensor]  # one vector for each optimizer step
    parts: dict[str, str]


def check_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> ModelResult:
    """Train a small random model of a configuration on the fast path, and as TRL does.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of a decoder, or of a model that has one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run the code that comes with it.

    Returns:
        [`ModelResult`].

    Raises:
        `InputError`: No small model of the configuration can be built, or TRL cannot train it.
    """
    return compare_with_trl(small_model(config, tiny_tokenizer(), trust_remote_code))


def compare_with_trl(model: PreTrainedModel) -> ModelResult:
    """Train copies of a small model on the fast path, and as TRL does."""
    without = {"micro_batching": "upstream"}
    stock = _ran(copy.deepcopy(model), without, "without the fast path", "TRL cannot train it here.")
    fast = _ran(copy.deepcopy(model), {}, "on the fast path", "Set micro_batching='upstream', and report it.")
    result = _compared(model, fast, stock)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not result.passed and fast.parts[SpeedPart.PLANNED] == "yes" and takes_positions:
        # TRL leaves positions to the model, and absolute ones (GPT-2) count its padding. Generation does not.
        reference = copy.deepcopy(model)
        reference.register_forward_pre_hook(_count_without_padding, with_kwargs=True)
        result = _compared(model, fast, _run(reference, without))
    return result


def _compared(model: PreTrainedModel, fast: "_Run", stock: "_Run") -> ModelResult:
    parts = fast.parts
    equal = [ours == theirs for ours, theirs in zip(fast.completions, stock.completions, strict=True)]
    if not all(equal):  # the gradient of the same completions
        fast = _run(copy.deepcopy(model), {"fast_generation": False})
    differences = [relative_difference(*pair) for pair in zip(fast.gradients, stock.gradients, strict=True)]
    return ModelResult(type(model).__name__, parts, max(differences), sum(equal) / len(equal))


def _ran(model: PreTrainedModel, settings: dict[str, Any], where: str, remedy: str) -> "_Run":
    """Train, and raise what ends the training as an `InputError`."""
    try:
        return _run(model, settings)
    except Exception as error:  # any that a model may raise
        got = f"{type(model).__name__}, which ends in {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise InputError("--model", got, f"a model that trains {where}", remedy) from error


def _count_without_padding(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or kwargs.get("position_ids") is not None:
        return args, kwargs
    return args, {**kwargs, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}


def fast_path_of(model: PreTrainedModel) -> dict[str, str]:
    """Return `"yes"`, or why not, for each part of the fast path, by a training of two steps."""
    return _run(model, {}).parts


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [(sum(ids) % 3) / 2 for ids in completion_ids]


def _run(model: PreTrainedModel, settings: dict[str, Any]) -> _Run:
    completions: list[tuple[int, ...]] = []
    gradients: list[torch.Tensor] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        completions.extend(tuple(ids) for ids in completion_ids)
        return _reward(completion_ids)

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            parts = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trained]
            gradients.append(torch.cat([part.flatten().double() for part in parts]))

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
