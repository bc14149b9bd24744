"""Forwards that are compared: without dropout and the noise of NEFTune, which would differ and draw random numbers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def without_noise(model: Any) -> Iterator[None]:
    """Inside the block no layer of the model draws random numbers, as in evaluation. A run that is resumed tests its
    model anew: its generator has to stand where that of the unbroken run does."""
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a plan of memory does not load

    with ExitStack() as stack:
        # Not `model.eval()`: in it, 4-bit layers repack for good on some CPUs.
        for module in model.modules():
            if module.training and not type(module).__module__.startswith("bitsandbytes"):
                stack.enter_context(swapped(module, training=False))
        yield
