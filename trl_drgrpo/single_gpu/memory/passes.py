"""One pass of a training step, run on a skeleton: training, scoring, generating. Each gives peaks of its segments."""

from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trl_drgrpo.features.fast_path.decoding.group_attention import group_attention_in
from trl_drgrpo.single_gpu.memory.caches import group_cache, has_group_cache, plain_cache
from trl_drgrpo.single_gpu.memory.ledger import Ledger
from trl_drgrpo.single_gpu.memory.setup import Setup
from trl_drgrpo.single_gpu.memory.shapes import Shape
from trl_drgrpo.single_gpu.memory.skeleton import Skeleton
from trl_drgrpo.single_gpu.memory.stand_ins import APART, FusedHead

Peaks = dict[str, int]  # per segment, in bytes


@contextmanager
def _run(skeleton: Skeleton, *inputs: torch.Tensor | None) -> Any:
    ledger = Ledger()
    ledger.known([*skeleton.model.parameters(), *skeleton.model.buffers()])
    ledger.known([each for each in inputs if each is not None])
    ledger.known([p.grad for p in skeleton.model.parameters() if p.grad is not None])
    with ledger, skeleton.precision:
        yield ledger
    skeleton.precision.forget()


def _hidden(skeleton: Skeleton, setup: Setup, inputs: Any) -> torch.Tensor:
    """(n, hidden): what goes into the head, the way the micro-batches of this setup do."""
    rows, width = inputs["ids"].shape
    out = skeleton.model.base_model(
        input_ids=inputs["ids"],
        attention_mask=inputs["mask"],
        position_ids=inputs["positions"],
        use_cache=False,
    ).last_hidden_state
    if setup.exact:
        return out.flatten(0, 1)[inputs["scored"]]
    if setup.device == "cuda":
        return out[:, :-1].reshape(-1, out.size(-1))[inputs["scored"]]
    return out[:, :-1].reshape(rows * (width - 1), -1)


def _inputs(shape: Shape) -> dict[str, Any]:
    packs, width = shape.packs, shape.width
    long = {"dtype": torch.long, "device": "meta"}
    mask = torch.empty(packs, 1, width, width, dtype=torch.bool, device="meta") if shape.masked else None
    if mask is not None:
        setattr(mask, APART, shape.apart)
    return {
        "ids": torch.empty(packs, width, **long),
        "positions": torch.empty(packs, width, **long),
        "mask": mask,
        "blocks": torch.empty(shape.apart[1], dtype=torch.bool, device="meta") if shape.apart else None,
        "scored": torch.empty(shape.scored, **long),
        "layout": torch.empty(shape.layout, **long),
        "padded": torch.empty(6, shape.padded, **long),
    }


def _input_bytes(inputs: dict[str, Any]) -> int:
    """Positions, labels, mask and the like live as long as their forward, as do ids and masks in TRL's
    layout: as parts, joined, and once more as they came."""
    return sum(each.nbytes for name, each in inputs.items() if each is not None and name != "layout")


