"""Kinds of values that fields take, and keys of their mappings: nobody else refuses others before the model loads.

transformers and TRL look at few of these when a configuration is built. The rest fails in the middle of a run, or, a
misspelled key of `generation_kwargs` for one, changes nothing without a word. The kinds are those of the fields'
annotations; the keys are those that the installed library takes, so no list here can grow old.
"""

import dataclasses
import enum
import functools
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.ranges import RANGES

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trl_drgrpo.config.config import DrGRPOConfig

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
_WORDS |= {list: "a list", type(None): "None"}
# What a recipe can write; objects of other classes are judged by whoever takes them.
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
# Documented to take more than their annotation says.
_ALSO: dict[str, tuple[type, ...]] = {
    "fsdp": (bool, list),
    "resume_from_checkpoint": (bool,),
    "scale_rewards": (bool,),
    "include_num_input_tokens_seen": (bool,),
    "debug": (list, type(None)),
}
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")  # mappings that may be written as the path of a JSON file
_JUDGED = ("dynamic_sampling", "run_warnings", "reward_weights", "step_reward_weights")  # by rules of their own

# Keys that TRL sets itself: a second value is an error in the middle of the run, or another shape of batch.
_TAKEN: dict[str, tuple[str, ...]] = {
    "chat_template_kwargs": (
        *("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict"),
        *("return_tensors", "continue_final_message"),
    ),
    "gradient_accumulation_kwargs": ("num_steps",),
    "generation_kwargs": ("num_return_sequences", "return_dict_in_generate", "n", "logprobs"),
}


ConfigClass = TypeVar("ConfigClass", bound=type)
Hint: TypeAlias = Any  # the annotation of a field: a class, a generic alias, a union, or a special form


def with_help(config_class: ConfigClass) -> ConfigClass:
    """The dataclass, each field that its docstring describes with this text as the `help` of command lines."""
    for name, text in described(inspect.getdoc(config_class) or "").items():
        each = config_class.__dataclass_fields__[name]
        each.metadata = types.MappingProxyType({**each.metadata, "help": text.replace("%", "%%")})
    return config_class


def described(docstring: str) -> dict[str, str]:
    """Text of each parameter in a docstring without its margin, on one line, without marks of references."""
    entries = re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n?)+)", docstring, re.MULTILINE)
    plain = {name: re.sub(r"\[(`[^`]+`)\]", r"\1", " ".join(text.split())) for name, text in entries}
    return {name: re.sub(r'`"([^`"]*)"`', r"'\1'", text) for name, text in plain.items()}


