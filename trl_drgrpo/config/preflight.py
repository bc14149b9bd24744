"""A trainer's inputs, before a model loads: [`prepare`] checks them and puts the rewards together."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch import nn
from transformers.utils import is_liger_kernel_available

from trl_drgrpo.common.disk import check_writable
from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.common.rows import check_images, check_prompt_values, column_values, known_length
from trl_drgrpo.config.best_metric import check_best_metric
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.config.field_kinds import optimizer_of
from trl_drgrpo.config.optional_parts import OptionArguments, built
from trl_drgrpo.config.rules import Rules, refuse, warn_of_distorted_sampling
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.process_rewards.without_outcome import process_only
from trl_drgrpo.rewards.columns import ask, check_columns, check_form, gold_columns
from trl_drgrpo.rewards.contract import checked_reward, reward_name
from trl_drgrpo.single_gpu.model_checks import check_model, own_tokenizer
from trl_drgrpo.single_gpu.peft_adapters import choose_quantization
from trl_drgrpo.single_gpu.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from trl_drgrpo.config.optional_parts import NoTurns
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction, StepScorer
    from trl_drgrpo.process_rewards.steps import StepSegmenter
    from trl_drgrpo.upstream.argument_types import (
        Data,
        EnvironmentFactory,
        EvalData,
        OneOrMore,
        Policy,
        Processor,
        RewardSource,
        StepRewardSource,
    )
    from trl_drgrpo.upstream.batches import RolloutBatch
    from trl_drgrpo.upstream.environments import EnvironmentTurns

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Trackers that nothing but their package of the same name can be missing for.
_TRACKERS = ("clearml", "codecarbon", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Parts of a trainer that are made of its arguments before a model loads.

    Args:
        rewards (`list`): Reward functions, wrapped to keep their contract; reward models and ids as given.
        arguments ([`OptionArguments`]): Say which options the run asks for.
        turns ([`EnvironmentTurns`]): The environments' turns; its `trainer` is set by the trainer.
        segmenter ([`StepSegmenter`], *optional*): Cuts completions into steps, where something asks for them.
        step_separator (`list[str]`): What the run is configured to cut at.
        step_scorer ([`StepScorer`], *optional*): Step reward functions, those of environments too.
        quantization_config (*optional*): As the model will be loaded.
        embeddings (`int`, *optional*): Number of the model's token embeddings; `None` where only loading tells.
    """

    rewards: list[Any]
    arguments: OptionArguments
    turns: "EnvironmentTurns | NoTurns"
    segmenter: "StepSegmenter | None"
    step_separator: list[str]
    step_scorer: "StepScorer | None"
    quantization_config: "QuantizationConfigMixin | None"
    embeddings: int | None


