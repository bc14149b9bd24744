"""The peak memory of a run, phase by phase: what is there all the time plus what a phase needs for a while.

    load        weights + one of them in full precision, where it is quantized on the way
    generate    weights + optimizer state + cache of keys and values + one step's tensors (+ vLLM's share)
    score       weights (+ reference) + optimizer state + a forward without gradient
    train       weights (+ reference) + optimizer state + gradients + a forward and backward
    step        weights (+ reference) + optimizer state + gradients + the optimizer's own temporaries

The peak is the largest of them, plus what is no tensor: the device's context, the allocator's slack.

From an amount of memory to batch sizes that fit (`propose`): the largest micro-batch, the rest by accumulation. What
the user gave stays as it is. Otherwise, in this order: the rows of an optimizer step are kept (64 where nothing says
how many); the completion length is 1,024, or the longest below it that fits into the model's context, behind the
prompt, and with the smallest batch; the micro-batch is the largest that fits; one generation serves as many
micro-batches of the step as fit. Where nothing fits that way, the same again with what costs time alone: generation in
rounds of fewer rows, then checkpoints that wait on the host, too.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from torch import nn

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS
from trl_drgrpo.single_gpu.memory import passes
from trl_drgrpo.single_gpu.memory.memory_settings import FIELD_KEYS, LOADED_IN, Setup, readable
from trl_drgrpo.single_gpu.memory.meta_layers import AdaptedLinear, QuantizedLinear
from trl_drgrpo.single_gpu.memory.meta_model import MASKS, NOT_PLANNED, Skeleton, reason, text_part
from trl_drgrpo.single_gpu.memory.micro_batch_shapes import Shape, scored_shapes, trained_shapes
from trl_drgrpo.single_gpu.memory.towers import Towers, towers_of
from trl_drgrpo.single_gpu.vocabulary import context_length

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
# On a CPU, where the plan is of resident memory: Python with what two steps of a run load, and what malloc keeps of
# freed tensors, as a share of all tensors. Measured (November 2026, glibc): 500 MB, and 8 to 30%.
RUNNING = 550 * MIB
KEPT = 0.2
# Threads that read weights ahead; none where they are quantized on the way.
READERS = 4

MOST_OTHERS = 3  # layers at the start that are unlike those behind them

Phases = dict[str, dict[str, int]]  # bytes, by phase and part; no part is 0


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
        others = (CONTEXT_PART, SLACK_PART, PROCESS_PART, *ENGINE_PARTS)
        return sum(size for part, size in self.phases[phase].items() if part not in others)


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

    def __init__(self, config: Any, setup: Setup, memory: int = 0):
        self.config, self.is_part = text_part(config)
        self.setup = setup
        self.memory = memory
        self.full = Skeleton(self.config, setup)
        towers = towers_of(config, setup) if self.is_part else Towers()
        self.parameters = self.full.parameters + towers.parameters
        self._shallow = self._build_shallow()
        self.is_extrapolated = bool(self._shallow)
        self._peaks: dict[Any, passes.Peaks] = {}  # equal runs are run once
        model = self.full.model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._gradients = sum(p.nbytes for p in self._trained)
        self.adapters = self._gradients if setup.adapter else 0
        modules = list(model.modules())
        self._quantized = [m for m in modules if isinstance(m, QuantizedLinear)]
        # To merge an adapter into its layer, one layer after the other: a float32 difference and its sum.
        adapted = [m.lora_a.in_features * m.lora_b.out_features for m in modules if isinstance(m, AdaptedLinear)]
        self._one_layer_merged = max(adapted, default=0) * 4 * 2
        outer = {id(p) for m in (model.get_input_embeddings(), self.full.head) for p in m.parameters()}
        sizes = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}  # tied weights count once
        ends = sum(size for key, size in sizes.items() if key in outer)
        layers = sum(sizes.values()) - ends - self.adapters
        self._base = {"embeddings and head": ends, "layers": layers, "towers and projectors": towers.nbytes}

    def estimate(self, setup: Setup) -> Estimate:
        """Estimate the memory of a run. Its setup must load the model in the same way as the planner's."""
        phases = {name: self._complete(setup, name, parts) for name, parts in self._parts(setup).items()}
        return Estimate(setup, phases, self.parameters, sum(p.numel() for p in self._trained))

    def training(self, setup: Setup) -> int:
        """Return a lower bound of the bytes of forward and backward, which is quick enough to search with."""
        return sum(self._complete(setup, "train", self._train(setup, roughly=True)).values())

    def _always(self, setup: Setup) -> dict[str, int]:
        is_second = setup.reference and setup.adapter is None  # else the reference is the model without adapters
        return {
            **self._base,
            "adapters": self.adapters,
            "reference adapter": self.adapters if setup.reference and setup.goes_on else 0,
            "reference model": sum(self._base.values()) if is_second else 0,
            "optimizer state": sum(_state_bytes(p, setup) for p in self._trained),
            "roll-outs": _rollouts(setup),
            "movement watch": _watched(self._trained),
        }

    def _parts(self, setup: Setup) -> Phases:
        """Return the parts of each phase, tensors alone."""
        always = self._always(setup)
        # Weights are cast on the host, but quantized on the device, one after the other.
        quantized = max((m.in_features * m.out_features for m in self._quantized), default=0)
        phases = {
            "load": {**self._base, "a weight, not quantized yet": quantized * LOADED_IN[self.setup.dtype]},
            "train": self._train(setup),
            "step": {**always, "gradients": self._gradients, "optimizer's temporaries": self._temporaries(setup)},
        }
        pending = {**always, "gradients": self._gradients if setup.generates_mid_window else 0}
        if setup.scores_old or setup.reference:
            phases["score"] = {**pending, "activations": self._score(setup) + _rollouts(setup)}
        if setup.vllm or setup.generates_elsewhere:
            phases["sync"] = {**pending, "one layer merged": 0 if setup.sends_adapters else self._one_layer_merged}
        else:
            one_batch = replace(setup, batch=setup.rows_at_once, accumulation=1, steps_per_generation=1)
            peaks = self.peaks(passes.generate, one_batch)
            cache = peaks["cache"]
            phases["generate"] = {
                **pending,
                "keys and values": cache,
                "logits and activations": max(peaks.values()) - cache,
            }
        return phases

    def _train(self, setup: Setup, roughly: bool = False) -> dict[str, int]:
        """Return the parts of the micro-batch that needs most.

        `roughly`: the parts of the micro-batch with the most tokens, which is a lower bound.
        """
        shapes = trained_shapes(self.config, setup)
        if roughly:
            shapes = (max(shapes, key=lambda shape: shape.tokens),)
        needs = []
        for shape in shapes:
            # The backward of a step's first micro-batch makes the gradients, so they are not there before it.
            activations = max(self.peaks(passes.train, setup, shape).values())
            needs.append((activations, self._gradients * shape.later))
        activations, gradients = max(needs, key=sum)
        return {**self._always(setup), "gradients": gradients, "activations": activations}

    def _score(self, setup: Setup) -> int:
        """Return the bytes of a forward without gradient, of policy or reference."""
        shapes = trained_shapes(self.config, setup)
        if setup.reference or setup.vllm or setup.generates_elsewhere:  # rows are scored before any is left out
            shapes += scored_shapes(self.config, setup)
        return max(self.peaks(passes.score, setup, replace(shape, later=False))["score"] for shape in shapes)

    def peaks(self, run: Callable[..., passes.Peaks], setup: Setup, shape: Shape | None = None) -> passes.Peaks:
        """Return the peaks of a pass at the full depth. A shape holds all else of the setup that the pass reads."""
        key: Any = (run, setup) if shape is None else (run, setup.checkpointing, setup.offload, setup.exact, shape)
        if key not in self._peaks:
            arguments = (setup,) if shape is None else (setup, shape)
            if not self._shallow:
                self._peaks[key] = _run(run, self.full, *arguments)
            else:
                (few, skeleton_of_few), (more, skeleton_of_more) = self._shallow.items()
                peaks_of_few = _run(run, skeleton_of_few, *arguments)
                peaks_of_more = _run(run, skeleton_of_more, *arguments)
                steps = (self.config.num_hidden_layers - few) // (more - few)
                self._peaks[key] = {
                    name: peak + steps * (peaks_of_more[name] - peak) for name, peak in peaks_of_few.items()
                }
        return self._peaks[key]

    def _build_shallow(self) -> dict[int, Skeleton]:
        """Return skeletons of two depths by their number of layers; empty where they would not be like the model."""
        kinds = _kinds(self.full)
        depth = self.config.num_hidden_layers
        if len(kinds) != depth or self.setup.checkpoint_every != 1:
            return {}
        pattern = next(_patterns(kinds), None)
        if pattern is None:
            return {}
        first, period = pattern
        # A first layer, a last one, and, with one period more, what lies between.
        few = first + (2 if period == 1 else period + (depth - first) % period)
        if few + period >= depth:
            return {}
        try:
            shallow = {layers: Skeleton(self.config, self.setup, layers) for layers in (few, few + period)}
        except InputError:  # a configuration may name layers that are no longer there
            return {}
        are_alike = all(_kinds(skeleton) == kinds[:layers] for layers, skeleton in shallow.items())
        return shallow if are_alike else {}

    def _complete(self, setup: Setup, name: str, parts: dict[str, int]) -> dict[str, int]:
        """Add the parts of vLLM, and those that are not tensors, to the parts of a phase."""
        awake = ("sync",) if setup.vllm_sleeps else ("train", "step", "score", "sync")  # it starts after the model
        if setup.vllm and name in awake:
            parts = {**parts, **self._engine(setup)}
        if setup.device == "cuda":
            parts[CONTEXT_PART] = CONTEXT
            parts[SLACK_PART] = int(SLACK * sum(parts.get(part, 0) for part in PASSING))
        else:
            parts |= {SLACK_PART: int(KEPT * sum(parts.values())), PROCESS_PART: RUNNING}
        return _without_zeros(parts)

    @property
    def _engines_base(self) -> int:
        """Bytes of the base in a vLLM engine: in 16 bits, or quantized as here."""
        return sum(self._base.values()) if self.setup.bits else 2 * self.parameters

    def _engine(self, setup: Setup) -> dict[str, int]:
        """Return the bytes of a vLLM engine on this device: its share, and a row's keys and values at least.

        Raises:
            `InputError`: The share has no room for the model.
        """
        config = self.config
        heads = self.config.num_attention_heads
        share = int(setup.vllm_share * self.memory)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        row = 2 * 2 * config.num_hidden_layers * shared * width * setup.width  # in 16 bits
        model = (self._engines_base, self.adapters // 2 if setup.sends_adapters else 0)
        if self.memory and sum(model) > share:
            got = f"{setup.vllm_share}, {readable(share)}"
            expected = f"at least {sum(model) / self.memory:.2f}"
            remedy = f"Raise it: vLLM loads a model of {readable(sum(model))}, and needs room for keys and values."
            raise InputError("vllm_gpu_memory_utilization", got, expected, remedy)
        return dict(zip(ENGINE_PARTS, (*model, max(share - sum(model), row)), strict=True))

    def _temporaries(self, setup: Setup) -> int:
        sizes = [p.nbytes for p in self._trained]
        if setup.optimizer == "adamw_torch":
            return sum(sizes) if setup.device == "cuda" else 2 * max(sizes)
        return max(sizes) if "8bit" in setup.optimizer or setup.optimizer == "adafactor" else 0

    def host(self, setup: Setup | None = None) -> Phases:
        """Return the bytes of the host's memory by phase and part.

        `"load"` and `"save"` beside a GPU, `"train"` where checkpoints wait there, `"sleep"` of a vLLM that keeps its
        base, and with adapters `"merge"`, which is another process. `setup`: as in [`estimate`]; by default the
        planner's.
        """
        setup = setup or self.setup
        phases = {}
        if setup.device == "cuda":
            element = LOADED_IN[setup.dtype]
            stored = LOADED_IN.get(str(getattr(self.config, "dtype", None)).removeprefix("torch."), 2)
            copied = 0
            if setup.bits or element != stored:
                packed = {id(m.weight) for m in self._quantized}
                plain = [p.numel() for p in self.full.model.parameters() if p.dim() > 1 and id(p) not in packed]
                matrices = [*plain, *(m.in_features * m.out_features for m in self._quantized)]
                at_once = 1 if setup.bits else READERS
                copied = element * sum(sorted(matrices, reverse=True)[:at_once])
            saved = self.adapters if setup.adapter else self.parameters * element
            phases["load"] = {PROCESS_PART: PROCESS["cuda"], "weights, on their way": copied}
            phases["save"] = {PROCESS_PART: PROCESS["cuda"], "weights, to be written": saved}
            if setup.checkpointing and setup.offload:
                tokens = max(shape.tokens for shape in trained_shapes(self.config, setup))
                one_input = tokens * self.config.hidden_size * element
                # Up to a bound of its own, PyTorch rounds what it pins to a power of two.
                pinned = 2 ** (one_input - 1).bit_length()
                checkpoints = -(-len(self.full.layers) // setup.checkpoint_every)
                phases["train"] = {PROCESS_PART: PROCESS["cuda"], "checkpoints": checkpoints * pinned}
        if setup.vllm and setup.vllm_sleeps and setup.sends_adapters:
            phases["sleep"] = {PROCESS_PART: PROCESS["cuda"], "vLLM: base": self._engines_base}
        if setup.adapter:
            sums = {"base in float32": self.parameters * LOADED_IN["float32"], "adapters": self.adapters}
            sums["one layer merged"] = self._one_layer_merged
            phases["merge"] = {PROCESS_PART: PROCESS["cpu"], **sums}
        return {name: _without_zeros(parts) for name, parts in phases.items()}


def _run(run: Callable[..., passes.Peaks], skeleton: Skeleton, *rest: Any) -> passes.Peaks:
    """Run a pass with masks in the first form that the model takes; raise an `InputError` where it takes none."""
    try:
        return run(skeleton, *rest)
    except NOT_PLANNED as error:
        if skeleton.masks != MASKS[-1]:
            skeleton.masks = MASKS[MASKS.index(skeleton.masks) + 1]
            return _run(run, skeleton, *rest)
        got = f"{skeleton.config.model_type}, whose {run.__name__} step cannot be run without weights"
        remedy = f"It cannot be planned. {reason(error)}"
        raise InputError("--model", got, "a decoder whose steps can be counted", remedy) from error


def _kinds(skeleton: Skeleton) -> list[tuple[Any, ...]]:
    """Return for each layer of a decoder what makes it differ from others: its weights, and its kind of attention."""
    types = getattr(skeleton.config, "layer_types", None) or ()
    kinds = []
    for number, layer in enumerate(skeleton.layers):
        weights = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        kinds.append((weights, *types[number : number + 1]))
    return kinds


def _patterns(kinds: list[tuple[Any, ...]]) -> Iterator[tuple[int, int]]:
    """Yield how layers repeat: how many at the start are others (dense ones before experts), and the period behind."""
    for first in range(MOST_OTHERS + 1):
        for period in range(1, (len(kinds) - first) // 2):
            if kinds[first + period :] == kinds[first:-period]:
                yield first, period


def _without_zeros(parts: dict[str, int]) -> dict[str, int]:
    return {part: size for part, size in parts.items() if size}


def _state_bytes(parameter: nn.Parameter, setup: Setup) -> int:
    """Return the bytes of an optimizer's state for one parameter."""
    name = setup.optimizer
    count = parameter.numel()
    size = parameter.element_size()
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
    """Return the bytes of the sampled elements: place, value at the start, and a flag for its gradient."""
    numbers_watched = max(1, WATCHED // max(1, len(trained)))
    return sum(min(p.numel(), numbers_watched) * (8 + p.element_size() + 1) for p in trained)


def _rollouts(setup: Setup) -> int:
    """Return the bytes of the ids, masks and log-probabilities of a generation batch."""
    per_token = 16 * setup.width + 4 * setup.completion * (setup.scores_old + setup.reference)
    return setup.generated_rows * per_token


# Settings that fit ---------------------------------------------------------------------------------------------------

ROWS_PER_STEP = 64
LENGTHS = (1024, 768, 512, 384, 256, 128, 64)
PROPOSED = ("batch", "accumulation", "steps_per_generation", "group", "completion", "checkpointing")


@dataclass(frozen=True)
class Proposal:
    """Settings that fit, or the smallest there are.

    Args:
        estimate ([`Estimate`]): Of the settings.
        fits (`bool`): Whether they fit the memory.
    """

    estimate: Estimate
    fits: bool

    @property
    def keys(self) -> dict[str, Any]:
        """The settings as recipe keys."""
        setup = self.estimate.setup
        keys = {FIELD_KEYS[name]: getattr(setup, name) for name in PROPOSED}
        if setup.generation_rows:
            keys[FIELD_KEYS["generation_rows"]] = setup.generation_rows
        if setup.offload:
            every = {"every_n_layers": setup.checkpoint_every} if setup.checkpoint_every > 1 else {}
            keys[CHECKPOINT_OPTIONS[0]] = {**every, "offload": True}
        return keys


def propose(planner: Planner, setup: Setup, memory: int, given: Any = (), rows: int | None = None) -> Proposal:
    """Find the best settings that fit.

    Args:
        planner ([`Planner`]): Planner of the model.
        setup ([`Setup`]): Given values and defaults.
        memory (`int`): Bytes of the device.
        given (`Collection[str]`): Recipe keys that must stay unchanged.
        rows (`int`, *optional*): Rows of an optimizer step; by default those of the given batch sizes, or 64.

    Returns:
        [`Proposal`]: With `fits=False`, the settings that need least.
    """
    if rows is None:
        says = {"per_device_train_batch_size", "gradient_accumulation_steps"} & set(given)
        rows = setup.batch * setup.accumulation if says else ROWS_PER_STEP
    rows = lcm(rows, setup.group)  # every prompt with all its completions
    lengths = [setup.completion]
    if "max_completion_length" not in given:
        context = context_length(planner.config)
        longest = LENGTHS[0] if context is None else max(1, context - setup.prompt)
        lengths = sorted({min(length, longest) for length in LENGTHS}, reverse=True)
    least = setup
    for rounds, offloaded in _ways(setup, given):
        for completion in lengths:
            batches = _batches(replace(offloaded, completion=completion), rows, given)
            least = min(_generations(batches[-1], given), key=lambda candidate: candidate.generated_rows)
            if rounds:
                least = _in_rounds(least)[-1]
            if planner.training(least) > memory:
                continue
            # A larger micro-batch needs more, so bisection finds the first that fits. `training` is a lower bound,
            # hence the candidates behind it are estimated in full, one by one.
            first = bisect_left(batches, True, key=lambda candidate: planner.training(candidate) <= memory)
            for candidate in batches[first:]:
                for generation in _generations(candidate, given):
                    for settled in _in_rounds(generation) if rounds else [generation]:
                        estimate = planner.estimate(settled)
                        if estimate.total <= memory:
                            return Proposal(estimate, True)
    return Proposal(planner.estimate(least), False)


def _ways(setup: Setup, given: Any) -> list[tuple[bool, Setup]]:
    """Return the ways to run, the fastest first: whether in rounds, and with checkpoints on the device or the host."""
    generates = not (setup.vllm or setup.generates_elsewhere)
    may_take_rounds = generates and FIELD_KEYS["generation_rows"] not in given
    may_offload = setup.device == "cuda" and setup.checkpointing and not set(CHECKPOINT_OPTIONS) & set(given)
    ways = [(False, setup)]
    if may_take_rounds:
        ways.append((True, setup))
    if may_offload and not setup.offload:
        ways.append((may_take_rounds, replace(setup, offload=True)))
    return ways


def _in_rounds(setup: Setup) -> list[Setup]:
    """Return the setup with rounds of equal size, the fewest rounds first."""
    rows = setup.generated_rows
    return [replace(setup, generation_rows=n) for n in range(rows // 2, 0, -1) if rows % n == 0] or [setup]


def _batches(setup: Setup, rows: int, given: Any) -> list[Setup]:
    """Return the micro-batches for so many rows per step, the largest first."""
    sizes = [n for n in range(min(rows, 64), 0, -1) if rows % n == 0]
    is_fixed = "gradient_accumulation_steps" in given
    if "per_device_train_batch_size" in given:
        sizes = [setup.batch]
    elif is_fixed:
        sizes = [max(1, rows // setup.accumulation)]
    batches = []
    for n in sizes:
        accumulation = setup.accumulation if is_fixed else max(1, rows // n)
        batches.append(replace(setup, batch=n, accumulation=accumulation))
    return batches


def _generations(setup: Setup, given: Any) -> list[Setup]:
    """Return setups by micro-batches per generation, the most first: whole groups, and a divisor of the step."""
    if {"steps_per_generation", "generation_batch_size"} & set(given):
        return [setup]
    steps = [n for n in range(setup.accumulation, 0, -1) if setup.accumulation % n == 0]
    complete_groups = [n for n in steps if setup.batch * n % setup.group == 0]
    return [replace(setup, steps_per_generation=n) for n in complete_groups or [setup.accumulation]]
