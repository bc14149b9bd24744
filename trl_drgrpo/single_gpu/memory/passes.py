"""The passes of a training step, run on a skeleton: training, scoring, generating. Each returns its peaks per segment,
in bytes beyond weights, buffers and gradients.

Segments (the forward, the head, the backward of the last layer and of the first) make peaks at one depth tell those at
another: within a segment live bytes grow by the same amount per layer.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trl_drgrpo.features.fast_path.decoding.group_cache import BLOCK, NOT_SERVED, GroupCache, group_attention_in
from trl_drgrpo.features.fast_path.sharing import mask_form
from trl_drgrpo.single_gpu.memory.memory_settings import Setup
from trl_drgrpo.single_gpu.memory.meta_layers import APART, Ledger, fused_head
from trl_drgrpo.single_gpu.memory.meta_model import Skeleton
from trl_drgrpo.single_gpu.memory.micro_batch_shapes import Shape
from trl_drgrpo.upstream.kv_cache import (
    CACHE,
    OTHER_CACHE_NAMES,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    select_rows,
    why_no_cache,
    why_no_dynamic_cache,
    why_no_groups,
)

Peaks = dict[str, int]  # per segment, in bytes
LONG: Any = {"dtype": torch.long, "device": "meta"}


@contextmanager
def _run(skeleton: Skeleton, *inputs: torch.Tensor | None, keeps_casts: bool = True) -> Iterator[Ledger]:
    skeleton.precision.keeps_casts = keeps_casts
    parameters = list(skeleton.model.parameters())
    there = [*parameters, *skeleton.model.buffers(), *(p.grad for p in parameters), *inputs]
    ledger = Ledger()
    ledger.known(tensor for tensor in there if tensor is not None)
    with ledger, skeleton.precision:
        yield ledger


def train(skeleton: Skeleton, setup: Setup, shape: Shape) -> Peaks:
    """Run forward and backward of one micro-batch."""
    model = skeleton.model
    layout = torch.empty(shape.layout, **LONG)
    _checkpoint(skeleton, setup.checkpoint_every if setup.checkpointing else 0, setup.offload)
    for parameter in model.parameters():  # gradients of earlier micro-batches: `estimate.py` counts them
        parameter.grad = torch.empty_like(parameter) if shape.later and parameter.requires_grad else None
    hooks = []
    if setup.adapter is not None and setup.checkpointing:  # TRL lets the embeddings' output ask for a gradient then
        embeddings = model.get_input_embeddings()
        hooks = [embeddings.register_forward_hook(lambda _, __, out: out.requires_grad_(True))]
    inputs = _inputs(skeleton, shape)
    with _run(skeleton, layout, *inputs) as ledger:
        ledger.mark("forward")
        hooks += _mark_backward(skeleton.layers, ledger)
        log_probs = _log_probs(skeleton, setup, *inputs)
        loss = _loss(log_probs[layout] if setup.exact else log_probs, setup)
        skeleton.precision.forget()
        ledger.mark("head")
        loss.backward()
        del log_probs, loss
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    ledger.peaks.pop("start", None)
    input_bytes = _input_bytes(skeleton.model.base_model.config, shape)
    return {name: peak + input_bytes for name, peak in ledger.peaks.items()}


@torch.no_grad()
def score(skeleton: Skeleton, setup: Setup, shape: Shape) -> Peaks:
    """Run the forward of one micro-batch without gradient."""
    _checkpoint(skeleton)
    inputs = _inputs(skeleton, shape)
    with _run(skeleton, *inputs) as ledger:
        ledger.mark("score")
        _log_probs(skeleton, setup, *inputs)
    return {"score": ledger.peaks["score"] + _input_bytes(skeleton.model.base_model.config, shape)}


def _inputs(skeleton: Skeleton, shape: Shape) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return token ids, mask, and places that are scored."""
    packs = shape.packs
    width = shape.width
    mask = None
    if shape.masked or skeleton.masks in ("all pairs", "padding"):
        mask = _mask(skeleton, packs, width, width)
        setattr(mask, APART, shape.apart)
    return torch.empty(packs, width, **LONG), mask, torch.empty(shape.scored, **LONG)


def _mask(skeleton: Skeleton, rows: int, queries: int, width: int) -> torch.Tensor | None:
    """Return a mask in the form that the model takes."""
    if skeleton.masks == "none":
        return None
    if skeleton.masks == "padding":
        return torch.empty(rows, width, **LONG)
    return torch.empty(rows, 1, queries, width, dtype=torch.bool, device="meta")