def prepare(
    args: DrGRPOConfig,
    model: "Policy",
    reward_funcs: "OneOrMore[RewardSource] | None",
    train_dataset: "Data | None",
    *,
    eval_dataset: "EvalData | None" = None,
    processing_class: "Processor | None" = None,
    step_reward_funcs: "OneOrMore[StepRewardSource] | None" = None,
    step_segmenter: "StepSegmenter | None" = None,
    advantage_func: "Callable[[RolloutBatch], Tensor] | None" = None,
    quantization_config: "QuantizationConfigMixin | None" = None,
    peft_config: "PeftConfig | None" = None,
    tools: Sequence[Callable[..., object]] | None = None,
    rollout_func: Callable[..., object] | None = None,
    environment_factory: "EnvironmentFactory | None" = None,
) -> Prepared:
    """Check a trainer's arguments, each and against each other, and put its rewards together.

    Args:
        args ([`DrGRPOConfig`]): The configuration, checked by itself.
        model, reward_funcs, train_dataset, eval_dataset, processing_class, step_reward_funcs, step_segmenter,
        advantage_func, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As given to [`DrGRPOTrainer`].

    Raises:
        `InputError`: No reward, weights that do not fit, a data set without `prompt` or too small for one generation
            batch, a reward function that asks for a column the data does not have, or for a program that is not there,
            a step reward that does not fit the configuration, and what [`check_model`] refuses.
    """
    # Step rewards: those that were passed, and those that environments declare.
    outcome_funcs = as_list(reward_funcs)
    steps_without_turns: list[StepRewardFunction] = []
    if step_reward_funcs is not None:
        from trl_drgrpo.process_rewards.named import step_reward

        steps_without_turns += map(step_reward, as_list(step_reward_funcs))
    arguments = OptionArguments(args, environment_factory)
    turns = built("turns", arguments, environment_factory, args.on_reward_error)
    if tools:
        from trl_drgrpo.upstream.environments import check_tools

        check_tools("tools", tools)
    steps = [*steps_without_turns, *turns.step_reward_funcs]
    # What needs no model is checked before anything is built or looked up for one.
    writers = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
    _check_inputs(args, outcome_funcs, steps, train_dataset, eval_dataset, writers)
    # The parts that cut completions into steps and score them.
    separator = args.separators(has_turns=bool(tools) or environment_factory is not None)
    arguments = dataclasses.replace(arguments, steps=steps)
    segmenter = step_segmenter or built("segmenter", arguments, separator)
    weights = args.step_reward_weights
    # Whoever gives weights counts the functions that they pass; those of environments weigh 1.
    if weights is not None and len(weights) == len(steps_without_turns):
        weights = [*weights, *[1.0] * len(turns.step_reward_funcs)]
    scorer = built("step_scorer", arguments, steps, segmenter, weights, args.on_reward_error)
    if steps and not (outcome_funcs or turns.outcome_rewards):
        if args.process_role == "baseline":
            remedy = "A baseline is subtracted from the outcome reward: pass reward_funcs, or use 'reward'."
            raise InputError("process_role", "'baseline' without reward_funcs", "'reward'", remedy)
        # TRL refuses to be built without a reward function.
        outcome_funcs = [process_only]
    segmenter_of_steps = segmenter if steps else None
    turns.choose(segmenter_of_steps, args)
    if advantage_func is not None and not callable(advantage_func):
        got = type(advantage_func).__name__
        raise InputError("advantage_func", got, "a function of a RolloutBatch", "Pass the function itself.")
    # The model and its tokenizer, by their files alone.
    quantization_config = choose_quantization(model, peft_config, quantization_config, args.model_init_kwargs)
    embeddings = check_model(args, model, outcome_funcs, quantization_config, peft_config)
    if processing_class is None and isinstance(model, nn.Module) and not _model_id(model):
        remedy = "There is no folder to load one from: pass processing_class=tokenizer."
        raise InputError("processing_class", "none for a model that was built in memory", "its tokenizer", remedy)
    tokenizer = processing_class
    if processing_class is None and isinstance(model, str):
        tokenizer = own_tokenizer(args, model)
    check_vocabulary(tokenizer, embeddings, named_splits(train_dataset, eval_dataset), args.chat_template_kwargs)
    # A model scores by its logits and keeps no contract of a function.
    rewards = []
    for reward in outcome_funcs:
        if callable(reward) and not isinstance(reward, nn.Module):
            reward = checked_reward(reward, args.on_reward_error)
        rewards.append(reward)
    return Prepared(rewards, arguments, turns, segmenter, separator, scorer, quantization_config, embeddings)


def as_list(argument: "OneOrMore[T] | None") -> list[T]:
    """Return an argument that may be one value, several, or none."""
    if argument is None:
        return []
    if isinstance(argument, (list, tuple)):
        return list(argument)
    return [cast(T, argument)]


def _check_inputs(
    args: DrGRPOConfig,
    reward_funcs: list[Any],
    steps: list[Any],
    train_dataset: Any,
    eval_dataset: Any,
    writers: dict[str, Any],
) -> None:
    """Check configuration, functions and data against each other. `writers`: other authors of completions."""
    has_environments = writers["environment_factory"] is not None
    # Both may add columns of their own, so that rewards may ask for anything.
    fixed_columns = writers["rollout_func"] is None and not has_environments
    # Functions, configuration, and the machine.
    for index, reward_func in enumerate(reward_funcs):
        try:
            check_form(reward_func, "")
        except InputError as error:
            got = f"{error.got} at position {index}"
            raise InputError("reward_funcs", got, error.expected, error.remedy) from None
    refuse(_contradictions(args, reward_funcs, steps, writers))
    _check_sharding(args)
    check_writable("output_dir", str(args.output_dir))
    if args.prior_pass_rates is not None:
        from trl_drgrpo.features.sampling.pass_rates import read_pass_rates

        read_pass_rates(user_path(args.prior_pass_rates))
    _check_trackers(args.report_to)
    _check_installed_optimizer(args)
    if args.use_liger_kernel and not is_liger_kernel_available():
        remedy = "Install it with `pip install liger-kernel`, or leave use_liger_kernel out."
        raise InputError("use_liger_kernel", "True, but liger-kernel is not installed", "the package", remedy)
    for func in [*reward_funcs, *steps]:
        ask(func, "check")
    # An environment may bring a reward of its own, of a name that nothing here knows.
    if not has_environments:
        names = _reward_names(reward_funcs)
        step_names = [reward_name(func) for func in steps]
        if args.correct_reward is not None:
            CorrectnessRule(names, args.correct_reward)
        sets = eval_dataset if isinstance(eval_dataset, dict) else ()
        check_best_metric(args, names, step_names, sets)
    _warn(args, steps)
    # Data comes last, as its values are read.
    for field, dataset in named_splits(train_dataset, eval_dataset).items():
        if not isinstance(dataset, (Dataset, IterableDataset)):
            expected = "a datasets.Dataset or datasets.IterableDataset"
            remedy = 'Pick a split (dataset["train"]), or build one with Dataset.from_list.'
            raise InputError(field, type(dataset).__name__, expected, remedy)
        if field == "train_dataset":
            _check_size(args, dataset)
            _refuse_images(args, dataset)
        if not has_environments:  # an environment may bring the prompt, too
            _check_prompts(field, dataset)
        check_images(dataset, field)
        # A stream may not know its columns before it is read.
        if dataset.column_names is not None and fixed_columns:
            _check_columns(reward_funcs, dataset.column_names)
            _check_columns(steps, [*dataset.column_names, "steps", "step_ends"])
            _check_golds([*reward_funcs, *steps], field, dataset)


