"""`DrGRPOTrainer`: TRL's `GRPOTrainer` with the objective of Dr. GRPO. Glue only.

Data's way: prompts -> (TRL) completions -> rewards, checked -> `group_advantages` -> (TRL) forward and loss, with L as
the divisor -> optimizer step. The mathematics is in `advantages.py` and `loss.py`, what this relies on inside TRL in
`upstream.py`.
"""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from trl_drgrpo.diagnostics.steps import ProcessRewardWatch, step_statistics
from trl_drgrpo.errors import InputError, RewardError
from trl_drgrpo.fast_path.trainer import FastPathTrainer
from trl_drgrpo.preflight import check_inputs
from trl_drgrpo.process_supervision import StepRewardFunc, StepScorer, StepScores, process_only
from trl_drgrpo.resume import StepBoundary
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.seams import require_seams
from trl_drgrpo.step_credit import StepBaseline, StepCredit, spread_over_tokens, step_advantages
from trl_drgrpo.steps import StepSegmenter
from trl_drgrpo.steps import step_segmenter as build_segmenter
from trl_drgrpo.upstream import ScoredBatch


class DrGRPOTrainer(FastPathTrainer):
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
        step_reward_funcs (`Callable` or list of them, *optional*, keyword only):
            Process rewards. Each is called as `f(prompts=, completions=, steps=, completion_ids=, step_ends=,
            trainer_state=, log_metric=, log_extra=, <dataset columns>)`, synchronous or asynchronous, and returns one
            list of floats (or `None` entries) per completion, one per step. They work beside `reward_funcs` or alone;
            `args` says how they become advantages (`step_credit`, `step_baseline`, the weights).
        step_segmenter ([`~trl_drgrpo.steps.StepSegmenter`], *optional*, keyword only):
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
        self.step_scorer: StepScorer | None = None
        if step_reward_funcs:
            segmenter = step_segmenter or build_segmenter(args.step_spec)
            self.step_scorer = StepScorer(step_reward_funcs, segmenter, args.step_reward_weights, args.on_reward_error)
            if not reward_funcs and environment_factory is None:
                reward_funcs = [process_only]
        self._batch: Any = None  # the newest ScoredBatch
        self.reward_scale = RunningRewardScale()
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
        self.step_boundary = StepBoundary(self)
        self.add_callback(self.step_boundary)
        if self.step_scorer:
            self.add_callback(ProcessRewardWatch())
        if args.max_completion_length is None and not self.use_vllm:
            self._fill_the_context()

    # Advantages

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Keep the batch. Infinite rewards are caught here, whoever gave them: a model, an environment, a function."""
        for i, name in enumerate(self.reward_func_names):
            self._refuse_infinite(batch.rewards_per_func[:, i], f"reward function '{name}'")
        self._batch = batch

    def _refuse_infinite(self, rewards: torch.Tensor, field: str) -> None:
        """An error, or NaN in place of the value (in place, `rewards` is a view) for those who opted in."""
        infinite = rewards.isinf()
        if not infinite.any():
            return
        if self.args.on_reward_error == "raise":
            row = int(infinite.nonzero()[0])
            got = f"{rewards[row].item()} in float32 for row {row} of the batch"
            raise RewardError(field, got, "numbers that float32 can hold", "Clip it, or return None.")
        rewards[infinite] = torch.nan

    def on_rollouts(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Replace the advantages of a scored generation batch by those of Dr. GRPO."""
        rewards = combine_rewards(self._batch.rewards_per_func, self.reward_weights)  # (B,) over all ranks
        self._refuse_infinite(rewards, "weighted sum of the rewards")
        num_generations: Any = self.num_generations if self.model.training else self.num_generations_eval
        advantages = group_advantages(rewards, num_generations, cast(AdvantageBaseline, self.args.advantage_baseline))
        if self.args.scale_by_running_std:
            if self.model.training:
                self.reward_scale.update(rewards)
            advantages = advantages / self.reward_scale.std
        rollouts["advantages"] = advantages[self._own_rows()]
        if self.step_scorer:
            rollouts["advantages"] = self._with_step_rewards(rollouts, rewards, num_generations)  # (B, T)
        self.replace_logged_advantages(_row_means(rollouts))
        return super().on_rollouts(rollouts)

    def _own_rows(self) -> slice:
        """This rank's rows among those of all ranks."""
        rows = len(self._batch.prompts)
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _with_step_rewards(
        self, rollouts: dict[str, Any], rewards: torch.Tensor, num_generations: int
    ) -> torch.Tensor:
        """`A_it = outcome_weight * A_i + process_weight * A_it(process)`, 0 on padding and masked tokens."""
        mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)  # (B, T), this rank's rows
        scores = self._score_steps(rollouts)
        step_rewards = self.gathered(scores.rewards)  # all ranks: a group may straddle them
        credits = step_advantages(
            step_rewards,
            num_generations,
            cast(StepCredit, self.args.step_credit),
            cast(StepBaseline, self.args.step_baseline),
            deepseekmath_std=self.args.deepseekmath_step_std,
        )
        process = spread_over_tokens(credits[self._own_rows()], [steps.ends for steps in scores.steps], mask)
        self.log_batch({name: [value] for name, value in step_statistics(step_rewards, rewards.tolist()).items()}, {})
        outcome = rollouts["advantages"].unsqueeze(1)
        advantages = self.args.outcome_weight * outcome + self.args.process_weight * process
        return advantages.masked_fill(~mask.bool(), 0.0)

    def _score_steps(self, rollouts: dict[str, Any]) -> StepScores:
        """Call the step reward functions on this rank's rows, and log what they report."""
        scorer, batch = cast(StepScorer, self.step_scorer), self._batch
        tool_masks: list[Any] = [None] * len(batch.prompts)
        if "tool_mask" in rollouts:
            masks = rollouts["tool_mask"].tolist()
            tool_masks = [mask[: len(ids)] for mask, ids in zip(masks, batch.completion_ids, strict=True)]
        metrics: dict[str, list[float]] = defaultdict(list)
        columns: dict[str, list[Any]] = defaultdict(list)
        keys = [key for key in batch.inputs[0] if key not in ("prompt", "completion", "completion_ids")]
        scores = scorer.score(
            [list(ids) for ids in batch.completion_ids],
            tool_masks,
            getattr(self.processing_class, "tokenizer", self.processing_class),  # a processor's, for images
            lambda name, value: metrics[name].append(value),
            log_extra=lambda column, values: columns[column].extend(values),
            prompts=batch.prompts,
            completions=batch.completions,
            trainer_state=self.state,
            **{key: [example[key] for example in batch.inputs] for key in keys},
        )
        for name, rewards in zip(scorer.names, scores.rewards_per_func, strict=True):
            if scored := [s for row in rewards for s in row if s is not None]:
                metrics[f"process_rewards/{name}/mean"].append(sum(scored) / len(scored))
        columns["steps"] = [list(steps.texts) for steps in scores.steps]
        columns["step_rewards"] = scores.rewards
        self.log_batch(metrics, columns)
        return scores

    # Loss

    def loss_constants(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """KL is weighed by `self.beta`: here the warmed-up one."""
        return {**super().loss_constants(inputs), "beta": self.beta_at(self.state.global_step)}

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

    # Generation

    def _fill_the_context(self) -> None:
        """Without `max_completion_length`: let transformers generate until the context is full (its default is 20)."""
        if {"max_length", "max_new_tokens"} & set(self.args.generation_kwargs or {}):
            return
        context = self.model.config.get_text_config().max_position_embeddings
        self.generation_config.max_length = self.generation_kwargs["max_length"] = context


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


def _row_means(rollouts: dict[str, Any]) -> list[float]:
    """One advantage per row for the table of completions: the mean over the tokens that are trained on."""
    advantages = rollouts["advantages"]
    if advantages.dim() == 1:
        return advantages.tolist()
    tokens = (rollouts["completion_mask"] * rollouts.get("tool_mask", 1)).sum(dim=1).clamp(min=1)
    return (advantages.sum(dim=1) / tokens).tolist()
