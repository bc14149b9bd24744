"""An adapter's folder and the base model that it names: found, checked, loaded.

What peft would pass over in silence is an error here: on a base with other layers than those of the training, some
adapters stay empty, or some of their weights have no place.
"""

from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors

_ADAPTER_FILE = "adapter_config.json"


def check_adapter_dir(adapter: Path) -> None:
    """Raises an `InputError` for a folder that is not that of one adapter, and says what it is."""
    if (adapter / _ADAPTER_FILE).is_file():
        return
    if not adapter.is_dir():
        what = "a file" if adapter.exists() else "which does not exist"
        raise InputError("adapter", f"{adapter}, {what}", "an adapter's folder", "Check the path.")
    inner = sorted(str(path.parent) for path in adapter.glob(f"*/{_ADAPTER_FILE}"))
    if inner:
        got = f"{adapter}, which holds adapters in subfolders only"
        raise InputError("adapter", got, "the folder of one adapter", f"Name one of them: {', '.join(inner)}.")
    what = "a whole model" if (adapter / "config.json").is_file() else f"a folder without {_ADAPTER_FILE}"
    remedy = "There is nothing to merge." if what == "a whole model" else "Name the folder that a LoRA run wrote."
    raise InputError("adapter", f"{adapter}, {what}", "an adapter's folder", remedy)


def base_of(adapter: Path, base: str | None) -> tuple[str, str | None]:
    """The base model's path or id, and its revision."""
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (KeyError, TypeError, ValueError) as error:
        got = f"{adapter / _ADAPTER_FILE}, which peft cannot read ({type(error).__name__}: {error})"
        raise InputError("adapter", got, "an adapter's folder", "Upgrade peft, or save the adapter again.") from error
    if config.is_prompt_learning:
        got = f"{adapter}, of type {getattr(config.peft_type, 'value', config.peft_type)}"
        remedy = "Virtual tokens cannot be merged into weights: use the adapter together with its base."
        raise InputError("adapter", got, "one that changes weights, such as LoRA", remedy)
    name, revision = (base, None) if base is not None else (config.base_model_name_or_path, config.revision)
    if not name:
        remedy = "Name it with --base (base=...)."
        raise InputError("base", "none: the adapter does not name its base model", "a folder or a Hub id", remedy)
    try:
        check_local("base", name)
    except InputError as error:
        remedy = f"{error.remedy} If it has moved, name where it is now with --base (base=...)."
        raise InputError("base", error.got, error.expected, remedy) from None
    path = Path(name).expanduser()
    return (str(path) if path.is_dir() else name), revision


def base_config(base: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The base's configuration; an `InputError` where it cannot be had or its weights are quantized."""
    from transformers import AutoConfig

    with hub_errors("base", base, "a folder, or a Hub id that can be reached"):
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        remedy = "Merging into quantized weights changes the model: name the original with --base (base=...)."
        raise InputError("base", f"{base}, whose weights are quantized", "weights in full precision", remedy)
    return config


def model_class_of(config: Any) -> Any:
    """The class TRL would train, so that weights keep their names; the auto class for remote code."""
    import transformers

    named = (config.architectures or [""])[0]
    return getattr(transformers, named, None) or transformers.AutoModelForCausalLM


def load(name: str, model_class: Any, **loading: Any) -> Any:
    """A model in float32, for evaluation; an `InputError` where its weights are missing or damaged."""
    import torch
    from safetensors import SafetensorError

    try:
        return model_class.from_pretrained(name, dtype=torch.float32, **loading).eval()
    except (OSError, ValueError, SafetensorError) as error:
        remedy = f"{type(error).__name__}: {_first_lines(error)}."
        raise InputError("base", f"{name}, whose weights do not load", "a complete model", remedy) from error


def attach(model: Any, adapter: Path) -> Any:
    """The model with an adapter's folder on it, unmerged; its embeddings are resized, see [`fit_vocabulary`]. Refuses
    weights that are missing or damaged, or do not fit this base in number or shape."""
    from peft import PeftModel

    try:
        peft_model: Any = PeftModel.from_pretrained(model, str(adapter))
        loaded = peft_model.load_adapter(str(adapter), "default")  # once more, as only this says what fits
    except (RuntimeError, ValueError) as error:
        raise _does_not_fit(adapter, f"peft says: {_first_lines(error)}") from error
    # Others are embeddings that peft saves twice.
    too_many = [name for name in loaded.unexpected_keys if peft_model.base_model.prefix in name]
    if loaded.missing_keys or too_many:
        found = [f"nothing for {name}" for name in loaded.missing_keys[:1]]
        found += [f"{name}, which the base has no place for" for name in too_many[:1]]
        count = len(loaded.missing_keys) + len(too_many)
        raise _does_not_fit(adapter, f"It holds {' and '.join(found)} ({count} such weights)")
    return peft_model.eval()


def fit_vocabulary(model: Any, adapter: Path) -> None:
    """Give the base as many embeddings as the adapter brings, where the run had extended the vocabulary. The adapter
    brings the content of the new rows, too."""
    from peft.utils import load_peft_weights
    from safetensors import SafetensorError

    if not any((adapter / f"adapter_model.{suffix}").is_file() for suffix in ("safetensors", "bin")):
        remedy = "Name a complete checkpoint."
        raise InputError("adapter", f"{adapter}, without adapter_model.safetensors", "an adapter's weights", remedy)
    try:
        weights = load_peft_weights(str(adapter), device="cpu")
    except (RuntimeError, OSError, EOFError, SafetensorError) as error:
        remedy = f"Name another checkpoint. {type(error).__name__}: {_first_lines(error)}."
        raise InputError("adapter", f"{adapter}, whose weights do not load", "an adapter's weights", remedy) from error
    embeddings = model.get_input_embeddings()
    (name,) = [name for name, module in model.named_modules() if module is embeddings]
    brought = weights.get(f"base_model.model.{name}.weight")
    if brought is not None and len(brought) > len(embeddings.weight):
        model.resize_token_embeddings(len(brought), mean_resizing=False)


def _does_not_fit(adapter: Path, why: str) -> InputError:
    remedy = f"Name the base it was trained on with --base. {why}."
    return InputError("adapter", f"{adapter}, which does not fit the base model", "an adapter of it", remedy)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300].rstrip(".")
