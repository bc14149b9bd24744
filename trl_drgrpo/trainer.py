"""`DrGRPOTrainer`: TRL's `GRPOTrainer` with the objective of Dr. GRPO. The way of a reward to the optimizer:

1. TRL calls the reward functions, which are checked (`rewards/contract.py`): `on_rewards` refuses infinite rewards;
2. `compute_advantages`: `r_i - baseline` (`objective/advantages.py`), with step rewards also `A_it`
   (`process_rewards/step_scorer.py`, `objective/step_advantages.py`);
3. `features/fast_path/` plans the micro-batches of each optimizer step: same gradient, less work;
4. `loss_constants`: TRL's loss divides by `B * L` and weighs KL by `beta` (`objective/loss.py` is its specification);
5. the optimizer step is TRL's. `upstream/trl_overrides.py` has the hooks; `features/` plug into them.
"""

import copy
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftConfig
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import TrainOutput
from transformers.utils.quantization_config import QuantizationConfigMixin
from trl import GRPOConfig

from trl_drgrpo.common.errors import DivergedError, RewardError, told
from trl_drgrpo.common.rows import check_batch
from trl_drgrpo.config.best_metric import PREFIX, metrics_by_set, prepare_early_stopping, with_best_metric
from trl_drgrpo.config.config import DrGRPOConfig, dr_grpo_config
from trl_drgrpo.config.optional_parts import OPTIONS, built
from trl_drgrpo.config.preflight import Prepared, as_list, named_splits, prepare
from trl_drgrpo.features.diagnostics.diagnostics import Diagnostics
from trl_drgrpo.features.diagnostics.movement import MovementWatch
from trl_drgrpo.features.diagnostics.progress import progress_by_default
from trl_drgrpo.features.earlier_batches import EarlierBatches
from trl_drgrpo.features.fast_path.fast_path import FastPath
from trl_drgrpo.features.model_card.publishing import ModelCard
from trl_drgrpo.features.resume.divergence import DivergenceGuard
from trl_drgrpo.features.resume.resume import Resume
from trl_drgrpo.objective.advantages import AdvantageBaseline, combine_rewards, group_advantages
from trl_drgrpo.objective.step_choices import StepBaseline, StepCredit
from trl_drgrpo.process_rewards.step_fields import StepFields
from trl_drgrpo.process_rewards.without_outcome import process_only
from trl_drgrpo.rewards.contract import checked_reward, reward_name, to_fix
from trl_drgrpo.single_gpu.model_checks import check_prompt_lengths
from trl_drgrpo.single_gpu.peft_adapters import limit_to_language_model, note_base_revision, prepare_adapters
from trl_drgrpo.single_gpu.policies import adapters_tokenizer, load_policy, load_reward_model
from trl_drgrpo.single_gpu.vocabulary import check_vocabulary, context_length, embedding_rows
from trl_drgrpo.upstream.batches import (
    CreditedBatch,
    DatasetRow,
    RolloutBatch,
    Rollouts,
    ScoredBatch,
    checked_advantages,
    refuse_infinite,
    trained_mask,
)
from trl_drgrpo.upstream.hooks import Feature, Model
from trl_drgrpo.upstream.seams import require_seams
from trl_drgrpo.upstream.trl_overrides import HostTrainer
from trl_drgrpo.upstream.versions import untested_versions

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.steps import StepSegmenter
    from trl_drgrpo.upstream.argument_types import (
        Data,
        EnvironmentFactory,
        EvalData,
        OneOrMore,
        Optimizers,
        Policy,
        Processor,
        RewardSource,
        StepRewardSource,
    )

FeatureSource = Feature | type[Feature]


