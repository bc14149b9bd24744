"""The passes of a training step, run on the meta device, where tensors have shapes and no values: training, scoring,
generating. A ledger counts what is alive. Each pass returns its peaks per segment, in bytes beyond weights, buffers
and gradients of earlier micro-batches.

Segments (the forward, the head, the backward of the last layer and of the first) are there so that the peaks of a
shallow model extrapolate to a deep one: within a segment live bytes grow by the same amount per layer.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from trl_drgrpo.features.fast_path.decoding.group_cache import BLOCK, NOT_SERVED, GroupCache, group_attention_in
from trl_drgrpo.features.fast_path.sharing import mask_form
from trl_drgrpo.single_gpu.memory.memory_settings import Setup
from trl_drgrpo.single_gpu.memory.meta_layers import APART, AdaptedLinear, Ledger, fused_head
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

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.utils import ModelOutput

Cache = dict[str, Any]  # a model's cache by the name that its forward takes; empty where layers keep it
Peaks = dict[str, int]  # per segment, in bytes
LONG: dict[str, Any] = {"dtype": torch.long, "device": "meta"}


@contextmanager
def _run(skeleton: Skeleton, *inputs: Tensor | None, keeps_casts: bool = True) -> Iterator[Ledger]:
    """Count what is allocated in the block, beside the model, gradients that it has already, and the inputs."""
    skeleton.precision.keeps_casts = keeps_casts
    present = [*inputs, *skeleton.model.buffers()]
    for parameter in skeleton.model.parameters():
        present += [parameter, parameter.grad]
    ledger = Ledger()
    ledger.known(filter(torch.is_tensor, present))
    with ledger, skeleton.precision:
        yield ledger


def train(skeleton: Skeleton, setup: Setup, shape: Shape) -> Peaks:
    """Run forward and backward of one micro-batch."""
    model = skeleton.model
    layout = torch.empty(shape.layout, **LONG)
    _checkpoint(skeleton, setup.checkpoint_every if setup.checkpointing else 0, setup.offload)
    # Gradients of earlier micro-batches: `estimate.py` counts them.
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if shape.later and parameter.requires_grad else None
    hooks = []
    if setup.adapter is not None and setup.checkpointing:
        # As TRL: a checkpointed layer whose input asks for no gradient would have no backward.
        embeddings = model.get_input_embeddings()
        hooks.append(embeddings.register_forward_hook(lambda _, __, out: out.requires_grad_(True)))
    inputs = _inputs(skeleton, shape)
    with _run(skeleton, layout, *inputs) as ledger:
        ledger.mark("forward")
        hooks += _mark_backward(skeleton.layers, ledger)
        log_probs = _log_probs(skeleton, setup, *inputs)
        # The fast path brings the values of its packs into TRL's layout of rows.
        loss = _loss(log_probs[layout] if setup.exact else log_probs, setup)
        skeleton.precision.forget()  # autocast's block ends with the loss
        ledger.mark("head")
        loss.backward()
        del log_probs, loss
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    ledger.peaks.pop("start", None)  # from before the first mark
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


def _inputs(skeleton: Skeleton, shape: Shape) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return token ids, mask, and places that are scored."""
    packs = shape.packs
    width = shape.width
    ids = torch.empty(packs, width, **LONG)
    scored = torch.empty(shape.scored, **LONG)
    mask = None
    if shape.masked or skeleton.masks in ("all pairs", "padding"):
        mask = _mask(skeleton, packs, width, width)
        # On the mask, because nothing else of ours comes through transformers' layers to [`attend`].
        setattr(mask, APART, shape.apart)
    return ids, mask, scored


def _mask(skeleton: Skeleton, rows: int, queries: int, width: int) -> Tensor | None:
    """Return a mask in the form that the model takes."""
    if skeleton.masks == "none":
        return None
    if skeleton.masks == "padding":
        return torch.empty(rows, width, **LONG)
    return torch.empty(rows, 1, queries, width, dtype=torch.bool, device="meta")


