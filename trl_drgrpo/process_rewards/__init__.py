"""Process rewards: what scores the steps of a completion.

Everything here is a step reward function, or makes one: called as `f(prompts=, completions=, steps=, completion_ids=,
step_ends=, ..., <dataset columns>)`, it returns one list of floats per completion, one per step, `None` where a step
cannot be scored. `verifiers` checks steps with a function or a chat model, `formats` with a process reward model
(PRM), `implicit` with a log-ratio, `monte_carlo` with rollouts, which also label steps; `training` makes a PRM of
them.

Names resolve on first use: importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.implicit import ImplicitRewardScorer as ImplicitRewardScorer
    from trl_drgrpo.process_rewards.monte_carlo import MonteCarloScorer as MonteCarloScorer
    from trl_drgrpo.process_rewards.monte_carlo import TrainerRollouts as TrainerRollouts
    from trl_drgrpo.process_rewards.monte_carlo import TransformersRollouts as TransformersRollouts
    from trl_drgrpo.process_rewards.monte_carlo import label_steps as label_steps
    from trl_drgrpo.process_rewards.named import register_prm_format as register_prm_format
    from trl_drgrpo.process_rewards.prm_scorer import PRMScorer as PRMScorer
    from trl_drgrpo.process_rewards.published_prms import ChatTurnScorer as ChatTurnScorer
    from trl_drgrpo.process_rewards.published_prms import MathPSAScorer as MathPSAScorer
    from trl_drgrpo.process_rewards.published_prms import MathShepherdScorer as MathShepherdScorer
    from trl_drgrpo.process_rewards.published_prms import QwenMathScorer as QwenMathScorer
    from trl_drgrpo.process_rewards.published_prms import SkyworkScorer as SkyworkScorer
    from trl_drgrpo.process_rewards.published_prms import TokenClassificationScorer as TokenClassificationScorer
    from trl_drgrpo.process_rewards.published_prms import VersaScorer as VersaScorer
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction as StepRewardFunction
    from trl_drgrpo.process_rewards.training import convert_math_shepherd as convert_math_shepherd
    from trl_drgrpo.process_rewards.training import convert_prm800k as convert_prm800k
    from trl_drgrpo.process_rewards.training import train_prm as train_prm
    from trl_drgrpo.process_rewards.verifiers import StepJudge as StepJudge
    from trl_drgrpo.process_rewards.verifiers import step_verifier as step_verifier

attach(__name__)
