"""Process rewards: what scores the steps of a completion.

Everything here is a step reward function, or makes one: called as `f(prompts=, completions=, steps=, completion_ids=,
step_ends=, ..., <dataset columns>)`, it returns one list of floats per completion, one per step, `None` where a step
cannot be scored. `step_verifiers` checks steps with a function, the scorers with a process reward model (PRM),
`implicit` with a log-ratio, `step_judge` with a chat model, `monte_carlo` with rollouts. `training` and `labeling`
make a PRM.

Names resolve on first use: importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.calling import StepRewardFunction as StepRewardFunction
    from trl_drgrpo.process_rewards.implicit import ImplicitRewardScorer as ImplicitRewardScorer
    from trl_drgrpo.process_rewards.implicit import PolicyLogRatio as PolicyLogRatio
    from trl_drgrpo.process_rewards.labeling import label_steps as label_steps
    from trl_drgrpo.process_rewards.marker import ChatTurnScorer as ChatTurnScorer
    from trl_drgrpo.process_rewards.marker import MathShepherdScorer as MathShepherdScorer
    from trl_drgrpo.process_rewards.marker import QwenMathScorer as QwenMathScorer
    from trl_drgrpo.process_rewards.monte_carlo import MonteCarloScorer as MonteCarloScorer
    from trl_drgrpo.process_rewards.newline_marker import MathPSAScorer as MathPSAScorer
    from trl_drgrpo.process_rewards.newline_marker import VersaScorer as VersaScorer
    from trl_drgrpo.process_rewards.rollouts import TrainerRollouts as TrainerRollouts
    from trl_drgrpo.process_rewards.rollouts import TransformersRollouts as TransformersRollouts
    from trl_drgrpo.process_rewards.scalar_head import ReasonFluxScorer as ReasonFluxScorer
    from trl_drgrpo.process_rewards.scalar_head import SkyworkScorer as SkyworkScorer
    from trl_drgrpo.process_rewards.step_judge import StepJudge as StepJudge
    from trl_drgrpo.process_rewards.step_verifiers import step_verifier as step_verifier
    from trl_drgrpo.process_rewards.stepwise_data import convert_math_shepherd as convert_math_shepherd
    from trl_drgrpo.process_rewards.stepwise_data import convert_prm800k as convert_prm800k
    from trl_drgrpo.process_rewards.token_classification import TokenClassificationScorer as TokenClassificationScorer
    from trl_drgrpo.process_rewards.training import train_prm as train_prm

attach(__name__)
