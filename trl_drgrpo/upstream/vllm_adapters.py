"""Sends the policy to vLLM after each change of its weights: a LoRA adapter, merged copies, or all weights.

An adapter goes through a folder, in memory where the system has such a place, from which a colocated engine and a
server on this machine load it. Merged copies go TRL's way, one layer at a time (`weight_sync.py`), as do all weights
where there is no adapter. `VLLMSync` takes the place of TRL's `VLLMGeneration`, whose table of weights is empty where
an adapter travels: what TRL does around them, waking the engine and clearing its cache of prefixes, stays TRL's.

Each version of an adapter has a name, an id and a folder of its own: whichever of them an engine looks up cached
prefixes by, keys and values of earlier weights are not found.
"""

import contextlib
import copy
import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock, Timeout
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from trl.generation import vllm_generation as of_trl

from trl_drgrpo.common.errors import InputError, UpstreamError
from trl_drgrpo.common.generation import VLLM_RANKS
from trl_drgrpo.search.sampling import AdapterRefused, load_adapter, serve_command, unload_adapter
from trl_drgrpo.upstream.checkpoint_weights import language_model_name, stored_name
from trl_drgrpo.upstream.kv_cache import without_adapters
from trl_drgrpo.upstream.private_state import swapped
from trl_drgrpo.upstream.weight_sync import merged_while_read, why_merged

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient

    from trl_drgrpo.upstream.trl_overrides import HostTrainer

logger = logging.getLogger(__name__)
_PREFIX = "base_model.model."  # of PEFT's names


class AdapterFolder:
    """A folder in which an adapter is written, one version at a time; removed when this object is gone, and by the
    next one where its process has crashed.

    Args:
        size (`int`): Bytes of the adapter, to see where there is room: in memory, as a rule.
    """

    def __init__(self, size: int):
        memory = Path("/dev/shm")
        has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * size
        root = memory if has_room else Path(tempfile.gettempdir())
        prefix = f"trl-drgrpo-{os.getuid()}-"
        for lock_file in root.glob(f"{prefix}*.lock"):
            _remove(FileLock(lock_file, blocking=False), lock_file.with_suffix(""))
        # The lock comes before the folder, and ends with its process: a folder without one is nobody's.
        self.path = root / f"{prefix}{uuid.uuid4().hex[:8]}"
        lock = FileLock(f"{self.path}.lock", blocking=False)
        lock.acquire()
        self.path.mkdir()
        weakref.finalize(self, _remove, lock, self.path)

    def write(self, model: PeftModel, version: Path, stored_layers: dict[str, str]) -> int:
        """Replace the version that is there by the model's active adapter; return its bytes.

        `stored_layers`: names of its layers in the base's checkpoint, which is what vLLM has loaded.
        """
        for old in self.path.iterdir():
            shutil.rmtree(old)
        version.mkdir()
        name = str(model.active_adapter)
        # Without embeddings: PEFT would look the base up on the Hub to learn whether they were resized.
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        renamed = {}
        # `base_model.model.<layer>.lora_A.weight`, for example, with the layer's name in the checkpoint.
        for key, value in state.items():
            layer, _, part = key.removeprefix(_PREFIX).partition(".lora_")
            renamed[f"{_PREFIX}{stored_layers[layer]}.lora_{part}"] = value.contiguous()
        save_file(renamed, version / "adapter_model.safetensors")
        config = copy.copy(model.peft_config[name])
        config.inference_mode = True
        config.save_pretrained(str(version))
        return sum(file.stat().st_size for file in version.iterdir())


def _remove(lock: FileLock, folder: Path) -> None:
    """Remove a folder and its lock, unless another process holds the lock."""
    with contextlib.suppress(Timeout, OSError):
        lock.acquire()
        shutil.rmtree(folder, ignore_errors=True)
        os.unlink(lock.lock_file)
        lock.release()


