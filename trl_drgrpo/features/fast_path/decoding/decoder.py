"""Sampling G completions of a prompt: run the prompt once, and do not go on with rows that have finished.

transformers' loop runs the same prompt through the model G times, and carries rows that ended long ago until the last
one ends. This loop is handed to `generate` as its `custom_generate`, so that everything before it (logits processors,
stopping criteria, cache, padding) is transformers' own. `why_not_decoded` says which calls stay as they are.

The same seed gives the same tokens as transformers' loop, up to rounding in the logits: for every row, also a finished
one, as many random numbers are drawn as there (`exponential`), and a token is chosen by the rule of
`torch.multinomial`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from trl_drgrpo.features.fast_path.decoding.forwards import Forwards
from trl_drgrpo.features.fast_path.speed import GENERATION, Speed, SpeedPart
from trl_drgrpo.upstream.kv_cache import ROW_BY_ROW, moved_in_decoding, why_no_cache, why_no_dynamic_cache
from trl_drgrpo.upstream.private_state import swapped

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from trl_drgrpo.features.fast_path.decoding.model_inputs import DecodingModel

BLOCK = 2**16  # numbers at a time: half a megabyte


def exponential(live: torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
    """
    Return rows `live` of `like.new_empty(rows, V).exponential_(1)`, with the generator left as after that.

    `Tensor.exponential_` of a CPU draws a uniform float64 per number and takes its logarithm, one number at a time: at
    2048 tokens in the vocabulary that is a tenth of a decoding step. Here the uniform numbers are drawn for all rows,
    so that the generator ends where it would, and the logarithm, vectorized, is taken for live rows alone. Where torch
    draws otherwise (on a GPU, or as a test of this build finds), `exponential_` itself is called.

    Args:
        live (`torch.Tensor` of shape `(n,)`, int64): Rows to return, ascending.
        rows (`int`): Rows to draw.
        like (`torch.Tensor` of shape `(n, V)`, float32): Tensor of the type and device of the numbers.
    """
    columns = like.size(1)
    if like.device.type != "cpu" or like.dtype != torch.float32 or not _draws_uniform():
        return like.new_empty(rows, columns).exponential_(1)[live]
    numbers = torch.empty_like(like)
    uniform = torch.empty(max(1, BLOCK // columns), columns, dtype=torch.float64)
    done = 0
    # Block after block over all rows, so that the generator moves on for rows that have left, too.
    for first in range(0, rows, len(uniform)):
        block = uniform[: rows - first].uniform_()
        is_within = (live >= first) & (live < first + len(block))
        within = live[is_within] - first
        if len(within) < len(block):
            block = block[within]
        numbers[done : done + len(within)] = _of_uniform(block)
        done += len(within)
    return numbers


def _of_uniform(uniform: torch.Tensor) -> torch.Tensor:
    """Return exponential numbers `-log(1 - u)`, in place."""
    return uniform.neg_().log1p_().neg_()


@cache
def _draws_uniform() -> bool:
    """Tell whether this torch makes exponential numbers from uniform float64, and from nothing else."""
    generator = torch.Generator().manual_seed(0)
    expected_generator = torch.Generator().manual_seed(0)
    uniform = torch.empty(4096, dtype=torch.float64).uniform_(generator=generator)
    numbers = _of_uniform(uniform).float()
    expected = torch.empty(4096).exponential_(1, generator=expected_generator)
    if not torch.equal(generator.get_state(), expected_generator.get_state()):
        return False
    return torch.allclose(numbers, expected, rtol=1e-6, atol=0)


# Other ways of decoding, and results of another form.
_OTHER_WAYS = """
    return_dict_in_generate prefill_chunk_size penalty_alpha dola_layers prompt_lookup_num_tokens assistant_early_exit
