"""Checks a run's demands against the model's configuration before the weights load.

`config.json` is a small file, and a model without weights is built from it in a fraction of a second (on the meta
device). Both know what loading would end in a traceback for, minutes later: a context shorter than the completions, an
attention implementation that is not there, a keyword that nobody takes, an adapter on layers the model does not have.
"""

import copy
import heapq
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from trl_drgrpo.common.errors import InputError, did_you_mean, require_package, shortened
from trl_drgrpo.common.hub_errors import check_weights, hub_errors, is_adapter, quiet_retries
from trl_drgrpo.common.rows import prompt_rows
from trl_drgrpo.single_gpu.peft_adapters import ALL_LINEAR, check_adapter, check_reference
from trl_drgrpo.single_gpu.policies import source_of
from trl_drgrpo.single_gpu.vocabulary import AT_ONCE, context_length, embedding_rows

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.argument_types import Data, Policy, Processor

_A_MODEL = "a local folder, or the id of a model on the Hub"
# Keywords with which the configuration is loaded as well.
_OF_BOTH = (
    "revision",
    "trust_remote_code",
    "cache_dir",
    "token",
    "subfolder",
    "local_files_only",
    "attn_implementation",
)
# Keywords for the weights alone that people use, and that stand in no signature.
_USUAL = ("dtype", "torch_dtype", "device_map", "max_memory", "quantization_config", "low_cpu_mem_usage")


