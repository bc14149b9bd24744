"""Kinds of values that fields take, and keys of their mappings: what nobody else would refuse before the model loads.

transformers and TRL look at few of these when a configuration is built. The rest fails in the middle of a run, or, a
misspelled key of `generation_kwargs` for one, changes nothing without a word. The kinds are those of the fields'
annotations; the keys are those that the installed library takes. Only `GenerationConfig` has no annotations: the kinds
of its fields are a table here, and a key that the table lacks may hold anything.
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
from typing import TYPE_CHECKING, Any, TypeVar

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS, RANGES

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    list: "a list",
    type(None): "None",
}
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
# Mappings that may be written as the path of a JSON file.
_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
# Fields with a rule of their own in `rules.py`, whose error says more.
_JUDGED = ("dynamic_sampling", "run_warnings", "reward_weights", "step_reward_weights")

# Keys that TRL sets itself: a second value is an error in the middle of the run, or another shape of batch.
_TAKEN = {
    "chat_template_kwargs": "conversation tools chat_template add_generation_prompt tokenize return_dict "
    "return_tensors continue_final_message",
    "gradient_accumulation_kwargs": "num_steps",
    "generation_kwargs": "num_return_sequences return_dict_in_generate n logprobs",
}
# Fields of `GenerationConfig` by kind. A test compares the names with the installed class, whose annotations say
# nothing: its constructor takes `**kwargs`.
SAMPLING_KINDS: dict[Any, str] = {
    bool: "do_sample use_cache use_mtp renormalize_logits remove_invalid_values token_healing output_attentions "
    "output_hidden_states output_scores output_logits return_dict_in_generate is_assistant disable_compile",
    int: "max_length max_new_tokens min_length min_new_tokens num_beams max_cache_len top_k no_repeat_ngram_size "
    "forced_bos_token_id forced_eos_token_id num_return_sequences pad_token_id bos_token_id "
    "encoder_no_repeat_ngram_size num_assistant_tokens prompt_lookup_num_tokens max_matching_ngram_size",
    float: "max_time temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "encoder_repetition_penalty length_penalty guidance_scale assistant_confidence_threshold "
    "assistant_ensemble_weight",
    str: "cache_implementation num_assistant_tokens_schedule speculation_type",
    str | list[str]: "stop_strings",
    list[int]: "suppress_tokens begin_suppress_tokens",
    int | list[int]: "eos_token_id decoder_start_token_id",
}

ConfigClass = TypeVar("ConfigClass", bound=type)
# By field or key, the kinds of which its value may be one.
Kinds = Mapping[str, tuple[Any, ...]]


def with_help(config_class: ConfigClass) -> ConfigClass:
    """Give each field that the docstring of its dataclass describes this text as its `help` on command lines."""
    for name, text in descriptions(inspect.getdoc(config_class) or "").items():
        field = config_class.__dataclass_fields__[name]
        # argparse formats help texts with `%`. Metadata is read-only, so the field gets another one.
        metadata = {**field.metadata, "help": text.replace("%", "%%")}
        field.metadata = types.MappingProxyType(metadata)
    return config_class


def descriptions(docstring: str) -> dict[str, str]:
    """Return the text about each parameter in a docstring of this package, on one line, without marks of
    references."""
    entries = re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n?)+)", docstring, re.MULTILINE)
    texts = {}
    for name, text in entries:
        text = " ".join(text.split())
        # [`trl.GRPOConfig`] becomes `trl.GRPOConfig`, and `"rloo"` becomes 'rloo'.
        text = re.sub(r"\[(`[^`]+`)\]", r"\1", text)
        texts[name] = re.sub(r'`"([^`"]*)"`', r"'\1'", text)
    return texts


def read_mappings(config: "DrGRPOConfig") -> None:
    """Replace mappings that were written as JSON text, as a command line does, by the mappings."""
    for name, alternatives in _kinds(type(config)).items():
        value = getattr(config, name)
        if dict in alternatives and isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                mapping = json.loads(value)
            except ValueError as error:
                remedy = f"It is not valid JSON: {error}."
                raise InputError(name, shortened(value), "a JSON mapping", remedy) from None
            setattr(config, name, mapping)


def check_kinds(config: "DrGRPOConfig") -> None:
    """Refuse a value of another kind than its field takes. `config` has been through [`read_mappings`].

    Raises:
        `InputError`: The first field whose value does not fit.
    """
    for name, alternatives in _kinds(type(config)).items():
        if name in RANGES or name in _JUDGED:
            continue
        value = getattr(config, name)
        if dict in alternatives and isinstance(value, str):
            # `deepspeed` may also be a mapping encoded as base64, which its reader judges.
            if name in _FILES and (name == "deepspeed" or os.path.isfile(value)):
                continue
            # Otherwise text stands for a mapping in JSON, and what was JSON is a mapping by now.
            alternatives = tuple(kind for kind in alternatives if kind is not str)
        _check_kind(name, value, alternatives, also=_ALSO.get(name, ()))


def check_choices(config: "DrGRPOConfig") -> None:
    """Refuse a text that is none of those that its field takes: of the annotation, TRL's metadata, or the table
    below. Numbers and booleans are judged elsewhere."""
    kinds = _kinds(type(config))
    choices = _choices()
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name)
        if value is None or isinstance(value, bool):
            continue
        allowed = _listed(kinds[name]) or choices.get(name) or field.metadata.get("choices")
        if allowed and value not in allowed:
            remedy = did_you_mean(value, allowed, "Pick one of them.", cutoff=0.6, form="{!r}")
            raise InputError(name, shortened(value), f"one of {', '.join(allowed)}", remedy)


def _listed(alternatives: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the texts that an annotation lists: those of a literal, or the values of an enumeration."""
    for kind in alternatives:
        if typing.get_origin(kind) is typing.Literal:
            return typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return tuple(str(member.value) for member in kind)
    return ()


