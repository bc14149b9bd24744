"""Autocast inside a decoding step, where dtypes are chosen by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast lowers products to on a type of device; `None` where it is off, or unknown there
    (the planner's device is `"meta"`)."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Inside the block operations keep the dtype of their inputs: autocast would compute norms and softmax in float32
    and give them back so, with a cast for the next product. The functions below cost less than `torch.autocast`."""
    if autocast_dtype(device) is None:
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)
