"""A ledger of the bytes of tensors that are alive, and stand-ins for what allocates them on the meta device.

The ledger counts op by op and remembers the most there ever were. It sees what PyTorch dispatches: results, saved
tensors, gradients, temporaries between ops; not what a kernel takes for itself while it runs. Storages are counted
once, however many views share them, and leave with the last reference. On the meta device storages have a size but no
memory, so a step of a 7B model can be counted on a laptop.

Each stand-in allocates what the real one allocates and keeps what the real one keeps for backward; none computes
anything:

- `Precision`: autocast (the meta device has none): casts, and their cache of trained float32 weights;
- `attend`: a fused attention kernel (flash or memory-efficient on GPUs, flash on CPUs);
- `fused_head`: TRL's log-probabilities in chunks, as its Triton kernel runs on a GPU;
- `QuantizedLinear`: weights of bitsandbytes, unpacked for each product;
- `AdaptedLinear`: PEFT's LoRA layer.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trl_drgrpo.single_gpu.memory.memory_settings import Adapter, Setup

Call = tuple[object, ...]  # an operation, and what decides the form of its result


class Ledger(TorchDispatchMode):
    """Counts every new storage inside the block until it dies.

    Attributes:
        live (`int`): Bytes alive now, without what was there before (see [`known`]).
        peaks (`dict[str, int]`): The most bytes alive at once, per segment of the run; see [`mark`].
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.segment = "start"
        self.peaks: dict[str, int] = defaultdict(int)
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._forms: dict[Call, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}  # of results

    def known(self, tensors: Iterable[Tensor]) -> None:
        """Leave out storages that were there before."""
        for tensor in tensors:
            self.enter(tensor, counts=False)

    def mark(self, segment: str) -> None:
        """Begin a segment, to which peaks belong from here on."""
        self.segment = segment
        self._note()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the guard against it costs more than the bookkeeping.
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        call = _call(func, args, kwargs)
        if call in self._forms:
            shape, strides, dtype = self._forms[call]
            out: object = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            out = func(*args, **kwargs)
            if call is not None and type(out) is Tensor and out.device.type == "meta":
                self._forms[call] = (out.shape, out.stride(), out.dtype)
        results = out if isinstance(out, (tuple, list)) else [out]
        for result in results:
            if isinstance(result, Tensor):
                self.enter(result)
        return out

    def enter(self, tensor: Tensor, counts: bool = True) -> None:
        """Count the storage of a tensor from here on, if it is new."""
        storage = tensor.untyped_storage()
        # Views of one storage are several Python objects with one address behind them.
        key = storage._cdata
        if key in self._references:
            return
        size = storage.nbytes() if counts else 0

        # Called when the storage dies, so the address may stand for another one afterwards.
        def leave(_: object) -> None:
            self._references.pop(key, None)
            self.live -= size

        self._references[key] = weakref.ref(storage, leave)
        self.live += size
        self._note()

    def _note(self) -> None:
        if self.live > self.peaks[self.segment]:
            self.peaks[self.segment] = self.live


