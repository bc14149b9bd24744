"""Public names for what the package reads and writes of TRL's trainer, and values replaced for the time of a block."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.generation import end_tokens, own_settings, without_own_settings
from trl_drgrpo.rewards.contract import RewardFunction
from trl_drgrpo.upstream.batches import DatasetRow, Rollouts
from trl_drgrpo.upstream.description import DescriptionGuard
from trl_drgrpo.upstream.hooks import Completions, Feature
from trl_drgrpo.upstream.logged_metrics import LoggedMetrics

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.argument_types import Data, EvalData, Processor
    from trl_drgrpo.upstream.stop_strings import StopStrings

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _joined(of_ranks: Sequence[dict[str, list[T]]]) -> Iterator[tuple[str, list[T]]]:
    """Yield the lists of all ranks under each of their names, in the order of names and ranks."""
    for name in sorted(set().union(*of_ranks)):
        values = []
        for lists in of_ranks:  # a rank may lack a name, as it has other rows
            values += lists.get(name, [])
        yield name, values


@contextmanager
def swapped(owner: object, **values: Any) -> Iterator[None]:
    """Attributes of `owner` replaced inside the block, restored after it; what came from its class does so again."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


# Where every process takes part in every forward and backward, none may leave one out.
_LOCKSTEP = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


# Arguments whose copy in TRL's trainer has another name.
_COPIED_AS = {"epsilon": "epsilon_low"}