"""
# Arguments that `generate` may be called with. Any other (images, an assistant) leaves the call to transformers.
_ARGUMENTS = {"input_ids", "attention_mask", "generation_config"}


# Values of an option that leave the loop as it is.
_OPTIONS = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "guidance_scale": (None, 1),  # its processor runs the model, without the prompt, between two steps
    **dict.fromkeys(_OTHER_WAYS.split(), (None, False, 0)),
}


def why_not_decoded(model: "DecodingModel", kwargs: dict[str, Any]) -> str | None:
    """Return why `model.generate(**kwargs)` is left to transformers; `None` where it samples, or takes the likeliest
    token, over a cache whose rows can be selected."""
    config = kwargs.get("generation_config")
    if config is None:
        return "generate is called without a generation_config"
    unknown = sorted(set(kwargs) - _ARGUMENTS)
    if unknown:
        return f"generate is called with {', '.join(unknown)}"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and peft.is_prompt_learning:
        return "the adapter prepends virtual tokens"
    for name, usual_values in _OPTIONS.items():
        value = getattr(config, name, None)
        # `generate` takes from the model what a call leaves out.
        if value is None:
            value = getattr(model.generation_config, name, None)
        if value not in usual_values:
            return f"{name} is {value!r}"
    return moved_in_decoding() or why_no_cache(model) or why_no_dynamic_cache(model.config)


# Shares of the batch that must have ended before they leave it. A row less saves its share of a step; leaving moves
# masks and positions, and with some caches keys and values. Where steps are replayed a row less saves next to nothing,
# and leaving costs two steps that are not.
DROP_WHEN_ENDED = 1 / 8
DROP_WHEN_ENDED_REPLAYED = 1 / 2


@torch.no_grad()
def decode(
    model: "DecodingModel",
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Callable[..., torch.Tensor],
    generation_config: "GenerationConfig",
    synced_gpus: bool = False,
    streamer: object = None,
    limits: Sequence[int] | None = None,
    speed: Speed | None = None,
    first_row: int = 0,
    rows_drawn: int | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Write tokens until every row has ended: the loop, in the form that `generate(custom_generate=...)` calls.

    Args:
        model ([`~transformers.PreTrainedModel`]): Decoder-only.
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Prompts, padded left.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As transformers prepared them.
        synced_gpus, streamer: Part of the call; not supported, and not asked for by a trainer.
        limits, speed: As in [`shared_prefill`].
        first_row, rows_drawn (`int`): Where random numbers are drawn for more rows than these: which of them is the
            first of these, and how many they are.

    Returns:
        `torch.Tensor` of shape `(B, L + T)`, int64: Prompts and what was sampled, padded behind a row's end.
    """
    rows = input_ids.size(0)
    device = input_ids.device
    pad_token_id = generation_config.pad_token_id or 0
    sampled = []  # one column of all rows per step
    live = torch.arange(rows, device=device)  # rows that are still in the batch
    if limits is None:
        row_limits = None
        ended = torch.zeros(rows, dtype=torch.bool, device=device)  # of rows in the batch
    else:
        row_limits = torch.tensor(limits, device=device)
        ended = row_limits <= 0
    longest = generation_config.max_length - input_ids.size(1)
    speed = speed or Speed()
    with Forwards(model, input_ids, model_kwargs, longest, speed) as forwards, _inference(model):
        drops = forwards.can_drop and _processes_row_by_row(logits_processor, speed)
        logits = forwards.logits
        ids: Any = input_ids
        while True:
            # A copy in float32, as in transformers: processors may write into it.
            scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32, device=device))
            if generation_config.do_sample:
                tokens = _sampled(scores, first_row + live, rows_drawn or rows)
            else:
                tokens = scores.argmax(dim=-1)
            # Rows that have ended stay until enough of them have, and write padding.
            tokens = tokens.masked_fill(ended, pad_token_id)
            column = torch.full((rows,), pad_token_id, device=device)
            sampled.append(column.index_put((live,), tokens))
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            ended = ended | stopping_criteria(ids, None)
            if row_limits is not None:
                ended = ended | (row_limits[live] <= len(sampled))
            going_on = (~ended).nonzero().squeeze(1)
            if not len(going_on):
                break
            share_to_drop = DROP_WHEN_ENDED_REPLAYED if forwards.replays else DROP_WHEN_ENDED
            if drops and len(going_on) <= (1 - share_to_drop) * len(live):
                speed.uses[SpeedPart.DROPPED_ROWS] += len(live) - len(going_on)
                forwards.keep(going_on)
                ids = ids[going_on]
                live = live[going_on]
                ended = ended[going_on]
            logits = forwards.step(ids)
    # Made out here, so that it is an ordinary tensor and none of inference mode.
    return torch.cat([input_ids, torch.stack(sampled, dim=1)], dim=1)


