"""Memory of the host beside a GPU: loading the weights, saving them, and merging an adapter at the end.

Weights are mapped from their files, whole or in shards: pages that the kernel drops when it needs them, so that files
add nothing here. What stays is what is copied: weights whose type is changed on their way, a few at a time, and the
whole base in float32 where `trl-drgrpo merge` runs on the host. As transformers 5.23 loads (`core_model_loading`).
"""

from typing import Any

from trl_drgrpo.single_gpu.memory.estimate import Planner
from trl_drgrpo.single_gpu.memory.setup import LOADED_IN
from trl_drgrpo.single_gpu.memory.stand_ins import FourBitLinear

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
            copied = element * sum(_weights(planner.model)[: 1 if setup.bits else READERS])
        saved = planner.adapters if setup.adapter else planner.parameters * element
        phases["load"] = {PROCESS_PART: PROCESS["cuda"], "weights, on their way": copied}
        phases["save"] = {PROCESS_PART: PROCESS["cuda"], "weights, to be written": saved}
    if setup.adapter:
        sums = {"base in float32": planner.parameters * LOADED_IN["float32"], "adapters": planner.adapters}
        phases["merge"] = {PROCESS_PART: PROCESS["cpu"], **sums, "one layer merged": planner.one_layer_merged()}
    return {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}


def _weights(model: Any) -> list[int]:
    """Elements of each weight matrix before it is quantized, the largest first."""
    quantized = [m for m in model.modules() if isinstance(m, FourBitLinear)]
    packed = {id(m.weight) for m in quantized}
    plain = [p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in packed]
    return sorted([*plain, *(m.shape[0] * m.shape[1] for m in quantized)], reverse=True)
