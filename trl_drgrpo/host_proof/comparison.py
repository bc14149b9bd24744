"""One small model, trained on the fast path and as TRL does: the same seed must give equal completions and gradients.

A part of the fast path counts as on where it has saved work, not where it says so.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.host_proof.recording import DEFAULTS, LONG_PROMPTS, PROMPTS, Recording, largest_difference, record

# Relative, in float32. A wrong mask, position or state is off by a thousandth at least.
TOLERANCE = 1e-3
# Sums in another order make at most so much. Between the two, TRL's own padding may be what differs.
ROUNDING = 1e-4
PROMPTS_OF_A_RUN = [*PROMPTS[:4], *LONG_PROMPTS[:4]]  # short and long ones, padded on the left beside each other
# Two micro-batches of 8 rows per optimizer step, which TRL takes as they come and the fast path plans anew.
SETTINGS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_completion_length": 24,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "run_log": False,
}
AS_TRL: dict[str, Any] = {"micro_batching": "upstream"}
WITHOUT_BALANCE: dict[str, Any] = {"router_aux_loss_coef": 0.0}


@dataclass(frozen=True)
class ModelResult:
    """Result of a model.

    Args:
        architecture (`str`): Class of the small model.
        parts (`dict[str, str]`): `"yes"`, or why not, by the name of each part of the fast path.
        gradient_difference (`float`): `|g - g'| / |g'|` from TRL's micro-batches, the worst of the optimizer steps.
        equal_tokens (`float`): Share of the completions that transformers' own loop samples from the same seed.
        plan (`str`): `"yes"`, or why `plan` cannot plan the model; empty: not tried.
        parameters (`int`, *optional*): Weights of the whole model as `plan` counts them. `None`: not tried, or it
            cannot build the model.
    """

    architecture: str
    parts: dict[str, str]
    gradient_difference: float
    equal_tokens: float
    plan: str = ""
    parameters: int | None = None

    @property
    def passed(self) -> bool:
        """Tell whether gradients and completions are those of TRL and transformers."""
        return self.gradient_difference <= TOLERANCE and self.equal_tokens == 1


def compare_with_trl(trainer_class: Callable[..., Any], model: PreTrainedModel) -> ModelResult:
    """Train copies of a small model on the fast path, and in TRL's micro-batches with transformers' generation.

    Args:
        trainer_class (`type`): `DrGRPOTrainer`, or a class of it.
        model ([`~transformers.PreTrainedModel`]): Left as it is.

    Raises:
        `InputError`: A training ends in an error; the message says which one.
    """

    def trained(where: str, remedy: str, **settings: Any) -> Recording:
        try:
            return train_briefly(trainer_class, model, **settings)
        except Exception as error:  # any that a model may raise
            message = " ".join(str(error).split())[:300]
            got = f"{type(model).__name__}, which ends in {type(error).__name__}: {message}"
            raise InputError("model", got, f"a model that trains {where}", remedy) from error

    # TRL's way first: a model that TRL cannot train is no fault of the fast path.
    stock = trained("without the fast path", "TRL cannot train it here.", **AS_TRL)
    fast = trained("on the fast path", "Set micro_batching='upstream', and report it.")
    parts = parts_in_use(fast.speed)
    if parts[SpeedPart.PLANNED] != "yes":
        # A mixture of experts keeps TRL's micro-batches for its balance loss. Without it there is a plan to compare.
        planned = train_briefly(trainer_class, model, **WITHOUT_BALANCE)
        if parts_in_use(planned.speed)[SpeedPart.PLANNED] == "yes":
            fast = planned
            stock = train_briefly(trainer_class, model, **AS_TRL, **WITHOUT_BALANCE)
    equal = 0
    for fast_ids, ids in zip(fast.completions, stock.completions, strict=True):
        equal += fast_ids == ids
    equal_tokens = equal / len(stock.completions)
    if equal_tokens < 1:
        # Gradients can only be compared on the same completions, so transformers' loop samples them for both.
        fast = train_briefly(trainer_class, model, **WITHOUT_BALANCE, fast_generation=False)
    difference = largest_difference(fast, stock)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    is_planned = parts_in_use(fast.speed).get(SpeedPart.PLANNED) == "yes"
    if difference > ROUNDING and is_planned and takes_positions:
        # TRL leaves positions to the model. Absolute ones (GPT-2), and scales of attention that grow with them, count
        # its padding. Generation does not.
        reference = copy.deepcopy(model)
        reference.register_forward_pre_hook(_count_without_padding, with_kwargs=True)
        stock = train_briefly(trainer_class, reference, **AS_TRL, **WITHOUT_BALANCE)
        difference = largest_difference(fast, stock)
    return ModelResult(type(model).__name__, parts, difference, equal_tokens)


def train_briefly(trainer_class: Callable[..., Any], model: PreTrainedModel, **settings: Any) -> Recording:
    """Train a copy of a model for two optimizer steps."""
    return record(
        trainer_class,
        DrGRPOConfig,
        model=copy.deepcopy(model),
        reward=example_reward,
        prompts=PROMPTS_OF_A_RUN,
        **SETTINGS | settings,
    )


def parts_in_use(speed: Speed | None) -> dict[str, str]:
    """Return `"yes"`, or why not, by the name of each part: a part that has never saved work is none."""
    if speed is None:
        return {}
    parts = speed.facts()
    for part, reason in parts.items():
        # `facts` tells what is switched on, `uses` counts how often it has saved work.
        if reason == "yes" and not speed.uses[SpeedPart(part)]:
            parts[part] = "it was never used"
    return parts


def example_reward(completion_ids: list[list[int]]) -> list[float]:
    """Reward completions by their tokens. The first group of a batch has equal rewards, so that rows are skipped."""
    group = DEFAULTS["num_generations"]
    rewards = [1.0] * group
    for ids in completion_ids[group:]:
        rewards.append(sum(ids) % 3 / 2)
    return rewards


def _count_without_padding(
    model: PreTrainedModel,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[tuple, dict[str, Any]]:
    """Number the positions of each row from its first real token on; a hook in front of a forward."""
    mask = kwargs.get("attention_mask")
    # Positions that the caller gives stay: transformers' generation leaves padding out by itself.
    if mask is None or mask.dim() != 2 or kwargs.get("position_ids") is not None:
        return args, kwargs
    # A row padded by two, mask 0 0 1 1 1, is numbered 0 0 0 1 2.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return args, {**kwargs, "position_ids": positions}