def check_model(
    args: "DrGRPOConfig",
    model: "Policy",
    reward_funcs: Sequence[object],
    quantization_config: "QuantizationConfigMixin | None",
    peft_config: "PeftConfig | None",
) -> int | None:
    """
    Refuse what this model cannot do, or could not be loaded with.

    Args:
        args ([`DrGRPOConfig`]): The configuration.
        model (`str` or [`~transformers.PreTrainedModel`]): As given to the trainer.
        reward_funcs (`list`): Of these, the ids of reward models are looked up.
        quantization_config (*optional*): As the model will be loaded.
        peft_config ([`~peft.PeftConfig`], *optional*): As given to the trainer.

    Returns:
        `int`, *optional*: The number of the model's token embeddings; `None` where only loading would tell.

    Raises:
        `InputError`: A model or reward model that cannot be had; completions as long as the context; an unknown
            keyword of `model_init_kwargs` or attention implementation; `use_vllm` without vLLM, or with weights that
            it could not be sent; an adapter that would train nothing, or on layers that are not there.
    """
    if args.use_vllm:
        from trl_drgrpo.upstream.weight_sync import refuse_unsendable

        refuse_unsendable(args, model, quantization_config, peft_config)
        require_package("vllm", "use_vllm", "True", "vllm")
    init = cast("dict[str, Any]", args.model_init_kwargs or {})  # a mapping by now
    check_adapter(model, peft_config, quantization_config, init)
    check_reference(model, peft_config, args.beta)
    config = getattr(model, "config", None)
    for reward in reward_funcs:
        if isinstance(reward, str) and "/" not in reward and not os.path.isdir(reward):
            from trl_drgrpo.rewards.recipe_names import REWARDS

            if reward in REWARDS:
                expected = "a function, or the folder or Hub id of a reward model"
                remedy = f"Pass trl_drgrpo.rewards.resolve_reward({reward!r})."
                raise InputError("reward_funcs", f"{reward}, a name for recipes", expected, remedy)
    # The policy's files before those of reward models: the first error is about the model that is trained.
    if isinstance(model, str):
        source, options = source_of(model, {"trust_remote_code": args.trust_remote_code, **init})
        check_weights("model", Path(source))
        config = _checked_config(source, options)
    for reward in reward_funcs:
        if isinstance(reward, str):
            with hub_errors("reward_funcs", reward, "a local folder, or the id of a reward model on the Hub"):
                AutoConfig.from_pretrained(reward, trust_remote_code=args.trust_remote_code)
    if isinstance(config, PreTrainedConfig):
        _check_context(args.max_completion_length, config)
        module = model if isinstance(model, nn.Module) else _without_weights(config, init, peft_config)
        if module is not None and peft_config is not None:
            from trl_drgrpo.single_gpu.adapter_targets import check_targets

            check_targets(peft_config, module)
    if isinstance(model, nn.Module):
        return embedding_rows(model)
    # An adapter may bring more embeddings than its base has.
    if config is None or is_adapter(model):
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def own_tokenizer(args: "DrGRPOConfig", model: str) -> "Processor | None":
    """Return the tokenizer of a model's folder or Hub id; `None` where it does not load, which TRL will say."""
    init = cast("dict[str, Any]", args.model_init_kwargs or {})
    source, options = source_of(model, {"revision": init.get("revision")})
    try:
        with quiet_retries():
            return AutoTokenizer.from_pretrained(source, trust_remote_code=args.trust_remote_code, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None


def _checked_config(name: str, init: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration that the model will be loaded with. Refuse a keyword that nobody takes."""
    if isinstance(init.get("config"), PreTrainedConfig):
        return init["config"]
    _check_attention(init.get("attn_implementation"))
    for key in ("dtype", "torch_dtype"):
        value = init.get(key)
        dtype = value
        if isinstance(value, str):
            dtype = getattr(torch, value, None)
        if value not in (None, "auto") and not isinstance(dtype, (torch.dtype, dict)):
            remedy = "For example bfloat16."
            raise InputError(f"model_init_kwargs: {key}", shortened(value), "a dtype of torch, or auto", remedy)
    # transformers takes a keyword that it does not know for a field of the configuration, and hands what is no field
    # to the model's constructor, whose `TypeError` comes once the weights' files are there.
    keywords = {*inspect.signature(PreTrainedModel.from_pretrained).parameters, *_OF_BOTH, *_USUAL}
    passed_on = _passed_on(init.keys() - keywords)
    options = {key: init[key] for key in init if key in _OF_BOTH or key in passed_on}
    config: PreTrainedConfig
    with hub_errors("model_name_or_path", name, _A_MODEL):
        config, unused = AutoConfig.from_pretrained(  # type: ignore[assignment]
            init.get("config") or name, return_unused_kwargs=True, **options
        )
    # Code of the repository may take any keyword, and have any class.
    if getattr(config, "auto_map", None):
        return config
    # What neither the configuration nor `from_pretrained` takes would end in a `TypeError` of the model's class.
    for key in unused:
        if key in passed_on:
            remedy = did_you_mean(key, [*keywords, *config.to_dict()], "Remove it.", cutoff=0.7)
            expected = f"a field of {type(config).__name__}, or a keyword of from_pretrained"
            raise InputError("model_init_kwargs", f"the key {key!r}", expected, remedy)
    names = getattr(config, "architectures", None)
    if not (isinstance(names, list) and names and hasattr(transformers, str(names[0]))):
        got = f"{name}, whose config.json names {shortened(names)} as architectures"
        remedy = "Save the model with save_pretrained, or upgrade transformers."
        raise InputError("model_name_or_path", got, "a class of transformers", remedy)
    return config


class _Reached(Exception):
    """Carries the keywords that reached the constructor of a model."""


class _Asking(PreTrainedModel):
    """A model without layers. Its constructor says which keywords it gets."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, **keywords: Any):
        raise _Reached(keywords)


def _passed_on(keywords: Collection[str]) -> Collection[str]:
    """Return the keywords that `from_pretrained` does not take itself, but passes on to the model's constructor.

    The installed transformers is asked: most of the keywords that it takes stand in no signature.
    """
    if not keywords:
        return ()
    try:
        # `state_dict` in the place of a name: nothing is looked for, on disk or on the Hub.
        arguments = {**dict.fromkeys(keywords), "config": PreTrainedConfig(), "state_dict": {}}
        _Asking.from_pretrained(None, **arguments)
    except _Reached as reached:
        return reached.args[0]
    return ()


def _check_attention(name: object) -> None:
    """Refuse an unknown implementation of attention."""
    if not isinstance(name, str) or "/" in name:  # a slash: a kernel on the Hub
        return
    names = ["eager", *AttentionInterface().valid_keys()]
    if name not in names and name.removeprefix("paged|") not in names:
        remedy = did_you_mean(name, names, "Use sdpa, which nearly every model supports.", cutoff=0.6)
        expected = f"one of {', '.join(sorted(names))}, or a kernel on the Hub"
        raise InputError("attn_implementation", repr(name), expected, remedy)


def _check_context(longest: int | None, config: PreTrainedConfig) -> None:
    context = context_length(config)
    if longest is not None and context is not None and longest >= context:
        expected = f"less than the model's context of {context} tokens, which the prompt shares"
        raise InputError("max_completion_length", str(longest), expected, "Lower it, or train another model.")


def refuse_too_long(tokens: int, row: int, most: int | None, context: int | None, of: str = "") -> None:
    """Refuse a prompt behind which a completion has no room in the model's context.

    Args:
        tokens (`int`): Of the longest prompt.
        row (`int`): Where it stands.
        most (`int`, *optional*): Most tokens of a completion; `None`: as many as there is room for.
        context (`int`, *optional*): Tokens that the model has positions for; `None`: no end.
        of (`str`, *optional*): Where the rows are, for the message: `" of train_dataset"`.
    """
    if context is not None and tokens + (most or 1) > context:
        got = f"{most} after a prompt of {tokens} tokens, row {row} (from 0){of}"
        expected = f"at most {context} tokens together, the model's context"
        raise InputError("max_completion_length", got, expected, "Lower it, or drop such prompts.")


_COUNTED = 10_000  # prompts of a split, those with the longest texts


class _SizedRow(NamedTuple):
    """A row of a split that may be too long: the size of its prompt in bytes, and its place."""

    size: int
    place: int
    row: dict[str, Any]


def _too_long(rows: Iterable[tuple[int, dict[str, Any]]], room: int) -> Iterator[_SizedRow]:
    """Yield the rows whose prompt may have more tokens than there is room for: a token has a byte at least."""
    for place, row in rows:
        size = len(str(row["prompt"]).encode(errors="replace"))
        if size > room:
            yield _SizedRow(size, place, row)


def check_prompt_lengths(
    splits: "Mapping[str, Data]",
    count: Callable[[list[dict[str, Any]]], list[int]],
    most: int | None,
    context: int | None,
) -> None:
    """Refuse data with a prompt behind which a completion has no room, see [`refuse_too_long`].

    A prompt has at most as many tokens as bytes, beside what a chat template adds, which the first prompt has, too. So
    prompts that surely fit cost a look at their text; of the others, those with the longest texts are tokenized.

    Args:
        splits (`Mapping[str, Any]`): Datasets by field. Of a stream the first rows are read.
        count (`Callable`): The tokens of each prompt of some rows, as the model gets them.
        most, context (`int`, *optional*): As there.
    """
    for field, dataset in splits.items():
        rows = prompt_rows(dataset)
        first = next(rows, None)
        if first is None:
            continue
        place, row = first
        tokens_of_first = count([row])[0]
        if tokens_of_first == 0:
            remedy = "Check the data, the tokenizer and its chat template."
            raise InputError("prompt", f"no tokens of row {place} of {field}", "at least one token", remedy)
        if context is None:
            continue
        # The first prompt's tokens stand for what the chat template adds to each: too many rather than too few.
        room = context - (most or 1) - tokens_of_first
        # A heap holds the longest alone, so a stream of any length takes little memory.
        too_long = _too_long(chain([first], rows), room)
        longest = heapq.nlargest(_COUNTED, too_long, key=lambda sized: sized.size)
        tokens: list[int] = []
        for start in range(0, len(longest), AT_ONCE):
            tokens += count([sized_row.row for sized_row in longest[start : start + AT_ONCE]])
        if tokens:
            index = tokens.index(max(tokens))
            refuse_too_long(tokens[index], longest[index].place, most, context, f" of {field}")


def _without_weights(
    config: PreTrainedConfig, init: Mapping[str, Any], peft_config: "PeftConfig | None"
) -> nn.Module | None:
    """Return the model on the meta device, where somebody needs it; `None` where only loading would tell."""
    # To compare names of layers with the adapter's, or to ask the class about an implementation of attention.
    targets = getattr(peft_config, "target_modules", None)
    is_named = targets is not None and targets != ALL_LINEAR
    for field in ("modules_to_save", "target_parameters"):
        is_named = is_named or bool(getattr(peft_config, field, None))
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if model_class is None or not (is_named or init.get("attn_implementation")):
        return None
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except (ValueError, ImportError) as error:
        if init.get("attn_implementation") is None:
            return None
        got = f"{init['attn_implementation']!r}, which {model_class.__name__} cannot run with here"
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InputError("attn_implementation", got, "another one, such as sdpa", f"{reason[:200]}.") from error
    except (RuntimeError, TypeError, AttributeError):  # a model that computes with its weights while it is built
        return None
