"""What TRL imports from the package `vllm` (the surface of 0.31), without vLLM: for tests where no GPU is.

`LLM` is an engine in this process around a real model. The weight-transfer group is a queue that hands buffers over in
the order of the stream; packing is as lazy as vLLM's: views of the tensors are kept, and copied when a buffer is full.
What a real engine would crash on (generating while asleep, unknown weights) is an error here, too.
"""

import contextlib
import copy
import importlib
import json
import math
import os
import queue
import sys
import threading
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from trl_drgrpo.upstream.kv_cache import CACHE

VERSION = "0.31.0"
BLOCK = 16  # tokens of a block of the prefix cache
# `hf_to_vllm_mapper` of its multimodal models.
PREFIXES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
PREFIXES |= {f"model.{part}.": f"{part}." for part in ("vision_tower", "multi_modal_projector", "visual")}
BUFFER_SIZE = 1024**3  # bytes of a packed buffer, vLLM's default


class Engine:
    """Generates from a model of its own, with vLLM's conventions.

    Args:
        model: Any causal language model of transformers.
        seed: Together with the number of the request it decides what is sampled.
        distortion: Spread of a fixed offset per token, added to the logits: an engine that computes other
            probabilities than the trainer, as kernels in reduced precision do.
    """

    def __init__(self, model, seed=0, distortion=0.0):
        self.model = model.eval().requires_grad_(False)
        self.params = {self.name_here(name): param for name, param in model.named_parameters()}
        self.seed = seed
        self.requests = 0
        self.loads = 0
        self.base = {name: param.data.clone() for name, param in self.params.items()}
        self.prefixes = {}  # keys and values by adapter and tokens, as vLLM looks them up
        offsets = torch.randn(model.config.get_text_config().vocab_size, generator=torch.Generator().manual_seed(0))
        self.offsets = distortion * offsets.to(next(model.parameters()).dtype)

    def name_here(self, name):
        """Rename the weights of a checkpoint, of today's or an older form, as vLLM's multimodal models do."""
        if self.model.config.get_text_config() is self.model.config:
            return name
        for old, new in PREFIXES.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def load_weights(self, weights):
        for name, tensor in weights:
            name = self.name_here(name)
            self.params[name].data.copy_(tensor)  # an unknown name is a KeyError, as in vLLM
            self.base[name].copy_(tensor)
            self.loads += 1

    def use_adapter(self, folder=None):
        """Generates with the adapter in a folder from now on; `None`: without one."""
        for name, value in self.base.items():
            self.params[name].data.copy_(value)
        if folder is None:
            return
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
        for name, b in load_file(Path(folder) / "adapter_model.safetensors").items():
            if ".lora_B." in name:
                a = load_file(Path(folder) / "adapter_model.safetensors")[name.replace(".lora_B.", ".lora_A.")]
                of = self.name_here(name.removeprefix("base_model.model.").replace(".lora_B.", "."))
                if of not in self.params:  # vLLM passes over it without a word
                    continue
                self.params[of].data.add_((scale * b.double() @ a.double()).to(self.params[of].dtype))

    @torch.no_grad()
    def generate(self, prompts, n, max_tokens, temperature=1.0, logprobs=0, adapter=None, **others):
        """Per prompt, n pairs of token ids and their log-probabilities after temperature. `adapter`: whatever the
        engine tells adapters by when it looks up a prefix."""
        neutral = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        unknown = {name: value for name, value in others.items() if neutral.get(name) != value}
        if unknown or logprobs != 0:
            raise ValueError(f"the stub cannot sample with {unknown}, logprobs={logprobs}")
        generator = torch.Generator().manual_seed(1000 * self.seed + self.requests)
        self.requests += 1
        return [self._sample(prompt, n, max_tokens, temperature, generator, adapter) for prompt in prompts]

    def _prefix(self, prompt, adapter):
        """Keys and values of the prompt's full blocks, computed or found."""
        cut = (len(prompt) - 1) // BLOCK * BLOCK
        key = (adapter, tuple(prompt[:cut]))
        if cut and key not in self.prefixes:
            self.prefixes[key] = self.model(torch.tensor([prompt[:cut]]), use_cache=True)[CACHE]
        return cut, copy.deepcopy(self.prefixes.get(key))

    def _sample(self, prompt, n, max_tokens, temperature, generator, adapter):
        stop = set(self.model.generation_config.eos_token_id)
        ids, rows, done = torch.tensor([prompt] * n), [([], []) for _ in range(n)], [False] * n
        cut, prefix = self._prefix(prompt, adapter)
        if prefix is not None:
            prefix.reorder_cache(torch.zeros(n, dtype=torch.long))  # also repeats running states
        for _ in range(max_tokens):
            known = {} if prefix is None else {CACHE: copy.deepcopy(prefix)}
            logits = self.model(ids[:, cut:], **known).logits[:, -1] + self.offsets
            log_probs = torch.log_softmax(logits / temperature, dim=-1)
            tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)
            for row, token in enumerate(tokens[:, 0].tolist()):
                if not done[row]:
                    rows[row][0].append(token)
                    rows[row][1].append(log_probs[row, token].item())
                    done[row] = token in stop
            if all(done):
                break
            ids = torch.cat([ids, tokens], dim=1)
        return rows


