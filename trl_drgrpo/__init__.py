"""Dr. GRPO (arXiv 2503.20783) as a plugin for Hugging Face TRL.

Importing this package is cheap: names resolve on first use, so `import trl_drgrpo` loads neither torch nor trl.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach
from trl_drgrpo.upstream.versions import drop_notices

if TYPE_CHECKING:
    from trl_drgrpo.common import __version__ as __version__
    from trl_drgrpo.common.errors import InputError as InputError
    from trl_drgrpo.common.errors import RewardError as RewardError
    from trl_drgrpo.config.config import DrGRPOConfig as DrGRPOConfig
    from trl_drgrpo.features.diagnostics.progress import ProgressCallback as ProgressCallback
    from trl_drgrpo.features.diagnostics.run_warnings import register_warning as register_warning
    from trl_drgrpo.objective.advantages import group_advantages as group_advantages
    from trl_drgrpo.objective.loss import dr_grpo_loss as dr_grpo_loss
    from trl_drgrpo.objective.loss_terms import LossTokens as LossTokens
    from trl_drgrpo.objective.step_advantages import step_advantages as step_advantages
    from trl_drgrpo.objective.step_advantages import step_token_advantages as step_token_advantages
    from trl_drgrpo.process_rewards.named import register_prm_format as register_prm_format
    from trl_drgrpo.process_rewards.steps import step_segmenter as step_segmenter
    from trl_drgrpo.report import write_report as write_report
    from trl_drgrpo.rewards.contract import RewardFunction as RewardFunction
    from trl_drgrpo.rewards.recipe_names import register_reward as register_reward
    from trl_drgrpo.single_gpu.lora_presets import lora_preset as lora_preset
    from trl_drgrpo.single_gpu.lora_presets import preset_arguments as preset_arguments
    from trl_drgrpo.trainer import DrGRPOTrainer as DrGRPOTrainer
    from trl_drgrpo.upstream.batches import CreditedBatch as CreditedBatch
    from trl_drgrpo.upstream.batches import RolloutBatch as RolloutBatch
    from trl_drgrpo.upstream.hooks import Feature as Feature
    from trl_drgrpo.upstream.hooks import LossTerm as LossTerm
    from trl_drgrpo.upstream.seams import check_upstream as check_upstream
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol as TrainerProtocol

# Modules that register names, by the kind of the name. They are imported when a name of that kind is first looked up;
# of a package that is listed, its modules are, too.
REGISTRATIONS = {
    "reward": (
        *("rewards.functions", "rewards.functions.strings", "rewards.functions.mathematics.answer_reward"),
        *("rewards.functions.code.program_reward", "rewards.functions.judge.judge", "rewards.combine"),
        *("rewards.isolation.isolated", "rewards.adapters.stacks", "process_rewards.published_prms"),
        *("process_rewards.implicit", "process_rewards.verifiers", "demo.task"),
    ),
    "PRM format": ("process_rewards.published_prms", "process_rewards.implicit"),
    "warning": ("features.diagnostics.warning_causes",),
}
drop_notices()
attach(__name__)
