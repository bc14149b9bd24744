"""Forwards that are compared: without dropout and the noise of NEFTune, which would differ and draw random numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_noise(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block no layer of the model draws random numbers, as in evaluation. A run that is resumed tests its
    model anew: its generator has to stand where that of the unbroken run does."""
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a plan of memory does not load

    with ExitStack() as stack:
        # Not `model.eval()`: in it, 4-bit layers repack for good on some CPUs.
        for module in model.modules():
            if module.training and not type(module).__module__.startswith("bitsandbytes"):
                stack.enter_context(swapped(module, training=False))
        yield


def random_state(device: torch.device) -> Callable[[], None]:
    """Note where the generators of the CPU and of a device stand. The function that is returned puts them back."""
    of_cpu = torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        torch.set_rng_state(of_cpu)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)

    return rewind
