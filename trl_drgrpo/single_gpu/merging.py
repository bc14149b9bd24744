"""An adapter merged into its base model, and the proof on what was written that the result is the same model.

- The adapter's folder and the base that it names are found and checked first. What peft would pass over in silence is
  an error: on a base with other layers than those of the training, some adapters stay empty, or have no place.
- The base is loaded anew in float32, never in 4 bit: merging into quantized weights changes what the model generates.
- What is compared is what counts: the folder that was written is loaded again, and its logits on fixed inputs are
  held against those of base and adapter, unmerged.
- Half precision rounds the sum of weight and update. The update of a short run may be smaller than that rounding; so
  the adapter's own effect on the logits stands beside the difference, and a merge that loses much of it says so.
- The model appears under its name when all of this is done; whatever fails leaves nothing behind.
"""

import contextlib
import copy
import logging
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.disk import check_writable, room_needed
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.finite import first_not_finite, refuse_not_finite
from trl_drgrpo.common.hub_errors import check_local, hub_errors, refuse_new_weights
from trl_drgrpo.common.reading import reading, user_path

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_ADAPTER_FILE = "adapter_config.json"
# Largest difference allowed, as a share of the largest logit. Measured on models of width 64 and 512: 1.4e-6 in
# float32, 0.6% to 1.4% in bfloat16, 0.07% to 0.2% in float16, where the adapter itself made 28% and 138%.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


def check_adapter_dir(adapter: Path) -> None:
    """Raise an `InputError` for a folder that is not that of one adapter, and say what it is."""
    if (adapter / _ADAPTER_FILE).is_file():
        return
    kind = f"a folder without {_ADAPTER_FILE}"
    expected = "an adapter's folder"
    remedy = "Name the folder that a LoRA run wrote."
    inner = sorted(str(path.parent) for path in adapter.glob(f"*/{_ADAPTER_FILE}"))
    if not adapter.is_dir():
        kind = "a file" if adapter.exists() else "which does not exist"
        remedy = "Check the path."
    elif inner:
        kind = "which holds adapters in subfolders only"
        expected = "the folder of one adapter"
        remedy = f"Name one of them: {', '.join(inner)}."
    elif (adapter / "config.json").is_file():
        kind = "a whole model"
        remedy = "There is nothing to merge."
    raise InputError("adapter", f"{adapter}, {kind}", expected, remedy)


def base_of(adapter: Path, base: str | None) -> tuple[str, str | None]:
    """Return the base model's path or id, and its revision."""
    from peft import PeftConfig

    remedy = "Upgrade peft, or save the adapter again."
    with reading("adapter", str(adapter / _ADAPTER_FILE), "an adapter's folder", remedy):
        config = PeftConfig.from_pretrained(str(adapter))
        if not isinstance(config.base_model_name_or_path, str | None):
            raise TypeError("base_model_name_or_path is not a text")
    if config.is_prompt_learning:
        got = f"{adapter}, of type {getattr(config.peft_type, 'value', config.peft_type)}"
        remedy = "Virtual tokens cannot be merged into weights: use the adapter together with its base."
        raise InputError("adapter", got, "one that changes weights, such as LoRA", remedy)
    name = base
    revision = None
    if name is None:
        name = config.base_model_name_or_path
        revision = config.revision
    if not name:
        remedy = "Name it with --base (base=...)."
        raise InputError("base", "none: the adapter does not name its base model", "a folder or a Hub id", remedy)
    try:
        check_local("base", name)
    except InputError as error:
        remedy = f"{error.remedy} If it has moved, name where it is now with --base (base=...)."
        raise InputError("base", error.got, error.expected, remedy) from None
    path = user_path(name)
    return (str(path) if path.is_dir() else name), revision


def base_config(base: str, revision: str | None, trust_remote_code: bool) -> "PreTrainedConfig":
    """Return the base's configuration; raise an `InputError` where it cannot be had or its weights are quantized."""
    from transformers import AutoConfig

    with hub_errors("base", base, "a folder, or a Hub id that can be reached"):
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        remedy = "Merging into quantized weights changes the model: name the original with --base (base=...)."
        raise InputError("base", f"{base}, whose weights are quantized", "weights in full precision", remedy)
    return config


