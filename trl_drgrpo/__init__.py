"""Dr. GRPO (arXiv 2503.20783) as a plugin for Hugging Face TRL.

Importing this package is cheap: names resolve on first use, so `import trl_drgrpo` loads neither torch nor trl.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from trl_drgrpo.advantages import group_advantages as group_advantages
    from trl_drgrpo.config import DrGRPOConfig as DrGRPOConfig
    from trl_drgrpo.loss import dr_grpo_loss as dr_grpo_loss
    from trl_drgrpo.seams import check_upstream as check_upstream
    from trl_drgrpo.step_credit import step_token_advantages as step_token_advantages
    from trl_drgrpo.steps import step_segmenter as step_segmenter
    from trl_drgrpo.trainer import DrGRPOTrainer as DrGRPOTrainer

_HOME = {
    "DrGRPOConfig": "trl_drgrpo.config",
    "DrGRPOTrainer": "trl_drgrpo.trainer",
    "check_upstream": "trl_drgrpo.seams",
    "dr_grpo_loss": "trl_drgrpo.loss",
    "group_advantages": "trl_drgrpo.advantages",
    "step_segmenter": "trl_drgrpo.steps",
    "step_token_advantages": "trl_drgrpo.step_credit",
}

__all__ = [
    "DrGRPOConfig",
    "DrGRPOTrainer",
    "__version__",
    "check_upstream",
    "dr_grpo_loss",
    "group_advantages",
    "step_segmenter",
    "step_token_advantages",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
