"""The peak memory of a run, phase by phase: what is there all the time plus what a phase needs for a while.

    load        weights + one of them in full precision, where it is quantized on the way
    generate    weights + optimizer state + cache of keys and values + one step's tensors (+ vLLM's share)
    score       weights (+ reference) + optimizer state + a forward without gradient
    train       weights (+ reference) + optimizer state + gradients + a forward and backward
    step        weights (+ reference) + optimizer state + gradients + the optimizer's own temporaries

The peak is the largest of them, plus what is no tensor: the device's context, the allocator's slack.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.memory import passes
from trl_drgrpo.single_gpu.memory.memory_settings import LOADED_IN, Setup, readable
from trl_drgrpo.single_gpu.memory.meta_layers import AdaptedLinear, QuantizedLinear
from trl_drgrpo.single_gpu.memory.meta_model import MASKS, NOT_PLANNED, Skeleton, reason, text_part
from trl_drgrpo.single_gpu.memory.micro_batch_shapes import Shape, scored_shapes, trained_shapes
from trl_drgrpo.single_gpu.memory.towers import Towers, towers_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MIB = 2**20
# On a GPU, beside tensors. Estimates that nobody has measured yet: the CUDA context with its kernels and the workspace
# of cuBLAS (600 and 32 MiB), and what the caching allocator holds but cannot use, as a share of what comes and goes
# within a phase.
CONTEXT_PART = "CUDA context (estimate)"
SLACK_PART = "slack (estimate)"
ENGINE_PARTS = ("vLLM: base", "vLLM: adapters", "vLLM: keys and values")
CONTEXT = 632 * MIB
SLACK = 0.05
PASSING = ("activations", "gradients", "keys and values", "logits and activations")
# Elements of trained parameters that the trainer compares with where they started (`diagnostics/movement.py`).
WATCHED = 100_000
# Python with PyTorch, transformers and TRL: 370 MB without CUDA (measured, anonymous pages); with CUDA an estimate.
PROCESS = {"cpu": 370 * MIB, "cuda": 3 * 2**30}
PROCESS_PART = "Python and libraries (estimate)"
NOT_TENSORS = (CONTEXT_PART, SLACK_PART, PROCESS_PART, *ENGINE_PARTS)
# On a CPU, where the plan is of resident memory: Python with what two steps of a run load, and what malloc keeps of
# freed tensors, as a share of all tensors. Measured (November 2026, glibc): 500 MB, and 8 to 30%.
RUNNING = 550 * MIB
KEPT = 0.2
# Threads in which transformers reads weights ahead; none where they are quantized on the way.
READERS = 4

MOST_OTHERS = 3  # layers at the start that are unlike those behind them

Parts = dict[str, int]  # bytes by part
Phases = dict[str, Parts]  # no part is 0


@dataclass(frozen=True)
class Estimate:
    """The memory of a run.

    Args:
        setup ([`Setup`]): The run.
        phases (`dict[str, dict[str, int]]`): Bytes by phase and part: `"load"`, `"train"`, `"step"` and, where a run
            has them, `"score"`, `"generate"` and `"sync"`, each at its peak.
        parameters (`int`): Of the model, without adapters.
        trained (`int`): Parameters that are trained.
    """

    setup: Setup
    phases: Phases
    parameters: int
    trained: int

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.phases[self.peak].values())

    @property
    def tensors(self) -> int:
        """Bytes in tensors: without context, process, slack and vLLM."""
        return max(map(self.tensors_of, self.phases))

    def tensors_of(self, phase: str) -> int:
        """Return the bytes in tensors at the peak of a phase."""
        parts = self.phases[phase]
        return sum(parts.values()) - sum(parts.get(part, 0) for part in NOT_TENSORS)


class Planner:
    """Estimates for one model, whose skeletons are built once.

    A pass is run at two small depths, which give its peak at every other depth: with two and with three layers, or
    with one and with two periods where kinds of layers alternate. Up to three others may stand in front of them. Other
    models are run at their full depth.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of the model. Of several parts, the language model is run, and the
            others are weights.
        setup ([`Setup`]): Says how it is loaded: dtype, bits, adapters, device.
        memory (`int`, *optional*): Bytes of the device, of which vLLM takes a share.

    Raises:
        `InputError`: The model cannot be built.
    """

    def __init__(self, config: "PreTrainedConfig", setup: Setup, memory: int = 0):
        self.config, self.is_part = text_part(config)
        self.setup = setup
        self.memory = memory
        self.full = Skeleton(self.config, setup)
        towers = towers_of(config, setup) if self.is_part else Towers()
        self.parameters = self.full.parameters + towers.parameters
        self._shallow = self._build_shallow()
        self.is_extrapolated = bool(self._shallow)
        self._peaks: dict[tuple[object, ...], passes.Peaks] = {}  # equal runs are run once

        model = self.full.model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # Each gradient has its parameter's dtype. With adapters nothing else is trained, and they are of float32.
        self._gradients = _nbytes(self._trained)
        self.adapters = self._gradients if setup.adapter else 0
        self._quantized: list[QuantizedLinear] = []
        largest_adapted = 0
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                self._quantized.append(module)
            elif isinstance(module, AdaptedLinear):
                elements = module.lora_a.in_features * module.lora_b.out_features
                largest_adapted = max(largest_adapted, elements)
        # An adapter is merged into one layer after the other: a float32 difference and its sum.
        self._one_layer_merged = 2 * 4 * largest_adapted
        # A set, and `parameters()` gives none twice: tied weights count once.
        ends = _nbytes({*model.get_input_embeddings().parameters(), *self.full.head.parameters()})
        everything = _nbytes((*model.parameters(), *model.buffers()))
        self._base = {
            "embeddings and head": ends,
            "layers": everything - ends - self.adapters,
            "towers and projectors": towers.nbytes,
        }

    def estimate(self, setup: Setup) -> Estimate:
        """Estimate the memory of a run. Its setup must load the model in the same way as the planner's."""
        phases: Phases = {}
        for name, parts in self._tensors(setup).items():
            phases[name] = self._complete(setup, name, parts)
        trained = sum(p.numel() for p in self._trained)
        return Estimate(setup, phases, self.parameters, trained)

    def training(self, setup: Setup) -> int:
        """Return a lower bound of the bytes of forward and backward, which is quick enough to search with."""
        parts = self._train(setup, roughly=True)
        return sum(self._complete(setup, "train", parts).values())

    def _always(self, setup: Setup) -> Parts:
        """Return the parts that are there from the first step to the last."""
        parts = {**self._base, "adapters": self.adapters}
        # The reference of KL: a copy of an adapter that is trained further, a second model without adapters, and
        # nothing with a new adapter, which is switched off.
        if setup.reference and setup.goes_on:
            parts["reference adapter"] = self.adapters
        if setup.reference and setup.adapter is None:
            parts["reference model"] = sum(self._base.values())
        parts["optimizer state"] = sum(_state_bytes(p, setup) for p in self._trained)
        parts["roll-outs"] = _rollouts(setup)
        parts["movement watch"] = _watched(self._trained)
        return parts

    def _tensors(self, setup: Setup) -> Phases:
        """Return the parts of each phase, tensors alone."""
        always = self._always(setup)
        # Weights are cast on the host, but quantized on the device, one after the other.
        unquantized = LOADED_IN[self.setup.dtype] * max(_sizes(self._quantized), default=0)
        phases = {
            "load": {**self._base, "a weight, not quantized yet": unquantized},
            "train": self._train(setup),
            "step": {**always, "gradients": self._gradients, "optimizer's temporaries": self._temporaries(setup)},
        }
        pending = dict(always)
        if setup.generates_mid_window:
            pending["gradients"] = self._gradients
        if setup.scores_old or setup.reference:
            # The batch that is scored is not yet among the roll-outs, which are those of the batch before.
            phases["score"] = {**pending, "activations": self._score(setup) + _rollouts(setup)}
        if setup.vllm or setup.generates_elsewhere:
            merged = 0 if setup.sends_adapters else self._one_layer_merged
            phases["sync"] = {**pending, "one layer merged": merged}
            return phases
        # Nothing else decides a generation, so setups with as many rows at once share an entry of the cache.
        one_batch = replace(setup, batch=setup.rows_at_once, accumulation=1, steps_per_generation=1)
        peaks = self.peaks(passes.generate, one_batch)
        cache = peaks["cache"]
        temporary = max(peaks.values()) - cache
        phases["generate"] = {**pending, "keys and values": cache, "logits and activations": temporary}
        return phases

    def _train(self, setup: Setup, roughly: bool = False) -> Parts:
        """Return the parts of the micro-batch that needs most.

        `roughly`: the parts of the micro-batch with the most tokens, which is a lower bound.
        """
        shapes = trained_shapes(self.config, setup)
        if roughly:
            shapes = (max(shapes, key=lambda shape: shape.tokens),)
        needs = []
        for shape in shapes:
            activations = max(self.peaks(passes.train, setup, shape).values())
            # The backward of a step's first micro-batch makes the gradients, so they are not there before it.
            gradients = self._gradients if shape.later else 0
            needs.append({"gradients": gradients, "activations": activations})
        largest_needs = max(needs, key=lambda parts: sum(parts.values()))
        return {**self._always(setup), **largest_needs}

    def _score(self, setup: Setup) -> int:
        """Return the bytes of a forward without gradient, of policy or reference."""
        shapes = trained_shapes(self.config, setup)
        # Rows are scored before any is left out.
        if setup.reference or setup.vllm or setup.generates_elsewhere:
            shapes += scored_shapes(self.config, setup)
        most = 0
        for shape in shapes:
            # No gradient is counted here, so equal shapes before and after the first micro-batch are run once.
            peaks = self.peaks(passes.score, setup, replace(shape, later=False))
            most = max(most, peaks["score"])
        return most

    def peaks(self, run: Callable[..., passes.Peaks], setup: Setup, shape: Shape | None = None) -> passes.Peaks:
        """Return the peaks of a pass at the full depth. A shape holds all else of the setup that the pass reads."""
        key: tuple[object, ...] = (run, setup)
        arguments: list[Setup | Shape] = [setup]
        if shape is not None:
            key = (run, setup.checkpointing, setup.offload, setup.exact, shape)
            arguments.append(shape)
        if key in self._peaks:
            return self._peaks[key]
        if self._shallow:
            few, many = self._shallow
            peaks = _run(run, self._shallow[few], *arguments)
            peaks_of_many = _run(run, self._shallow[many], *arguments)
            # Within a segment every period of layers adds the same amount, see `passes.py`. For example 28 equal
            # layers, run with 2 and with 3 of them: 26 times the difference is added.
            periods = (self.config.num_hidden_layers - few) // (many - few)
            for name, peak in peaks.items():
                peaks[name] = peak + periods * (peaks_of_many[name] - peak)
        else:
            peaks = _run(run, self.full, *arguments)
        self._peaks[key] = peaks
        return peaks

    def _build_shallow(self) -> dict[int, Skeleton]:
        """Return skeletons of two depths by their number of layers; empty where they would not be like the model."""
        kinds = _kinds(self.full)
        depth = self.config.num_hidden_layers
        if len(kinds) != depth or self.setup.checkpoint_every != 1:
            return {}
        first, period = _pattern(kinds)
        # A first layer, a last one, and, with one period more, what lies between. Layers that do not make up a whole
        # period at the end are added to the smaller depth.
        few = first + (2 if period == 1 else period + (depth - first) % period)
        if few + period >= depth:
            return {}
        shallow = {}
        for layers in (few, few + period):
            try:
                skeleton = Skeleton(self.config, self.setup, layers)
            except InputError:  # a configuration may name layers that are no longer there
                return {}
            if _kinds(skeleton) != kinds[:layers]:
                return {}
            shallow[layers] = skeleton
        return shallow

    def _complete(self, setup: Setup, name: str, parts: Parts) -> Parts:
        """Add the parts of vLLM, and those that are not tensors, to the parts of a phase."""
        awake = ("sync",) if setup.vllm_sleeps else ("train", "step", "score", "sync")  # it starts after the model
        if setup.vllm and name in awake:
            parts = {**parts, **self._engine(setup)}
        if setup.device == "cuda":
            passing = sum(parts.get(part, 0) for part in PASSING)
            parts |= {CONTEXT_PART: CONTEXT, SLACK_PART: int(SLACK * passing)}
        else:
            slack = int(KEPT * sum(parts.values()))
            parts |= {SLACK_PART: slack, PROCESS_PART: RUNNING}
        return _without_zeros(parts)

    @property
    def _engines_base(self) -> int:
        """Bytes of the base in a vLLM engine: in 16 bits, or quantized as here."""
        return sum(self._base.values()) if self.setup.bits else 2 * self.parameters

    def _engine(self, setup: Setup) -> Parts:
        """Return the bytes of a vLLM engine on this device: its share, and a row's keys and values at least.

        Raises:
            `InputError`: The share has no room for the model.
        """
        adapters = self.adapters // 2 if setup.sends_adapters else 0  # float32 here, 16 bits there
        model = self._engines_base + adapters
        # vLLM takes its share of the whole device, and fills with keys and values what the model leaves of it.
        share = int(setup.vllm_share * self.memory)
        if self.memory and model > share:
            got = f"{setup.vllm_share}, {readable(share)}"
            expected = f"at least {model / self.memory:.2f}"
            remedy = f"Raise it: vLLM loads a model of {readable(model)}, and needs room for keys and values."
            raise InputError("vllm_gpu_memory_utilization", got, expected, remedy)
        config = self.config
        heads = getattr(config, "num_attention_heads", 0)  # none in models of running states alone
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        shared_heads = getattr(config, "num_key_value_heads", None) or heads
        # Without a device's size there is no share, but a row must fit: keys and values, 2 bytes each.
        one_row = 2 * 2 * config.num_hidden_layers * shared_heads * head_dim * setup.width
        sizes = (self._engines_base, adapters, max(share - model, one_row))
        return dict(zip(ENGINE_PARTS, sizes, strict=True))

    def _temporaries(self, setup: Setup) -> int:
        """Return the bytes that the optimizer's step needs beside its state."""
        largest = max(p.nbytes for p in self._trained)
        if setup.optimizer == "adamw_torch":  # all weights at once on a GPU (`foreach`), else one after the other
            return self._gradients if setup.device == "cuda" else 2 * largest
        if "8bit" in setup.optimizer or setup.optimizer == "adafactor":
            return largest
        return 0  # the default, `adamw_torch_fused`, works in place

    def host(self, setup: Setup | None = None) -> Phases:
        """Return the bytes of the host's memory by phase and part.

        `"load"` and `"save"` beside a GPU, `"train"` where checkpoints wait there, `"sleep"` of a vLLM that keeps its
        base, and with adapters `"merge"`, which is another process. `setup`: as in [`estimate`]; by default the
        planner's.
        """
        setup = setup or self.setup
        phases: Phases = {}
        if setup.device == "cuda":
            saved = self.adapters if setup.adapter else self.parameters * LOADED_IN[setup.dtype]
            phases["load"] = {"weights, on their way": self._cast_while_loading(setup)}
            phases["save"] = {"weights, to be written": saved}
            if setup.checkpointing and setup.offload:
                phases["train"] = {"checkpoints": self._offloaded(setup)}
        if setup.vllm and setup.vllm_sleeps and setup.sends_adapters:
            phases["sleep"] = {"vLLM: base": self._engines_base}
        if setup.adapter:
            phases["merge"] = {
                "base in float32": self.parameters * LOADED_IN["float32"],
                "adapters": self.adapters,
                "one layer merged": self._one_layer_merged,
            }
        for name, parts in phases.items():
            process = PROCESS["cpu" if name == "merge" else "cuda"]
            phases[name] = _without_zeros({PROCESS_PART: process, **parts})
        return phases

    def _cast_while_loading(self, setup: Setup) -> int:
        """Return the bytes of the largest matrices that are on the host at once, on their way to the device."""
        element = LOADED_IN[setup.dtype]
        stored = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        if not setup.bits and element == LOADED_IN.get(stored, 2):
            # Nothing is cast: pages of the files go to the device as they are.
            return 0
        packed = {module.weight for module in self._quantized}
        matrices = _sizes(self._quantized)
        for parameter in self.full.model.parameters():
            if parameter.dim() > 1 and parameter not in packed:
                matrices.append(parameter.numel())
        at_once = 1 if setup.bits else READERS
        return element * sum(sorted(matrices, reverse=True)[:at_once])

    def _offloaded(self, setup: Setup) -> int:
        """Return the bytes of the checkpoints that wait on the host."""
        tokens = max(shape.tokens for shape in trained_shapes(self.config, setup))
        one_input = tokens * self.config.hidden_size * LOADED_IN[setup.dtype]
        # Up to a bound of its own, PyTorch (2.13) rounds what it pins to a power of two: 5 MB take 8.
        pinned = 2 ** (one_input - 1).bit_length()
        checkpoints = math.ceil(len(self.full.layers) / setup.checkpoint_every)
        return checkpoints * pinned