def _processes_row_by_row(logits_processor: LogitsProcessorList, speed: Speed) -> bool:
    """Tell whether no processor would notice that rows have left."""
    reason = speed.barred.get(SpeedPart.DROPPED_ROWS)
    kinds = set(map(type, logits_processor)) - set(ROW_BY_ROW)
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        reason = f"{names} may hold something for each row of the first batch"
    speed.set(SpeedPart.DROPPED_ROWS, reason)
    return reason is None


def _sampled(scores: torch.Tensor, live: torch.Tensor, rows: int) -> torch.Tensor:
    """Draw one token per row in the batch, by the rule and with the random numbers of `torch.multinomial` over all
    rows. As there, scores that are not finite are a `RuntimeError`: the policy has diverged."""
    probabilities = scores.softmax(dim=-1)
    if not probabilities.sum().isfinite():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    # With exponential numbers E, the largest of `p / E` is at i with probability p_i. `torch.multinomial` draws so.
    return (probabilities / exponential(live, rows, probabilities)).argmax(dim=-1)


@contextmanager
def shared_prefill(
    model: "DecodingModel",
    shares: bool = True,
    limits: Sequence[int] | None = None,
    speed: Speed | None = None,
    rows_at_once: int | None = None,
) -> Iterator[None]:
    """Inside the block, `model.generate` runs each prompt once wherever it can. The model is left as it was.

    Args:
        model ([`~transformers.PreTrainedModel`] or its PEFT wrapper): The policy.
        shares (`bool`): `False` leaves all to transformers, but for rounds and the words when memory runs out.
        limits (`Sequence[int]`, *optional*): Tokens that each row of a call may write.
        speed ([`Speed`], *optional*): Is told what is used of the fast path, and why not.
        rows_at_once (`int`, *optional*): Rows whose keys and values are held at a time; all of a call by default.
    """
    generate = model.generate
    speed = speed or Speed()

    def generate_rows(
        is_ours: bool,
        limits: Sequence[int] | None,
        kwargs: dict[str, Any],
        **of_round: int,
    ) -> Any:
        if is_ours:
            kwargs["custom_generate"] = partial(decode, limits=limits, speed=speed, **of_round)
        elif limits is not None and "input_ids" in kwargs:
            # A loop that went on longer would draw more random numbers, and later samples would be others.
            from trl_drgrpo.features.fast_path.decoding.row_limits import row_limits

            kwargs["stopping_criteria"] = row_limits(limits, kwargs["input_ids"].size(1))
        try:
            return generate(**kwargs)
        except torch.OutOfMemoryError as error:
            from trl_drgrpo.features.fast_path.decoding.too_little_memory import does_not_fit, new_tokens

            ids = kwargs.get("input_ids")
            if not isinstance(ids, torch.Tensor):
                raise
            tokens = new_tokens(model, ids, kwargs.get("generation_config"))
            raise does_not_fit(error, ids, tokens, is_ours) from error

    def decoding_shared(*args: Any, **kwargs: Any) -> Any:
        is_ours = shares
        if shares:
            reason = "generate is called with positional arguments"
            if not args:
                reason = why_not_decoded(model, kwargs)
            if reason:
                speed.off(reason, *GENERATION)
                is_ours = False
        if args:  # whose rows nobody can tell
            return generate(*args, **kwargs)
        if rows_at_once is not None:
            from trl_drgrpo.features.fast_path.decoding.rounds import in_rounds

            return in_rounds(partial(generate_rows, is_ours), limits, kwargs, rows_at_once, draws_all=is_ours)
        return generate_rows(is_ours, limits, kwargs)

    with swapped(model, generate=decoding_shared):
        yield


@contextmanager
def _inference(model: "DecodingModel") -> Iterator[None]:
    """`torch.inference_mode`: no views nor versions to keep count of. What modules keep of the forwards inside (rotary
    angles of longer rows) is made ordinary tensors, or a backward would refuse it. Quantized layers keep more."""
    mode = torch.inference_mode()
    if getattr(model, "is_quantized", False):
        mode = nullcontext()  # not `inference_mode(False)`: it switches gradients on
    try:
        with mode:
            yield
    finally:
        # Buffers, and plain attributes: models keep tensors in either.
        for module in model.modules():
            for tensors in (module._buffers, vars(module)):
                for name, value in tensors.items():
                    if isinstance(value, torch.Tensor) and value.is_inference():
                        tensors[name] = value.clone()
