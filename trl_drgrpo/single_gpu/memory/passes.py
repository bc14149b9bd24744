"""The passes of a training step, run on a skeleton: training, scoring, generating; and their peaks at the full depth.

A skeleton runs with two and with three layers. In each segment of a phase (the forward, the head, the backward of the
last layer and of the first) live bytes grow by the same amount per layer, so two depths give every other one exactly;
a peak over segments is the largest of straight lines. A model whose layers differ is run at its full depth instead.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trl_drgrpo.features.fast_path.decoding.group_cache import BLOCK, NOT_SERVED, GroupCache, group_attention_in
from trl_drgrpo.single_gpu.memory.memory_settings import Setup
from trl_drgrpo.single_gpu.memory.meta_layers import APART, FusedHead, Ledger
from trl_drgrpo.single_gpu.memory.meta_model import Skeleton, build
from trl_drgrpo.single_gpu.memory.micro_batch_shapes import Shape, scored_shapes, trained_shapes


@torch.no_grad()
def filled_cache(skeleton: Skeleton, rows: int, length: int) -> Any:
    """A cache of transformers that holds the keys and values of `length` tokens of so many rows."""
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    _checkpoint(skeleton, False)
    with skeleton.precision:
        return skeleton.model(input_ids=ids, position_ids=ids, use_cache=True, logits_to_keep=1).past_key_values


def group_cache(prefilled: Any, rows: int, most: int, written: int = 0, values_in: Any = None) -> GroupCache:
    """A cache that holds each prompt of `prefilled` once, and so many tokens of each of the rows' completions, whose
    values come in a dtype of their own under autocast."""
    prompts = prefilled.layers[0].keys.size(0)
    cache: Any = GroupCache(prefilled, [row * prompts // rows for row in range(rows)], None, most=most)
    for layer in cache.layers if written else ():
        window = written + 1 if layer.window is None else layer.window + max(BLOCK, layer.window // 2)
        held = min(written + 1, window)  # with room for the next one
        shape = layer.grid.shape[0], layer.heads, layer.grid.shape[1], held, layer.prompt_values.size(2)
        layer.keys = layer.prompt_keys.new_empty(shape)
        layer.values = layer.prompt_values.new_empty(shape, dtype=values_in or layer.prompt_values.dtype)
        layer.tokens, layer.dropped = written, written + 1 - held
    return cache


@torch.no_grad()
def has_group_cache(skeleton: Skeleton, setup: Setup) -> bool:
    """Whether the model takes a cache in which a prompt is held once: one step over it is tried."""
    if not (setup.exact and setup.fast_generation) or getattr(skeleton.config, "attention_chunk_size", None):
        return False
    ids = torch.empty(1, 1, dtype=torch.long, device="meta")
    try:
        cache = group_cache(filled_cache(skeleton, 1, 1), 1, 1)
        with skeleton.precision, group_attention_in(skeleton.model):
            skeleton.model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
    except NOT_SERVED:
        return False
    return True


Peaks = dict[str, int]  # per segment, in bytes


@contextmanager
def _run(skeleton: Skeleton, *inputs: torch.Tensor | None) -> Any:
    ledger = Ledger()
    ledger.known([*skeleton.model.parameters(), *skeleton.model.buffers()])
    ledger.known([each for each in inputs if each is not None])
    ledger.known([p.grad for p in skeleton.model.parameters() if p.grad is not None])
    with ledger, skeleton.precision:
        yield ledger


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
        "scored": torch.empty(shape.scored, **long),
        "layout": torch.empty(shape.layout, **long),
    }


def _input_bytes(shape: Shape) -> int:
    """Positions, labels, mask and the like live as long as their forward, as do ids and masks in TRL's layout: as
    parts, joined, and once more as they came."""
    tokens = shape.packs * shape.width
    masks = tokens * shape.width * shape.masked + (shape.apart[1] if shape.apart else 0)
    return masks + 8 * (2 * tokens + shape.scored + 6 * shape.padded)


def _log_probs(skeleton: Skeleton, setup: Setup, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    head: Any = skeleton.head
    compute = skeleton.precision.dtype or hidden.dtype
    return FusedHead.apply(hidden, head.weight, head.bias, compute, setup.device)  # type: ignore[return-value]


def train(skeleton: Skeleton, setup: Setup, shape: Shape) -> Peaks:
    """Forward and backward of one micro-batch."""
    model = skeleton.model
    _checkpoint(skeleton, setup.checkpointing)
    for parameter in model.parameters():  # those of earlier micro-batches are counted where phases are put together
        parameter.grad = torch.empty_like(parameter) if shape.later and parameter.requires_grad else None
    inputs = _inputs(shape)
    hooks = _follow_embeddings(model, setup)
    with _run(skeleton, *inputs.values()) as ledger:
        ledger.mark("forward")
        hooks += _mark_backward(skeleton.layers, ledger)
        log_probs, entropy = _log_probs(skeleton, setup, _hidden(skeleton, setup, inputs))
        loss = _loss(log_probs[inputs["layout"]] if setup.exact else log_probs, setup)
        skeleton.precision.forget()
        ledger.mark("head")
        loss.backward()
        del log_probs, entropy, loss
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return {name: peak + _input_bytes(shape) for name, peak in ledger.peaks.items() if name != "start"}


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

    # Run again, in backward, function modes have been left, and autocast is a block of its own.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    checkpointed = partial(checkpoint, context_fn=lambda: (nullcontext(), skeleton.precision), **options)
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
    return {"score": ledger.peaks["score"] + _input_bytes(shape)}


@torch.no_grad()
def generate(skeleton: Skeleton, setup: Setup) -> Peaks:
    """The first step, over the prompts, and the last, over one token of every row; and, as `"cache"`, what keys and
    values take in the end."""
    model, rows = skeleton.model, setup.generated_rows
    prompts = max(1, rows // setup.group) if setup.exact and setup.fast_generation else rows
    groups = has_group_cache(skeleton, setup)
    _checkpoint(skeleton, False)
    long = {"dtype": torch.long, "device": "meta"}
    ids = torch.empty(prompts, setup.prompt, **long)
    mask = torch.empty(prompts, 1, setup.prompt, setup.prompt, dtype=torch.bool, device="meta")
    with _run(skeleton, ids) as ledger:
        ledger.mark("prompts")
        ledger._enter(mask)
        out = model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        skeleton.precision.forget()
        ledger.mark("copies")
        del out
        copied = None
        if groups:
            tested = [torch.empty_like(each) for layer in cache.layers for each in (layer.keys, layer.values)]
            copied = group_cache(cache, rows, setup.completion), tested  # by the first step, over a cache of each kind
        elif prompts < rows:
            cache.batch_select_indices(torch.empty(rows, **long))
        del cache, copied
    peaks = {name: ledger.peaks[name] for name in ("prompts", "copies")}
    if groups:
        mask, prefilled = None, filled_cache(skeleton, prompts, setup.prompt)
        cache = group_cache(prefilled, rows, setup.completion, setup.completion - 1, skeleton.precision.dtype)
    else:
        mask = torch.empty(rows, 1, 1, setup.width, dtype=torch.bool, device="meta")
        cache = filled_cache(skeleton, rows, setup.width - 1)
    skeleton.precision.keeps_casts = not groups
    with _run(skeleton) as ledger, group_attention_in(model) if groups else nullcontext():
        ledger.mark("tokens")
        for each in _held(cache):
            ledger._enter(each)
        if groups:
            torch.empty_like(cache.layers[-1].keys)  # the old one, while the last layer grows
        ids = torch.empty(rows, 1, **long)
        out = model(input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]
        del out
        peaks["cache"] = sum(each.nbytes for each in _held(cache))
        skeleton.precision.forget()
        ledger.mark("sampling")
        scores = logits.to(copy=True, dtype=torch.float32)
        probabilities = functional.softmax(scores, dim=-1)
        drawn = torch.empty_like(probabilities)
        live = drawn[torch.empty(rows, **long)]
        chosen = probabilities / live
        del logits, scores, probabilities, drawn, live, chosen, cache
    skeleton.precision.keeps_casts = True
    # Ids, mask and positions of every row so far, the old and the new while one token is added.
    return peaks | {name: ledger.peaks[name] + 6 * rows * setup.width * 8 for name in ("tokens", "sampling")}


def _held(cache: Any) -> list[torch.Tensor]:
    names = ("prompt_keys", "prompt_values", "keys", "values")
    held = (getattr(layer, name, None) for layer in cache.layers for name in names)
    return [each for each in held if each is not None]


class Passes:
    """Peaks of a model's passes, in bytes above what is there all the time.

    Args:
        config: Of the text model.
        setup ([`Setup`]): The run.
    """

    def __init__(self, config: Any, setup: Setup):
        self.config = config
        self.full = build(config, setup)
        self._shallow: dict[int, Skeleton] = {}
        self._known: dict[tuple[str, Setup, Shape | None], Peaks] = {}
        self._setup = setup
        layers = self.full.layers
        kinds = {tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()) for layer in layers}
        kinds_of_attention = set(getattr(config, "layer_types", None) or ())
        self.is_uniform = len(kinds) == 1 and len(kinds_of_attention) <= 1

    def train(self, setup: Setup, gradients: int = 0, roughly: bool = False) -> tuple[int, int]:
        """
        Forward, backward and, in a step's first micro-batch, the gradients that come to be.

        `gradients`: bytes of those that a later micro-batch finds. `roughly`: only the micro-batch of most tokens, a
        lower bound. Returns bytes of the micro-batch that needs most, and of the gradients it finds.
        """
        found = []
        shapes = trained_shapes(self.config, setup)
        for shape in [max(shapes, key=lambda each: each.packs * each.width)] if roughly else shapes:
            run = partial(train, shape=shape)
            peaks = self.continued("train", run, _decisive(setup), shape)
            found.append((max(peaks.values()), gradients * shape.later))
        return max(found, key=sum)

    def score(self, setup: Setup) -> int:
        """Log-probabilities without gradient: of the policy where they are needed, else of the reference."""
        shapes = {replace(each, later=False) for each in trained_shapes(self.config, setup)}
        if setup.reference or setup.vllm or setup.generates_elsewhere:  # rows are scored before any is left out
            shapes |= {replace(each, later=False) for each in scored_shapes(self.config, setup)}
        adapters = setup.scores_old
        name = "score" if adapters else "score without adapters"
        runs = {each: partial(score, shape=each, adapters=adapters) for each in shapes}
        return max(self.continued(name, run, _decisive(setup), each)["score"] for each, run in runs.items())

    def generate(self, setup: Setup) -> tuple[int, int]:
        """Sampling the first and the last token of a generation batch, with its cache of keys and values; and that
        cache alone."""
        one_batch = replace(setup, batch=setup.generated_rows, accumulation=1, steps_per_generation=1)
        peaks = self.continued("generate", generate, one_batch)
        return max(peaks.values()), peaks["cache"]

    def continued(
        self, name: str, run: Callable[[Skeleton, Setup], Peaks], setup: Setup, shape: Shape | None = None
    ) -> Peaks:
        """What a run gives at the full depth."""
        key = (name, setup, shape)
        if key not in self._known:
            depth = self.config.num_hidden_layers
            if not self.is_uniform or depth <= 3:
                peaks = run(self.full, setup)
            else:
                two, three = run(self._at(2), setup), run(self._at(3), setup)
                peaks = {segment: two[segment] + (depth - 2) * (three[segment] - two[segment]) for segment in two}
            self._known[key] = peaks
        return self._known[key]

    def _at(self, layers: int) -> Skeleton:
        if layers not in self._shallow:
            self._shallow[layers] = build(self.config, self._setup, layers)
        return self._shallow[layers]


def _decisive(setup: Setup) -> Setup:
    """A setup without what its shapes say: equal ones are run once."""
    return replace(
        setup, prompt=1, completion=1, batch=1, group=1, accumulation=1, steps_per_generation=1, iterations=1
    )