class PrivateState(GRPOTrainer):
    """`GRPOTrainer` with public names for what the rest of this package reads and writes."""

    args: "DrGRPOConfig"
    model: PreTrainedModel  # or PEFT's wrapper of one
    model_wrapped: torch.nn.Module
    ref_model: PreTrainedModel | None
    optimizer: torch.optim.Optimizer | None
    processing_class: "Processor"
    reward_funcs: list[RewardFunction | PreTrainedModel]
    train_dataset: "Data"
    eval_dataset: "EvalData | None"
    max_completion_length: float | None  # while a loss is computed, see `Hooks.loss_constants`
    _buffered_inputs: list[Rollouts] | None
    train_sampler: Any = None  # the newest that TRL made
    takes: Sequence[str] = ()  # arguments read once, of features that are not there, too
    stop_strings: "StopStrings | None" = None  # texts that end a completion
    _make_environments: Callable[[], list[Any]] | None = None  # makes the list for a batch's environments
    _environments: list[Any] | None = None
    built_with: dict[str, Any]  # the arguments as they were when the trainer was built
    passed_args: Any = None  # the `GRPOConfig` that was converted
    passed_with: dict[str, Any] = {}  # noqa: RUF012  # its fields then; replaced, never changed
    features: Sequence[Feature]
    _describing: DescriptionGuard | None = None  # asked for before the constructor has run
    _logged_metrics: LoggedMetrics | None = None
    _tr_loss: torch.Tensor  # of the steps since the last log, set when training begins

    # No `cached_property`: to pyright that is no property, as `TrainerProtocol` has it.

    @property
    def describing(self) -> DescriptionGuard:
        """Guards what describes the run, see `description.py`."""
        if self._describing is None:
            self._describing = DescriptionGuard()
        return self._describing

    @property
    def logged_metrics(self) -> LoggedMetrics:
        """The numbers since the last log."""
        if self._logged_metrics is None:
            self._logged_metrics = LoggedMetrics(self)
        return self._logged_metrics

    @property
    def unwrapped_model(self) -> PreTrainedModel:
        """The policy, or PEFT's wrapper around it, without those of processes."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def citation(self) -> str:
        """BibTeX of the paper that the trainer's class names."""
        return self._paper["citation"]

    @property
    def in_lockstep(self) -> bool:
        """Tell whether every process takes part in each forward and backward, and may hold a part of each gradient
        only."""
        return self.accelerator.distributed_type in _LOCKSTEP

    @property
    def counts_forwards(self) -> bool:
        """Tell whether every micro-batch of an optimizer step needs a forward and a backward, also where no process
        runs any: the engine counts them."""
        return self.in_lockstep and self.accelerator.distributed_type != DistributedType.FSDP

    @property
    def group_size(self) -> int:
        """G of the generation batch at hand: evaluation may have its own."""
        if self.model.training:  # TRL, too, tells a training from an evaluation by this
            return self.args.num_generations
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def training_examples(self) -> "Data":
        """The training set as the dataloader reads it: without the columns that transformers leaves out."""
        dataset = self.train_dataset
        if isinstance(dataset, Dataset) and self.args.remove_unused_columns:
            return self._remove_unused_columns(dataset, description="training")
        return dataset

    def checkpoint_folder(self, trial: dict[str, Any] | None = None) -> Path:
        """Folder of a checkpoint at the current optimizer step."""
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def save_checkpoint_now(self) -> None:
        """Write a checkpoint outside the schedule."""
        self._save_checkpoint(self.model, trial=None)

    @property
    def micro_step(self) -> int:
        """Micro-batches processed so far: TRL decides by it when to generate and which slice of a batch is due."""
        return self._step

    def set_micro_step(self, value: int) -> None:
        """Go on from a number of processed micro-batches."""
        self._step = value

    def check_assignments(self) -> None:
        """Check the arguments again where one was assigned to after the constructor, and refuse one of which the
        trainer or a feature uses a copy made there."""
        self.refuse_lost_assignments()
        changed = [name for name, then in self.built_with.items() if getattr(self.args, name) != then]
        if changed or vars(self.args).keys() - self.built_with.keys():  # the latter: no field at all
            self.args.check()
        read_once = set(self.takes)
        for feature in self.features:
            read_once.update(feature.takes)
        for name in changed:
            now = getattr(self.args, name)
            # TRL's constructor copies many arguments to attributes of the same name, and reads those from then on.
            copied = vars(self).get(_COPIED_AS.get(name, name), now)
            if isinstance(copied, torch.Tensor):  # such as `reward_weights`
                copied = copied.tolist()
            if name in read_once or now != copied:
                expected = f"{self.built_with[name]!r}, as when it was built"
                remedy = "The trainer has copied it: set it before, or build a new trainer."
                raise InputError(name, f"{now!r}, assigned after the trainer was built", expected, remedy)

    def refuse_lost_assignments(self) -> None:
        """Refuse an assignment to the `GRPOConfig` that the trainer was built with: it has made a copy of it."""
        for name, then in self.passed_with.items():
            now = getattr(self.passed_args, name)
            if now != then:
                remedy = "The trainer works with a copy of it: assign it to trainer.args, or pass a DrGRPOConfig."
                raise InputError(name, f"{now!r}, assigned to the GRPOConfig", "trainer.args", remedy)

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; where images come in, the processor's."""
        processor = self.processing_class
        return processor if isinstance(processor, PreTrainedTokenizerBase) else getattr(processor, "tokenizer")  # noqa: B009

    @property
    def takes_images(self) -> bool:
        """Tell whether some batches may come with images."""
        return self.text_tokenizer is not self.processing_class

    @property
    def pad_token_id(self) -> int:
        """Token that TRL pads with."""
        return cast(int, self.text_tokenizer.pad_token_id)  # TRL sees to it that there is one

    @property
    def generate_every(self) -> int:
        """Micro-batches that one generation batch serves."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def pending_rollouts(self) -> list[Rollouts] | None:
        """Micro-batches of the current generation batch; `None` when the next step generates anyway."""
        # The condition under which TRL's `_prepare_inputs` generates.
        return None if self._step % self.generate_every == 0 else self._buffered_inputs

    def set_pending_rollouts(self, micro_batches: list[Rollouts] | None) -> None:
        """Go on with these micro-batches of the current generation batch."""
        self._buffered_inputs = micro_batches

    @property
    def buffered_rollouts(self) -> list[Rollouts]:
        """Micro-batches of the current generation batch, also those that are done."""
        return self._buffered_inputs or []

    @property
    def environments(self) -> list[Any] | None:
        """One environment per row of this rank's newest generation batch; `None` where there are none."""
        return self._environments

    @environments.setter
    def environments(self, environments: list[Any] | None) -> None:
        # TRL begins a batch by `self.environments = []`. It then appends to the list, and resets what is in it.
        if environments == [] and self._make_environments is not None:
            environments = self._make_environments()
        self._environments = environments

    def begin_environments_with(self, make_list: Callable[[], list[Any]]) -> None:
        """Use a list of another class for the environments of each batch, see `environments.py`."""
        self._make_environments = make_list

    def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, from the event loop on which TRL runs asynchronous methods of environments."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.async_loop).result()

    @contextmanager
    def completions_up_to(self, tokens: int | None) -> Iterator[None]:
        """Inside the block, the backend writes at most so many tokens; with vLLM, the most that any process says.

        `None`: as many as the run allows. All processes enter it.
        """
        if tokens is None:
            yield
            return
        # TRL reads the limit here for vLLM, and from both settings of generation for transformers.
        if self.use_vllm:  # one request, or one group of engines, serves several processes
            with swapped(self.vllm_generation, max_completion_length=max(self.gathered([tokens]))):
                yield
        else:
            shorter = {**self.generation_kwargs, "max_new_tokens": tokens}
            with swapped(self.generation_config, max_new_tokens=tokens), swapped(self, generation_kwargs=shorter):
                yield

    def sample_completions(self, prompt_ids: list[list[int]], num_generations: int) -> list[list[int]]:
        """Completion ids, sampled from the policy with the trainer's own backend and settings, outside a generation
        batch. Equal prompts are consecutive, `num_generations` of each."""
        return self._generate_single_turn(prompt_ids, None, {}, num_generations)[0]

    def sample_rollouts(self, inputs: list[DatasetRow]) -> Rollouts:
        """A generation batch, sampled and scored as in training, outside of it. `inputs`: rows of the training data
        loader, each as often as there are generations."""
        return Rollouts(**self._generate_and_score_completions(inputs))

    def gathered(self, values: list[T]) -> list[T]:
        """A list of Python objects of every rank, in the order of ranks."""
        return gather_object(values)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a completion, as TRL counts them; one that ends in none of them was cut off. A list: an
        [`EndToken`] equals each of them, and has another hash."""
        return end_tokens(self.eos_token_ids, self.pad_token_id)

    def sample_as_configured(self) -> None:
        """Take what `generation_kwargs` say of the end of a completion, and say what the model's own
        `generation_config` would have changed."""
        options = self.args.generation_kwargs or {}
        self.eos_token_ids = end_tokens(self.eos_token_ids, options.get("eos_token_id"), options.get("stop_token_ids"))
        strings = options.get("stop" if self.use_vllm else "stop_strings") or []
        if isinstance(strings, str):
            strings = [strings]
        if strings:
            from trl_drgrpo.upstream.stop_strings import StopStrings

            self.stop_strings = StopStrings(strings, self.text_tokenizer, self.eos_token_ids)
        longest_turn = self.args.max_turn_length
        if self.use_vllm:
            if longest_turn is not None:
                self.vllm_generation.max_completion_length = longest_turn
            return
        # TRL samples with its `generation_config`, and puts `generation_kwargs` over the model's meanwhile: each
        # setting goes into both.
        if self.args.max_completion_length is None and "max_length" not in options:
            # Until the context is full: transformers' default is 20 tokens.
            context = self.model.config.get_text_config().max_position_embeddings
            self.generation_config.max_length = self.generation_kwargs["max_length"] = context
        if longest_turn is not None:
            self.generation_config.max_new_tokens = self.generation_kwargs["max_new_tokens"] = longest_turn
        # transformers loses the tokenizer, which reads them, on the way to a `custom_generate`: the criterion is
        # passed ready made (`sampling_as_configured`).
        self.generation_config.stop_strings = None
        self.generation_kwargs.pop("stop_strings", None)
        self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids
        # transformers fills fields that are `None` from the model's `generation_config`.
        unused = []
        for name, value in own_settings(self.model).items():
            if getattr(self.generation_config, name, None) is None:
                unused.append(f"{name}={value}")
        if unused:
            logger.warning(
                "The model's generation_config has %s, which is not used in training: completions are sampled from "
                "the policy as it is. Set generation_kwargs to train with it all the same.",
                ", ".join(unused),
            )

    @contextmanager
    def sampling_as_configured(self) -> Iterator[None]:
        """Inside the block, transformers takes nothing from the model's `generation_config`, and stops at texts."""
        if self.use_vllm:
            yield
            return
        model: PreTrainedModel = self.accelerator.unwrap_model(self.model_wrapped)
        stopping = {}
        # TRL calls `generate` without a way to add an argument, so the model's method brings it.
        if self.stop_strings is not None:
            generate = cast(Callable[..., torch.Tensor], model.generate)
            stopping["generate"] = partial(generate, stopping_criteria=self.stop_strings.criteria)
        with without_own_settings(model), swapped(model, **stopping):
            yield

    def cut_at_stop_strings(self, prompt_ids: Sequence[Sequence[int]], completions: Completions) -> Completions:
        """Completions of these prompts without what stands behind a stop string."""
        if self.stop_strings is None:
            return completions
        ids, log_probs = completions
        ids = [self.stop_strings.cut(prompt, row) for prompt, row in zip(prompt_ids, ids, strict=True)]
        if log_probs is not None:
            log_probs = [values[: len(row)] for values, row in zip(log_probs, ids, strict=True)]
        return ids, log_probs

    def log_batch(self, metrics: dict[str, list[float]], columns: dict[str, list[Any]]) -> None:
        """Log what was seen in the newest generation batch: the mean over ranks of `metrics`, and `columns` of the
        table of logged completions. Called by every rank, each with its own rows."""
        # The exchange stands outside of the guards: a rank that left it out would let the others wait.
        of_ranks = self.gathered([(metrics, columns)])
        logged = self._metrics["train" if self.model.training else "eval"]
        with self.describing("The metrics of a batch"):
            for name, values in _joined([of_rank for of_rank, _ in of_ranks]):
                logged[name].append(sum(values) / len(values))
        with self.describing("The table of completions"):
            for name, values in _joined([of_rank for _, of_rank in of_ranks]):
                self._logs["extra"][name].extend(values)

    @property
    def loss_scale(self) -> float | None:
        """The factor of float16 losses, which falls whenever a gradient overflows; `None` in other types."""
        return None if self.accelerator.scaler is None else self.accelerator.scaler.get_scale()

    @property
    def attention(self) -> str | None:
        """The implementation of attention that the policy uses."""
        return getattr(self.model.config, "_attn_implementation", None)

    def read_step_settings(self) -> None:
        """Take `logging_steps`, `eval_steps` and `save_steps` from the arguments, as a run that begins does: those of
        a checkpoint's state have replaced them."""
        self.state.compute_steps(self.args, self.state.max_steps)

    def replace_logged_advantages(self, advantages: list[float]) -> None:
        """Correct the advantages of the newest rows in the table of logged completions; each rank gives its own."""
        # TRL has just appended those of this batch, over all ranks, to its table.
        advantages = self.gathered(advantages)
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):  # a deque holds the newest rows only, maybe fewer
            logged.pop()
        logged.extend(advantages)

    def advance_train_sampler(self, epochs: int) -> None:
        """Move the prompt order past `epochs` finished epochs: TRL's sampler starts over after a resume."""
        sampler = self.train_sampler
        if sampler is not None and getattr(sampler, "shuffle", False):
            # TRL's `RepeatSampler` draws one permutation at the beginning of each epoch.
            for _ in range(epochs):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