def _call(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Call | None:
    """Return what decides the form of a result that is a tensor of its own; `None` for any other call.

    A loop over tokens makes the same calls again and again, and the meta device takes up to 0.3 ms to find out what
    each of them gives: minutes for a model that computes its states token by token, such as Jamba.
    """
    if not _gives_a_new_tensor(func):
        return None
    call: list[object] = [func]
    for value in (*args, *chain.from_iterable(kwargs.items())):
        if isinstance(value, Tensor):
            call += [value.shape, value.stride(), value.dtype, value.device]
        elif isinstance(value, (list, tuple)):
            call += [len(value), *value]
        else:
            call += [type(value), value]  # 1 and 1.0 are equal, and promote differently
    if any(isinstance(part, Tensor) for part in call):
        return None
    return tuple(call)


@cache
def _gives_a_new_tensor(func: torch._ops.OpOverload) -> bool:
    """Tell whether an operation gives one tensor, which is no view, and writes to none."""
    if func.overloadpacket is torch.ops.aten._unsafe_view:  # whose schema does not say that it is one
        return False
    schema = func._schema
    returns = schema.returns
    is_tensor = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_tensor and not schema.is_mutable


# Of TRL's fused head: tokens and vocabulary entries of a tile. `trl.kernels.chunked_logprob`, `trl.trainer.utils`.
HEAD_TOKENS = 4096
HEAD_VOCABULARY = 32768
# Bytes per logit that come and go while a tile is folded, in the forward and in the backward: none in the Triton
# kernel. Those of plain PyTorch are held against real runs by `tests/trainer/test_memory_measured.py`.
FOLDING_BYTES = {"cuda": (0, 0), "cpu": (12, 29)}
# Of bitsandbytes: weights that share a scale, scales that share one when quantized twice, and its code books, in
# float32: 16 values for the weights, 256 for the scales.
BLOCK = 64
NESTED_BLOCK = 256
CODE_BYTES = 4 * (16 + 256)

# What autocast runs in its type; and what it runs in float32, on a GPU alone.
_LOWER = {
    functional.linear,
    functional.conv1d,
    functional.scaled_dot_product_attention,
    torch.einsum,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.baddbmm,
    torch.addmm,
}
_FLOAT32_ON_GPU = {
    functional.layer_norm,
    functional.softmax,
    functional.log_softmax,
    torch.softmax,
    torch.Tensor.softmax,
    torch.pow,
    torch.Tensor.pow,
    torch.rsqrt,
    torch.cumsum,
    torch.Tensor.cumsum,
}
# Products of tokens, sorted by expert, with each expert's weights: on the meta device they take bfloat16 alone.
_GROUPED = {getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}


class Precision(TorchFunctionMode):
    """Autocast to `dtype`, attention kernels, and dropout, as they are on `device`.

    Args:
        dtype (`torch.dtype`, *optional*): Compute dtype of matrix products; `None`: no autocast.
        device (`str`): `"cuda"` or `"cpu"`.
    """

    def __init__(self, dtype: torch.dtype | None, device: str) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device
        # Behind prompts that are held once, casts are freed one by one (measured on a CPU).
        self.keeps_casts = True
        self._casts: dict[int, Tensor] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.forget()

    def forget(self) -> None:
        """End autocast's outermost block, which frees cast weights that nothing else holds."""
        self._casts.clear()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self.dtype is not None and func in _LOWER:
            args = tuple(map(self._lowered, args))
            kwargs = {name: self._lowered(argument) for name, argument in kwargs.items()}
        elif self.dtype is not None and self.device == "cuda" and func in _FLOAT32_ON_GPU:
            # `softmax` and the like get their tensors by position.
            args = tuple(argument.float() if _is_float(argument) else argument for argument in args)
        # The kernels that the meta device lacks, or replaces by plain ops that would allocate more.
        if func is functional.scaled_dot_product_attention:
            return attend(*args, device=self.device, **kwargs)
        if func in _GROUPED:
            return _grouped(*args[:2])
        if func is functional.dropout and self.device == "cuda":
            return _dropout_on_gpu(*args, **kwargs)
        return func(*args, **kwargs)

    def _lowered(self, value: object) -> object:
        """Cast a tensor to autocast's dtype."""
        if not _is_float(value) or value.dtype == self.dtype:
            return value
        # Autocast caches the casts of trained float32 weights only. Without gradient, a view of one (`weight.T`) is a
        # leaf, too, but it dies after the product, and its id would stand for the next one.
        is_weight = value.is_leaf and value.requires_grad and not value._is_view()
        if not (self.keeps_casts and is_weight and value.dtype == torch.float32):
            return value.to(self.dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(self.dtype)
        return self._casts[id(value)]


def _is_float(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def _dropout_on_gpu(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]  # its mask is one byte per element


Tensors = Sequence[Tensor | None]


class Context(Protocol):
    """Things that PyTorch keeps of one call between its forward and its backward."""

    back: Callable[..., object]
    like: list[tuple[torch.Size, torch.dtype] | None]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: Tensors

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class Kernel(torch.autograd.Function):
    """Stand-in for an op, with the op's allocations.

    `Kernel.apply(run, back, *inputs)`: `run(*inputs)` returns the result and the tensors to save for backward.
    `back(grad, *saved)` returns the workspace of the backward, which is alive beside the inputs' gradients. Neither
    function may hold a tensor, as it would live too long.
    """

    @staticmethod
    def forward(
        ctx: Context,
        run: Callable[..., tuple[Tensor, Tensors]],
        back: Callable[..., object],
        *inputs: Tensor | None,
    ) -> Tensor:
        out, saved = run(*inputs)
        ctx.back = back
        # Shapes and dtypes, not the inputs: those that backward does not need are freed.
        ctx.like = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensors:  # type: ignore[override]
        grads: list[Tensor | None] = []
        for like, needs_grad in zip(ctx.like, ctx.needs_input_grad[2:], strict=True):
            if like is not None and needs_grad:
                shape, dtype = like
                grads.append(grad.new_empty(shape, dtype=dtype))
            else:
                grads.append(None)
        # Dies before the gradients are handed on, as the real kernel's does.
        workspace = ctx.back(grad, *ctx.saved_tensors)
        del workspace
        return None, None, *grads


def _grouped(tokens: Tensor, weights: Tensor) -> Tensor:
    """Stand in for the product of `(n, columns)` tokens and `(experts, columns, rows)` weights."""

    def run(tokens: Tensor, weights: Tensor):
        return tokens.new_empty(tokens.size(0), weights.size(-1)), [tokens, weights]

    return Kernel.apply(run, lambda grad, *saved: None, tokens, weights)  # type: ignore[return-value]


APART = "apart"  # attribute of a mask: as in `Shape`


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    device: str = "cuda",
) -> Tensor:
    """Stand in for PyTorch's `scaled_dot_product_attention` when it takes a fused kernel of `device`.

    Queries are `(B, heads, n, head_dim)`; keys and values may have fewer heads. PyTorch turns a boolean mask into
    numbers first. Where branches attend apart, each block keeps the keys and values it gathered, and its output.
    """
    copied = 0
    blocks = getattr(attn_mask, APART, None)
    if blocks is not None:  # the masks of its blocks, in the place of one over the whole pack
        copied, score_entries = blocks
        attn_mask = query.new_empty(score_entries)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
        batch, heads, n, _ = query.shape
        # The kernels write `(B, n, heads, head_dim)`, so that joining the heads copies nothing.
        out = query.new_empty(batch, n, heads, value.size(-1)).transpose(1, 2)
        log_sums = query.new_empty(batch, heads, n, dtype=torch.float32)
        saved = [query, key, value, mask, out, log_sums]
        if copied:
            for tensor in (key, value):
                saved.append(tensor.new_empty(copied, heads, tensor.size(-1)))
            saved.append(torch.empty_like(out))
        return out, saved

    def back(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None):
        workspace = [query.new_empty(query.shape[:3], dtype=torch.float32)]
        if device == "cuda":
            # Gradients of the queries are summed in float32, those of shared keys and values are made per head.
            workspace.append(query.new_empty(query.shape, dtype=torch.float32))
            if key.size(1) != query.size(1):
                for tensor in (key, value):
                    workspace.append(tensor.new_empty(*query.shape[:2], *tensor.shape[2:]))
        return workspace

    return Kernel.apply(run, back, query, key, value, attn_mask)  # type: ignore[return-value]


def fused_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype, device: str) -> Tensor:
    """Stand in for TRL's `ChunkedLogProbFunction`: the only logits are those of one tile.

    Its Triton kernel folds a tile in place; in plain PyTorch, on a CPU, several float32 tensors of the tile's size
    come and go.
    """
    forward_bytes, backward_bytes = FOLDING_BYTES[device]

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None):
        statistics = hidden.new_empty(7, len(hidden), dtype=torch.float32)
        tile = _tile(hidden, weight, compute, forward_bytes)
        # The sums behind the last tile give one number of each kind per token.
        log_z = torch.empty_like(statistics[0])
        log_probs = torch.empty_like(log_z)
        entropy = torch.empty_like(log_z)
        del tile
        return log_probs, [hidden, weight, bias, log_z, entropy]

    def back(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Tensor):
        # Gradients are summed over the tiles in float32; those in float32 already need no sum beside them.
        sums = [torch.empty_like(grad)]  # zeros: the entropy's gradient
        for tensor in (hidden, weight, bias):
            if tensor is not None and tensor.requires_grad and tensor.dtype != torch.float32:
                sums.append(torch.empty_like(tensor, dtype=torch.float32))
        return sums, _tile(hidden, weight, compute, backward_bytes)

    return Kernel.apply(run, back, hidden, weight, bias)  # type: ignore[return-value]


