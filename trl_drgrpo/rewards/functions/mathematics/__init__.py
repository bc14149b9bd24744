"""Mathematical answers: where they stand, what they mean, whether two are equal.

[`MathReward`] is the reward. `answers` finds the final answer, `latex` and `brackets` read its spelling, `quantities`
its numbers and units, `equivalence` compares without algebra where it can, and `algebra` with it where it must.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import lazy_names

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.mathematics.answers import extract_answer as extract_answer
    from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent as equivalent
    from trl_drgrpo.rewards.functions.mathematics.reward import MathReward as MathReward
    from trl_drgrpo.rewards.functions.mathematics.reward import math_reward as math_reward

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "MathReward": "reward",
        "equivalent": "equivalence",
        "extract_answer": "answers",
        "math_reward": "reward",
    },
)

__all__ = [
    "MathReward",
    "equivalent",
    "extract_answer",
    "math_reward",
]
