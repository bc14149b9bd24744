"""Memory planned ahead: what a run will need at its peak, from the model's configuration alone.

Reading order: setup (what of a run matters) -> skeleton (the model without memory) -> stand_ins (how bytes are
counted) -> shapes (of micro-batches) -> passes -> estimate -> proposal. The formulas in words, and estimates against
measurements, are in `recipes/guides/memory.md`.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.single_gpu.memory.devices import parse_memory as parse_memory
    from trl_drgrpo.single_gpu.memory.estimate import Estimate as Estimate
    from trl_drgrpo.single_gpu.memory.estimate import Planner as Planner
    from trl_drgrpo.single_gpu.memory.proposal import propose as propose
    from trl_drgrpo.single_gpu.memory.setup import Adapter as Adapter
    from trl_drgrpo.single_gpu.memory.setup import Setup as Setup
    from trl_drgrpo.single_gpu.memory.skeleton import read_config as read_config

attach(__name__)