def _tile(hidden: Tensor, weight: Tensor, compute: torch.dtype, folding: int) -> list[Tensor]:
    """Return a tile of logits and its factors. `folding` bytes per logit come and go while the tile is folded."""
    rows = min(len(hidden), HEAD_TOKENS)
    columns = min(len(weight), HEAD_VOCABULARY)
    tile = hidden.new_empty(rows, HEAD_VOCABULARY, dtype=compute)
    tensors = [tile, hidden[:rows].to(compute), weight[:columns].to(compute)]
    hidden.new_empty(rows * columns * folding, dtype=torch.uint8)  # dies at once, but the ledger has seen it
    return tensors


class QuantizedLinear(nn.Module):
    """bitsandbytes' layers, whose weights are unpacked for each product.

    `Linear4bit`: half a byte per weight, scales per block. `Linear8bitLt`: one byte per weight and a scale per row;
    the input is quantized as well.

    Args:
        rows, columns (`int`): Of the weight.
        bias (`torch.Tensor`, *optional*): Kept as it is.
        compute (`torch.dtype`): Compute dtype of the product.
        setup ([`Setup`]): 4 or 8 bits, and whether the scales of 4 bits are quantized, too.
    """

    def __init__(self, rows: int, columns: int, bias: Tensor | None, compute: torch.dtype, setup: Setup) -> None:
        super().__init__()
        self.out_features = rows
        self.in_features = columns
        self.shape = (rows, columns)
        self.compute = compute
        bits = setup.bits
        self.bits = bits
        # On a CPU, a kernel multiplies packed weights in the forward, and with 8 bits everywhere.
        self.packed = setup.device == "cpu" or bits == 8
        blocks = math.ceil(rows * columns / BLOCK)
        if bits == 8:
            scales = 4 * rows
        elif setup.nested:  # a byte per block, and float32 scales of these
            scales = blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + CODE_BYTES
        else:
            scales = 4 * blocks + 64  # float32, and the code book of 16 values
        self.weight = nn.Parameter(_bytes(math.ceil(rows * columns * bits / 8)), requires_grad=False)
        self.register_buffer("scales", _bytes(scales))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        quantized = torch.empty_like(x, dtype=torch.int8) if self.bits == 8 else None
        shape = self.shape
        packed = self.packed

        def run(x: Tensor):
            weight = None if packed else x.new_empty(shape)
            out = x.new_empty(*x.shape[:-1], shape[0])
            del weight
            return out, []  # nothing is saved: the backward unpacks the weight again

        out: Any = Kernel.apply(run, lambda grad: grad.new_empty(shape), x.to(self.compute))
        out = out.to(x.dtype)
        del quantized  # alive until here, beside the product
        return out


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