def _log_probs(skeleton: Skeleton, setup: Setup, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    head: Any = skeleton.head
    compute = skeleton.precision.dtype or hidden.dtype
    return FusedHead.apply(hidden, head.weight, head.bias, compute, setup.device)  # type: ignore[return-value]


def train(skeleton: Skeleton, setup: Setup, shape: Shape) -> Peaks:
    """Forward and backward of one micro-batch."""
    model = skeleton.model
    _checkpoint(skeleton, setup.checkpointing)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:  # those of earlier micro-batches; they are counted where the phase is put together
        parameter.grad = torch.empty_like(parameter) if shape.later else None
    inputs = _inputs(shape)
    hooks = _follow_embeddings(model, setup)
    layers = skeleton.layers
    with _run(skeleton, *inputs.values()) as ledger:
        ledger.mark("forward")
        hooks += _mark_backward(layers, ledger)
        log_probs, entropy = _log_probs(skeleton, setup, _hidden(skeleton, setup, inputs))
        loss = _loss(log_probs[inputs["layout"]] if setup.exact else log_probs, setup)
        skeleton.precision.forget()
        ledger.mark("head")
        loss.backward()
        del log_probs, entropy, loss
    for hook in hooks:
        hook.remove()
    for parameter in trained:
        parameter.grad = None
    return {name: peak + _input_bytes(inputs) for name, peak in ledger.peaks.items() if name != "start"}


def _loss(log_probs: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Dr. GRPO's token losses, as TRL writes them."""
    old = log_probs.detach()
    advantages = torch.empty_like(old)
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if setup.reference:
        losses = losses + torch.exp(old - log_probs) - (old - log_probs) - 1
    return (losses * advantages).sum() / setup.completion


def _checkpoint(skeleton: Skeleton, on: bool) -> None:
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    def checkpointed(function: Any, *args: Any) -> Any:
        calls = []

        def run(*inputs: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                return function(*inputs)
            # Run again, in backward: function modes have been left there, and autocast is a block of its own.
            try:
                with skeleton.precision:
                    return function(*inputs)
            finally:
                skeleton.precision.forget()

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    # What `activation_checkpointing_enable` sets; called by neither of its names, since one of them goes away.
    for module in skeleton.model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = on
            module._gradient_checkpointing_func = checkpointed  # type: ignore[assignment]


def _follow_embeddings(model: Any, setup: Setup) -> list[Any]:
    """With adapters and checkpointing TRL lets the embeddings' output ask for a gradient."""
    if setup.adapter is None or not setup.checkpointing:
        return []
    return [model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_(True))]


def _mark_backward(layers: nn.ModuleList, ledger: Ledger) -> list[Any]:
    """Segments of the backward: the last layer's, those between, the first one's and whatever follows."""
    last = len(layers) - 1
    names = {last: "last layer", 0: "first layer"}

    def follow(index: int) -> Any:
        def mark(grad: torch.Tensor) -> None:
            ledger.mark(names.get(index, "layers between"))

        def hook(_: Any, __: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:
                hidden.register_hook(mark)

        return hook

    return [layer.register_forward_hook(follow(i)) for i, layer in enumerate(layers)]


@torch.no_grad()
def score(skeleton: Skeleton, setup: Setup, shape: Shape, adapters: bool) -> Peaks:
    """Forward of one micro-batch without gradient."""
    _checkpoint(skeleton, False)
    inputs = _inputs(shape)
    skeleton.adapters(enabled=adapters)
    with _run(skeleton, *inputs.values()) as ledger:
        ledger.mark("score")
        _log_probs(skeleton, setup, _hidden(skeleton, setup, inputs))
    skeleton.adapters(enabled=True)
    return {"score": ledger.peaks["score"] + _input_bytes(inputs)}


def cache_bytes(skeleton: Skeleton, setup: Setup) -> Peaks:
    """Keys and values of a whole generation batch."""
    if not has_group_cache(skeleton, setup):
        cache = plain_cache(skeleton, setup, setup.generated_rows, setup.width)
        return {"cache": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}
    cache = group_cache(plain_cache(skeleton, setup, _prompts(setup), setup.prompt), setup, setup.completion - 1)
    held = ("prompt_keys", "prompt_values", "keys", "values")
    return {"cache": sum(getattr(layer, name).nbytes for layer in cache.layers for name in held)}


def _prompts(setup: Setup) -> int:
    """Different prompts of a generation batch."""
    return max(1, setup.generated_rows // setup.group)


@torch.no_grad()
def generate(skeleton: Skeleton, setup: Setup) -> Peaks:
    """The first step, over the prompts, and the last, over one token of every row."""
    from transformers import DynamicCache

    model, rows = skeleton.model, setup.generated_rows
    _checkpoint(skeleton, False)
    shared = setup.exact and setup.fast_generation
    prompts = _prompts(setup) if shared else rows
    groups = has_group_cache(skeleton, setup)
    long = {"dtype": torch.long, "device": "meta"}
    peaks = {}
    ids = torch.empty(prompts, setup.prompt, **long)
    mask = torch.empty(prompts, 1, setup.prompt, setup.prompt, dtype=torch.bool, device="meta")
    positions = torch.empty_like(ids)
    with _run(skeleton, ids, positions) as ledger:
        ledger.mark("prompts")
        ledger._enter(mask)
        cache: Any = DynamicCache(config=skeleton.config)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        skeleton.precision.forget()
        ledger.mark("copies")
        del out
        copied = None
        if groups:
            tested = [torch.empty_like(each) for layer in cache.layers for each in (layer.keys, layer.values)]
            copied = group_cache(cache, setup), tested  # by the first step, over a cache of each kind
        elif prompts < rows:
            cache.batch_select_indices(torch.empty(rows, **long))
        peaks |= {name: ledger.peaks[name] for name in ("prompts", "copies")}
        del cache, copied
    with _run(skeleton) as ledger, group_attention_in(model) if groups else nullcontext():
        ledger.mark("tokens")
        ids, positions = torch.empty(rows, 1, **long), torch.empty(rows, 1, **long)
        mask = None if groups else torch.empty(rows, 1, 1, setup.width, dtype=torch.bool, device="meta")
        cache = plain_cache(skeleton, setup, prompts if groups else rows, setup.prompt if groups else setup.width - 1)
        if groups:
            cache = group_cache(cache, setup, setup.completion - 1)
            torch.empty_like(cache.layers[-1].keys)  # the old one, while the last layer grows
        ledger._note()
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[:, -1]
        skeleton.precision.forget()
        ledger.mark("sampling")
        scores = logits.to(copy=True, dtype=torch.float32)
        probabilities = functional.softmax(scores, dim=-1)
        drawn = torch.empty_like(probabilities)
        live = drawn[torch.empty(rows, **long)]
        chosen = probabilities / live
        del logits, scores, probabilities, drawn, live, chosen, cache
    # Ids, mask and positions of every row so far, the old and the new while one token is added.
    return peaks | {name: ledger.peaks[name] + 6 * rows * setup.width * 8 for name in ("tokens", "sampling")}
