"""The example of a model card: a prompt of the run, and the settings that its completions were sampled with.

Executed, the snippet of the card gives the model the very tokens that the run gave it: with the system prompt, the
template, the tools and the options of the chat template. Values become Python literals. A prompt that has none, such
as one with an image, is not shown: then the example is a question of no run.
"""

import ast
import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers.utils import get_json_schema

_ROWS = 100  # rows of the data in which a short prompt is looked for
_CHARACTERS = 4000  # of a short prompt
_WIDTH = 100
_QUESTION = "What is 3 + 4?"
_LENGTH = 1024  # tokens of the example's completion, where the run has no limit


@dataclass(frozen=True)
class Example:
    """
    Parts of the snippet, as Python.

    Args:
        prompt (`str`): A text, or a list of messages.
        is_chat (`bool`): Whether the prompt is a list of messages.
        template (`dict[str, str]`): Further arguments of the chat template, by name; empty for a text.
        loading (`dict[str, str]`): Further arguments of loading the model.
        trusts_code (`bool`): Whether the repository's own code runs.
        decoding (`dict[str, str]`): Arguments of `model.generate`, by name.
    """

    prompt: str
    is_chat: bool
    template: dict[str, str]
    loading: dict[str, str]
    trusts_code: bool
    decoding: dict[str, str]


def example_of(trainer: Any, model: Any) -> Example:
    """Return the example of a run's card."""
    row = example_row(trainer)
    is_chat = isinstance(row["prompt"], list)
    template = {}
    if is_chat:
        template = _template_arguments(trainer, row)
    options = trainer.args.model_init_kwargs or {}
    return Example(
        prompt=literal(row["prompt"]) or repr(_QUESTION),
        is_chat=is_chat,
        template=template,
        loading=_loading(model),
        trusts_code=bool(options.get("trust_remote_code") or getattr(trainer.args, "trust_remote_code", False)),
        decoding=_decoding(trainer),
    )


def example_row(trainer: Any) -> dict[str, Any]:
    """Return a row of the training data with a prompt that can be shown: the first short one, else the shortest."""
    rows = trainer.newest_rows  # a stream is not read for this, and environments add to the prompts of the data
    if hasattr(trainer.train_dataset, "__len__") and trainer.environment_factories is None:
        rows = islice(trainer.train_dataset, _ROWS)
    shown = []
    for row in rows:
        text = literal(row.get("prompt"))
        if text is not None and len(text) <= _CHARACTERS:
            return dict(row)
        if text is not None:
            shown.append((len(text), dict(row)))
    if not shown:
        return {"prompt": _QUESTION}
    return min(shown, key=lambda pair: pair[0])[1]


def literal(value: Any) -> str | None:
    """Write a value as a Python literal, in lines of some length; `None` where there is none, or the value is empty.

    Example:

    ```python
    >>> literal([{"role": "user", "content": "2 + 2?"}]), literal(object())
    ("[{'role': 'user', 'content': '2 + 2?'}]", None)

    ```
    """
    text = pprint.pformat(value, width=_WIDTH, sort_dicts=False)
    try:
        return text if value and ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _template_arguments(trainer: Any, row: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that the trainer passes to the chat template beside the messages."""
    arguments = dict(trainer.chat_template_kwargs)
    tools = trainer.tools_of(row)
    if tools:
        arguments["tools"] = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
    if trainer.chat_template is not None:  # TRL's own, for some models with tools
        arguments["chat_template"] = trainer.chat_template
    # `literal` has none for None, False and 0, which are values here.
    return {name: literal(value) or repr(value) for name, value in arguments.items()}


def _loading(model: Any) -> dict[str, str]:
    """Return the quantization that an adapter was trained with, as its base is not saved with it."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None or not hasattr(model, "peft_config"):
        return {}
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = values.get("quant_method")
    if getattr(method, "value", method) != "bitsandbytes":
        return {}
    if values.get("load_in_8bit"):
        return {"quantization_config": "BitsAndBytesConfig(load_in_8bit=True)"}
    arguments = ["load_in_4bit=True"]
    for name in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"):
        value = values.get(name)
        if value is None:
            continue
        if "dtype" in name:
            value = str(value).removeprefix("torch.")
        arguments.append(f"{name}={value!r}")
    return {"quantization_config": f"BitsAndBytesConfig({', '.join(arguments)})"}


def _decoding(trainer: Any) -> dict[str, str]:
    """Return all settings of the run's sampling: a missing one would be taken from the model's own."""
    args = trainer.args
    decoding = {
        "max_new_tokens": args.max_completion_length or _LENGTH,
        "do_sample": True,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "eos_token_id": sorted(trainer.eos_token_ids),
    }
    further_settings = dict(args.generation_kwargs or {})
    if args.use_vllm:  # its other options are unknown to transformers
        stop = further_settings.get("stop")
        further_settings = {"stop_strings": stop} if stop else {}
    shown = {name: repr(value) for name, value in (decoding | further_settings).items() if value is not None}
    if "stop_strings" in shown:
        shown["tokenizer"] = "tokenizer"
    return shown
