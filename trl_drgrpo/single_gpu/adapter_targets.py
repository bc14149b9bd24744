"""The layers that an adapter's configuration names, against those of the model, before it loads."""

from difflib import get_close_matches
from typing import Any

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.single_gpu.peft_adapters import ALL_LINEAR, HEAD


def check_targets(config: Any, model: nn.Module) -> None:
    """`target_modules` of which no layer has the name (PEFT passes over single ones, and so does this), and a name in
    `modules_to_save` that no module has, which PEFT ignores."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    ends = sorted({name.rpartition(".")[2] for name in modules if name})
    of_parameters, of_modules = ("parameter", parameters, parameters), ("module", modules, ends)
    for field, (kind, names, known) in {"target_parameters": of_parameters, "modules_to_save": of_modules}.items():
        for name in getattr(config, field, None) or ():
            if not any(f".{each}".endswith(f".{name}") for each in names):
                got = f"{name!r}, which no {kind} of {type(model).__name__} is called"
                remedy = did_you_mean(name, known, f"Name a {kind}, or remove it.", cutoff=0.6)
                raise InputError(f"peft_config.{field} (lora_{field})", got, f"names of {kind}s", remedy)
    targets = getattr(config, "target_modules", None)
    if not targets or targets == ALL_LINEAR or getattr(config, "target_parameters", None):
        return
    if any(check_target_module_exists(config, name) for name in modules):
        _refuse_tied_target(config, model)
        return
    layers = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
    given = [targets] if isinstance(targets, str) else sorted(targets)
    near = [match for each in given for match in get_close_matches(each, layers, n=1, cutoff=0.6)]
    remedy = f"{ALL_LINEAR} targets every linear layer."
    if near:
        remedy = f"Did you mean {', '.join(dict.fromkeys(near))}?"
    got = f"{', '.join(given)}, matching no layer of {type(model).__name__}"
    expected = f"names such as {', '.join(layer for layer in layers if layer != HEAD)}, or {ALL_LINEAR}"
    raise InputError("peft_config.target_modules (lora_target_modules)", got, expected, remedy)


def _refuse_tied_target(config: Any, model: nn.Module) -> None:
    """An adapter on embeddings that PEFT would put on the output head, too."""
    model_config: Any = model.config
    if not (getattr(config, "ensure_weight_tying", False) and model_config.get_text_config().tie_word_embeddings):
        return
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if module is embeddings and check_target_module_exists(config, name):
            got = f"True with an adapter on {name}, whose weights {HEAD} shares"
            remedy = f"TRL multiplies by {HEAD}.weight itself, so an adapter there is never trained: set it to False."
            raise InputError("peft_config.ensure_weight_tying", got, "False", remedy)
