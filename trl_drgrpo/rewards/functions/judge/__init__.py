"""A language model as the judge: the reward, the client that asks the server, and how a score is read from a reply."""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.judge.judge import JUDGE_TEMPLATE as JUDGE_TEMPLATE
    from trl_drgrpo.rewards.functions.judge.judge import JudgeReward as JudgeReward

attach(__name__)
