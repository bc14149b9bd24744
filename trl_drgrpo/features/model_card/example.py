"""The example of a model card: a prompt of the run, and the settings that its completions were sampled with.

Executed, the snippet of the card gives the model the very tokens that the run gave it: with the system prompt, the
template, the tools and the options of the chat template. Values become Python literals. A prompt that has none, such
as one with an image, is not shown: then the example is a question of no run.
"""

import ast
import math
import pprint
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, TypedDict

from transformers import PreTrainedModel
from transformers.utils import get_json_schema

from trl_drgrpo.features.model_card.objective import plain_data
from trl_drgrpo.upstream.batches import DatasetRow, ScoredBatch

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

_ROWS = 100  # of the data that are looked at for a prompt that is short enough
_CHARACTERS = 4000
_WIDTH = 100
_QUESTION = "What is 3 + 4?"
_LENGTH = 1024  # tokens of the example's completion, where the run has no limit


class Example(TypedDict):
    """Parts of the snippet, as Python.

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


def example_of(trainer: "TrainerProtocol", newest: ScoredBatch | None = None) -> Example:
    """Return the example of a run's card. `newest`: this rank's rows of the newest generation batch."""
    row = example_row(trainer, newest)
    is_chat = isinstance(row["prompt"], list)
    options = trainer.args.model_init_kwargs or {}
    return Example(
        prompt=literal(row["prompt"]) or repr(_QUESTION),
        is_chat=is_chat,
        template=_template_arguments(trainer, row) if is_chat else {},
        loading=_loading(trainer.unwrapped_model),
        trusts_code=bool(options.get("trust_remote_code") or getattr(trainer.args, "trust_remote_code", False)),
        decoding=_decoding(trainer),
    )


def example_row(trainer: "TrainerProtocol", newest: ScoredBatch | None) -> DatasetRow:
    """Return a row of the training data with a prompt that can be shown: the first short one, else the shortest.

    A stream is not read for this, and environments add to the prompts of the data: there, rows of the newest batch.
    """
    # The first short prompt, in the order of the data: the same card for the same run.
    rows: Iterable[DatasetRow] = ()
    if hasattr(trainer.train_dataset, "__len__") and trainer.turns.factory is None:
        rows = islice(trainer.train_dataset, _ROWS)
    elif newest is not None:
        rows = [{**row, "prompt": prompt} for row, prompt in zip(newest.inputs, newest.prompts, strict=True)]
    shortest: DatasetRow = {"prompt": _QUESTION}
    least = math.inf
    for row in rows:
        text = literal(row.get("prompt"))
        if text is None:
            continue
        if len(text) <= _CHARACTERS:
            return dict(row)
        if len(text) < least:
            shortest = dict(row)
            least = len(text)
    return shortest


def literal(value: object) -> str | None:
    """Return Python for a value, in lines of some length; `None` where Python has none, or the value is empty.

    Example:

    ```python
    >>> literal([{"role": "user", "content": "2 + 2?"}]), literal(object())
    ("[{'role': 'user', 'content': '2 + 2?'}]", None)

    ```
    """
    text = pprint.pformat(value, width=_WIDTH, sort_dicts=False)
    try:  # read back: a representation may look like Python and be something else
        return text if value and ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _template_arguments(trainer: "TrainerProtocol", row: DatasetRow) -> dict[str, str]:
    """Return arguments that the trainer passes to the chat template beside the messages."""
    arguments = trainer.template_arguments(row)
    if "tools" in arguments:
        tools = arguments["tools"]
        arguments["tools"] = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
    # `literal` gives None for what is empty; here None, False and 0 are values, too.
    return {name: literal(value) or repr(value) for name, value in arguments.items()}


def _loading(model: PreTrainedModel) -> dict[str, str]:
    """Return the quantization that an adapter was trained with: its base is not saved with it."""
    values = plain_data(getattr(model.config, "quantization_config", None)) or {}
    if not hasattr(model, "peft_config") or values.get("quant_method") != "bitsandbytes":
        return {}
    # As code that builds the same configuration.
    arguments = ["load_in_8bit=True"]
    if not values.get("load_in_8bit"):
        arguments = ["load_in_4bit=True"]
        for name in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"):
            value = values.get(name)
            if value is None:
                continue
            if name.endswith("dtype"):  # by its name, which needs no import of torch
                value = str(value).removeprefix("torch.")
            arguments.append(f"{name}={value!r}")
    return {"quantization_config": f"BitsAndBytesConfig({', '.join(arguments)})"}


def _decoding(trainer: "TrainerProtocol") -> dict[str, str]:
    """Return the run's sampling, each setting stated: what is left out would be the model's own."""
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
    options = args.generation_kwargs or {}
    if not args.use_vllm:
        decoding |= options
    elif options.get("stop"):  # of vLLM's other options transformers knows none
        decoding["stop_strings"] = options["stop"]
    shown = {name: repr(value) for name, value in decoding.items() if value is not None}
    if "stop_strings" in shown:
        shown["tokenizer"] = "tokenizer"  # transformers finds texts with it
    return shown
