"""Sampling G completions of a prompt: run the prompt once, and do not go on with rows that have finished.

transformers' loop runs the same prompt through the model G times, and carries rows that ended long ago until the last
one ends. This loop is handed to `generate` as its `custom_generate`, so that everything before it (logits processors,
stopping criteria, cache, padding) is transformers' own.

The same seed gives the same tokens as transformers' loop, up to rounding in the logits: for every row, also a finished
one, as many random numbers are drawn as there, and a token is chosen by the rule of `torch.multinomial`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process as processors

# Dropping rows copies the cache once, about what a step reads of it: worth it when a share of the rows has ended.
DROP_WHEN_ENDED = 1 / 8
# Each looks at a row and its scores alone. Others (a repetition penalty) hold something per row of the first batch.
_ROW_BY_ROW = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.MinPLogitsWarper,
    processors.NoRepeatNGramLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
)
_OTHER_WAYS = (  # of decoding, and results of another form
    "return_dict_in_generate",
    "prefill_chunk_size",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)
# What `generate` may be called with: anything else (images, an assistant, ...) is left to transformers.
_ARGUMENTS = {"input_ids", "attention_mask", "generation_config"}


@contextmanager
def shared_prefill(model: Any) -> Iterator[None]:
    """Inside the block, `model.generate` decodes as described above wherever it can. The model is left as it was."""
    generate = model.generate
    had_own = "generate" in vars(model)

    def decoding_shared(*args: Any, **kwargs: Any) -> Any:
        if not args and _can_decode(model, kwargs):
            kwargs["custom_generate"] = decode
        return generate(*args, **kwargs)

    model.generate = decoding_shared
    try:
        yield
    finally:
        if had_own:
            model.generate = generate
        else:
            del model.generate


def _can_decode(model: Any, kwargs: dict[str, Any]) -> bool:
    given, default = kwargs.get("generation_config"), model.generation_config
    if given is None or not set(kwargs) <= _ARGUMENTS or model.config.is_encoder_decoder:
        return False
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and peft.is_prompt_learning:
        return False

    def option(name: str) -> Any:  # as `generate` reads it: what the call leaves out comes from the model
        value = getattr(given, name, None)
        return getattr(default, name, None) if value is None else value

    return (
        (option("num_beams") or 1) == 1
        and (option("num_return_sequences") or 1) == 1
        and option("use_cache") is not False
        and option("cache_implementation") in (None, "dynamic")
        and not any(option(name) for name in _OTHER_WAYS)
        and _has_plain_cache(model)
    )


def _has_plain_cache(model: Any) -> bool:
    """Whether rows of the model's cache can be selected: keys and values of every token, and no running state."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a cache of its own
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@torch.no_grad()
def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Callable[..., torch.Tensor],
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """The decoding loop, in the form that `generate(custom_generate=...)` calls.

    Args:
        model ([`~transformers.PreTrainedModel`]): Decoder-only.
        input_ids (`torch.Tensor` of shape `(B, P)`, int64): Prompts, padded left. Equal rows are run once.
        logits_processor, stopping_criteria, generation_config: As transformers prepared them.
        synced_gpus (`bool`), streamer: Part of the call; neither is supported, nor asked for by a trainer.
        model_kwargs: `attention_mask` and `position_ids` of shape `(B, P)`, `past_key_values`, and the like.

    Returns:
        `torch.Tensor` of shape `(B, P + T)`, int64: Prompts and what was sampled, padded behind a row's end.
    """
    rows, device = input_ids.size(0), input_ids.device
    pad_token_id = generation_config.pad_token_id or 0
    selects = type(model_kwargs.get("past_key_values")) is DynamicCache  # rows of other caches may not be selected
    drops = selects and all(type(processor) in _ROW_BY_ROW for processor in logits_processor)
    first, copies = _equal_rows(input_ids, model_kwargs.get("attention_mask")) if selects else (None, None)

    inputs = model.prepare_inputs_for_generation(
        _select(input_ids, first), is_first_iteration=True, **_select_rows(model_kwargs, first)
    )
    outputs = model(**inputs, return_dict=True)
    cache = model_kwargs["past_key_values"] = outputs.past_key_values
    logits = _select(outputs.logits[:, -1].clone(), copies)
    del outputs  # its logits may be those of whole prompts
    if copies is not None:
        cache.batch_select_indices(copies)

    sampled: list[torch.Tensor] = []  # one column of all rows per step
    live = torch.arange(rows, device=device)  # rows that are still in the batch
    ended = torch.zeros(rows, dtype=torch.bool, device=device)  # of those in the batch
    ids: Any = input_ids
    while True:
        scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32, device=device))
        tokens = _sampled(scores, live, rows) if generation_config.do_sample else scores.argmax(dim=-1)
        tokens = tokens.masked_fill(ended, pad_token_id)
        sampled.append(torch.full((rows,), pad_token_id, device=device).index_put((live,), tokens))
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        ended = ended | stopping_criteria(ids, None)
        going_on = (~ended).nonzero().squeeze(1)
        if not len(going_on):
            return torch.cat([input_ids, torch.stack(sampled, dim=1)], dim=1)
        model_kwargs = _one_token_on(model_kwargs)
        if drops and len(going_on) <= (1 - DROP_WHEN_ENDED) * len(live):
            ids, live, ended = ids[going_on], live[going_on], ended[going_on]
            model_kwargs["past_key_values"].batch_select_indices(going_on)
            model_kwargs = _select_rows(model_kwargs, going_on)
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        logits = model(**inputs, return_dict=True).logits[:, -1]


def _equal_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(U,) the first of each set of equal rows, and (B,) which of them each row is a copy of."""
    both = input_ids if attention_mask is None else torch.cat([input_ids, attention_mask], dim=1)
    first: list[int] = []
    number: dict[tuple[int, ...], int] = {}
    copies = []
    for i, row in enumerate(both.tolist()):
        key = tuple(row)
        if key not in number:
            number[key] = len(first)
            first.append(i)
        copies.append(number[key])
    device = input_ids.device
    return torch.tensor(first, device=device), torch.tensor(copies, device=device)


def _sampled(scores: torch.Tensor, live: torch.Tensor, rows: int) -> torch.Tensor:
    """One token per row in the batch, by the rule and with the random numbers of `torch.multinomial` over all rows. As
    there, scores that are not finite are a `RuntimeError`: the policy has diverged."""
    probabilities = scores.softmax(dim=-1)
    if not probabilities.isfinite().all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    exponential = probabilities.new_empty(rows, probabilities.size(1)).exponential_(1)
    return (probabilities / exponential[live]).argmax(dim=-1)


def _one_token_on(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The mask and the positions, one token longer."""
    longer = dict(model_kwargs)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if (positions := model_kwargs.get("position_ids")) is not None:
        longer["position_ids"] = torch.cat([positions, positions[:, -1:] + 1], dim=1)
    return longer


def _select(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return values if rows is None else values[rows]


def _select_rows(model_kwargs: dict[str, Any], rows: torch.Tensor | None) -> dict[str, Any]:
    return {
        key: _select(value, rows) if key in ("attention_mask", "position_ids") and value is not None else value
        for key, value in model_kwargs.items()
    }
