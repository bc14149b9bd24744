"""The studies of a small language model. In rung b it is told its verdict, rung c was not made to show the length
bias, and in rung d it finds out its verdict by itself."""

from trl_drgrpo.labs.study import arithmetic, guessing, verifying
from trl_drgrpo.labs.study.trajectories import Rung, RunSettings

GUESSING = Rung(
    name="guessing",
    warm_start=guessing.warm_start,
    make_prompts=guessing.make_prompts,
    reward=guessing.verdict_reward,
    max_completion=guessing.MAX_COMPLETION,
    rollout=guessing.guessing_rollout,
    environment_tokens=guessing.FEEDBACK_TOKENS,
    fixed_tokens=1,  # the guess
)
ARITHMETIC = Rung(
    name="arithmetic",
    warm_start=arithmetic.warm_start,
    make_prompts=arithmetic.make_prompts,
    reward=arithmetic.answer_reward,
    max_completion=arithmetic.MAX_COMPLETION,
    learnable=True,
    settings=RunSettings(steps=40, learning_rate=5e-5),
    measured_batches=8,
)
VERIFY = Rung(
    name="verify",
    warm_start=verifying.warm_start,
    make_prompts=verifying.make_prompts,
    reward=verifying.passes,
    max_completion=verifying.MAX_COMPLETION,
    rollout=verifying.sampling_rollout,
    fixed_tokens=verifying.FIRST_TOKENS,
    verdict=verifying.true_verdict,
    verdict_weight=verifying.VERDICT_WEIGHT,
    chance=verifying.CHANCE,
    decisions=verifying.decisions,
)
RUNGS = {rung.name: rung for rung in (GUESSING, ARITHMETIC, VERIFY)}