def _input_bytes(config: Any, shape: Shape) -> int:
    """Return the bytes of positions, labels, masks and the like, which live as long as their forward.

    So do ids and masks in TRL's layout: as parts, joined, and once more in their original form.
    """
    masks = shape.tokens * shape.width * shape.masked + (shape.apart[1] if shape.apart else 0)
    form = mask_form(config)
    if not isinstance(form, str):
        # A model with windowed and other layers gets a mask for each. Masks that are added are float32.
        masks *= max(1, len(form.kinds)) * (4 if form.additive else 1)
    return masks + 8 * (2 * shape.tokens + shape.scored + 6 * shape.padded)


def _log_probs(skeleton: Skeleton, setup: Setup, ids: torch.Tensor, mask: Any, scored: torch.Tensor) -> torch.Tensor:
    """Score tokens in the way of this setup, and return their log-probabilities."""
    backbone = skeleton.backbone
    inputs = _taken(backbone, input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    hidden = backbone(**inputs).last_hidden_state
    if not setup.exact:
        hidden = hidden[:, :-1]
    hidden = hidden.reshape(-1, hidden.size(-1))
    if setup.exact or setup.device == "cuda":
        hidden = hidden[scored]
    head: Any = skeleton.head
    return fused_head(hidden, head.weight, head.bias, skeleton.precision.dtype or hidden.dtype, setup.device)


def _loss(log_probs: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Return Dr. GRPO's loss, with the tensors that TRL's implementation makes."""
    old = log_probs.detach()
    advantages = torch.empty_like(old)
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if setup.reference:
        losses = losses + torch.exp(old - log_probs) - (old - log_probs) - 1
    return (losses * advantages).sum() / setup.completion


def _checkpoint(skeleton: Skeleton, every: int = 0, offload: bool = False) -> None:
    """Checkpoint one in `every` layers, or none. With `offload`, their inputs leave the device until backward."""
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Run again, in backward, function modes have been left, and autocast is a block of its own.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    run_again: Any = partial(checkpoint, context_fn=lambda: (nullcontext(), skeleton.precision), **options)

    def offloaded(*args: Any) -> Any:
        # As `save_on_cpu`: a tensor that is saved is let go of, and a new one is made when backward asks for it.
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved.shape, saved.dtype), _from_host):
            return run_again(*args)

    # What `activation_checkpointing_enable` sets; called by neither of its names, since one of them goes away.
    layers = [module for module in skeleton.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = every > 0 and number % every == 0
        layer._gradient_checkpointing_func = offloaded if offload else run_again  # type: ignore[assignment]


def _from_host(form: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
    shape, dtype = form
    return torch.empty(shape, dtype=dtype, device="meta")


def _mark_backward(layers: nn.ModuleList, ledger: Ledger) -> list[Any]:
    """Mark the segments of the backward: the last layer, the layers between, the first layer and the rest."""

    def marks(name: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: ledger.mark(name))

        return hook

    names = ["first layer", *["layers between"] * (len(layers) - 2), "last layer"]
    return [layer.register_forward_hook(marks(name)) for layer, name in zip(layers, names, strict=False)]


def _taken(model: Any, **inputs: Any) -> dict[str, Any]:
    """Return the inputs that a model's forward takes; models of running states take no positions."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}


def generate(skeleton: Skeleton, setup: Setup) -> Peaks:
    """Run the first step, over the prompts, and the last, over one token of every row.

    The peak `"cache"` is the size of keys, values and running states in the end.
    """
    config = skeleton.config
    runs_once = not (why_no_cache(skeleton.model) or why_no_dynamic_cache(config))
    is_fast = setup.exact and setup.fast_generation and runs_once
    is_chunked = bool(getattr(config, "attention_chunk_size", None))
    has_groups = runs_once and not is_chunked and why_no_groups(DynamicCache(config=config)) is None
    # Prompts held once; prompts run once, then copied; every row by itself.
    for once, groups in ((True, True), (True, False)):
        if is_fast and (has_groups or not groups):
            try:
                return _generate(skeleton, setup, once, groups)
            except NOT_SERVED:  # a cache that cannot be shared, or whose rows cannot be selected
                pass
    return _generate(skeleton, setup, once=False, groups=False)


# Names of the cache in a model's output and in its forward: of keys and values, Mamba's, RWKV's.
_CACHES = (CACHE, *OTHER_CACHE_NAMES)


def _cache_in(output: Any) -> dict[str, Any]:
    """Return an output's cache by the name that a forward takes; empty for a model that keeps it in its layers."""
    for name in _CACHES:  # the first: transformers 5.24 also gives its cache under older names
        cache = getattr(output, name, None)
        if cache is not None:
            return {name: cache}
    return {}


@torch.no_grad()
def _generate(skeleton: Skeleton, setup: Setup, once: bool, groups: bool) -> Peaks:
    model = skeleton.model
    rows = setup.rows_at_once
    prompts = max(1, rows // setup.group) if once else rows
    _checkpoint(skeleton)

    def step(ids: torch.Tensor, mask: torch.Tensor | None, cache: dict[str, Any]) -> Any:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": ids, "logits_to_keep": 1, **cache}
        return model(**_taken(model, **inputs, use_cache=True))

    ids = torch.empty(prompts, setup.prompt, **LONG)
    mask = _mask(skeleton, prompts, setup.prompt, setup.prompt)
    with _run(skeleton, ids) as ledger:
        ledger.mark("prompts")
        if mask is not None:
            ledger.enter(mask)
        cache = _cache_in(step(ids, mask, {}))
        skeleton.precision.forget()
        ledger.mark("copies")
        prefilled: Any = next(iter(cache.values()), None)
        if groups:  # by the first step, over a cache of each kind
            tested = [torch.empty_like(tensor) for tensor in _held(cache)]
            copied = _group_cache(prefilled, rows, setup.completion)
            del tested, copied
        elif prompts < rows:
            select_rows(prefilled, torch.empty(rows, **LONG))
    peaks = {name: ledger.peaks[name] for name in ("prompts", "copies")}
    group_cache: Any = None
    if groups:
        mask = None
        group_cache = _group_cache(prefilled, rows, setup.completion, setup.completion - 1, skeleton.precision.dtype)
        cache = dict.fromkeys(cache, group_cache)
    else:
        mask = _mask(skeleton, rows, 1, setup.width)
        ids = torch.empty(rows, setup.width - 1, **LONG)
        with skeleton.precision:
            cache = _cache_in(step(ids, _mask(skeleton, rows, setup.width - 1, setup.width - 1), {}))
    del prefilled
    with _run(skeleton, keeps_casts=not groups) as ledger, group_attention_in(model) if groups else nullcontext():
        ledger.mark("tokens")
        for tensor in _held(cache):
            ledger.enter(tensor)
        if groups:
            torch.empty_like(group_cache.groups[-1].keys)  # the old one, while the last layer grows
        ids = torch.empty(rows, 1, **LONG)
        logits = step(ids, mask, cache).logits[:, -1]
        peaks["cache"] = sum(tensor.nbytes for tensor in _held(cache))
        skeleton.precision.forget()
        ledger.mark("sampling")
        scores = logits.to(copy=True, dtype=torch.float32)
        probabilities = functional.softmax(scores, dim=-1)
        drawn = torch.empty_like(probabilities)
        live = drawn[torch.empty(rows, **LONG)]
        chosen = probabilities / live
        del logits, scores, probabilities, drawn, live, chosen, cache, group_cache
    # Ids, mask and positions of every row so far, the old and the new while one token is added.
    return peaks | {name: ledger.peaks[name] + 6 * rows * setup.width * 8 for name in ("tokens", "sampling")}


def _group_cache(prefilled: Any, rows: int, most: int, written: int = 0, lowered: Any = None) -> GroupCache:
    """Make a cache that holds each prompt of `prefilled` once, and so many tokens of each row's completion.

    `lowered`: dtype of autocast, which the first step after the prompts casts keys and values to.
    """
    prompts = _held(prefilled)[0].size(0)
    cache: Any = GroupCache(prefilled, [row * prompts // rows for row in range(rows)], None, most=most)
    for layer in cache.groups if written else ():
        window = written + 1 if layer.window is None else layer.window + max(BLOCK, layer.window // 2)
        positions = min(written + 1, window)  # with room for the next one
        shape = layer.grid.shape[0], layer.heads, layer.grid.shape[1], positions, layer.prompt_values.size(2)
        if lowered is not None:
            layer.prompt_keys = layer.prompt_keys.to(lowered)
            layer.prompt_values = layer.prompt_values.to(lowered)
        layer.keys = layer.prompt_keys.new_empty(shape)
        layer.values = layer.prompt_values.new_empty(shape)
        layer.tokens = written
        layer.dropped = written + 1 - positions
    return cache


def _held(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a cache: keys and values, states of convolutions and recurrences, keys of an indexer."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    if isinstance(cache, dict):
        cache = list(cache.values())
    elif hasattr(cache, "layers"):
        cache = cache.layers
    elif isinstance(cache, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        cache = list(vars(cache).values())
    if not isinstance(cache, (list, tuple)):
        return []
    return list(chain(*map(_held, cache)))