def model_class_of(config: "PreTrainedConfig", adapter: Path | None = None) -> Any:
    """Return the class that was trained, so that layers have the names of the adapter.

    By default this is the class that a checkpoint names; the auto class for remote code. The language model of a
    multimodal checkpoint can be trained by itself, too (`AutoModelForCausalLM`): the names in the adapter's file tell.
    """
    import torch
    import transformers

    architecture = (config.architectures or [""])[0]
    auto_class = transformers.AutoModelForCausalLM
    named_class = getattr(transformers, architecture, None) or auto_class
    is_multimodal = config.get_text_config(decoder=True) is not config
    if adapter is None or not is_multimodal or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return named_class
    # Built without memory, to see in which of the two the adapter's first weight is at home. For example
    # `model.language_model.layers.0.q_proj.lora_A.weight`: a language model by itself has no `model.language_model`.
    key = next(iter(_adapter_weights(adapter)), "").removeprefix("base_model.model.")
    with torch.device("meta"):
        multimodal_model: Any = named_class(copy.deepcopy(config))
        language_model: Any = auto_class.from_config(copy.deepcopy(config))
    return auto_class if _depth_in(language_model, key) > _depth_in(multimodal_model, key) else named_class


def _depth_in(model: "PreTrainedModel", key: str) -> int:
    """Return how many parts of a weight's name are modules of a model, one inside the other."""
    modules = dict(model.named_modules())
    parts = key.split(".")
    return max(depth for depth in range(len(parts)) if ".".join(parts[:depth]) in modules)


def load(name: str, model_class: "type[PreTrainedModel]", **loading: Any) -> "PreTrainedModel":
    """Return a model in float32, for evaluation; refuse weights that are missing, damaged or not finite."""
    import torch

    try:
        loaded: Any = model_class.from_pretrained(name, dtype=torch.float32, output_loading_info=True, **loading)
        model, info = loaded
    except Exception as error:
        remedy = f"{type(error).__name__}: {_first_lines(error)}."
        raise InputError("base", f"{name}, whose weights do not load", "a complete model", remedy) from error
    refuse_new_weights("base", name, model, info, "They would be random: name the base that was trained.")
    refuse_not_finite(model, "base", name)
    return model.eval()


def attach(model: "PreTrainedModel", adapter: Path, is_trainable: bool = False) -> "PeftModel":
    """Put the adapter of a folder on a model, unmerged, after [`fit_vocabulary`].

    Refuses weights that are missing or damaged, or do not fit this base in number or shape.
    """
    from peft import PeftModel

    try:
        peft_model = PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable)
        # Once more, as only this says what fits: `from_pretrained` drops the result of loading.
        loaded = peft_model.load_adapter(str(adapter), "default", is_trainable=is_trainable)
    except Exception as error:
        raise _does_not_fit(adapter, f"peft says: {_first_lines(error)}") from error
    missing = loaded.missing_keys
    # Keys without the adapter's prefix are embeddings that peft saves twice.
    superfluous = [name for name in loaded.unexpected_keys if peft_model.base_model.prefix in name]
    problems = []
    if missing:
        problems.append(f"nothing for {missing[0]}")
    if superfluous:
        problems.append(f"{superfluous[0]}, which the base has no place for")
    if problems:
        count = len(missing) + len(superfluous)
        raise _does_not_fit(adapter, f"It holds {' and '.join(problems)} ({count} such weights)")
    refuse_not_finite(peft_model, "adapter", str(adapter))
    return peft_model.eval()


def fit_vocabulary(model: "PreTrainedModel", adapter: Path) -> None:
    """Give the base as many embeddings as the adapter brings, where the run had extended the vocabulary.

    The adapter brings the content of the new rows, too.
    """
    # peft saves whole embeddings beside the adapter where their number of rows has changed.
    weights = _adapter_weights(adapter)
    embeddings = model.get_input_embeddings()
    (name,) = [name for name, module in model.named_modules() if module is embeddings]
    adapted = weights.get(f"base_model.model.{name}.weight")
    if adapted is not None and len(adapted) > embeddings.weight.size(0):  # type: ignore[operator]
        model.resize_token_embeddings(len(adapted), mean_resizing=False)


def _adapter_weights(adapter: Path) -> "dict[str, Tensor]":
    """Return the tensors of an adapter's file by name.

    Refuses a file that is missing or damaged, and a pickle with more than tensors.
    """
    from peft.utils import load_peft_weights

    if not any((adapter / f"adapter_model.{suffix}").is_file() for suffix in ("safetensors", "bin")):
        remedy = "Name a complete checkpoint."
        raise InputError("adapter", f"{adapter}, without adapter_model.safetensors", "an adapter's weights", remedy)
    try:
        return load_peft_weights(str(adapter), device="cpu")
    except UnpicklingError as error:
        got = f"{adapter}, whose weights are a pickle with more than tensors"
        remedy = "It may run code, and is not read. Save it again."
        raise InputError("adapter", got, "adapter_model.safetensors", remedy) from error
    except Exception as error:
        remedy = f"Name another checkpoint. {type(error).__name__}: {_first_lines(error)}."
        raise InputError("adapter", f"{adapter}, whose weights do not load", "an adapter's weights", remedy) from error


