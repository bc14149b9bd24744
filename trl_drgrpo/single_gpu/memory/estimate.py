"""The peak memory of a run, phase by phase: what is there all the time plus what a phase needs for a while.

    load        weights + one of them in full precision, where it is quantized on the way
    generate    weights + optimizer state + cache of keys and values + one step's tensors (+ vLLM's share)
    score       weights (+ reference) + optimizer state + a forward without gradient
    train       weights (+ reference) + optimizer state + gradients + a forward and backward
    step        weights (+ reference) + optimizer state + gradients + the optimizer's own temporaries

The peak is the largest of them, plus what is no tensor: the device's context, the allocator's slack.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trl_drgrpo.single_gpu.memory.memory_settings import LOADED_IN, Setup
from trl_drgrpo.single_gpu.memory.meta_layers import AdaptedLinear, QuantizedLinear
from trl_drgrpo.single_gpu.memory.meta_model import build
from trl_drgrpo.single_gpu.memory.passes import Passes

MIB = 2**20
ACTIVATIONS = "activations"
# On a GPU, beside tensors. Estimates that nobody has measured yet: the CUDA context with its kernels and the workspace
# of cuBLAS (600 and 32 MiB), and what the caching allocator holds but cannot use, as a share of what comes and goes
# within a phase.
CONTEXT_PART, SLACK_PART = "CUDA context (estimate)", "slack (estimate)"
CONTEXT = 632 * MIB
SLACK = 0.05
# Elements of trained parameters that the trainer compares with where they started (`diagnostics/movement.py`).
WATCHED = 100_000


@dataclass(frozen=True)
class Phase:
    """One phase at its peak.

    Args:
        name (`str`): `"load"`, `"generate"`, `"score"`, `"train"`, `"step"` or `"sync"`.
        parts (`dict[str, int]`): Bytes per component; those of 0 are left out.
    """

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The component that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class Estimate:
    """The memory of a run.

    Args:
        setup ([`Setup`]): The run.
        phases (`tuple[Phase, ...]`): In their order.
        parameters (`int`): Of the model, without adapters.
        trained (`int`): Parameters that are trained.
    """

    setup: Setup
    phases: tuple[Phase, ...]
    parameters: int
    trained: int

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.peak.total

    @property
    def tensors(self) -> int:
        """Bytes in tensors: without context, slack and vLLM."""
        beside = (CONTEXT_PART, SLACK_PART, "vLLM")
        return max(sum(n for part, n in phase.parts.items() if part not in beside) for phase in self.phases)


class Planner:
    """Estimates for one model, whose skeletons are built once.

    Args:
        config: Of the text model; see [`read_config`].
        setup ([`Setup`]): Says how it is loaded: dtype, bits, adapters, device.
        memory (`int`, *optional*): Bytes of the device, of which vLLM takes a share.

    Raises:
        `InputError`: The model cannot be built.
    """

    def __init__(self, config: Any, setup: Setup, memory: int = 0):
        self.config = config
        self.setup = setup
        self.memory = memory
        self._passes = Passes(config, setup)
        self.model = self._passes.full.model  # on the meta device
        self.parameters = self._passes.full.parameters
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._gradients = sum(p.nbytes for p in self._trained)
        self.adapters = self._gradients if setup.adapter else 0
        self._base = _weights(self.model, self.adapters)
        self._reference = 0
        if setup.reference and setup.adapter is None:
            self._reference = sum(_weights(build(config, replace(setup, bits=0), plain=True).model, 0).values())
        self._known: dict[Setup, Estimate] = {}

    def estimate(self, setup: Setup) -> Estimate:
        """The memory of a run, whose setup is like the planner's in everything that decides how the model is
        loaded."""
        if setup not in self._known:
            phases = tuple(self._complete(setup, name, parts) for name, parts in self._parts(setup).items())
            trained = sum(p.numel() for p in self._trained)
            self._known[setup] = Estimate(setup, phases, self.parameters, trained)
        return self._known[setup]

    def training(self, setup: Setup) -> int:
        """Bytes that forward and backward need at least, whatever the other phases need: quick, to search with."""
        return self._complete(setup, "train", self._train(setup, roughly=True)).total

    def _always(self, setup: Setup) -> dict[str, int]:
        return {
            **self._base,
            "adapters": self.adapters,
            "reference model": self._reference,
            "optimizer state": sum(_state_bytes(p, setup) for p in self._trained),
            "roll-outs": _rollouts(setup),
            "movement watch": _watched(self._trained),
        }

    def _train(self, setup: Setup, roughly: bool = False) -> dict[str, int]:
        # None held: they come to be in the backward.
        activations, held = self._passes.train(setup, self._gradients, roughly)
        return {**self._always(setup), "gradients": held, ACTIVATIONS: activations}

    def _parts(self, setup: Setup) -> dict[str, dict[str, int]]:
        """Of each phase, without what is no tensor."""
        always = self._always(setup)
        # Weights are cast on the host, but quantized on the device, one after the other.
        quantized = max((rows * columns for rows, columns in _quantized(self.model)), default=0)
        phases = {
            "load": {**self._base, "a weight, not quantized yet": quantized * LOADED_IN[self.setup.dtype]},
            "train": self._train(setup),
            "step": {**always, "gradients": self._gradients, "optimizer's temporaries": self._temporaries(setup)},
        }
        pending = {**always, "gradients": self._gradients if setup.generates_mid_window else 0}
        if setup.scores_old or setup.reference:
            phases["score"] = {**pending, ACTIVATIONS: self._passes.score(setup) + _rollouts(setup)}
        if setup.vllm or setup.generates_elsewhere:
            phases["sync"] = {**pending, "one layer merged": self.one_layer_merged()}
        else:
            most, cache = self._passes.generate(setup)
            phases["generate"] = {**pending, "keys and values": cache, "logits and activations": most - cache}
        return phases

    def _complete(self, setup: Setup, name: str, parts: dict[str, int]) -> Phase:
        """With vLLM, and on a GPU what is no tensor."""
        parts = dict(parts)
        awake = ("sync",) if setup.vllm_sleeps else ("train", "step", "score", "sync")  # it starts after the model
        if setup.vllm and name in awake:
            parts["vLLM"] = int(setup.vllm_share * self.memory)
        if setup.device == "cuda":
            passing = (ACTIVATIONS, "gradients", "keys and values", "logits and activations")
            parts[CONTEXT_PART] = CONTEXT
            parts[SLACK_PART] = int(SLACK * sum(parts.get(each, 0) for each in passing))
        return Phase(name, {part: size for part, size in parts.items() if size})

    def _temporaries(self, setup: Setup) -> int:
        sizes = [p.nbytes for p in self._trained]
        if setup.optimizer == "adamw_torch":
            return sum(sizes) if setup.device == "cuda" else 2 * max(sizes)
        return max(sizes) if "8bit" in setup.optimizer or setup.optimizer == "adafactor" else 0

    def one_layer_merged(self) -> int:
        """Bytes to merge an adapter into its layer, one layer after the other: a float32 difference and its sum."""
        layers = [m for m in self.model.modules() if isinstance(m, AdaptedLinear)]
        sizes = [m.lora_a.in_features * m.lora_b.out_features * 4 * 2 for m in layers]
        return max(sizes, default=0)


def _quantized(model: Any) -> list[tuple[int, int]]:
    """Rows and columns of each quantized weight."""
    return [m.shape for m in model.modules() if isinstance(m, QuantizedLinear)]


def _weights(model: Any, adapters: int) -> dict[str, int]:
    """Bytes of the base: embeddings and head, everything else but adapters. Tied weights count once."""
    outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    sizes = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    ends = sum(size for key, size in sizes.items() if key in outer)
    return {"embeddings and head": ends, "layers": sum(sizes.values()) - ends - adapters}


def _state_bytes(parameter: nn.Parameter, setup: Setup) -> int:
    """Bytes of an optimizer's state for one parameter."""
    name, count, size = setup.optimizer, parameter.numel(), parameter.element_size()
    if "paged" in name and setup.device == "cuda":
        return 0  # in memory that moves to the host when the device runs short
    if "8bit" in name and count >= 4096:
        return 2 * count + 2 * 4 * -(-count // 256)
    if name == "sgd":
        return 0
    if name == "adafactor":
        return 4 * sum(parameter.shape) if parameter.dim() > 1 else 4 * count
    if "lion" in name or name == "rmsprop":
        return count * size
    return 2 * count * size + 4  # both moments in the type of the weights, and a step count


def _watched(trained: list[nn.Parameter]) -> int:
    """Bytes for the sampled elements: of each its place, its value at the start, and whether it had a gradient."""
    each = max(1, WATCHED // max(1, len(trained)))
    return sum(min(p.numel(), each) * (8 + p.element_size() + 1) for p in trained)


def _rollouts(setup: Setup) -> int:
    """Bytes of the ids, masks and log-probabilities of a generation batch."""
    per_token = 16 * setup.width + 4 * setup.completion * (setup.scores_old + setup.reference)
    return setup.generated_rows * per_token


# Python with PyTorch, transformers and TRL: 370 MB without CUDA (measured, anonymous pages); with CUDA an estimate.
PROCESS = {"cpu": 370 * 2**20, "cuda": 3 * 2**30}
PROCESS_PART = "Python and libraries (estimate)"
# Threads that read weights ahead; none where they are quantized on the way.
READERS = 4


def host_phases(planner: Planner) -> dict[str, dict[str, int]]:
    """Bytes of the host's memory by phase and part: `"load"` and `"save"` beside a GPU, and with adapters `"merge"`,
    which is another process."""
    setup, phases = planner.setup, {}
    if setup.device == "cuda":
        element = LOADED_IN[setup.dtype]
        stored = LOADED_IN.get(str(getattr(planner.config, "dtype", None)).removeprefix("torch."), 2)
        copied = 0
        if setup.bits or element != stored:
            copied = element * sum(_matrix_sizes(planner.model)[: 1 if setup.bits else READERS])
        saved = planner.adapters if setup.adapter else planner.parameters * element
        phases["load"] = {PROCESS_PART: PROCESS["cuda"], "weights, on their way": copied}
        phases["save"] = {PROCESS_PART: PROCESS["cuda"], "weights, to be written": saved}
    if setup.adapter:
        sums = {"base in float32": planner.parameters * LOADED_IN["float32"], "adapters": planner.adapters}
        phases["merge"] = {PROCESS_PART: PROCESS["cpu"], **sums, "one layer merged": planner.one_layer_merged()}
    return {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}


def _matrix_sizes(model: Any) -> list[int]:
    """Elements of each weight matrix before it is quantized, the largest first."""
    packed = {id(m.weight) for m in model.modules() if isinstance(m, QuantizedLinear)}
    plain = [p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in packed]
    return sorted([*plain, *(rows * columns for rows, columns in _quantized(model))], reverse=True)