def _choices() -> dict[str, tuple[str, ...]]:
    """Return the texts of fields whose annotation lists none."""
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
    """Refuse a key of a mapping that nobody would read, and a value that its reader would refuse in the run.

    Raises:
        `InputError`: Names the field, the key, and the nearest one that exists.
    """
    for name, kinds in _keys(config).items():
        _check_mapping(name, getattr(config, name), kinds)
    # A mapping inside a mapping, or inside of the object that transformers makes of it.
    accelerator: Any = config.accelerator_config
    if accelerator and not isinstance(accelerator, Mapping):
        accelerator = vars(accelerator)
    name = "gradient_accumulation_kwargs"
    if accelerator and accelerator.get(name):
        from accelerate.utils import GradientAccumulationPlugin

        _check_mapping(name, accelerator[name], _kinds(GradientAccumulationPlugin))
    # The libraries judge values themselves: they are asked now, with an object that is thrown away.
    with _refused_values("generation_kwargs", config.generation_kwargs):
        _check_sampling(config)
    with _refused_values("lr_scheduler_type, lr_scheduler_kwargs", config.lr_scheduler_kwargs):
        _build_schedule(config)
    _check_optimizer(config)


def _check_mapping(name: str, mapping: object, kinds: Kinds | None) -> None:
    """Check keys and values of a field that holds a mapping; `kinds` is `None` where any key may stand."""
    if not isinstance(mapping, Mapping):
        return
    for key, value in mapping.items():
        field = f"{name}: {key}"
        if key in _TAKEN.get(name, "").split():
            raise InputError(field, "a key that TRL sets itself", "another one", "Remove it.")
        if not isinstance(key, str):
            raise InputError(field, f"a key of type {type(key).__name__}", "text", "Put it in quotes.")
        if kinds is None:
            continue
        if key not in kinds:
            remedy = did_you_mean(key, kinds, f"It takes {', '.join(kinds) or 'none'}.", cutoff=0.6)
            raise InputError(field, "an unknown key", f"a key of {name}", f"{remedy:.300}")
        _check_kind(field, value, kinds[key])


def _check_kind(field: str, value: object, kinds: tuple[Any, ...], also: tuple[type, ...] = ()) -> None:
    """Refuse a value of none of these kinds. The message does not name those that are allowed `also`."""
    if any(_fits(kind, value) for kind in (*kinds, *also)):
        return
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    # Without repeats: several kinds of lists are one word.
    words = dict.fromkeys(_WORDS[origin] for origin in origins if origin in _WORDS)
    raise InputError(field, shortened(value), " or ".join(words), "Leave it out for the default.")