class AdaptedLinear(nn.Module):
    """PEFT's LoRA layer: `base(x) + B(A(dropout(x))) * scaling`, in the order and the types of its forward.

    Its weights are in float32, as PEFT's are, also on a base in bfloat16.

    Args:
        base (`nn.Module`): The layer under it.
        columns, rows (`int`): Its inputs and outputs.
        adapter ([`Adapter`]): Its rank and dropout.
        precision ([`Precision`]): Whether there is autocast.
    """

    def __init__(self, base: nn.Module, columns: int, rows: int, adapter: Adapter, precision: Precision):
        super().__init__()
        as_peft: Any = {"bias": False, "dtype": torch.float32, "device": "meta"}
        self.base = base
        self.precision = precision
        self.lora_a = nn.Linear(columns, adapter.rank, **as_peft)
        self.lora_b = nn.Linear(adapter.rank, rows, **as_peft)
        self.dropout = nn.Dropout(adapter.dropout) if adapter.dropout else nn.Identity()

    @property
    def weight(self) -> Any:
        """Return the base's weight, as PEFT does: some layers read its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        is_quantized = isinstance(self.base, QuantizedLinear)
        result_dtype = result.dtype
        if is_quantized:
            # As PEFT: backward fails on a changed view of a 4-bit product.
            result = result.clone()
        if not is_quantized or self.precision.dtype is None:
            x = x.to(torch.float32)
        update = self.lora_b(self.lora_a(self.dropout(x))) * 2.0  # the scaling, whose value changes no size
        # PEFT casts the update on a quantized base, and the sum on any other.
        if is_quantized:
            return result + update.to(result_dtype)
        return (result + update).to(result_dtype)
