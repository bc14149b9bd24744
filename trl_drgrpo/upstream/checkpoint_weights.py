"""Weights of checkpoints whose file calls them by other names than the model does, and the name of KL's reference.

When `from_pretrained` loads a model, transformers fuses the experts of a mixture and renames parts of vision-language
models; when it saves, it undoes that. `Trainer` knows nothing of it when it resumes (transformers 5.23): what it does
not find under the model's names stays as it was when the model was built.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

REFERENCE = "ref"  # where a model has an adapter of this name, TRL takes it for the reference of KL


def load_translated(model: Any, folder: Path) -> Any:
    """Load all weights of a checkpoint in place, the way `from_pretrained` does; returns what `load_state_dict`
    returns, `None` for a model that has no `from_pretrained`."""
    if not isinstance(model, PreTrainedModel):
        return None
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    return model.load_state_dict(loaded.state_dict(), strict=False)


def without_tied(model: Any, load_result: Any) -> Any:
    """Result of `load_state_dict`, without missing keys that are tied to a loaded weight."""
    sources = getattr(model, "all_tied_weights_keys", None) or {}
    missing = load_result.missing_keys
    kept = [key for key in missing if key not in sources or sources[key] in missing]
    return type(load_result)(kept, load_result.unexpected_keys)