@contextmanager
def _refused_values(field: str, value: object) -> Iterator[None]:
    """Make one `InputError` of what a library says about the values of a field."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        remedy = f"{type(error).__name__}: {error!s:.300}."
        raise InputError(field, shortened(value), "values that fit", remedy) from error


def refused(error: Exception, fields: Mapping[str, Any], owner: str) -> InputError:
    """Return the refusal of a whole configuration, said of the field that its message names."""
    message = " ".join(str(error).split()).rstrip(".")
    names = [word for word in re.findall(r"\w+", message) if word in fields]
    name = names[0] if names else None
    # The table comes second: such a message may name another field beside the one that it is about.
    for words, field in _UNNAMED.items():
        if words in message:
            name = field
    if name is None:
        return InputError("configuration", f"values that {owner} refuses", "values that fit together", f"{message}.")
    return InputError(name, shortened(fields[name]), "a value that fits the others", f"{message}.")


# Words of a message that names no field, and the field that it is about.
_UNNAMED = {
    "global eval batch size": "per_device_eval_batch_size",
    "8 bit and 4 bit": "load_in_8bit",
    "valid DebugOption": "debug",
    "Invalid task type": "lora_task_type",
    "strategy IntervalStrategy.STEPS requires": "eval_steps",
}


@functools.cache
def _kinds(config_class: type) -> Kinds:
    """Return the kinds that each field of a dataclass takes, by its annotation."""
    hints = typing.get_type_hints(config_class)
    return {field.name: _alternatives(hints[field.name]) for field in dataclasses.fields(config_class)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, mappings without the types of their keys and values.

    Example: `int | dict[str, Any] | None` gives `(int, dict, type(None))`.
    """
    members = (hint,)
    # `Optional[int]` has another origin than `int | None`.
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
    return tuple(dict if typing.get_origin(member) is dict else member for member in members)


def _fits(kind: Any, value: object) -> bool:
    """Tell whether a value is of a kind. Literals fit here: [`check_choices`] judges them, with the nearest one."""
    origin = typing.get_origin(kind) or kind
    if kind is Any or origin is typing.Literal or type(value) not in _PLAIN:
        return True
    if origin is list:
        (item_kind,) = typing.get_args(kind) or (Any,)
        return isinstance(value, list | tuple) and all(_fits(item_kind, item) for item in value)
    # Python counts booleans among the whole numbers: `max_steps: true` would be 1.
    if isinstance(value, bool):
        return origin is bool
    if origin is float:
        return isinstance(value, int | float)
    return isinstance(origin, type) and isinstance(value, origin)


# Who reads the mappings ----------------------------------------------------------------------------------------------


