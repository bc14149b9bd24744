"""`DrGRPOTrainer`: TRL's `GRPOTrainer` with the objective of Dr. GRPO. Glue only.

Data's way: prompts -> (TRL) completions -> rewards, checked -> `group_advantages` -> (TRL) forward and loss, with L as
the divisor -> optimizer step. The mathematics is in `advantages.py` and `loss.py`, what this relies on inside TRL in
`upstream.py`.
"""

import logging
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from trl import GRPOConfig

from trl_drgrpo.advantages import AdvantageBaseline, RunningRewardScale, combine_rewards, group_advantages
from trl_drgrpo.config import DrGRPOConfig
from trl_drgrpo.errors import InputError, RewardError
from trl_drgrpo.preflight import check_inputs
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.runstate import RunState, load_rollouts, save_rollouts
from trl_drgrpo.upstream import GRPOSeams, require_seams

logger = logging.getLogger(__name__)


class DrGRPOTrainer(GRPOSeams):
    """
    Trainer for Dr. GRPO ([Understanding R1-Zero-Like Training](https://huggingface.co/papers/2503.20783)).

    A drop-in for [`trl.GRPOTrainer`]: same arguments in the same order, every inherited feature. What differs:

    - advantages are `r_i - baseline` (see [`group_advantages`]), never divided by a group's std; a group of equal
      rewards has advantages of exactly 0;
    - token losses are summed and divided by `B * L` with a constant `L` (see [`dr_grpo_loss`]);
    - reward functions are checked on every call, inputs before the model loads;
    - checkpoints hold what a resumed run needs to be the same run.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As in [`trl.GRPOTrainer`]. `args` is a [`DrGRPOConfig`]; a plain [`trl.GRPOConfig`] is converted with
            [`DrGRPOConfig.from_grpo_config`].
        parent_kwargs:
            Arguments that a newer TRL may add to `GRPOTrainer`, passed on as they are.

    Raises:
        `InputError` (a `ValueError`): Arguments that cannot work, before a model loads.
        `UpstreamError`: The installed TRL has moved something this trainer relies on.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_drgrpo import DrGRPOTrainer

    trainer = DrGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "dr-grpo"]  # noqa: RUF012  # a plain class attribute, as TRL declares it
    _name = "Dr. GRPO"
    _paper = {  # noqa: RUF012
        "title": "Understanding R1-Zero-Like Training: A Critical Perspective",
        "id": "2503.20783",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{liu2025understanding,
                title        = {{Understanding R1-Zero-Like Training: A Critical Perspective}},
                author       = {Zichen Liu and Changyu Chen and Wenjun Li and Penghui Qi and Tianyu Pang and Chao Du
                                and Wee Sun Lee and Min Lin},
                year         = 2025,
                eprint       = {arXiv:2503.20783},
            }"""),
    }
    args: DrGRPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel | Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Any = None,
        **parent_kwargs: Any,
    ):
        require_seams()
        args = _dr_grpo_config(args, model)
        reward_funcs = _as_list(reward_funcs)
        check_inputs(
            args,
            reward_funcs,
            train_dataset,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._rewards_per_func = torch.empty(0)  # (B, F) of the newest generation batch, all ranks
        self._window_start = 0  # micro-batches processed when the current optimizer step began
        self.reward_scale = RunningRewardScale()
        self.loss_normalizer = int(
            args.loss_normalizer or args.max_completion_length or 0
        )  # one is set, says the config
        super().__init__(
            model=model,
            reward_funcs=[
                f if not callable(f) or isinstance(f, torch.nn.Module) else checked_reward(f, args.on_reward_error)
                for f in reward_funcs
            ],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            **parent_kwargs,
        )
        self.add_callback(_WindowStart(self))
        if args.max_completion_length is None and not self.use_vllm:
            self._generate_to_the_end_of_the_context()

    # Advantages

    def on_rewards(self, rewards_per_func: torch.Tensor) -> None:
        self._rewards_per_func = rewards_per_func

    def on_rollouts(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Replace the advantages of a scored generation batch by those of Dr. GRPO."""
        rewards = combine_rewards(self._rewards_per_func, self.reward_weights)  # (B,) over all ranks
        num_generations: Any = self.num_generations if self.model.training else self.num_generations_eval
        advantages = group_advantages(rewards, num_generations, cast(AdvantageBaseline, self.args.advantage_baseline))
        if self.args.scale_by_running_std:
            if self.model.training:
                self.reward_scale.update(rewards)
            advantages = advantages / self.reward_scale.std
        rows = rollouts["advantages"].size(0)
        first = self.accelerator.process_index * rows
        rollouts["advantages"] = advantages[first : first + rows]
        self.replace_logged_advantages(advantages.tolist())
        return rollouts

    # Loss

    def loss_constants(self) -> dict[str, Any]:
        """TRL divides by `self.max_completion_length` and weighs KL by `self.beta`: here L, and the warmed-up beta."""
        return {"max_completion_length": self.loss_normalizer, "beta": self.beta_at(self.state.global_step)}

    def beta_at(self, step: int) -> float:
        """KL weight of an optimizer step, counted from 0: `beta * min(1, (step + 1) / beta_warmup_steps)`."""
        warmup_steps = self.args.beta_warmup_steps
        return self.beta * min(1.0, (step + 1) / warmup_steps) if warmup_steps else self.beta

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.args.beta_warmup_steps and self.model.training:
            logs["drgrpo/beta"] = self.beta_at(self.state.global_step - 1)  # the step that was just finished
        if self.args.scale_by_running_std and self.model.training:
            logs["drgrpo/reward_scale"] = self.reward_scale.std
        super().log(logs, start_time)

    # Resume

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`trl.GRPOTrainer.train`]; when a reward function fails, a checkpoint is saved before the error."""
        try:
            return super().train(*args, **kwargs)
        except RewardError:
            self._save_what_was_computed()
            raise

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        if self.pending_rollouts is not None:
            save_rollouts(checkpoint, self.accelerator.process_index, self.pending_rollouts)
        if self.args.should_save:
            RunState(self.loss_normalizer, self.micro_step, self.reward_scale.state_dict()).save(checkpoint)

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        state = RunState.load(checkpoint)
        if state is None:
            logger.warning("%s holds no Dr. GRPO state: going on with L = %d.", checkpoint, self.loss_normalizer)
            return
        if self.args.loss_normalizer not in (None, state.loss_normalizer):
            raise InputError(
                "loss_normalizer",
                str(self.args.loss_normalizer),
                f"{state.loss_normalizer}, with which the run in {checkpoint} was started",
                "Another L is another step size in the middle of a run: leave loss_normalizer out, or start anew.",
            )
        if state.loss_normalizer != self.loss_normalizer:
            message = "Keeping L = %d of the resumed run (max_completion_length is now %d)."
            logger.warning(message, state.loss_normalizer, self.loss_normalizer)
        self.loss_normalizer = state.loss_normalizer
        self.reward_scale.load_state_dict(state.reward_scale)
        self.micro_step = state.micro_step
        self.pending_rollouts = load_rollouts(checkpoint, self.accelerator.process_index, self.accelerator.device)
        self.advance_train_sampler(int((self.state.epoch or 0.0) + 1e-6))

    def _save_what_was_computed(self) -> None:
        """A checkpoint at the last finished optimizer step, for a run that is about to end with an error."""
        if self.accelerator.num_processes > 1:
            logger.error("A reward function failed. With several processes no checkpoint is saved at this point.")
            return
        if (self.micro_step - 1) // self.generate_every != self._window_start // self.generate_every:
            self.pending_rollouts = None  # those at hand are newer than the step that the run will resume from
        self.micro_step = self._window_start
        checkpoint = self.save_checkpoint_now()
        if checkpoint is not None:
            logger.error("A reward function failed. The run up to here is saved: resume from %s.", checkpoint)

    # Generation

    def _generate_to_the_end_of_the_context(self) -> None:
        """Without `max_completion_length`: let transformers generate until the context is full (its default is 20)."""
        if {"max_length", "max_new_tokens"} & set(self.args.generation_kwargs or {}):
            return
        context = self.model.config.get_text_config().max_position_embeddings
        self.generation_config.max_length = self.generation_kwargs["max_length"] = context


class _WindowStart(TrainerCallback):
    """Notes where an optimizer step began, so that an interrupted one can be repeated."""

    def __init__(self, trainer: DrGRPOTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._window_start = self.trainer.micro_step


def _dr_grpo_config(args: GRPOConfig | None, model: Any) -> DrGRPOConfig:
    if isinstance(args, DrGRPOConfig):
        return args
    if isinstance(args, GRPOConfig):
        return DrGRPOConfig.from_grpo_config(args)
    if args is None:
        model_name = model if isinstance(model, str) else model.config._name_or_path
        return DrGRPOConfig(f"{model_name.rstrip('/').split('/')[-1] or 'model'}-DrGRPO")
    raise InputError("args", type(args).__name__, "a DrGRPOConfig", "Build it with trl_drgrpo.DrGRPOConfig(...).")


def _as_list(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