def _does_not_fit(adapter: Path, why: str) -> InputError:
    remedy = f"Name the base it was trained on with --base. {why}."
    return InputError("adapter", f"{adapter}, which does not fit the base model", "an adapter of it", remedy)


def _first_lines(error: Exception) -> str:
    lines = list(filter(None, map(str.strip, str(error).splitlines())))
    return " ".join(lines[:2])[:300].rstrip(".")


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge.

    Args:
        output_dir (`str`): The merged model's folder.
        base (`str`): The base model.
        dtype (`str`): Of the weights that were written.
        max_logit_difference (`float`): Largest difference between the logits of the folder that was written and of
            base and adapter unmerged, on the fixed inputs, computed in float32.
        max_logit (`float`): Largest logit, absolute.
        adapter_effect (`float`): Largest difference that the adapter makes to the logits of its base.
    """

    output_dir: str
    base: str
    dtype: str
    max_logit_difference: float
    max_logit: float
    adapter_effect: float


def merge_adapter(
    adapter_dir: str | Path,
    output_dir: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> MergeReport:
    """
    Merge an adapter into its base model, on CPU in float32, and save the result with its tokenizer.

    Args:
        adapter_dir (`str` or `Path`):
            Folder with `adapter_config.json`: a run's output or one of its checkpoints.
        output_dir (`str` or `Path`):
            Folder to write; must not exist, or be empty.
        base (`str`, *optional*):
            Folder or Hub id of the base model; by default the one that the adapter names.
        dtype (`str`, *optional*):
            `"float32"`, `"bfloat16"` or `"float16"`: of the weights that are written. Defaults to the base's own.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run code that comes with the base model.

    Returns:
        [`MergeReport`].

    Raises:
        `InputError`: No adapter or several, an adapter that cannot be merged, a base that is missing, quantized or of
            another shape, an output that exists, or merged logits that differ from unmerged ones.

    Memory: 4 bytes per parameter of the base; once more on disk while it writes.
    """
    adapter = user_path(adapter_dir)
    output = Path(os.path.realpath(user_path(output_dir)))
    if dtype is not None and dtype not in TOLERANCES:
        raise InputError("dtype", repr(dtype), f"one of {', '.join(TOLERANCES)}", "Leave it out for the base's own.")
    is_new = not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir()))
    if not is_new:
        raise InputError("output", f"{output}, which exists", "a new folder", "Choose another name, or remove it.")
    if output.is_mount() or output == Path.cwd():
        remedy = f"Name a folder inside it, such as {output / 'merged'}."
        raise InputError("output", f"{output}, which cannot be renamed to", "a new folder", remedy)
    check_adapter_dir(adapter)
    base, revision = base_of(adapter, base)
    config = base_config(base, revision, trust_remote_code)
    if dtype is None:
        dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
        if dtype not in TOLERANCES:
            dtype = "float32"
    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _appearing(output) as folder:
        unmerged = _write(adapter, base, loading, config, dtype, folder)
        written = load(str(folder), model_class_of(config, adapter), trust_remote_code=trust_remote_code)
        difference = unmerged.judge(written, dtype)
    return MergeReport(str(output), base, dtype, difference, unmerged.max_logit, unmerged.effect)


@dataclass(frozen=True)
class _Unmerged:
    """Outputs of base and adapter unmerged, against which a merged model is judged.

    Args:
        inputs (`list[torch.Tensor]`): Token ids, `(1, n)` each.
        logits (`list[torch.Tensor]`): Logits of each input, `(1, n, vocabulary)`, in float32.
        effect (`float`): Largest difference that the adapter makes to the logits of its base.
    """

    inputs: "list[Tensor]"
    logits: "list[Tensor]"
    effect: float

    @property
    def max_logit(self) -> float:
        """Largest logit, absolute."""
        return max(logits.abs().max().item() for logits in self.logits)

    def judge(self, merged: "PreTrainedModel", dtype: str) -> float:
        """Return the largest difference of the merged model's logits; refuse one that is not that of rounding."""
        difference = _largest_difference(_logits(merged, self.inputs), self.logits)
        scale = self.max_logit
        allowed = TOLERANCES[dtype] * max(1.0, scale)
        # The merge is nearer to the base than to the adapter. An effect below 1e-4 of the logits is in the range in
        # which float32 rounds, too, and says nothing.
        is_lost = self.effect > 1e-4 * scale and difference > self.effect / 2
        # Half precision may lose an update, which is said below. In float32 nothing but a wrong base loses one.
        if math.isinf(difference) or difference > allowed or (is_lost and dtype == "float32"):
            if is_lost:
                allowed = min(allowed, self.effect / 2)
            got = f"logits that differ by {difference:.3g} from those of base and adapter"
            remedy = "Nothing was written. Check that the base is the one used in training, or choose a wider dtype."
            raise InputError("merged model", got, f"at most {allowed:.3g} in {dtype}", remedy)
        if is_lost:
            logger.warning(
                "Rounding to %s changes the logits by up to %.2g, the adapter itself by %.2g: much of what was "
                "trained is lost. Write float32, or use the adapter with its base.",
                dtype,
                difference,
                self.effect,
            )
        return difference


