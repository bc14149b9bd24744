"""Counts the bytes of tensors that are alive, op by op, and remembers the most there ever were.

It sees what PyTorch dispatches: results, saved tensors, gradients, temporaries between ops; not what a kernel takes
for itself while it runs. Storages are counted once, however many views share them, and leave with the last reference.
On the meta device storages have a size but no memory, so a step of a 7B model can be counted on a laptop.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
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