def _contradictions(args: DrGRPOConfig, rewards: list[Any], steps: list[Any], writers: dict[str, Any]) -> Rules:
    """Settings that do not fit the functions, or whatever else writes completions."""
    if not (rewards or steps or writers["environment_factory"] is not None):
        # The sentence before the comma is TRL's, for those who search for it.
        remedy = (
            "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines a "
            "`get_reward` method, or `step_reward_funcs`."
        )
        yield InputError("reward_funcs", "none", "at least one reward function", remedy)
    weights = args.reward_weights
    if weights is not None and len(weights) != len(rewards):
        expected = f"{len(rewards)}, one per reward function"
        yield InputError("reward_weights", f"{len(weights)} weights", expected, "Give one number per function.")
    takes_turns = bool(writers["tools"]) or writers["environment_factory"] is not None
    if args.max_completion_length is None and takes_turns:
        remedy = "TRL ends conversations with tools at this limit: set max_completion_length."
        yield InputError("max_completion_length", "None together with tools", "a number of tokens", remedy)
    if args.max_turn_length is not None and not takes_turns:
        remedy = "A completion has a single turn without them: set max_completion_length."
        yield InputError("max_turn_length", f"{args.max_turn_length} without tools", "None", remedy)
    for name, value in writers.items():
        if value and args.forks > 1:
            # Such a completion is not one continuation of its prompt, which could go on from a cut.
            remedy = f"Completions with {name} cannot be branched: remove it, or set forks=1."
            yield InputError("forks", f"{args.forks} with {name}", "1", remedy)
    cuts_by_doubt = args.forks > 1 and args.fork_at == "doubt"
    if cuts_by_doubt and not steps:
        remedy = "Pass step_reward_funcs, or set fork_at='entropy' or 'drawn'."
        yield InputError("fork_at", "'doubt' without step_reward_funcs", "scores of steps", remedy)
    if steps:
        from trl_drgrpo.config.step_preflight import step_contradictions

        yield from step_contradictions(args, steps)


def _warn(args: DrGRPOConfig, steps: list["StepRewardFunction"]) -> None:
    """Warn of what is allowed and may surprise."""
    warn_of_distorted_sampling(args)
    if steps:
        from trl_drgrpo.config.step_preflight import warn_of_steps

        warn_of_steps(args, steps)
    unused = _changed_step_settings(args)
    if unused and not steps:
        logger.warning(
            "%s: no effect without step_reward_funcs. Pass step_reward_funcs, or remove the setting.",
            ", ".join(unused),
        )


def named_splits(train_dataset: "Data | None", eval_dataset: "EvalData | None") -> dict[str, "Data"]:
    """Return the datasets of a run, by field."""
    splits: dict[str, Any] = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict) and eval_dataset:
        splits |= {f"eval_dataset[{name!r}]": split for name, split in eval_dataset.items()}
    else:
        splits["eval_dataset"] = eval_dataset
    return {field: dataset for field, dataset in splits.items() if dataset is not None}


def _refuse_images(args: DrGRPOConfig, dataset: "Data") -> None:
    """Refuse options under which rows of several generations become one batch, or go on from a prefix: of text
    only."""
    images = {"image", "images"}.intersection(dataset.column_names or ())
    without_images = {"dynamic_sampling": False, "curriculum": False, "forks": 1}
    chosen = [field for field, off in without_images.items() if getattr(args, field) != off]
    if images and chosen:
        got = f"{getattr(args, chosen[0])!r} with the column {' and '.join(sorted(images))}"
        remedy = f"Remove {' and '.join(chosen)} to train on images."
        raise InputError(chosen[0], got, "prompts without images", remedy)


def _check_sharding(args: DrGRPOConfig) -> None:
    """Refuse FSDP on CPUs, where accelerate trains whole copies of the model and says nothing."""
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    processes: Any = args.distributed_state
    if (args.fsdp or by_launcher) and processes.distributed_type == DistributedType.MULTI_CPU:
        source = "from the launcher" if by_launcher else shortened(args.fsdp)
        remedy = "On CPUs accelerate would train full copies of the model: remove it."
        raise InputError("fsdp", f"{source}, on CPUs", "GPUs to shard a model on", remedy)


