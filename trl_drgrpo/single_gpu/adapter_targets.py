"""The layers that an adapter's configuration names, against those of the model."""

from difflib import get_close_matches

from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.single_gpu.peft_adapters import ALL_LINEAR, HEAD
from trl_drgrpo.single_gpu.unfit_layers import last_names, linear_layer_names


def check_targets(config: PeftConfig, model: nn.Module) -> None:
    """Refuse names of layers, parameters and modules that a model does not have.

    PEFT passes over a single one of `target_modules`, and so does this, as long as another one is there.
    """
    modules = list(dict(model.named_modules()))
    parameters = list(dict(model.named_parameters()))
    _refuse_missing(config, model, "target_parameters", "parameter", parameters, parameters)
    _refuse_missing(config, model, "modules_to_save", "module", modules, last_names(modules))
    targets = getattr(config, "target_modules", None)
    # PEFT chooses the layers itself, or needs none beside parameters.
    if not targets or targets == ALL_LINEAR or getattr(config, "target_parameters", None):
        return
    if any(check_target_module_exists(config, name) for name in modules):
        _refuse_tied_target(config, model)
        return
    layers = linear_layer_names(model)
    requested = [targets] if isinstance(targets, str) else sorted(targets)
    nearest: dict[str, None] = {}  # in order, without repetitions
    for target in requested:
        nearest |= dict.fromkeys(get_close_matches(target, layers, n=1, cutoff=0.6))
    remedy = f"{ALL_LINEAR} targets every linear layer."
    if nearest:
        remedy = f"Did you mean {', '.join(nearest)}?"
    if HEAD in layers:
        layers.remove(HEAD)
    got = f"{', '.join(requested)}, matching no layer of {type(model).__name__}"
    expected = f"names such as {', '.join(layers)}, or {ALL_LINEAR}"
    raise InputError("peft_config.target_modules (lora_target_modules)", got, expected, remedy)


def _refuse_missing(
    config: PeftConfig, model: nn.Module, field: str, kind: str, names: list[str], suggestions: list[str]
) -> None:
    """Refuse the first name in a field that is not the end of one of `names`."""
    for requested in getattr(config, field, None) or ():
        # Dots in front: `proj` is not the end of `q_proj`.
        if not any(f".{name}".endswith(f".{requested}") for name in names):
            got = f"{requested!r}, which no {kind} of {type(model).__name__} is called"
            remedy = did_you_mean(requested, suggestions, f"Name a {kind}, or remove it.", cutoff=0.6)
            raise InputError(f"peft_config.{field} (lora_{field})", got, f"names of {kind}s", remedy)


def _refuse_tied_target(config: PeftConfig, model: nn.Module) -> None:
    """Refuse an adapter on embeddings that PEFT would put on the output head, too."""
    if not (getattr(config, "ensure_weight_tying", False) and isinstance(model, PreTrainedModel)):
        return
    if not model.config.get_text_config().tie_word_embeddings:
        return
    # With `ensure_weight_tying`, PEFT adapts both layers of tied weights where one is a target.
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        if module is embeddings and check_target_module_exists(config, name):
            got = f"True with an adapter on {name}, whose weights {HEAD} shares"
            remedy = f"TRL multiplies by {HEAD}.weight itself, so an adapter there is never trained: set it to False."
            raise InputError("peft_config.ensure_weight_tying", got, "False", remedy)
