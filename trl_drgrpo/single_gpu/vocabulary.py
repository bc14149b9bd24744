"""Token ids against the model's embeddings.

A token that was added to the tokenizer without resizing the model has no embedding: the first forward ends in an
`IndexError`, on a GPU in a device assert that names nothing. Many tokenizers hold ids beyond the embeddings that
nothing uses (Gemma 3's text models lack that of an image), and many models have more embeddings than the tokenizer has
tokens. So what counts is what this run uses: the special tokens, and the tokens of its prompts.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import refuse_empty_vocabulary
from trl_drgrpo.common.rows import prompt_rows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

    from trl_drgrpo.upstream.argument_types import Data, Processor

AT_ONCE = 256  # prompts that are tokenized together


def embedding_rows(model: "PreTrainedModel | PeftModel") -> int | None:
    """Return the number of token embeddings of a model in memory; `None` where it has none that can be counted."""
    embeddings = model.get_input_embeddings()
    rows = getattr(embeddings, "num_embeddings", None)
    weight = getattr(embeddings, "weight", None)
    if rows is None and weight is not None:
        rows = weight.shape[0]
    return rows or None  # 0: partitioned by DeepSpeed


def context_length(config: "PreTrainedConfig") -> int | None:
    """Return the tokens that a model has positions for, prompt and completion together.

    A scaling of its rotary positions adds to them. `None` where positions have no end.
    """
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or getattr(text, "alibi", False):
        return None
    # `rope_parameters` since transformers 5; newer configurations have one mapping in it per kind of layer.
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for scaling in (rope, *rope.values()):
        if not isinstance(scaling, Mapping):
            continue
        # Such as YaRN's 4 over 32,768 original positions: 131,072, where `max_position_embeddings` may say either.
        factor = scaling.get("factor")
        if isinstance(factor, int | float):
            original = scaling.get("original_max_position_embeddings") or text.max_position_embeddings
            length = max(length, int(factor * original))
    return length


def check_vocabulary(
    processing_class: "Processor | None",
    rows: int | None,
    splits: "Mapping[str, Data]",
    template: Mapping[str, Any] | None = None,
) -> None:
    """
    Refuse a tokenizer without a vocabulary, and tokens that this run uses and the model has no embedding for.

    Args:
        processing_class: The tokenizer, or a processor with one.
        rows (`int`, *optional*): Number of the model's token embeddings; `None`: not known, ids are not checked.
        splits (`Mapping`): Datasets by field. Their prompts are tokenized only if the tokenizer has ids beyond `rows`.
        template (`dict`, *optional*): `chat_template_kwargs`.

    Raises:
        `InputError`: Names the token, its id and where it is used.
    """
    refuse_empty_vocabulary(processing_class)
    tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)
    if processing_class is None or rows is None or not hasattr(tokenizer, "get_vocab"):
        return
    # Most tokenizers end here, and no prompt is tokenized.
    names = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if not names:
        return
    for kind in ("eos_token", "pad_token"):
        index = getattr(tokenizer, f"{kind}_id")
        if index in names:
            raise _no_embedding(names[index], index, rows, f"the {kind}")
    for field, dataset in splits.items():
        for row, ids in _prompt_ids(dataset, processing_class, template or {}):
            for index in ids:
                if index >= rows:
                    raise _no_embedding(names.get(index, ""), index, rows, f"row {row} (from 0) of {field}")


def _no_embedding(token: str, index: int, rows: int, place: str) -> InputError:
    remedy = (
        "The tokenizer has tokens that the model was not resized for: call "
        "model.resize_token_embeddings(len(tokenizer)), save the model and train it, or use its own tokenizer."
    )
    expected = f"ids below {rows}, the model's embeddings"
    return InputError("processing_class", f"the token {token!r} of id {index} in {place}", expected, remedy)


def _prompt_ids(
    dataset: "Data", processing_class: "Processor", template: Mapping[str, Any]
) -> Iterator[tuple[int, list[int]]]:
    """Yield row number and token ids of the prompts of a split, texts or messages, as TRL makes them."""
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **template}
    rows = prompt_rows(dataset)
    while batch := dict(islice(rows, AT_ONCE)):
        prompts: list[Any] = [row["prompt"] for row in batch.values()]
        if isinstance(prompts[0], str):
            encoded: Any = processing_class(text=prompts)
        else:
            encoded = processing_class.apply_chat_template(prompts, **options)
        yield from zip(batch, encoded["input_ids"], strict=True)
