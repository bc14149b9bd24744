"""Dr. GRPO (arXiv 2503.20783) as a plugin for Hugging Face TRL.

Importing this package is cheap: names resolve on first use, so `import trl_drgrpo` loads neither torch nor trl.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach
from trl_drgrpo.process_rewards.prm_names import FORMATS
from trl_drgrpo.rewards.recipe_names import REWARDS, Entry
from trl_drgrpo.upstream.versions import drop_notices

if TYPE_CHECKING:
    from trl_drgrpo.common import __version__ as __version__
    from trl_drgrpo.common.errors import InputError as InputError
    from trl_drgrpo.common.errors import RewardError as RewardError
    from trl_drgrpo.config.config import DrGRPOConfig as DrGRPOConfig
    from trl_drgrpo.features.diagnostics.progress import ProgressCallback as ProgressCallback
    from trl_drgrpo.objective.advantages import group_advantages as group_advantages
    from trl_drgrpo.objective.loss import dr_grpo_loss as dr_grpo_loss
    from trl_drgrpo.objective.loss_terms import LossTokens as LossTokens
    from trl_drgrpo.objective.step_advantages import step_advantages as step_advantages
    from trl_drgrpo.objective.step_advantages import step_token_advantages as step_token_advantages
    from trl_drgrpo.process_rewards.steps import step_segmenter as step_segmenter
    from trl_drgrpo.report import write_report as write_report
    from trl_drgrpo.rewards.contract import RewardFunction as RewardFunction
    from trl_drgrpo.single_gpu.lora_presets import lora_preset as lora_preset
    from trl_drgrpo.single_gpu.lora_presets import preset_arguments as preset_arguments
    from trl_drgrpo.trainer import DrGRPOTrainer as DrGRPOTrainer
    from trl_drgrpo.upstream.batches import CreditedBatch as CreditedBatch
    from trl_drgrpo.upstream.batches import RolloutBatch as RolloutBatch
    from trl_drgrpo.upstream.hooks import Feature as Feature
    from trl_drgrpo.upstream.hooks import LossTerm as LossTerm
    from trl_drgrpo.upstream.seams import check_upstream as check_upstream
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol as TrainerProtocol

# Names in recipes of what stands above the room of rewards. Nothing is imported until a recipe uses one.
REWARDS.update(
    {name: Entry(f"{__name__}.process_rewards.named", None, name) for name in (*FORMATS, "prm")}
    | {
        "step_judge": Entry(f"{__name__}.process_rewards", None, "StepJudge"),
        "list_sum_reward": Entry(f"{__name__}.demo.task", "list_sum_reward"),
        "list_sum_line_reward": Entry(f"{__name__}.demo.task", "line_reward"),
    }
)
drop_notices()
attach(__name__)
