"""One GPU: LoRA and QLoRA presets, adapters that train, and merging an adapter into its base model.

Names resolve on first use, so importing this package loads neither torch nor peft.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.features.diagnostics.movement import MovementWatch as MovementWatch
    from trl_drgrpo.single_gpu.lora_presets import lora_preset as lora_preset
    from trl_drgrpo.single_gpu.lora_presets import preset_arguments as preset_arguments
    from trl_drgrpo.single_gpu.merging import MergeReport as MergeReport
    from trl_drgrpo.single_gpu.merging import merge_adapter as merge_adapter

attach(__name__)
