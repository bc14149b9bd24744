"""Notices and bars of other libraries that no user can act on, each filtered by its exact source: here, and nowhere
else."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Logger -> how its message begins, and why it says nothing to a user of this package.
_LOG_LINES = {
    # A kernel for inference in 4 bit on CPUs with AVX512-BF16: importing bitsandbytes, as transformers does, tries it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # What every trainer does where a tokenizer names other special tokens than the model: nothing is left to do.
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config",
}
# Module that warns -> names that TRL 1.16 itself sets and calls in every run, and transformers 5.23 has renamed.
_RENAMED = {
    "transformers.training_args": ("gradient_checkpointing",),
    "transformers.modeling_utils": (
        "is_gradient_checkpointing",
        "gradient_checkpointing_enable",
        "gradient_checkpointing_disable",
    ),
}
_BRIEF_SECONDS = 3.0


def drop_notices() -> None:
    """Filter them from now on. Called before TRL is imported; a second call changes nothing."""
    for name, beginning in _LOG_LINES.items():
        logging.getLogger(name).addFilter(_Beginning(beginning))  # equal ones are added once
    for module, names in _RENAMED.items():
        for name in names:
            warnings.filterwarnings(
                "ignore", f"`{name}` is deprecated and will be removed in v6", FutureWarning, module
            )


@dataclass(frozen=True)
class _Beginning:
    """Lets through all lines but those that begin like this."""

    beginning: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


@contextmanager
def brief_bars() -> Iterator[None]:
    """Inside, transformers shows its bars (loading weights, writing shards) only where they take some seconds."""
    from transformers.utils import logging as transformers_logging

    def delayed(factory: Any, args: Any, kwargs: Any) -> Any:
        options = {"delay": _BRIEF_SECONDS, **kwargs}
        return factory(*args, **options) if previous is None else previous(factory, args, options)

    previous = transformers_logging.set_tqdm_hook(delayed)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def without_tied(model: Any, load_result: Any) -> Any:
    """Result of `load_state_dict`, without missing keys that are tied to a loaded weight."""
    sources = getattr(model, "all_tied_weights_keys", None) or {}
    missing = load_result.missing_keys
    kept = [key for key in missing if key not in sources or sources[key] in missing]
    return type(load_result)(kept, load_result.unexpected_keys)
