"""Options of checkpointing that TRL's trainer would lose: where inputs of layers wait, and which layers have them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_drgrpo.upstream.kv_cache import without_adapters
from trl_drgrpo.upstream.private_state import swapped

# Of the options of checkpointing, those that the model takes. The others go to torch.
_FOR_THE_MODEL = ("offload", "every_n_layers")


@contextmanager
def checkpoints_as_configured(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Inside the block, checkpointing that is switched on again has all its options.

    transformers takes `offload` and `every_n_layers` out of `gradient_checkpointing_kwargs` when training starts. TRL
    switches checkpointing off while it generates or scores, and on again with all of them as options of torch's
    `checkpoint`, which refuses them in the next forward.
    """
    base = without_adapters(model)
    enable = base.gradient_checkpointing_enable

    def enable_with_options(
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **for_the_model: Any
    ) -> None:
        for_torch = dict(gradient_checkpointing_kwargs or {})
        for name in _FOR_THE_MODEL:
            if name in for_torch:
                for_the_model[name] = for_torch.pop(name)
        if not can_pin():
            for_the_model["offload"] = False  # they are on the host already
        enable(gradient_checkpointing_kwargs=for_torch or None, **for_the_model)

    with swapped(base, gradient_checkpointing_enable=enable_with_options):
        yield


def can_pin() -> bool:
    """Tell whether memory of the host can be pinned for a device."""
    return torch.accelerator.is_available()