def _check_trackers(report_to: str | list[str] | None) -> None:
    """Refuse trackers that transformers does not know, and those that it says are not installed."""
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    available = get_available_reporting_integrations()
    for name in as_list(report_to):
        if name in ("all", "none"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            remedy = did_you_mean(name, INTEGRATION_TO_CALLBACK, "Write report_to: none for no tracker.", cutoff=0.6)
            raise InputError("report_to", name, f"one of {', '.join(INTEGRATION_TO_CALLBACK)}, or none", remedy)
        if name in _TRACKERS and name not in available:
            remedy = f"Install it with `pip install {name}`, or leave it out of report_to."
            raise InputError("report_to", f"{name}, but {name} is not installed", f"the package {name}", remedy)


def _model_id(model: object) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


def _reward_names(reward_funcs: list["RewardSource"]) -> list[str]:
    """Return the names that the trainer will use: of a model the last part of its id."""
    functions = []
    models = []
    for reward in reward_funcs:
        if isinstance(reward, (str, nn.Module)):
            path = reward if isinstance(reward, str) else _model_id(reward)
            models.append(path.rstrip("/").split("/")[-1])
        else:
            functions.append(reward_name(reward))
    return functions + models


def _check_columns(funcs: Sequence["RewardSource | StepRewardFunction"], columns: list[str]) -> None:
    for func in funcs:
        if callable(func) and not isinstance(func, nn.Module):
            check_columns(func, columns, reward_name(func))


def _check_golds(funcs: Sequence["RewardSource | StepRewardFunction"], field: str, dataset: "Data") -> None:
    """Check the values of the columns that reward functions require."""
    readers_of: dict[str, dict[str, None]] = {}  # names in their order, once each: two functions may have one
    for func in funcs:
        if callable(func):
            for column in gold_columns(func, dataset.column_names or []):
                readers_of.setdefault(column, {})[reward_name(func)] = None
    # Each column is read once, whatever the number of its readers.
    values_of = column_values(dataset, list(readers_of))
    for func in funcs:
        ask(func, "check_values", values_of)
    for column, values in values_of.items():
        if values.nulls:
            readers = ", ".join(readers_of[column])
            _warn_once(
                f"{field}: the column {column} is null in {values.nulls} of {values.rows} rows, first in row "
                f"{values.first_null} (from 0). {readers} gets None there; this package's own rewards skip such rows. "
                "Fill them in, or drop them."
            )


# `trl-drgrpo train` prepares a run before the model loads, and its trainer does so once more.
@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _changed_step_settings(args: DrGRPOConfig) -> list[str]:
    """Return the fields about step rewards that are not at their defaults."""
    about_steps = ("step_", "process_role", "process_weight", "outcome_weight", "deepseekmath_")
    changed = []
    for field in dataclasses.fields(args):
        name = field.name
        if not name.startswith(about_steps):
            continue
        if name == "step_separator" and args.forks > 1:  # forks lie behind steps
            continue
        if getattr(args, name) != field.default:
            changed.append(name)
    return changed


def _check_installed_optimizer(args: DrGRPOConfig) -> None:
    problem = optimizer_of(args, args.optim_args)
    # Some optimizers are put together from the model, which is not there yet: "... requires a model".
    needs_model = isinstance(problem, ValueError) and "a model" in str(problem)
    if isinstance(problem, (ImportError, ValueError)) and not needs_model:
        name = str(getattr(args.optim, "value", args.optim))
        raise InputError("optim", name, "an optimizer that is installed", f"{problem!s:.300}.")


def _check_size(args: DrGRPOConfig, dataset: "Data") -> None:
    rows = known_length(dataset)
    needed = args.generation_batch_size // args.num_generations
    if rows is not None and rows < needed:
        expected = f"at least {needed} (generation batch of {args.generation_batch_size} rows / num_generations)"
        remedy = "TRL drops incomplete batches, so nothing would be trained: add prompts, or lower the batch size."
        raise InputError("train_dataset", f"{rows} prompts", expected, remedy)


def _check_prompts(field: str, dataset: "Data") -> None:
    """Refuse data without the column, or with something else in it than prompts."""
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        usual = ("question", "problem", "instruction", "query", "input")
        likely = [column for column in usual if column in columns]
        column = [*likely, *columns, "question"][0]
        remedy = f'Rename yours: dataset.rename_column("{column}", "prompt").'
        raise InputError(field, f"columns {columns}", "a column 'prompt'", remedy)
    check_prompt_values(dataset, f"{field}, column prompt")