def read_mappings(config: "DrGRPOConfig") -> None:
    """Replaces mappings that were written as JSON text, as a command line does, by the mappings."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if dict in _members(hint) and isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                setattr(config, name, json.loads(value))
            except ValueError as error:
                raise InputError(name, shortened(value), "a JSON mapping", f"It is not valid JSON: {error}.") from None


def check_kinds(config: "DrGRPOConfig") -> None:
    """Refuses a value of another kind than its field takes. `config` has been through [`read_mappings`].

    Raises:
        `InputError`: The first field whose value does not fit.
    """
    for name, hint in _hints(type(config)).items():
        if name in RANGES or name in _JUDGED:
            continue
        value, members = getattr(config, name), _members(hint)
        if dict in members and isinstance(value, str):
            if name in _FILES and (name == "deepspeed" or os.path.isfile(value)):
                continue
            members = tuple(member for member in members if member is not str)
        _check_kind(name, value, members, _ALSO.get(name, ()))


def check_choices(config: "DrGRPOConfig") -> None:
    """Refuses a text that is none of those that its field takes: of the annotation, TRL's metadata, or the table
    below. Numbers and booleans are judged elsewhere."""
    hints, choices = _hints(type(config)), _choices()
    for field in dataclasses.fields(config):
        allowed = _listed(hints[field.name]) or choices.get(field.name) or field.metadata.get("choices")
        value = getattr(config, field.name)
        if allowed and value not in allowed and value is not None and not isinstance(value, bool):
            remedy = did_you_mean(value, allowed, "Pick one of them.", cutoff=0.6, form="{!r}")
            raise InputError(field.name, shortened(value), f"one of {', '.join(allowed)}", remedy)


def _listed(hint: Hint) -> tuple[str, ...]:
    """The texts that an annotation lists: those of a literal, or the values of an enumeration."""
    for member in _members(hint):
        if typing.get_origin(member) is typing.Literal:
            return typing.get_args(member)
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return tuple(str(each.value) for each in member)
    return ()


def _choices() -> dict[str, tuple[str, ...]]:
    """The texts of fields whose annotation lists none."""
    from accelerate.utils import DynamoBackend
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
    from transformers.training_args import trainer_log_levels

    return {
        "importance_sampling_level": ("token", "sequence"),
        **dict.fromkeys(("log_level", "log_level_replica"), tuple(trainer_log_levels)),
        "vllm_mode": ("server", "colocate"),
        "cache_implementation": (*ALL_CACHE_IMPLEMENTATIONS, "paged"),
        "include_num_input_tokens_seen": ("all", "non_padding", "no"),
        "torch_compile_backend": tuple(backend.value.lower() for backend in DynamoBackend),
        "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    }


def check_keys(config: "DrGRPOConfig") -> None:
    """Refuses a key of a mapping that nobody would read, and a value that its reader would refuse in the run.

    Raises:
        `InputError`: Names the field, the key, and the nearest one that is known.
    """
    for name, known in _keys(config).items():
        if isinstance(given := getattr(config, name), Mapping):
            _check_mapping(name, given, known)
    nested = getattr(config.accelerator_config, "gradient_accumulation_kwargs", None)
    if isinstance(config.accelerator_config, Mapping):
        nested = config.accelerator_config.get("gradient_accumulation_kwargs")
    if nested:
        from accelerate.utils import GradientAccumulationPlugin

        _check_mapping("gradient_accumulation_kwargs", nested, _hints(GradientAccumulationPlugin))
    with _refused_values("generation_kwargs", config.generation_kwargs):
        _check_sampling(config)
    with _refused_values("lr_scheduler_type, lr_scheduler_kwargs", config.lr_scheduler_kwargs):
        _schedule(config)
    _check_optimizer(config)


def _check_mapping(name: str, given: Mapping[object, object], known: Mapping[str, Hint] | None) -> None:
    for key, value in given.items():
        field = f"{name}: {key}"
        if key in _TAKEN.get(name, ()):
            raise InputError(field, "a key that TRL sets itself", "another one", "Remove it.")
        if not isinstance(key, str):
            raise InputError(field, f"a key of type {type(key).__name__}", "text", "Put it in quotes.")
        if known is None:
            continue
        if key not in known:
            remedy = did_you_mean(key, known, f"It takes {', '.join(known) or 'none'}.", cutoff=0.6)
            raise InputError(field, "an unknown key", f"a key of {name}", f"{remedy:.300}")
        _check_kind(field, value, _members(known[key]))


def _check_kind(field: str, value: object, members: tuple[Hint, ...], also: tuple[Hint, ...] = ()) -> None:
    if not any(_fits(member, value) for member in (*members, *also)):
        words = dict.fromkeys(_WORDS.get(typing.get_origin(member) or member, "") for member in members)
        expected = " or ".join(filter(None, words))
        raise InputError(field, shortened(value), expected, "Leave it out for the default.")


@contextmanager
def _refused_values(field: str, value: object) -> Iterator[None]:
    """Makes one `InputError` of what a library says about the values of a field."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(
            field, shortened(value), "values that fit", f"{type(error).__name__}: {error!s:.300}."
        ) from error


def refused(error: Exception, fields: Mapping[str, Any], owner: str) -> InputError:
    """The refusal of a whole configuration, said of the field that its message names."""
    told = " ".join(str(error).split()).rstrip(".")
    named = next((word for word in re.findall(r"\w+", told) if word in fields), None)
    for words, field in _UNNAMED.items():
        named = field if words in told else named
    if named is None:
        return InputError("configuration", f"values that {owner} refuses", "values that fit together", f"{told}.")
    return InputError(named, shortened(fields[named]), "a value that fits the others", f"{told}.")


_UNNAMED = {
    "global eval batch size": "per_device_eval_batch_size",
    "8 bit and 4 bit": "load_in_8bit",
    "valid DebugOption": "debug",
    "Invalid task type": "lora_task_type",
    "strategy IntervalStrategy.STEPS requires": "eval_steps",
}


