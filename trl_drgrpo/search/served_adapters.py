"""LoRA adapters on a vLLM server, loaded while it runs: `POST /v1/load_lora_adapter` with a folder that it sees.

Every load has a name of its own. vLLM looks up cached prefixes by the adapter's name and folder, so one that is loaded
under an old name, or in place, would be answered with keys and values of the weights before.
"""

import contextlib
import json
import uuid
import weakref
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.judge.chat_client import import_http

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank
SECONDS = 600.0  # for a server that is busy
FILE = "adapter_config.json"


class AdapterRefused(Exception):
    """The server did not load an adapter; the message says why."""


def serve_command(model: str, rank: int, options: str = "") -> str:
    """The command that starts a server for adapters of this rank on a model."""
    offered = next((each for each in RANKS if each >= rank), RANKS[-1])
    variables = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    logprobs = "--logprobs-mode processed_logprobs --max-logprobs -1"
    return f"{variables} vllm serve {model} --enable-lora --max-lora-rank {offered} {logprobs}{options}"


def load_adapter(base_url: str, name: str, folder: Path) -> None:
    """Loads the adapter of a folder under a name; `AdapterRefused` where the server does not."""
    status, said = _post(base_url, "load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    if status == 404 and "lora" not in said.lower():
        raise AdapterRefused("it has no /v1/load_lora_adapter: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set")
    if status != 200:
        unseen = status == 404 or "No adapter found" in said
        raise AdapterRefused(f"it does not see {folder}" if unseen else said)


def unload_adapter(base_url: str, name: str) -> None:
    """Takes an adapter off the server's list, as far as the server still answers."""
    with contextlib.suppress(import_http().TransportError):
        _post(base_url, "unload_lora_adapter", {"lora_name": name}, seconds=5.0)


def served_name(owner: Any, base_url: str, model: str) -> str:
    """The name under which a server has a model: a local adapter is loaded, until `owner` is gone; any other model's
    name is its own. An `InputError` says how to start the server."""
    folder = Path(model).expanduser().absolute()
    if not (folder / FILE).is_file() or (folder / "config.json").is_file():
        return model
    config = json.loads((folder / FILE).read_text(encoding="utf-8"))
    name = f"{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        load_adapter(base_url, name, folder)
    except (AdapterRefused, import_http().TransportError) as error:
        command = serve_command(str(config.get("base_model_name_or_path")), config.get("r") or 1)
        got = f"{base_url}, which does not load the adapter {model}: {error}"
        raise InputError("vllm_server_base_url", got, "a server that does", f"Start it with: {command}") from None
    weakref.finalize(owner, unload_adapter, base_url, name)
    return name


def _post(base_url: str, route: str, body: dict[str, Any], seconds: float = SECONDS) -> tuple[int, str]:
    """Status and message of the answer."""
    response = import_http().post(f"{base_url.rstrip('/')}/v1/{route}", json=body, timeout=seconds)
    try:
        said = response.json()
        said = said.get("error", said).get("message", response.text)
    except (ValueError, AttributeError):
        said = response.text
    return response.status_code, " ".join(str(said).split())[:300]
