"""Names of parts of transformers' models that decoding replaces."""

import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

ROTARY = "apply_rotary_pos_emb"  # in the file of nearly every model: (q, k, cos, sin) -> (q, k)
# Functions of models' files that update a running state by a token, and the package whose kernel they call instead
# where it is installed.
STATE_UPDATES = {
    "causal_conv1d_update": "causal_conv1d",
    "torch_recurrent_gated_delta_rule": "fla",
    "recurrent_kimi_delta_attention": "fla",
    "mamba2_selective_state_update": "mamba_ssm",
    "mamba_selective_state_update": "mamba_ssm",
}


def layer_files(model: Any) -> list[ModuleType]:
    """Return the Python modules whose functions the layers of a model call by their names."""
    files: dict[str, ModuleType] = {}
    for layer in {type(module) for module in model.modules()}:
        # Decorators stand in other files than what they decorate.
        name = inspect.unwrap(layer.forward).__module__
        if name in sys.modules:
            files[name] = sys.modules[name]
    return list(files.values())


def state_updates(files: list[ModuleType]) -> Iterator[tuple[ModuleType, str, str]]:
    """Yield the functions of [`STATE_UPDATES`] that are plain torch: file, name and package."""
    for file in files:
        for name, package in STATE_UPDATES.items():
            # Kernels from the Hub take the place of a function by an object.
            if isinstance(getattr(file, name, None), FunctionType) and find_spec(package) is None:
                yield file, name, package
