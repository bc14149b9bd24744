"""A language model as the judge: the reward, the client that asks the server, and how a score is read from a reply."""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import lazy_names

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.judge.reward import JUDGE_TEMPLATE as JUDGE_TEMPLATE
    from trl_drgrpo.rewards.functions.judge.reward import JudgeReward as JudgeReward

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "JUDGE_TEMPLATE": "reward",
        "JudgeReward": "reward",
    },
)

__all__ = [
    "JUDGE_TEMPLATE",
    "JudgeReward",
]