def _run(run: Callable[..., passes.Peaks], skeleton: Skeleton, *arguments: Setup | Shape) -> passes.Peaks:
    """Run a pass with masks in the first form that the model takes; raise an `InputError` where it takes none."""
    try:
        return run(skeleton, *arguments)
    except NOT_PLANNED as error:
        if skeleton.masks != MASKS[-1]:
            # The form stays: later passes begin with the one that this pass ran with.
            skeleton.masks = MASKS[MASKS.index(skeleton.masks) + 1]
            return _run(run, skeleton, *arguments)
        got = f"{skeleton.config.model_type}, whose {run.__name__} step cannot be run without weights"
        remedy = f"It cannot be planned. {reason(error)}"
        raise InputError("--model", got, "a decoder whose steps can be counted", remedy) from error


Kind = tuple[object, ...]


def _kinds(skeleton: Skeleton) -> list[Kind]:
    """Return for each layer of a decoder what makes it differ from others: its weights, and its kind of attention."""
    types = getattr(skeleton.config, "layer_types", None) or ()
    kinds: list[Kind] = []
    for number, layer in enumerate(skeleton.layers):
        weights = [(name, weight.shape) for name, weight in layer.named_parameters()]
        kinds.append((weights, *types[number : number + 1]))
    return kinds