def _input_bytes(config: "PreTrainedConfig", shape: Shape) -> int:
    """Return the bytes of positions, labels, masks and the like, which live as long as their forward.

    So do ids and masks in TRL's layout: as parts, joined, and once more in their original form.
    """
    mask_bytes = shape.tokens * shape.width if shape.masked else 0
    if shape.apart is not None:
        _, score_entries = shape.apart
        mask_bytes += score_entries
    form = mask_form(config)
    if not isinstance(form, str):  # else the fast path makes none
        # A model with windowed and other layers gets a mask for each.
        mask_bytes *= max(1, len(form.kinds))
        if form.additive:
            mask_bytes *= 4  # float32 in the place of booleans
    # In int64: ids and positions of the packs, places that are scored, and TRL's ids and masks three times over.
    return mask_bytes + 8 * (2 * shape.tokens + shape.scored + 6 * shape.padded)


def _log_probs(skeleton: Skeleton, setup: Setup, ids: Tensor, mask: Tensor | None, scored: Tensor) -> Tensor:
    """Score tokens in the way of this setup, and return their log-probabilities."""
    backbone = skeleton.backbone
    inputs = _taken(backbone, input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    hidden = backbone(**inputs).last_hidden_state
    if not setup.exact:
        hidden = hidden[:, :-1]
    hidden = hidden.reshape(-1, hidden.size(-1))
    # Stock TRL scores prompts, too, where its kernel does not run.
    if setup.exact or setup.device == "cuda":
        hidden = hidden[scored]
    head = skeleton.head
    compute = skeleton.precision.dtype or hidden.dtype
    return fused_head(hidden, head.weight, head.bias, compute, setup.device)


def _loss(log_probs: Tensor, setup: Setup) -> Tensor:
    """Return Dr. GRPO's loss, with the tensors that TRL's implementation makes."""
    old = log_probs.detach()
    advantages = torch.empty_like(old)
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if setup.reference:  # KL; the old values stand for those of the reference
        losses = losses + torch.exp(old - log_probs) - (old - log_probs) - 1
    return (losses * advantages).sum() / setup.completion  # the advantages stand for the mask


def _checkpoint(skeleton: Skeleton, every: int = 0, offload: bool = False) -> None:
    """Checkpoint one in `every` layers, or none. With `offload`, their inputs leave the device until backward."""
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Run again, in backward, function modes have been left, and autocast is a block of its own.
    run_again = partial(
        checkpoint,
        context_fn=lambda: (nullcontext(), skeleton.precision),
        use_reentrant=False,
        preserve_rng_state=False,
    )

    def from_host(form: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = form
        return torch.empty(shape, dtype=dtype, device="meta")

    def offloaded(*args: Any) -> object:
        # As `save_on_cpu`: a tensor that is saved is let go of, and a new one is made when backward asks for it.
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved.shape, saved.dtype), from_host):
            return run_again(*args)

    # What `activation_checkpointing_enable` sets; called by neither of its names, since one of them goes away. As
    # there, `number % every` counts from the first layer.
    layers = [module for module in skeleton.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = every > 0 and number % every == 0
        layer._gradient_checkpointing_func = offloaded if offload else run_again  # type: ignore[assignment]


Output = Tensor | tuple[Tensor, ...]


def _mark_backward(layers: nn.ModuleList, ledger: Ledger) -> list[RemovableHandle]:
    """Mark the segments of the backward: the last layer, the layers between, the first layer and the rest."""

    def mark_on_arrival(name: str, layer: nn.Module, inputs: tuple[object, ...], out: Output) -> None:
        # Backward reaches a layer with the gradient of its output.
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: ledger.mark(name))

    hooks = []
    for number, layer in enumerate(layers):
        name = "layers between"
        if number == 0:
            name = "first layer"
        elif number == len(layers) - 1:
            name = "last layer"
        hooks.append(layer.register_forward_hook(partial(mark_on_arrival, name)))
    return hooks


