"""Names of parts of transformers' models that decoding replaces."""

import inspect
import sys
from types import ModuleType

from torch import nn

ROTARY = "apply_rotary_pos_emb"  # in the file of nearly every model: (q, k, cos, sin) -> (q, k)


def layer_files(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules whose functions the layers of a model call by their names."""
    files: dict[str, ModuleType] = {}
    for layer in {type(module) for module in model.modules()}:
        # Decorators stand in other files than what they decorate.
        name = inspect.unwrap(layer.forward).__module__
        if name in sys.modules:
            files[name] = sys.modules[name]
    return list(files.values())
