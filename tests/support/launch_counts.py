"""Operations for which a GPU would launch a kernel, counted on a CPU."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.upstream.private_state import swapped

_aten = torch.ops.aten
# A view under another name, and memory that nobody writes to.
_WITHOUT_KERNEL = {
    _aten._unsafe_view,
    _aten.detach,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.lift_fresh,
    _aten.new_empty,
    _aten.new_empty_strided,
}


class _Operations(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.is_counting = True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._can_decompose():  # in inference mode they come whole
            with self:
                return operation.decompose(*args, **(kwargs or {}))
        packet = operation.overloadpacket
        if self.is_counting and not operation.is_view and packet not in _WITHOUT_KERNEL:
            self.counts[str(packet)] += 1
        return operation(*args, **(kwargs or {}))


class _WholeNorms(TorchFunctionMode):
    """Counts an RMS norm once: a GPU has one kernel for it, and a CPU takes it apart."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in (torch.rms_norm, torch.nn.functional.rms_norm):
            return function(*args, **(kwargs or {}))
        self.operations.counts["aten.rms_norm"] += 1
        self.operations.is_counting = False
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.operations.is_counting = True


@contextmanager
def counted_operations():
    """Inside the block operations that are not views are counted; gives the counts by name. Casts that do nothing do
    not count: they are never dispatched."""
    operations = _Operations()
    with operations, _WholeNorms(operations):
        yield operations.counts


@contextmanager
def counted_forwards(model):
    """Inside the block the operations of each forward of the model are counted; gives a list of counts."""
    counts, blocks = [], []

    def begin(module, args):
        blocks.append(counted_operations())
        counts.append(blocks[-1].__enter__())

    def end(module, args, output):
        blocks.pop().__exit__(None, None, None)

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def decoding_step(model, shares=True, autocast=False):
    """Operations of one decoding step over 8 rows of 2 prompts, by name."""
    ids = torch.arange(12).view(2, 6).repeat_interleave(4, dim=0)
    config = GenerationConfig(max_new_tokens=6, do_sample=True, pad_token_id=0, eos_token_id=1, suppress_tokens=[1])
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # As accelerate does: autocast begins anew in each forward, and so do its copies of weights.
    forward = torch.autocast("cpu", torch.bfloat16, enabled=autocast)(inner.forward)
    with swapped(inner, forward=forward), counted_forwards(inner) as counts, shared_prefill(model, shares):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return counts[-1]


def training_step(model, autocast=False):
    """Operations of forward and backward of one pack, as wide as a row of 24 tokens, by name."""
    ids = torch.arange(24)[None]
    mask = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]  # the plain mask of packs on a GPU
    positions = torch.arange(24)[None]
    with counted_operations() as counts, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.sum().backward()
    return counts


def per_layer(build, count, **options):
    """Operations that a second layer adds, by name. `build`: a model of so many layers."""
    return count(build(2), **options) - count(build(1), **options)
