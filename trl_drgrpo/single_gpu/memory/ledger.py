"""Counts the bytes of tensors that are alive, op by op, and remembers the most there ever were.

It sees what PyTorch dispatches: results, saved tensors, gradients, temporaries between ops; not what a kernel takes
for itself while it runs. Storages are counted once, however many views share them, and leave with the last reference.
On the meta device storages have a size but no memory, so a step of a 7B model can be counted on a laptop. What an op
gives there is a matter of shapes, which PyTorch works out in Python: an op met again gets what it got before.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Of ops whose result is new memory: shape, strides and type by op and arguments.
_RESULTS: dict[Any, Any] = {}
_MAKES_NEW: dict[Any, bool] = {}


class Ledger(TorchDispatchMode):
    """Inside the block, every new storage is counted until it dies.

    Attributes:
        live (`int`): Bytes alive now, without what was there before (see [`known`]).
        peaks (`dict[str, int]`): The most bytes alive at once, per segment of the run; see [`mark`].
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.segment = "start"
        self.peaks: dict[str, int] = defaultdict(int)
        self._references: dict[int, Any] = {}

    def known(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that were there before and do not count."""
        for tensor in tensors:
            self._enter(tensor, counts=False)

    def mark(self, segment: str) -> None:
        """From here on, peaks belong to this segment."""
        self.segment = segment
        self._note()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs more than the bookkeeping

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _result(func, args, kwargs or {})
        if isinstance(out, torch.Tensor):
            self._enter(out)
        elif isinstance(out, (tuple, list)):
            for each in out:
                if isinstance(each, torch.Tensor):
                    self._enter(each)
        return out

    def _enter(self, tensor: torch.Tensor, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        size = storage.nbytes() if counts else 0

        def leave(_: Any) -> None:
            self._references.pop(key, None)
            self.live -= size

        self._references[key] = weakref.ref(storage, leave)
        self.live += size
        self._note()

    def _note(self) -> None:
        if self.live > self.peaks[self.segment]:
            self.peaks[self.segment] = self.live


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an op; on the meta device from what it returned before, where that is new memory."""
    makes_new = _MAKES_NEW.get(func)
    if makes_new is None:
        returns = func._schema.returns
        one = len(returns) == 1 and returns[0].alias_info is None and str(returns[0].type) == "Tensor"
        makes_new = _MAKES_NEW[func] = one and not func._schema.is_mutable
    if not makes_new:
        return func(*args, **kwargs)
    on_meta: list[bool] = []
    key = (func, _signature(args, on_meta), _signature(tuple(kwargs.items()), on_meta))
    if not all(on_meta) or not on_meta:
        return func(*args, **kwargs)
    try:
        known = _RESULTS.get(key)
    except TypeError:  # an argument that cannot be a key
        return func(*args, **kwargs)
    if known is not None:
        return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")
    out = func(*args, **kwargs)
    if type(out) is torch.Tensor and out.is_meta and out.untyped_storage().nbytes() == _span(out):
        _RESULTS[key] = (tuple(out.shape), out.stride(), out.dtype)
    return out


def _signature(values: Any, on_meta: list[bool]) -> Any:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            on_meta.append(value.is_meta)
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (tuple, list)):
            found.append(_signature(value, on_meta))
        else:
            found.append((type(value), value))
    return tuple(found)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
