"""Memory planned ahead: what a run will need at its peak, from the model's configuration alone.

Reading order: memory_settings (what of a run and its device matters) -> meta_model (the model without memory) ->
meta_layers (its layers' bytes, and how they are counted) -> micro_batch_shapes -> passes -> estimate -> proposal. The
formulas in words, and estimates against measurements, are in `recipes/studies/memory.md`.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.single_gpu.memory.estimate import Estimate as Estimate
    from trl_drgrpo.single_gpu.memory.estimate import Planner as Planner
    from trl_drgrpo.single_gpu.memory.memory_settings import Adapter as Adapter
    from trl_drgrpo.single_gpu.memory.memory_settings import Setup as Setup
    from trl_drgrpo.single_gpu.memory.memory_settings import parse_memory as parse_memory
    from trl_drgrpo.single_gpu.memory.meta_model import Skeleton as Skeleton
    from trl_drgrpo.single_gpu.memory.meta_model import read_config as read_config
    from trl_drgrpo.single_gpu.memory.meta_model import text_part as text_part
    from trl_drgrpo.single_gpu.memory.proposal import propose as propose

attach(__name__)