def _taken(model: nn.Module, **inputs: Any) -> dict[str, Any]:
    """Return the inputs that a model's forward takes; models of running states take no positions."""
    parameters = inspect.signature(model.forward).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return inputs
    return {name: value for name, value in inputs.items() if name in parameters}


def generate(skeleton: Skeleton, setup: Setup) -> Peaks:
    """Run the first step, over the prompts, and the last, over one token of every row.

    The peak `"cache"` is the size of keys, values and running states in the end.
    """
    config = skeleton.config
    runs_once = not (why_no_cache(skeleton.model) or why_no_dynamic_cache(config))
    # As the fast path: prompts held once; else prompts run once, then copied; else every row by itself.
    if runs_once and setup.exact and setup.fast_generation:
        is_chunked = bool(getattr(config, "attention_chunk_size", None))
        ways = [False]
        if not is_chunked and why_no_groups(DynamicCache(config=config)) is None:
            ways = [True, False]
        for groups in ways:
            with suppress(*NOT_SERVED):  # a cache that cannot be shared, or whose rows cannot be selected
                return _generate(skeleton, setup, once=True, groups=groups)
    return _generate(skeleton, setup, once=False, groups=False)


# Names of the cache in a model's output and in its forward: of keys and values, Mamba's, RWKV's.
_CACHES = (CACHE, *OTHER_CACHE_NAMES)


def _cache_in(output: "ModelOutput") -> Cache:
    """Return the cache in a model's output."""
    # The first: transformers 5.24 also gives its cache under older names.
    for name in _CACHES:
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
    cache, peaks = _run_prompts(skeleton, setup, prompts, groups)
    # The cache before the last step. It is made outside of a ledger, and counted when it is entered below: the steps
    # between, one token each, would take too long.
    group_cache = None
    if groups:
        mask = None
        prefilled = next(iter(cache.values()))
        group_cache = _group_cache(prefilled, rows, setup.completion, setup.completion - 1, skeleton.precision.dtype)
        del prefilled  # a group cache has taken its place
        cache = dict.fromkeys(cache, group_cache)
    else:
        written = setup.width - 1
        ids = torch.empty(rows, written, **LONG)
        with skeleton.precision:
            cache = _cache_in(_step(model, ids, _mask(skeleton, rows, written, written), {}))
        mask = _mask(skeleton, rows, 1, setup.width)
    with _run(skeleton, keeps_casts=not groups) as ledger, group_attention_in(model) if groups else nullcontext():
        ledger.mark("tokens")
        for tensor in _held(cache):
            ledger.enter(tensor)
        if group_cache is not None:
            # Counted by the ledger: the old buffer lives while the new one of the last layer is filled.
            torch.empty_like(group_cache.groups[-1].keys)
        ids = torch.empty(rows, 1, **LONG)  # alive while a token is drawn
        logits = _step(model, ids, mask, cache).logits[:, -1]
        peaks["cache"] = sum(tensor.nbytes for tensor in _held(cache))
        skeleton.precision.forget()
        ledger.mark("sampling")
        _draw(logits)
    # Ids, mask and positions of every row so far, the old and the new while one token is added.
    bookkeeping = 6 * rows * setup.width * 8
    copies = _joined_adapters(skeleton) if groups else 0
    for name in ("tokens", "sampling"):
        peaks[name] = ledger.peaks[name] + bookkeeping + copies
    return peaks


def _joined_adapters(skeleton: Skeleton) -> int:
    """Return the bytes of the copies of all adapters that decoding steps over a group cache read.

    37 MB for rank 16 on all linear layers of 1.5 billion weights under autocast, which an H100 had more on 2026-11-28
    than before adapters were joined.
    """
    copied = 0
    for layer in skeleton.model.modules():
        if not isinstance(layer, AdaptedLinear):
            continue
        dtype = skeleton.precision.dtype or layer.weight.dtype
        if not dtype.is_floating_point:  # the bytes of a quantized base
            dtype = layer.lora_a.weight.dtype
        copied += dtype.itemsize * (layer.lora_a.weight.numel() + layer.lora_b.weight.numel())
    return copied