class LLM:
    """The engine in the trainer's process ("colocate"). `calls` notes what was asked of it, in order."""

    instances: list = []  # noqa: RUF012

    def __init__(self, model, **kwargs):
        named = getattr(transformers, AutoConfig.from_pretrained(model).architectures[0])
        self.engine = Engine(named.from_pretrained(model), seed=kwargs["seed"])
        self.kwargs = kwargs
        self.calls = []
        self.asleep, self.loaded = set(), []
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights)))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=kwargs["max_model_len"]),
            add_lora=self._add_lora,
        )
        self.instances.append(self)

    def _load_weights(self, weights):
        if "weights" in self.asleep:
            raise RuntimeError("weights are loaded into memory that is not mapped")
        if self.calls[-1:] != ["load_weights"]:
            self.calls.append("load_weights")
        self.engine.load_weights(weights)

    def _add_lora(self, request):
        if "weights" in self.asleep or not self.kwargs.get("enable_lora"):
            raise RuntimeError("asleep, or LoRA is not enabled")
        if request.rank > self.kwargs["max_lora_rank"]:
            raise ValueError(f"LoRA rank {request.rank} is greater than max_lora_rank {self.kwargs['max_lora_rank']}")
        self.calls.append("add_lora")
        if request.lora_int_id in self.loaded:  # vLLM has that one already, it thinks
            return False
        self.loaded.append(request.lora_int_id)
        self.engine.use_adapter(request.lora_path)
        return True

    def generate(self, prompts, sampling_params, use_tqdm=True, lora_request=None):
        if self.asleep:
            raise RuntimeError(f"asleep: {self.asleep}")
        self.calls.append("generate")
        if lora_request is None:
            self.engine.use_adapter(None)
        adapter = lora_request and (lora_request.lora_name, lora_request.lora_path)
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        rows = self.engine.generate(ids, adapter=adapter, **sampling_params.values)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[
                    SimpleNamespace(
                        token_ids=ids,
                        logprobs=[
                            {t: SimpleNamespace(logprob=p, rank=1)} for t, p in zip(ids, log_probs, strict=True)
                        ],
                    )
                    for ids, log_probs in completions
                ],
            )
            for prompt, completions in zip(prompts, rows, strict=True)
        ]

    def sleep(self, level):
        if not self.kwargs["enable_sleep_mode"]:
            raise RuntimeError("only where it was enabled")
        self.calls.append("sleep" if level == 2 else f"sleep at level {level}")
        self.asleep = {"weights", "kv_cache"}
        if level < 2:
            return
        for param in self.engine.params.values():
            param.data.fill_(math.nan)  # level 2 throws the weights away

    def wake_up(self, tags):
        self.calls.append(f"wake_up {' '.join(tags)}")
        self.asleep -= set(tags)

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        self.engine.prefixes.clear()


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def rank(self):
        return json.loads((Path(self.lora_path) / "adapter_config.json").read_text())["r"]


class SamplingParams:
    def __init__(self, **values):
        self.values = values


# Weight transfer -----------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """The two ends of a weight-transfer group: who has joined, and the buffers on their way."""

    joined: threading.Event = field(default_factory=threading.Event)
    buffers: queue.Queue = field(default_factory=queue.Queue)
    group: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(store=None, socket=None))


LINKS: dict[int, Link] = {}  # by port


def trainer_init(init_info):
    link = LINKS.setdefault(init_info["master_port"], Link())
    link.joined.set()
    return link


def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    views, size = [], 0
    for item in iterator:
        views.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        size += views[-1].numel()
        if size > BUFFER_SIZE:
            group.buffers.put(torch.cat(views))
            views, size = [], 0
    if views:
        group.buffers.put(torch.cat(views))


def unpacked(buffers, update_info):
    """The tensors that were announced, from the buffers that arrive."""
    packed = torch.empty(0, dtype=torch.uint8)
    described = zip(*(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True)
    for name, dtype_name, shape in described:
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        while packed.numel() < size:
            packed = torch.cat([packed, buffers.get(timeout=10)])
        yield name, packed[:size].clone().view(dtype).view(shape)
        packed = packed[size:]


# Put in vLLM's place -------------------------------------------------------------------------------------------------

MODULES = {
    "vllm": {"LLM": LLM, "RequestOutput": SimpleNamespace, "SamplingParams": SamplingParams, "__version__": VERSION},
    "vllm.sampling_params": {"StructuredOutputsParams": SimpleNamespace},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.utils": {},
    "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    "vllm.distributed": {},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
    "vllm.distributed.weight_transfer.packed_tensor": {
        "packed_nccl_broadcast_producer": packed_nccl_broadcast_producer
    },
}
OF_TRL = ("trl.generation.vllm_client", "trl.generation.vllm_generation")


@contextlib.contextmanager
def installed():
    """Inside the block TRL finds vLLM; afterwards everything is as it was, the environment included."""
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    environment = dict(os.environ)  # TRL sets RANK, WORLD_SIZE and the like for a colocated engine
    trl_modules = [importlib.import_module(name) for name in OF_TRL]
    as_before = [dict(vars(module)) for module in trl_modules]
    for name in hidden:
        del sys.modules[name]
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        for module in trl_modules:
            importlib.reload(module)  # in place: classes that are in use elsewhere see the new names
        client = trl_modules[0].VLLMClient
        client.init_communicator = _without_a_gpu(client.init_communicator)
        yield
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        for module, before in zip(trl_modules, as_before, strict=True):
            vars(module).clear()
            vars(module).update(before)
        os.environ.clear()
        os.environ.update(environment)
        LINKS.clear()


def _without_a_gpu(init_communicator):
    """TRL refuses a device that is not CUDA, because NCCL would; the stub's group takes any."""

    def init(self, device=0):
        return init_communicator(self, "cuda")

    return init
