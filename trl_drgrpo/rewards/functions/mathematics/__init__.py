"""Mathematical answers: where they stand, what they mean, whether two are equal.

[`MathReward`] is the reward. `answers` finds the final answer and reads what is cheap to read of it; `latex` and
`relations` take its spelling apart, `quantities` its numbers and units. `equivalence` compares without algebra where
it can; where it must, `guards` says what is safe, and `algebra` decides.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.mathematics.answer_reward import MathReward as MathReward
    from trl_drgrpo.rewards.functions.mathematics.answer_reward import math_reward as math_reward
    from trl_drgrpo.rewards.functions.mathematics.answer_reward import unreadable_gold as unreadable_gold
    from trl_drgrpo.rewards.functions.mathematics.answers import extract_answer as extract_answer
    from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent as equivalent

attach(__name__)