def _keys(config: "DrGRPOConfig") -> dict[str, Kinds | None]:
    """Return the keys that each mapping may have, with their kinds; `None`: any."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from torch.utils.checkpoint import checkpoint
    from transformers import ContinuousBatchingConfig, SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
    from transformers.trainer_pt_utils import AcceleratorConfig

    # Options of the schedule. transformers' functions for these two take `**kwargs` and hand them to the class.
    kind = SchedulerType(config.lr_scheduler_type)
    by_metric: dict[str, Any] = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    schedule = by_metric.get(kind.value) or TYPE_TO_SCHEDULER_FUNCTION[kind]
    of_schedule = dict.fromkeys(inspect.signature(schedule).parameters, (Any,))
    for set_by_trainer in ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"):
        of_schedule.pop(set_by_trainer, None)
    # Options of checkpointing: torch's, whose annotations are not followed, and two that the model takes.
    of_checkpoint: dict[str, tuple[Any, ...]] = {}
    for parameter in inspect.signature(checkpoint).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            of_checkpoint[parameter.name] = (Any,)
    of_checkpoint |= {
        "use_reentrant": (bool, type(None)),
        "preserve_rng_state": (bool,),
        "offload": (bool,),
        "every_n_layers": (int,),
    }
    return {
        "accelerator_config": _kinds(AcceleratorConfig),
        # A template may read any.
        "chat_template_kwargs": None,
        # vLLM refuses a key that it does not know itself.
        "generation_kwargs": None if config.use_vllm else _sampling_keys(),
        # Older versions of transformers lack the second field.
        **{name: of_checkpoint for name in CHECKPOINT_OPTIONS if hasattr(config, name)},
        "lr_scheduler_kwargs": of_schedule,
        "transformers_continuous_batching_config": _kinds(ContinuousBatchingConfig),
    }


def _sampling_keys() -> Kinds:
    """Return the fields of `GenerationConfig`, which looks at the kind of few of them itself."""
    from transformers import GenerationConfig

    # A field that the table lacks may hold anything.
    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    keys: dict[str, tuple[Any, ...]] = dict.fromkeys(names, (Any,))
    for kind, names_of_kind in SAMPLING_KINDS.items():
        for name in keys.keys() & names_of_kind.split():
            keys[name] = (*_alternatives(kind), type(None))
    return keys


def _check_sampling(config: "DrGRPOConfig") -> None:
    """Refuse keys that `GenerationConfig` refuses, and those under which nothing is sampled: greedy search, beams."""
    options: Any = config.generation_kwargs  # a mapping by now
    if config.use_vllm or not options:
        return
    from transformers import GenerationConfig
    from transformers.generation import GenerationMode

    def samples(options: Mapping[str, Any]) -> bool:
        # TRL samples unless the options say otherwise.
        mode = GenerationConfig(**{"do_sample": True, **options}).get_generation_mode()
        return mode in (GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)

    if not samples(options):
        # Blame the first key that ends sampling by itself; where only several do together, the first of all.
        culprits = (key for key, value in options.items() if not samples({key: value}))
        key = next(culprits, next(iter(options)))
        remedy = "A group needs different completions, each drawn from the policy: remove it."
        raise InputError(f"generation_kwargs: {key}", shortened(options[key]), "sampling", remedy)


def _build_schedule(config: "DrGRPOConfig") -> None:
    """Build the scheduler of the run around one number: what it refuses, it refuses here."""
    if config.lr_scheduler_type in ("greedy", "linear", "constant") or not config.learning_rate:
        return
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    steps = config.max_steps if config.max_steps > 0 else 1000
    options: Any = config.lr_scheduler_kwargs  # a mapping by now
    schedule: Any = get_scheduler(config.lr_scheduler_type, optimizer, 0, steps, options)
    # Some options fail only where the rate is computed, as a text in the place of a number does.
    for rate in getattr(schedule, "lr_lambdas", ()):
        for step in (0, steps // 2, steps - 1):
            rate(step)


def _check_optimizer(config: "DrGRPOConfig") -> None:
    """Refuse a key of `optim_args` that changes nothing in the optimizer of the run, whatever its value."""
    arguments = config.optim_args
    if not arguments:
        return
    keys = []
    # Split as transformers does, where `a=b=c` fails without the field's name.
    for option in arguments.replace(" ", "").split(","):
        parts = option.split("=")
        if len(parts) != 2 or not all(parts):
            remedy = "For example momentum=0.9."
            raise InputError("optim_args", repr(arguments), "key=value, several joined by commas", remedy)
        keys.append(parts[0])
    plain = optimizer_of(config, None)
    if isinstance(plain, Exception):  # it needs the model, or a package: `prepare` says so
        return

    def is_read(key: str) -> bool:
        # A value that is no number is an error of the key's reader, or another keyword; unread it changes nothing.
        return optimizer_of(config, f"{key}=?") != plain

    for key in keys:
        if not is_read(key):
            names = filter(is_read, inspect.signature(plain[0]).parameters)
            optimizer = getattr(config.optim, "value", config.optim)
            remedy = did_you_mean(key, names, "Remove it.", cutoff=0.6)
            raise InputError("optim_args", f"the key {key!r}", f"a key that {optimizer} reads", remedy)
    problem = optimizer_of(config, arguments)
    if isinstance(problem, Exception):
        raise InputError("optim_args", repr(arguments), "values that fit", f"{problem!s:.200}.")


def optimizer_of(config: "DrGRPOConfig", arguments: str | None) -> Any:
    """Return class and keywords of the optimizer of a run with these `optim_args`, or the error of transformers."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    # `dataclasses.replace` would run the constructor of the configuration, which calls this function.
    args: Any = types.SimpleNamespace(**vars(config))
    args.optim = OptimizerNames(config.optim)
    args.optim_args = arguments
    try:
        return Trainer.get_optimizer_cls_and_kwargs(args)
    # Any error: for each optimizer transformers imports a package and converts values in its own way.
    except Exception as error:
        return error
