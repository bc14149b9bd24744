"""`DrGRPOTrainer`: TRL's `GRPOTrainer` with the objective of Dr. GRPO. Glue only.

Data's way: prompts -> (TRL) completions -> rewards, checked -> advantages (`credit.py`) -> planned micro-batches
(`fast_path/`) -> (TRL) forward and loss, with L as the divisor -> optimizer step. What this relies on inside TRL is in
`upstream.py`.
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from trl import GRPOConfig

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.config.preflight import check_inputs
from trl_drgrpo.features.diagnostics.feature import DiagnosedTrainer
from trl_drgrpo.features.resume.feature import StepBoundary
from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.process_rewards.calling import StepRewardFunc, StepScorer, process_only
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.steps import step_segmenter as build_segmenter
from trl_drgrpo.rewards.contract import checked_reward, without_frames
from trl_drgrpo.single_gpu.adapters import choose_quantization, prepare_adapters
from trl_drgrpo.single_gpu.memory.warning import MemoryWatch
from trl_drgrpo.single_gpu.model_checks import check_model
from trl_drgrpo.single_gpu.movement import MovementWatch
from trl_drgrpo.upstream.seams import require_seams
from trl_drgrpo.upstream.weight_sync import sync_merged_layers


class DrGRPOTrainer(DiagnosedTrainer):
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
            [`DrGRPOConfig.from_grpo_config`]. `peft_config` may be a [`lora_preset`].
        step_reward_funcs (`Callable` or list of them, *optional*, keyword only):
            Process rewards. Each is called as `f(prompts=, completions=, steps=, completion_ids=, step_ends=,
            trainer_state=, log_metric=, log_extra=, <dataset columns>)`, synchronous or asynchronous, and returns one
            list of floats (or `None` entries) per completion, one per step. They work beside `reward_funcs` or alone;
            `args` says how they become advantages (`step_credit`, `step_baseline`, the weights).
        step_segmenter ([`StepSegmenter`], *optional*, keyword only):
            Cuts completions into steps; built from `args.step_separator` by default.
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
        *,
        step_reward_funcs: StepRewardFunc | Sequence[StepRewardFunc] | None = None,
        step_segmenter: StepSegmenter | None = None,
        **parent_kwargs: Any,
    ):
        require_seams()
        args = _dr_grpo_config(args, model)
        reward_funcs, step_reward_funcs = _as_list(reward_funcs), _as_list(step_reward_funcs)
        check_inputs(
            args,
            reward_funcs,
            train_dataset,
            eval_dataset=eval_dataset,
            step_reward_funcs=step_reward_funcs,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        init: Any = args.model_init_kwargs
        quantization_config = choose_quantization(model, peft_config, quantization_config, init)
        self.step_scorer: StepScorer | None = None
        if step_reward_funcs:
            segmenter = step_segmenter or build_segmenter(args.step_spec)
            self.step_scorer = StepScorer(step_reward_funcs, segmenter, args.step_reward_weights, args.on_reward_error)
            if not reward_funcs and environment_factory is None:
                reward_funcs = [process_only]
        check_model(args, model, reward_funcs, quantization_config, peft_config)
        self.reward_scale = RunningRewardScale()
        self.given_optimizers = optimizers
        # The config has made sure that one of the two is set.
        self.loss_normalizer = int(args.loss_normalizer or args.max_completion_length or 0)
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
        for i in range(len(reward_funcs), len(self.reward_funcs)):  # those that TRL added for environments
            name = self.reward_func_names[i]
            reward_func: Any = self.reward_funcs[i]
            self.reward_funcs[i] = checked_reward(reward_func, args.on_reward_error, name)
        if self.use_vllm and not self._in_lockstep:
            sync_merged_layers(self.vllm_generation)
        self.step_boundary = StepBoundary(self)
        self.add_callback(self.step_boundary)
        self.movement_watch = MovementWatch()
        if not self.shards_gradients:
            self.add_callback(self.movement_watch)
        self.add_callback(MemoryWatch())
        self.start_diagnostics()
        if args.max_completion_length is None and not self.use_vllm:
            self._fill_the_context()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; a configuration that was assigned to since the constructor is checked again.

        Raises:
            `InputError`: Before the first step: a value that contradicts Dr. GRPO, or that comes too late.
        """
        self.args.check()
        for name, (then, now) in self.changed_too_late().items():
            remedy = "The trainer has copied it: assign it before, or build the trainer anew."
            raise InputError(name, f"{now!r}, assigned after the trainer was built", f"{then!r}, as then", remedy)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except RewardError as error:
            raise without_frames(error) from error.__cause__

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            return super().evaluate(*args, **kwargs)
        except RewardError as error:
            raise without_frames(error) from error.__cause__

    def on_built(self, trainable_values: dict[str, torch.Tensor]) -> None:
        prepare_adapters(self.model, trainable_values, self.args.adapter_dtype)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            logs |= self.describing.value("The numbers of a step", self._numbers, otherwise={})
        super().log(logs, start_time)

    def _numbers(self) -> dict[str, float]:
        numbers = self.movement_watch.logged_once()
        if self.args.beta_warmup_steps:
            numbers["drgrpo/beta"] = self.beta_at(self.state.global_step - 1)  # the step that was just finished
        if self.args.scale_by_running_std:
            numbers["drgrpo/reward_scale"] = self.reward_scale.std
        return numbers

    # Generation

    def _fill_the_context(self) -> None:
        """Without `max_completion_length`: let transformers generate until the context is full (its default is 20)."""
        if {"max_length", "max_new_tokens"} & set(self.args.generation_kwargs or {}):
            return
        context = self.model.config.get_text_config().max_position_embeddings
        self.generation_config.max_length = self.generation_kwargs["max_length"] = context


def _dr_grpo_config(args: GRPOConfig | None, model: Any) -> DrGRPOConfig:
    if isinstance(args, DrGRPOConfig):
        args.check()
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
