"""Decides which completions are correct: a threshold on one named reward, never a guess about a continuous one.

With `correct_threshold` a completion is correct when the reward reaches it. Without one, only a reward that has given
nothing but 0 and 1 so far is read as incorrect and correct; its first other value ends that, for good, and says what
to set. A completion without that reward is neither.
"""

import logging
import math
from collections.abc import Sequence

from trl_drgrpo.common.errors import InputError

logger = logging.getLogger(__name__)


class CorrectnessRule:
    """Judges completions by one reward.

    Args:
        names (`Sequence[str]`): The reward functions, in their order.
        reward (`str`, *optional*): The one that says what is correct; the first one by default.
        threshold (`float`, *optional*): Correct if the reward is at least this; `None`: see the module docstring.

    Attributes:
        name (`str`): The reward that is asked.
        index (`int`): Its column in the rewards per function.

    Raises:
        `InputError`: There is no reward of that name.

    Example:

    ```python
    >>> rule = CorrectnessRule(["accuracy", "format"])
    >>> rule.judge([1.0, 0.0, float("nan")])
    [True, False, None]
    >>> CorrectnessRule(["accuracy"], threshold=0.5).judge([0.7, 0.2])
    [True, False]

    ```
    """

    def __init__(self, names: Sequence[str], reward: str | None = None, threshold: float | None = None):
        if reward is not None and reward not in names:
            expected = f"one of {', '.join(names)}" if names else "a reward function's name"
            raise InputError("correct_reward", repr(reward), expected, "Name a reward function of the run.")
        self.name = reward if reward is not None else names[0]
        self.index = list(names).index(self.name)
        self.threshold = threshold
        self.is_binary = True  # whether all values so far were 0 or 1

    def judge(self, rewards: Sequence[float]) -> list[bool | None] | None:
        """Per reward: correct, incorrect, or neither (`None`); NaN is unscorable. `None` as a whole: it cannot be
        told."""
        if self.threshold is not None:
            return [None if math.isnan(reward) else reward >= self.threshold for reward in rewards]
        if self.is_binary:
            other = next((r for r in rewards if not math.isnan(r) and r not in (0.0, 1.0)), None)
            if other is None:
                return [None if math.isnan(reward) else reward == 1.0 for reward in rewards]
            self.is_binary = False
            logger.info(
                "The reward %r gave %g, so the run cannot tell which completions are correct: it logs no pass rate "
                "and no lengths of correct and incorrect completions. Set correct_threshold (and correct_reward, for "
                "another reward).",
                self.name,
                other,
            )
        return None
