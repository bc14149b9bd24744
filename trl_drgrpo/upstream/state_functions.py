"""Names of the functions by which transformers' models update running states."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType, ModuleType

# Functions of models' files that update a running state by a token, and the package whose kernel they call instead
# where it is installed.
STATE_UPDATES = {
    "causal_conv1d_update": "causal_conv1d",
    "torch_recurrent_gated_delta_rule": "fla",
    "recurrent_kimi_delta_attention": "fla",
    "mamba2_selective_state_update": "mamba_ssm",
    "mamba_selective_state_update": "mamba_ssm",
}


def state_updates(files: list[ModuleType]) -> Iterator[tuple[ModuleType, str, str]]:
    """Yield the functions of [`STATE_UPDATES`] that are plain torch: file, name and package."""
    for file in files:
        for name, package in STATE_UPDATES.items():
            # Kernels from the Hub take the place of a function by an object.
            if isinstance(getattr(file, name, None), FunctionType) and find_spec(package) is None:
                yield file, name, package