def _write(
    adapter: Path, base: str, loading: dict[str, Any], config: "PreTrainedConfig", dtype: str, folder: Path
) -> _Unmerged:
    """Merge and save; return the outputs from before the merge."""
    import torch

    model = load(base, model_class_of(config, adapter), **loading)
    fit_vocabulary(model, adapter)
    # The same rows every time, spread over the vocabulary by a prime step.
    vocabulary = model.config.get_text_config().vocab_size
    inputs = []
    for length in (1, 7, 32):
        ids = torch.arange(1, length + 1) * 7919 % vocabulary
        inputs.append(ids.unsqueeze(0))
    # In this order: the adapter is put onto the model itself, which is the base no longer.
    logits_of_base = _logits(model, inputs)
    adapted = attach(model, adapter)
    logits = _logits(adapted, inputs)
    unmerged = _Unmerged(inputs, logits, _largest_difference(logits, logits_of_base))
    if unmerged.effect == 0:  # B starts at 0, and a run without a step leaves it there
        logger.warning("%s changes nothing: the merged model is its base.", adapter)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        remedy = f"peft says: {str(error).rstrip('.')}."
        raise InputError("adapter", f"{adapter}, which cannot be merged", "LoRA or a variant of it", remedy) from error
    unmerged.judge(merged, "float32")  # before rounding: the merge itself
    merged = merged.to(getattr(torch, dtype))
    weight = first_not_finite(merged.named_parameters())
    if weight is not None:
        got = f"{dtype}, which cannot hold {weight}"
        remedy = "Nothing was written. Choose bfloat16 or float32."
        raise InputError("dtype", got, "a type whose range holds every weight", remedy)
    # Training with gradient checkpointing switches the cache off, and saves that with the model.
    for settings in (merged.config, merged.config.get_text_config(), merged.generation_config):
        if getattr(settings, "use_cache", None) is False:
            settings.use_cache = True
    merged.save_pretrained(folder)
    _save_tokenizer(adapter, base, loading, folder)
    return unmerged


def _logits(model: "PreTrainedModel | PeftModel", inputs: "list[Tensor]") -> "list[Tensor]":
    import torch

    with torch.no_grad():
        return [model(input_ids=ids).logits.float() for ids in inputs]


def _largest_difference(logits: "list[Tensor]", references: "list[Tensor]") -> float:
    """Return the largest difference over all inputs; infinite where the shapes differ or a logit is NaN."""
    largest = 0.0
    for tensor, reference in zip(logits, references, strict=True):
        if tensor.shape != reference.shape:
            return math.inf
        difference = (tensor - reference).abs().max().item()
        if math.isnan(difference):  # `max` may pass over it
            return math.inf
        largest = max(largest, difference)
    return largest


def _save_tokenizer(adapter: Path, base: str, loading: dict[str, Any], folder: Path) -> None:
    """Save the tokenizer that the run has saved with its adapter, else the base's."""
    from transformers import AutoTokenizer

    source = base
    options = loading
    if (adapter / "tokenizer_config.json").is_file():
        source = str(adapter)
        options = {"trust_remote_code": loading["trust_remote_code"]}  # the revision is the base's
    try:
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
    except Exception as error:
        logger.warning("No tokenizer in %s (%s): none was written.", source, type(error).__name__)


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Make a folder beside `output` that takes its name at the end of the block, or is removed if the block fails."""
    check_writable("output", str(output))
    # Beside it: a folder can be renamed within a file system alone.
    part = output.parent / f".{output.name}.part-{os.getpid()}"
    try:
        with room_needed(part, lambda: "No merged model was written."):
            part.mkdir(parents=True)
            yield part
            part.replace(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)