def _run_prompts(skeleton: Skeleton, setup: Setup, prompts: int, groups: bool) -> tuple[Cache, Peaks]:
    """Run the first step, and bring its cache into the form in which all rows go on."""
    rows = setup.rows_at_once
    ids = torch.empty(prompts, setup.prompt, **LONG)
    mask = _mask(skeleton, prompts, setup.prompt, setup.prompt)
    with _run(skeleton, ids) as ledger:
        ledger.mark("prompts")
        if mask is not None:
            ledger.enter(mask)
        cache = _cache_in(_step(skeleton.model, ids, mask, {}))
        skeleton.precision.forget()
        ledger.mark("copies")
        prefilled = next(iter(cache.values()), None)
        if groups:  # the first step is run over a copy of the model's cache and over a group cache, and compared
            tested = [torch.empty_like(tensor) for tensor in _held(cache)]
            copied = _group_cache(prefilled, rows, setup.completion)
            del tested, copied
        elif prompts < rows:
            select_rows(prefilled, torch.empty(rows, **LONG))
    return cache, dict(ledger.peaks)


def _step(model: nn.Module, ids: Tensor, mask: Tensor | None, cache: Cache) -> Any:
    """Return the model's output for the next tokens of every row, over what the cache holds."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": ids, "logits_to_keep": 1, **cache}
    return model(**_taken(model, **inputs, use_cache=True))


def _draw(logits: Tensor) -> None:
    """Make the tensors that drawing a token makes of `(rows, vocabulary)` logits: six are alive at once where the
    logits are float32, too."""
    scores = logits.to(copy=True, dtype=torch.float32)
    probabilities = functional.softmax(scores, dim=-1)
    drawn = torch.empty_like(probabilities)
    live = drawn[torch.empty(len(logits), **LONG)]
    torch.div(probabilities, live)


def _group_cache(
    prefilled: Any, rows: int, most: int, written: int = 0, lowered: torch.dtype | None = None
) -> GroupCache:
    """Make a cache that holds each prompt of `prefilled` once, and so many tokens of each row's completion.

    `lowered`: dtype of autocast, which the first step after the prompts casts keys and values to.
    """
    prompts = _held(prefilled)[0].size(0)
    prompt_of_row = [row * prompts // rows for row in range(rows)]  # 0, 0, 0, 1, 1, 1 for 2 prompts of 3 rows
    cache = GroupCache(prefilled, prompt_of_row, None, most=most)
    if not written:
        return cache
    for layer in cache.groups:
        positions = written + 1  # with room for the next one
        if layer.window is not None:
            # Tokens behind it are dropped by the block, see `group_cache.py`.
            positions = min(positions, layer.window + max(BLOCK, layer.window // 2))
        groups, rows_in_group = layer.grid.shape
        shape = (groups, layer.heads, rows_in_group, positions, layer.prompt_values.size(2))
        if lowered is not None:
            layer.prompt_keys = layer.prompt_keys.to(lowered)
            layer.prompt_values = layer.prompt_values.to(lowered)
        layer.keys = layer.prompt_keys.new_empty(shape)
        layer.values = layer.prompt_values.new_empty(shape)
        layer.tokens = written
        layer.dropped = written + 1 - positions
    return cache


def _held(cache: object) -> list[Tensor]:
    """Return the tensors of a cache: keys and values, states of convolutions and recurrences, keys of an indexer."""
    if isinstance(cache, Tensor):
        return [cache]
    # A cache has layers, and their attributes are tensors, or dicts and lists of tensors.
    members: Iterable[object]
    if isinstance(cache, dict):
        members = cache.values()
    elif isinstance(cache, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        members = vars(cache).values()
    elif isinstance(cache, list | tuple):
        members = cache
    else:
        members = getattr(cache, "layers", ())
    tensors = []
    for member in members:
        tensors += _held(member)
    return tensors