@functools.cache
def _hints(config_class: type) -> dict[str, Hint]:
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _members(hint: Hint) -> tuple[Hint, ...]:
    """The alternatives of an annotation, mappings without the types of their keys and values."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(dict if typing.get_origin(member) is dict else member for member in members)


def _fits(kind: Hint, value: object) -> bool:
    origin = typing.get_origin(kind) or kind
    if kind is Any or origin is typing.Literal or type(value) not in _PLAIN:
        return True
    if origin is list:
        items = typing.get_args(kind) or (Any,)
        return isinstance(value, (list, tuple)) and all(_fits(items[0], item) for item in value)
    if origin is bool:
        return isinstance(value, bool)
    numbers = {int: int, float: (int, float)}
    return isinstance(origin, type) and isinstance(value, numbers.get(origin, origin)) and not isinstance(value, bool)


# Who reads the mappings ----------------------------------------------------------------------------------------------


def _keys(config: "DrGRPOConfig") -> dict[str, Mapping[str, Hint] | None]:
    """Keys that each mapping may have, with their kinds; `None`: any."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from torch.utils.checkpoint import checkpoint
    from transformers import ContinuousBatchingConfig, SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
    from transformers.trainer_pt_utils import AcceleratorConfig

    kind = SchedulerType(config.lr_scheduler_type)
    by_metric = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    schedule = by_metric.get(kind.value) or TYPE_TO_SCHEDULER_FUNCTION[kind]
    set_by_trainer = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
    named = [p.name for p in inspect.signature(checkpoint).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {
        "accelerator_config": _hints(AcceleratorConfig),
        "chat_template_kwargs": None,  # a template may read any
        "generation_kwargs": None if config.use_vllm else _sampling_keys(),  # vLLM refuses others itself
        "gradient_checkpointing_kwargs": {
            **dict.fromkeys(named, Any),
            "use_reentrant": bool | None,
            "preserve_rng_state": bool,
        },
        "lr_scheduler_kwargs": {p: Any for p in inspect.signature(schedule).parameters if p not in set_by_trainer},
        "transformers_continuous_batching_config": _hints(ContinuousBatchingConfig),
    }


def _sampling_keys() -> Mapping[str, Hint]:
    """The fields of `GenerationConfig`, of the kinds that its documentation gives: it looks at few of them itself."""
    from transformers import GenerationConfig

    kinds = {"bool": bool, "int": int, "float": float, "str": str, "list[int]": list[int]}
    kinds |= {"Union[int, list[int]]": int | list[int], "str` or `list[str]": str | list[str]}
    documented = re.findall(r"(\w+) \(`([^`]+(?:` or `[^`]+)?)`", GenerationConfig.__doc__ or "")
    known = dict.fromkeys((key for key in GenerationConfig().__dict__ if not key.startswith("_")), Any)
    return known | {key: kinds[kind] | None for key, kind in documented if kind in kinds}


def _check_sampling(config: "DrGRPOConfig") -> None:
    """Keys that `GenerationConfig` refuses, and such under which nothing is sampled: greedy search, beams."""
    given = config.generation_kwargs
    if config.use_vllm or not given:
        return
    from transformers import GenerationConfig
    from transformers.generation import GenerationMode

    def samples(options: Mapping[str, Any]) -> bool:
        mode = GenerationConfig(**{"do_sample": True, **options}).get_generation_mode()
        return mode in (GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)

    if not samples(given):
        key = next((key for key, value in given.items() if not samples({key: value})), next(iter(given)))
        remedy = "A group needs different completions, each drawn from the policy: remove it."
        raise InputError(f"generation_kwargs: {key}", shortened(given[key]), "sampling", remedy)


def _schedule(config: "DrGRPOConfig") -> None:
    """Builds the scheduler of the run around one number: what it refuses, it refuses here."""
    if config.lr_scheduler_type in ("greedy", "linear", "constant") or not config.learning_rate:
        return
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    steps = config.max_steps if config.max_steps > 0 else 1000
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, 0, steps, config.lr_scheduler_kwargs)
    for rate in getattr(schedule, "lr_lambdas", ()):
        for step in (0, steps // 2, steps - 1):
            rate(step)


def _check_optimizer(config: "DrGRPOConfig") -> None:
    """`optim_args` as the optimizer of the run reads them: a key that changes nothing, whatever its value, is none."""
    if not config.optim_args:
        return
    pairs = [pair.split("=") for pair in config.optim_args.replace(" ", "").split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        remedy = "For example momentum=0.9."
        raise InputError("optim_args", repr(config.optim_args), "key=value, several joined by commas", remedy)
    plain = optimizer_of(config, None)
    if isinstance(plain, Exception):  # it needs the model, or a package: `prepare` says so
        return
    optimizer = str(getattr(config.optim, "value", config.optim))
    for key, _ in pairs:
        if optimizer_of(config, f"{key}=?") == plain:
            parameters = inspect.signature(plain[0]).parameters
            read = [name for name in parameters if optimizer_of(config, f"{name}=?") != plain]
            remedy = did_you_mean(key, read, "Remove it.", cutoff=0.6)
            raise InputError("optim_args", f"the key {key!r}", f"a key that {optimizer} reads", remedy)
    if isinstance(problem := optimizer_of(config, config.optim_args), Exception):
        raise InputError("optim_args", repr(config.optim_args), "values that fit", f"{problem!s:.200}.")


def optimizer_of(
    config: "DrGRPOConfig", arguments: str | None
) -> tuple[type["Optimizer"], dict[str, Any]] | Exception:
    """Class and keywords of the optimizer of a run with these `optim_args`, or the error that transformers raises."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    args: Any = types.SimpleNamespace(**vars(config))
    args.optim, args.optim_args = OptimizerNames(config.optim), arguments
    try:
        return Trainer.get_optimizer_cls_and_kwargs(args)
    except Exception as error:
        return error