class DrGRPOTrainer(HostTrainer):
    """
    Trainer for Dr. GRPO ([Understanding R1-Zero-Like Training](https://huggingface.co/papers/2503.20783)).

    A drop-in for [`trl.GRPOTrainer`]: same arguments in the same order, every inherited feature. What differs:

    - advantages of outcomes are `r_i - baseline` (see [`group_advantages`]), never divided by a group's std; a group
      of equal rewards has advantages of exactly 0;
    - token losses are summed and divided by `B * L` with a constant `L` (see [`dr_grpo_loss`]);
    - reward functions are checked on every call, inputs before the model loads;
    - checkpoints hold what a resumed run needs to be the same run.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As in [`trl.GRPOTrainer`]. `args` is a [`DrGRPOConfig`]; a plain [`trl.GRPOConfig`] is converted with
            [`DrGRPOConfig.from_grpo_config`]. `peft_config` may be a [`lora_preset`]. An environment may also define
            `get_turn_rewards()`, a step reward per turn, with `on_turn_begin()` and `state_key()`: see
            `recipes/guides/process_rewards.md`.
        step_reward_funcs (`Callable`, `str`, `dict` or list of them, *optional*, keyword only):
            Process rewards. A text or mapping is read as in a recipe: a name, `{"prm": {...}}`, the folder or Hub id
            of a process reward model. Each is called as `f(prompts=, completions=, steps=, completion_ids=,
            step_ends=, trainer_state=, log_metric=, log_extra=, <dataset columns>)`, synchronous or asynchronous, and
            returns one list of floats (or `None` entries) per completion, one per step; with environments it is
            passed `environments=`, too. They work beside `reward_funcs` or alone; `args` says how they become
            advantages (`step_credit`, `step_baseline`, the weights).
        step_segmenter ([`StepSegmenter`], *optional*, keyword only):
            Cuts completions into steps; built from `args.step_separator` by default.
        advantage_func (`Callable[[RolloutBatch], torch.Tensor]`, *optional*, keyword only):
            Takes the place of [`~DrGRPOTrainer.compute_advantages`], with the same arguments and result.
        features ([`Feature`], class of them, or sequence of both, *optional*, keyword only):
            Features of your own beside this package's: [`LossTerm`] for additional loss per token, [`Feature`] for the
            hooks in `recipes/guides/extending.md`. A class is built with the trainer as its argument.
        parent_kwargs:
            Arguments that a newer TRL may add to `GRPOTrainer`, passed on as they are.

    Raises:
        `InputError` (a `ValueError`): Arguments that cannot work, before a model loads.
        `UpstreamError`: The installed TRL has moved something this trainer relies on, or a proof on a tiny model has
            found that gradients or merged adapters are wrong on the installed libraries.

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
    dataset_name: str | None = None  # what the run log calls the data; its builder's name by default

    def __init__(
        self,
        model: "Policy",
        reward_funcs: "OneOrMore[RewardSource] | None" = None,
        args: GRPOConfig | None = None,
        train_dataset: "Data | None" = None,
        eval_dataset: "EvalData | None" = None,
        processing_class: "Processor | None" = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: "Optimizers" = (None, None),
        quantization_config: QuantizationConfigMixin | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: "EnvironmentFactory | None" = None,
        *,
        step_reward_funcs: "OneOrMore[StepRewardSource] | None" = None,
        step_segmenter: "StepSegmenter | None" = None,
        advantage_func: Callable[[RolloutBatch], torch.Tensor] | None = None,
        features: "OneOrMore[FeatureSource]" = (),
        **parent_kwargs: Any,
    ):
        vanished = require_seams()
        if args is not None and not isinstance(args, DrGRPOConfig):
            self.passed_args = args
        args = dr_grpo_config(args, model)
        prepare_early_stopping(args, callbacks or ())
        run = prepare(
            args,
            model,
            reward_funcs,
            train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            step_reward_funcs=step_reward_funcs,
            step_segmenter=step_segmenter,
            advantage_func=advantage_func,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.step_scorer = run.step_scorer
        self.step_separator = run.step_separator
        self.advantage_func = advantage_func
        # The config has made sure that one of the two is set.
        self.loss_normalizer = int(args.loss_normalizer or args.max_completion_length or 0)
        # Features are listed before TRL's constructor runs, because it calls hooks (`opening_repository`) already.
        self._build_features(run, optimizers)
        self._add_features(features, args)
        if vanished or untested_versions():
            # A proof on a tiny model, made once for these versions. It comes before the model of the run is loaded.
            from trl_drgrpo.host_proof.keeping import require_proof

            settings = {
                "tools": tools or environment_factory,
                "rollout_func": rollout_func,
                "use_vllm": args.use_vllm,
            }
            barred = require_proof(DrGRPOTrainer, args, vanished, settings)
            self.fast_path.speed.bar(barred)
        if processing_class is None:
            processing_class = adapters_tokenizer(model, args.trust_remote_code)
        # A copy, because it may be narrowed to layers of this model. A model that is named by a text is loaded by
        # TRL: `load_policy` narrows it then.
        peft_config = copy.copy(peft_config)
        self.given_adapter = peft_config
        if not isinstance(model, str):
            limit_to_language_model(peft_config, model)
        super().__init__(
            model,
            run.rewards,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            run.quantization_config,
            peft_config,
            tools,
            rollout_func,
            run.turns.factory,
            **parent_kwargs,
        )
        # TRL has appended the rewards of environments to those that were passed. These take their places: with
        # on_reward_error="unscorable", an environment that fails costs its row and not the run.
        first = len(self.reward_funcs) - len(self.turns.outcome_rewards)
        for i, outcome_reward in enumerate(self.turns.outcome_rewards, start=first):
            self.reward_funcs[i] = checked_reward(outcome_reward, name=self.reward_func_names[i])
        # With FSDP or DeepSpeed a process may hold a part of the model and of each gradient only.
        if not self.in_lockstep:
            self.features = [*self.features, self.movement_watch]
            memory_watch = built("memory_watch", run.arguments)
            if memory_watch is not None:
                self.add_callback(memory_watch)
        for feature in self.features:
            self.add_callback(feature)
            feature.on_trainer_built()
        if self.step_scorer:
            self.step_scorer.on_trainer_built(self)
        splits = named_splits(train_dataset, eval_dataset)
        if run.embeddings is None:  # `prepare` could not count them before the model was loaded
            embeddings = embedding_rows(self.unwrapped_model)
            check_vocabulary(self.processing_class, embeddings, splits, args.chat_template_kwargs)
        if rollout_func is None:
            # Prompts are measured as the model gets them, with chat template and tools, which TRL's constructor sets.
            context = None
            if self.use_vllm:
                context = args.vllm_max_model_length
            if not context:
                context = context_length(self.model.config)
            check_prompt_lengths(splits, self.prompt_lengths, args.max_completion_length, context)
        # A plain `GRPOConfig` was converted, so an assignment to it from here on is lost. `refuse_lost_assignments`
        # compares it with these values to say so.
        if self.passed_args is not None:
            self.passed_with = dict(vars(self.passed_args))

    def _build_features(self, run: Prepared, optimizers: "Optimizers") -> None:
        self.resume = Resume(self, optimizers[0])
        self.fast_path = FastPath(self)
        self.diagnostics = Diagnostics(self, self.fast_path.speed)
        self.earlier = EarlierBatches(self)
        self.model_card = ModelCard(self, optimizers)
        self.movement_watch = MovementWatch(self)
        # An option that the run does not ask for is the placeholder of `config/optional_parts.py`, often `None`.
        self.sampling = built("sampling", run.arguments, self)
        self.forks = built("forks", run.arguments, self, run.segmenter)
        self.router_balance = built("router_balance", run.arguments, self)
        self.turns = run.turns
        # Read once, here: a later assignment to one of these arguments is refused.
        self.takes = [name for option in OPTIONS.values() for name in option.takes]
        # The guard is the first: it refuses before anything is written or deleted.
        core = [DivergenceGuard(self, self.resume), self.resume, self.diagnostics, self.fast_path]
        parts = [self.sampling, self.forks, self.router_balance, self.earlier, self.model_card, self.turns]
        self.features = [*core, *(part for part in parts if isinstance(part, Feature))]
        for feature in self.features:
            feature.trainer = self

    def _add_features(self, features: "OneOrMore[FeatureSource]", args: DrGRPOConfig) -> None:
        """Build the user's features and list them behind this package's own."""
        for source in as_list(features):
            from trl_drgrpo.upstream.passed_features import built_feature

            feature = built_feature(source, self, args)
            feature.trainer = self
            self.features = [*self.features, feature]
        self.check_owners()

    def load_policy(self, load: Callable[..., Model], name: str, options: dict[str, Any]) -> Model:
        model = load_policy(load, name, options)
        limit_to_language_model(self.given_adapter, model)
        return model

    def load_reward_model(self, load: Callable[..., Model], name: str, options: dict[str, Any]) -> Model:
        return load_reward_model(load, name, options)

    def on_built(self, trainable_values: dict[str, torch.Tensor]) -> None:
        prepare_adapters(self.model, trainable_values, self.args.adapter_dtype)
        note_base_revision(self.model, (self.args.model_init_kwargs or {}).get("revision"))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as [`trl.GRPOTrainer.train`] does, with these differences.

        A run begins only in a folder that holds no other one, unless `overwrite_output_dir` is set, and to which no
        other process writes; when a reward function fails, a checkpoint is saved before the error; on SIGTERM, one is
        saved after the optimizer step, and the process exits with 143; `resume_from_checkpoint=True` takes the newest
        complete checkpoint of the run that wrote last, or starts the run and says so; the path of one that is not
        complete, or was changed since it was written, is an `InputError`. So is a configuration that contradicts
        Dr. GRPO by now, or a field that was assigned too late.
        """
        # Again, because `trainer.features` and `trainer.args` may have been assigned since the trainer was built.
        self.check_owners()
        self.check_assignments()
        try:
            with ExitStack() as running:
                # First: it refuses a folder of another run before anything else writes there.
                checkpoint = running.enter_context(self.resume.started(resume_from_checkpoint))
                running.enter_context(progress_by_default(self))
                if self.args.gradient_checkpointing_kwargs:
                    from trl_drgrpo.upstream.checkpointing import checkpoints_as_configured

                    running.enter_context(checkpoints_as_configured(self.model))
                for feature in self.features:
                    running.enter_context(feature.around_train())
                return super().train(checkpoint, *args, **kwargs)
        except (RewardError, DivergedError) as error:
            raise error.with_traceback(None) from error.__cause__  # without the loop's dozens of frames
        finally:
            self.is_in_train = False  # which transformers leaves as it is after an error

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as in TRL. In training, metrics without the one that `metric_for_best_model` names are an
        `InputError`. Of several evaluation sets each has all its metrics under its name: `eval_<name>_reward`."""
        if not self.is_in_train:
            self.refuse_lost_assignments()
        try:
            metrics = super().evaluate(*args, **kwargs)
        except (RewardError, DivergedError) as error:
            raise error.with_traceback(None) from error.__cause__  # without the loop's dozens of frames
        prefix = kwargs.get("metric_key_prefix", "eval")
        if prefix.startswith(PREFIX):
            metrics = metrics_by_set(metrics, prefix)
        # In training, transformers passes `ignore_keys` alone. For each of several sets it then calls this method
        # again, with more arguments.
        is_scheduled = self.is_in_train and not args and kwargs.keys() <= {"ignore_keys"}
        if is_scheduled:
            return with_best_metric(self.args, metrics)
        return metrics

    # Rewards become advantages

    def on_rows(self, rows: Sequence[DatasetRow]) -> None:
        """Check the rows of a stream, which has no length and so was not checked before the run."""
        super().on_rows(rows)
        field = "train_dataset" if self.model.training else "eval_dataset"
        data = getattr(self, field)
        splits = [data]
        if isinstance(data, dict):  # several evaluation sets, by name
            splits = data.values()
        if not all(hasattr(split, "__len__") for split in splits):
            check_batch(rows, field)

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Refuse infinite rewards, whoever gave them: a model, an environment, a function."""
        for i, name in enumerate(self.reward_func_names):
            refuse_infinite(batch.rewards_per_func[:, i], f"reward function '{name}'", self.args.on_reward_error)

    def on_rollouts(self, batch: ScoredBatch, rollouts: Rollouts) -> Rollouts:
        """Replace the advantages of a scored generation batch by those of Dr. GRPO."""
        steps = StepFields()
        if self.step_scorer:
            steps = self.step_scorer.fields(self, batch, rollouts)
        # A row whose environment failed has no reward, whatever the reward functions made of what is left of it.
        batch.rewards_per_func[self.turns.failed_rows()] = torch.nan
        rewards = combine_rewards(batch.rewards_per_func, self.reward_weights)
        refuse_infinite(rewards, "weighted sum of the rewards", self.args.on_reward_error)
        if self.reward_func_names == [process_only.__name__]:
            # Step rewards work alone, and `process_only` gives 0 to every row. A row without any score for its steps
            # cannot be judged, so it must leave the group like a row without an outcome.
            is_unscorable = [bool(row) and set(row) == {None} for row in steps.step_rewards or ()]
            unscorable = torch.tensor(is_unscorable, device=rewards.device)
            rewards = rewards.masked_fill(unscorable, torch.nan)
        rewarded = RolloutBatch(
            **vars(steps),
            scored=batch,
            rewards=rewards,
            completion_mask=rollouts["completion_mask"],
            trained_mask=trained_mask(rollouts),
            num_generations=self.group_size,
            own_rows=batch.rows_of_rank(self.accelerator.process_index),
            training=self.model.training,
            forks=self.forks.of_all_ranks,
        )
        advantages = self._checked_advantages(rewarded)
        rollouts["advantages"] = advantages
        ratios = rollouts.get("importance_sampling_ratio")
        credited = CreditedBatch(**vars(rewarded), advantages=advantages, sampling_ratios=ratios)
        # TRL has noted its own advantages for the table of completions. What only describes a run never ends it.
        means = self.describing.value(
            "The table of completions", lambda: credited.row_advantages.tolist(), otherwise=[]
        )
        self.replace_logged_advantages(means)
        self.on_credit(credited)
        return rollouts

    def compute_advantages(self, batch: RolloutBatch) -> torch.Tensor:
        """The advantages of a generation batch. Override it, or pass `advantage_func`, for a credit of your own.

        Called once per generation batch (with `dynamic_sampling`, per round of it) on every rank, in evaluations too.

        Args:
            batch ([`RolloutBatch`]): Rewards and steps of all ranks, masks and texts of this rank's rows.

        Returns:
            `torch.Tensor`: One advantage per row of this rank `(b,)`, or of all ranks `(B,)`, or one per token of this
            rank's rows `(b, T)`; any dtype and device. They must be finite. Tokens that are not trained on get 0.
        """
        args = self.args
        # One number for all groups: 1, or with `scale_by_running_std` the std over earlier batches.
        outcome = self._outcome_advantages(batch) / self.earlier.divisor(batch)  # (B,), with forks (b, T)
        if batch.step_rewards is None or batch.step_ends is None:
            return outcome
        from trl_drgrpo.objective.step_advantages import broadcast_to_tokens, step_advantages, with_closings

        rule = cast(StepCredit, args.step_credit)
        unscorable = batch.rewards.isnan()
        is_baseline = args.process_role == "baseline"
        outcome_weight = args.outcome_weight
        process_weight = args.process_weight
        # The tokens after the last separator are the decision to stop. The unbiased rules credit it by itself; the
        # published baselines pay it with the last step, as their papers do.
        closings_apart = batch.forks is not None or is_baseline or args.step_baseline in ("to_go", "none")
        rewards, ends = with_closings(batch.step_rewards, batch.step_ends, apart=closings_apart)
        if batch.forks is not None:
            from trl_drgrpo.objective.fork_advantages import fork_step_advantages

            credits = fork_step_advantages(rewards, ends, batch.num_generations, batch.forks, rule, unscorable)
        elif is_baseline:
            scored = outcome.masked_fill(unscorable, torch.nan)
            credits, metrics = self.earlier.value_baseline.subtract(
                scored, rewards, ends, batch.num_generations, update=batch.training
            )
            logs = {f"process/baseline_{name}": [value] for name, value in metrics.items()}
            self.log_batch(logs, {})
            # The credits are outcomes minus a baseline: they take the outcome's place, and its weight.
            process_weight = outcome_weight
            outcome_weight = 0.0
        else:
            credits = step_advantages(
                rewards,
                batch.num_generations,
                rule,
                cast(StepBaseline, args.step_baseline),
                deepseekmath_std=args.deepseekmath_step_std,
                state_keys=batch.state_keys,
                unscorable=unscorable,
            )
        # Groups may be spread over ranks, so credits were computed from all rows; this rank trains its own.
        rows = batch.own_rows
        process = broadcast_to_tokens(credits[rows], ends[rows], batch.trained_mask)  # (b, T)
        if outcome.dim() == 1:
            outcome = outcome[rows].to(process.device).unsqueeze(1)
        return outcome_weight * outcome + process_weight * process

    def _outcome_advantages(self, batch: RolloutBatch) -> torch.Tensor:
        """Advantages of the outcome rewards: `(B,)`; with forks, whose siblings are compared, `(b, T)`."""
        if batch.forks is None:
            baseline = cast(AdvantageBaseline, self.args.advantage_baseline)
            return group_advantages(batch.rewards, batch.num_generations, baseline)
        from trl_drgrpo.objective.fork_advantages import fork_token_advantages

        return fork_token_advantages(
            batch.rewards, batch.num_generations, batch.forks, batch.trained_mask, batch.own_rows
        )

    @property
    def own_advantages(self) -> str | None:
        """Name of the function or override that takes the place of the formulas; `None`: these are used."""
        if self.advantage_func is not None:
            return f"advantage_func '{reward_name(self.advantage_func)}'"
        if type(self).compute_advantages is not DrGRPOTrainer.compute_advantages:
            return f"method {type(self).__name__}.compute_advantages"
        return None

    def _checked_advantages(self, batch: RolloutBatch) -> torch.Tensor:
        """Checked result of `advantage_func` or `compute_advantages` for a batch."""
        if self.advantage_func is None:
            return checked_advantages(self.compute_advantages(batch), batch, "compute_advantages")
        try:
            advantages = self.advantage_func(batch)
        except Exception as error:  # a user's function: what was computed up to here is saved before the run ends
            remedy = to_fix(error, option=None)
            raise RewardError("advantage_func", told(error), "a tensor of advantages", remedy) from error
        return checked_advantages(advantages, batch, "advantage_func")

    @property
    def run_id(self) -> str:
        """Id of the run that trains or has trained last; kept when it is resumed."""
        return self.resume.run_id

    # Advantages become a loss

    def loss_constants(self, inputs: Rollouts) -> dict[str, float]:
        """The objective's two constants, under the names by which TRL's loss reads them.

        TRL divides the summed token losses by its rows times `self.max_completion_length`, and weighs KL by
        `self.beta`: here by `B * L`, with the rows of a stock micro-batch as B, and by the warmed-up beta.
        """
        return {
            "max_completion_length": self.loss_normalizer / self.fast_path.rows_per_nominal_row(inputs),
            "beta": self.beta_at(self.state.global_step),
        }

    def beta_at(self, step: int) -> float:
        """KL weight of an optimizer step, counted from 0: `beta * min(1, (step + 1) / beta_warmup_steps)`."""
        warmup_steps = self.args.beta_warmup_steps
        if not warmup_steps:
            return self.beta
        return self.beta * min(1.0, (step + 1) / warmup_steps)

    def add_to_log(self, logs: dict[str, float]) -> None:
        if self.args.beta_warmup_steps and self.model.training:
            # transformers has counted the step that was just finished.
            logs["drgrpo/beta"] = self.beta_at(self.state.global_step - 1)
        super().add_to_log(logs)