def _pattern(kinds: list[Kind]) -> tuple[int, int]:
    """Return how layers repeat: how many at the start are others (dense ones before experts), and the period behind.

    For example 1 and 2 for layers of the kinds d, a, b, a, b, a, b. All are others where nothing repeats.
    """
    for first in range(MOST_OTHERS + 1):
        for period in range(1, (len(kinds) - first) // 2):
            if kinds[first + period :] == kinds[first:-period]:
                return first, period
    return len(kinds), 1


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _sizes(layers: list[QuantizedLinear]) -> list[int]:
    """Return the numbers of weights, as they are before they are packed."""
    return [layer.in_features * layer.out_features for layer in layers]


def _without_zeros(parts: Parts) -> Parts:
    return {part: size for part, size in parts.items() if size}


def _state_bytes(parameter: nn.Parameter, setup: Setup) -> int:
    """Return the bytes of an optimizer's state for one parameter."""
    name = setup.optimizer
    count = parameter.numel()
    if "paged" in name and setup.device == "cuda":
        return 0  # in memory that moves to the host when the device runs short
    # bitsandbytes leaves smaller ones as they are.
    if "8bit" in name and count >= 4096:
        scales = -(-count // 256)
        return 2 * (count + 4 * scales)  # two moments of a byte, each with a float32 scale per 256
    if name == "sgd":
        return 0
    if name == "adafactor":  # sums over rows and columns in the place of a matrix
        return 4 * sum(parameter.shape) if parameter.dim() > 1 else 4 * count
    if "lion" in name or name == "rmsprop":
        return parameter.nbytes
    return 2 * parameter.nbytes + 4  # both moments in the type of the weights, and a step count


def _watched(trained: list[nn.Parameter]) -> int:
    """Return the bytes of the sampled elements: place, value at the start, and a flag for its gradient."""
    per_parameter = max(1, WATCHED // max(1, len(trained)))
    nbytes = 0
    for parameter in trained:
        elements = min(parameter.numel(), per_parameter)
        nbytes += elements * (8 + parameter.element_size() + 1)
    return nbytes


def _rollouts(setup: Setup) -> int:
    """Return the bytes of the ids, masks and log-probabilities of a generation batch."""
    log_probs = setup.scores_old + setup.reference  # old ones, those of the reference
    per_row = 16 * setup.width + 4 * setup.completion * log_probs  # ids and masks in int64
    return setup.generated_rows * per_row
