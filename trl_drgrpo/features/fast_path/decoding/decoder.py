"""Replaces `model.generate` in a block: this package's loop where possible, else transformers'."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from trl_drgrpo.features.fast_path.decoding.calls import can_decode
from trl_drgrpo.features.fast_path.decoding.forwards import Forwards
from trl_drgrpo.features.fast_path.decoding.loop import sample
from trl_drgrpo.features.fast_path.decoding.out_of_memory import does_not_fit
from trl_drgrpo.features.fast_path.decoding.prefixes import Prefixes
from trl_drgrpo.upstream.swapping import swapped


@contextmanager
def shared_prefill(
    model: Any, shares: bool = True, limits: Sequence[int] | None = None, kept: Prefixes | None = None
) -> Iterator[None]:
    """Inside the block, `model.generate` runs each prompt once wherever it can. The model is left as it was.

    Args:
        model ([`~transformers.PreTrainedModel`] or its PEFT wrapper): The policy.
        shares (`bool`): `False` leaves all to transformers, but for the words when memory runs out.
        limits (`Sequence[int]`, *optional*): Tokens that each row of a call may write. transformers ignores them.
        kept ([`Prefixes`], *optional*): Keys and values of earlier calls, and of these for later ones.
    """
    generate = model.generate

    def decoding_shared(*args: Any, **kwargs: Any) -> Any:
        is_ours = shares and not args and can_decode(model, kwargs)
        if is_ours:
            kwargs["custom_generate"] = partial(decode, limits=limits, kept=kept)
        try:
            return generate(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not isinstance(ids := kwargs.get("input_ids"), torch.Tensor):
                raise
            raise does_not_fit(
                error, ids, _new_tokens(model, ids, kwargs.get("generation_config")), is_ours
            ) from error

    with swapped(model, generate=decoding_shared):
        yield


def _new_tokens(model: Any, input_ids: torch.Tensor, config: Any) -> int:
    """Tokens that a completion may have at most."""
    config = config or model.generation_config
    return config.max_new_tokens or max(0, (config.max_length or 0) - input_ids.size(1))


@torch.no_grad()
def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    limits: Sequence[int] | None = None,
    kept: Prefixes | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """The decoding loop, in the form that `generate(custom_generate=...)` calls. See [`sample`]. `synced_gpus` and
    `streamer` are part of the call, not supported, and not asked for by a trainer."""
    most = generation_config.max_length - input_ids.size(1)
    with Forwards(model, input_ids, model_kwargs, most, kept) as forwards, _inference(model):
        tokens = sample(forwards, input_ids, logits_processor, stopping_criteria, generation_config, limits)
    return tokens.clone()  # an ordinary tensor


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    """`torch.inference_mode`: no views nor versions to keep count of. What modules keep of the forwards inside (rotary
    angles of longer rows) is made ordinary tensors, or a backward would refuse it. Quantized layers keep more."""
    try:
        # Not `inference_mode(False)`: it switches gradients on.
        with nullcontext() if getattr(model, "is_quantized", False) else torch.inference_mode():
            yield
    finally:
        for module in model.modules():
            for held in (module._buffers, vars(module)):
                for name, value in held.items():
                    if isinstance(value, torch.Tensor) and value.is_inference():
                        held[name] = value.clone()