class VLLMSync(of_trl.VLLMGeneration):
    """TRL's `VLLMGeneration`, to which adapters travel where vLLM can take them.

    Args:
        trainer ([`HostTrainer`]): Has `vllm_lora` among its arguments, and is told what a sync took.

    Raises:
        `InputError`: Adapters cannot travel, and nothing else may; how to start the server.
    """

    model: PeftModel

    def __init__(self, *args: Any, trainer: "HostTrainer", **kwargs: Any):
        self.trainer = trainer
        trainer.vllm_lora = trainer.args.vllm_lora  # a copy on the trainer: a later assignment is refused
        self.folder: AdapterFolder | None = None  # of the process that writes for its machine
        self.path: Any = None  # of that folder, on every process; `None`: weights travel
        self.version = 0
        self.bytes = 0
        self.stored_names: dict[str, str] = {}  # in the checkpoint, by the model's names: of layers, or of weights
        self.unload: Any = None  # takes the version that a server has off its list, at the latest at the end
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        reason = self._why_merged()
        if reason is not None:
            self._merge_instead(reason)
        else:
            self.path = self._common_folder()
        # TRL builds a colocated engine or the client of a server by these names in its module, with fixed arguments.
        engines = {}
        if self.path:
            engines = {"LLM": _engine_class(self.adapter.r), "VLLMClient": _client_class(self)}
        with swapped(of_trl, **engines):
            super()._init_vllm()
        if self.mode == "server":  # the main process alone has asked it, and may have changed its mind
            decided = [self.path]
            broadcast_object_list(decided)
            self.path = decided[0]

    @property
    def adapter(self) -> Any:
        """Its configuration."""
        return self.model.active_peft_config

    @property
    def is_quantized(self) -> bool:
        """Tell whether the base is: its weights cannot travel."""
        return bool(getattr(self.model, "is_quantized", False))

    def _why_merged(self) -> str | None:
        """Return why the model has no adapter that could travel; empty where there is none at all."""
        model = self.model
        if not isinstance(model, PeftModel):
            return ""
        if self.trainer.vllm_lora == "merged":
            return "vllm_lora is 'merged'"
        if self.trainer.in_lockstep:
            return "the model is sharded"
        if len(model.active_adapters) > 1:
            return f"{len(model.active_adapters)} adapters are active"
        return why_merged(self.adapter) or self._why_not_layer_by_layer(model.get_base_model())

    def _why_not_layer_by_layer(self, base: nn.Module) -> str | None:
        """Return why vLLM has no place for the adapter of a layer; `None`: all names of layers are noted."""
        language_model = language_model_name(cast(PreTrainedModel, base))
        for name, layer in base.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            linear = layer.get_base_layer()
            if not isinstance(linear, nn.Linear):
                return f"it has an adapter on a layer of type {type(linear).__name__}"
            # vLLM adapts the language model of a multimodal model alone.
            if not name.startswith(language_model):
                return f"it has an adapter outside of the language model ({name})"
            stored = stored_name(base, f"{name}.weight", (linear.out_features, linear.in_features))
            if stored is None:
                return f"its checkpoint stores {name} in another form"
            self.stored_names[name] = stored.removesuffix(".weight")
        return None

    def _merge_instead(self, reason: str) -> None:
        """Say once that weights travel, unless they must not."""
        self.stored_names = {}
        setting = self.trainer.vllm_lora
        if setting == "adapter" or self.is_quantized:
            got = f"{setting!r}, but {reason or 'all weights are trained'}"
            remedy = "A base in 16 bits may use 'merged'; or remove use_vllm."
            raise InputError("vllm_lora", got, "a LoRA adapter that vLLM can take", remedy)
        if reason and setting == "auto" and self.accelerator.is_main_process:
            logger.warning("vLLM gets merged weights in the place of the adapter: %s.", reason)

    def _common_folder(self) -> Path:
        """Make and return the folder of this machine."""
        if self._writes:
            size = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
            self.folder = AdapterFolder(size)
        paths = gather_object([self.folder and self.folder.path])
        if self.mode == "server":
            return paths[0]
        # The rank of this machine's first process, which writes for all of its engines.
        return paths[self.accelerator.process_index - self.accelerator.local_process_index]

    @property
    def _writes(self) -> bool:
        server = self.mode == "server"
        return self.accelerator.is_main_process if server else self.accelerator.is_local_main_process

    def _write(self) -> tuple[str, Path]:
        """Write the next version of the adapter; return its name and its folder."""
        self.version += 1
        version = self.path / str(self.version)
        if self.folder is not None:
            self.bytes = self.folder.write(self.model, version, self.stored_names)
        return f"{self.path.name}-{self.version}", version

    def _iter_named_params(self) -> Any:
        # TRL yields each weight under its name in the model, and `sync_weights` sends what comes. Nothing comes where
        # an adapter travels. Else names are those of the checkpoint, which is what vLLM has loaded.
        if self.path is not None:
            return
        self.bytes = 0
        base = without_adapters(self.model)
        for name, param in super()._iter_named_params():
            self.bytes += param.nbytes
            if name not in self.stored_names:  # looked up in the first sync alone
                self.stored_names[name] = stored_name(base, name, tuple(param.shape)) or name
            yield self.stored_names[name], param

    def sync_weights(self) -> None:
        """Send weights as TRL does, or an adapter, or merged copies; the trainer logs seconds and bytes."""
        began = time.perf_counter()
        # Of a sharded model TRL gathers all weights before it merges: there is no layer by itself.
        merging = self.path is None and not self.trainer.in_lockstep
        with merged_while_read(self.model) if merging else nullcontext():
            super().sync_weights()
        if self.path is not None and self.mode == "colocate":
            self._load()
        seconds = time.perf_counter() - began
        sizes = {"sampling/sync_seconds": [seconds], "sampling/sync_bytes": [float(self.bytes)]}
        self.trainer.log_batch(sizes if self._writes else {}, {})

    def _load(self) -> None:
        """Load the next version into the engine of this process, which is awake."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        name, version = self._write()
        self.accelerator.wait_for_everyone()  # one process writes for all of its machine
        self.llm.newest = LoRARequest(name, self.version, str(version))
        if not self.llm.llm_engine.add_lora(self.llm.newest):
            raise UpstreamError("vLLM did not take the adapter. Train with vllm_lora='merged'.")
        self.accelerator.wait_for_everyone()  # before anybody may write the next one

    def load_into_server(self, client: "VLLMClient") -> None:
        """Load the next version in the place of the one before."""
        name, version = self._write()
        load_adapter(client.base_url, name, version)
        if self.unload is not None:  # only now: a request must find one of the two
            self.unload()
        client.model = name
        self.unload = weakref.finalize(self, unload_adapter, client.base_url, name)

    def begin_with_server(self, client: "VLLMClient") -> bool:
        """Tell whether adapters travel to a server, tried with the first one; if not, the log says why.

        Raises:
            `InputError`: Weights cannot travel either; how to start the server.
        """
        info: dict[str, Any] = {}
        # What the server says of itself comes first: it names the flag that is missing.
        try:
            info = client.get_server_info()
            problem = self._problem(client, info)
            if problem is None:
                self.load_into_server(client)
                return True
        except RuntimeError:  # TRL's word for it
            problem = "it runs without VLLM_SERVER_DEV_MODE=1"
        except AdapterRefused as error:
            problem = str(error)
        if self.trainer.vllm_lora == "adapter" or self.is_quantized or not info.get("weight_transfer_config"):
            options = " --quantization bitsandbytes" if self.is_quantized else ""
            command = serve_command(self.model.name_or_path, self.adapter.r, options)
            got = f"{client.base_url}, to which no adapter can be sent: {problem}"
            raise InputError("vllm_server_base_url", got, "a server that takes them", f"Start it with: {command}")
        self.path = self.folder = None
        self._merge_instead(problem)
        return False

    def _problem(self, client: "VLLMClient", info: dict[str, Any]) -> str | None:
        """Return the problem that the server states itself, if any."""
        served = info.get("model_config", {}).get("model")
        lora = info.get("lora_config")
        base = self.model.name_or_path
        # By the last part: a server on another machine may have the same model in another folder.
        served_names = {Path(name).name for name in (served, client.model) if name}
        if base and Path(base).name not in served_names:
            return f"it serves {served or client.model}, the adapter is one of {base}"
        if lora is None:
            return "it runs without --enable-lora"
        if lora["max_lora_rank"] < self.adapter.r:
            return f"its --max-lora-rank is {lora['max_lora_rank']}, the adapter has {self.adapter.r}"
        return None


def _engine_class(rank: int) -> Any:
    """Return TRL's colocated engine with adapters. A function: the name is there only where vLLM is installed."""

    engine: Any = getattr(of_trl, "LLM", object)
    # vLLM offers ranks of a fixed list, and pads smaller ones.
    offered_rank = min(size for size in VLLM_RANKS if size >= rank)

    class AdapterEngine(engine):
        newest: Any = None  # request for the newest version

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options, enable_lora=True, max_lora_rank=offered_rank, max_loras=1)

        def generate(self, *args: Any, **options: Any) -> Any:
            return super().generate(*args, **{"lora_request": self.newest, **options})

        def sleep(self, *args: Any, **options: Any) -> Any:
            # Level 2, which TRL asks for, would forget the base, which nobody sends again.
            return super().sleep(*args, **{**options, "level": 1})

    return AdapterEngine


def _client_class(sync: VLLMSync) -> Any:
    """Return TRL's client of a server, which gets adapters."""

    class AdapterClient(of_trl.VLLMClient):
        def init_communicator(self, *args: Any, **options: Any) -> None:
            if not sync.begin_with_server(self):  # adapters need no NCCL group
                super().init_communicator(*args, **options)

        def update_named_params(self, *args: Any, **options: Any) -> None:
            if sync.path is None:  # weights travel
                super().update_named_params(*args, **options)
                return
            try:
                sync.load_into_server(self)
            except AdapterRefused as error:
                got = f"{self.base_url}, which no longer loads adapters: {error}"
                raise InputError("vllm_server_base_url", got, "a server that does", "Resume when it does.") from None

    return AdapterClient
