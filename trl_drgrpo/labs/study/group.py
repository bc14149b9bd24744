r"""One group under every objective: the lengths of its answers, the weight of a token, the pull of an answer.

The weights of `objectives.py` are in the units of their own divisors, so they cannot be laid side by side. Here each
is relative to an even group: half of its answers are correct (of an odd G, half rounded down), and all are as long as
the answers of this group are on average. 1 is the mean weight that the objective gives to a token there. So

- the length bias is seen within a group: tokens of answers that differ in length alone weigh 1, or they do not;
- the difficulty bias is seen between groups: how far an uneven group is from the even one.

The pull of an answer is the sum over its tokens, in units of such an answer of the even group: the joint effect of its
length and its advantage. Pure numbers, no torch.
"""

from dataclasses import dataclass

import numpy as np

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.objectives import OBJECTIVES


@dataclass(frozen=True)
class ExampleGroup:
    """A group whose correct answers all have one length, and whose incorrect ones all have one.

    Args:
        right (`int`): Number of correct answers, 0 to G; they come first.
        length_right, length_wrong (`int`): Tokens of a correct and of an incorrect answer, at least 1.
        num_generations (`int`, *optional*, defaults to `8`): G, at least 2.
        max_length (`int`, *optional*, defaults to `256`): Tokens at which answers are cut; also L.

    Raises:
        [`InputError`]: A number out of its range.

    Example:

    ```python
    >>> group = ExampleGroup(right=1, length_right=10, length_wrong=300, num_generations=4)
    >>> group.rewards, group.lengths
    (array([1., 0., 0., 0.]), array([ 10, 256, 256, 256]))

    ```
    """

    right: int
    length_right: int
    length_wrong: int
    num_generations: int = 8
    max_length: int = 256

    def __post_init__(self) -> None:
        if self.num_generations < 2:
            raise InputError("num_generations", str(self.num_generations), "at least 2", "One answer has no baseline.")
        if not 0 <= self.right <= self.num_generations:
            raise InputError(
                "right", str(self.right), f"0 to {self.num_generations}", "It counts answers of the group."
            )
        for name in ("length_right", "length_wrong", "max_length"):
            if getattr(self, name) < 1:
                raise InputError(name, str(getattr(self, name)), "at least 1 token", "An answer ends with a token.")

    @property
    def is_right(self) -> np.ndarray:
        """Mask of correct answers, `(G,)`, bool."""
        return np.arange(self.num_generations) < self.right

    @property
    def rewards(self) -> np.ndarray:
        """1 for a correct answer, 0 for an incorrect one, `(G,)`."""
        return self.is_right.astype(float)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the answers after the cut, `(G,)`."""
        return np.minimum(np.where(self.is_right, self.length_right, self.length_wrong), self.max_length)

    def token_weights(self, objective: str) -> np.ndarray:
        """Weight of a token of each answer, 1 in the even group of the same mean length, `(G,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.

        Returns:
            `np.ndarray` of shape `(G,)`: Positive for correct answers, negative for incorrect ones, 0 in a group whose
            answers are all correct or all incorrect.

        Example: with lengths of 10 and 30 tokens, GRPO gives a token of the correct answer 3 times the weight.

        ```python
        >>> group = ExampleGroup(right=1, length_right=10, length_wrong=30, num_generations=2)
        >>> group.token_weights("grpo").round(2), group.token_weights("dr_grpo").round(2)
        (array([ 2.  , -0.67]), array([ 1., -1.]))

        ```
        """
        return relative_token_weights(objective, self.rewards, self.lengths)

    def pulls(self, objective: str) -> np.ndarray:
        """Sum of the token weights of each answer, 1 for an answer of the even group, `(G,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
        """
        return self.token_weights(objective) * self.lengths / self.lengths.mean()


def relative_token_weights(objective: str, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Weight of a token of each answer of any group, 1 in the even group of the same mean length, `(G,)`.

    The batch and L cancel. `assets/group_widget.js` of the report computes the same in a browser.

    Args:
        objective (`str`): A key of `OBJECTIVES`.
        rewards (`np.ndarray` of shape `(G,)`): Rewards, none missing, at least two.
        lengths (`np.ndarray` of shape `(G,)`): Tokens, at least 1.
    """
    chosen, size = OBJECTIVES[objective], len(rewards)
    even = (np.arange(size) < size // 2).astype(float)
    alike = np.full(size, lengths.mean())
    weights = chosen.token_weights(rewards, lengths, size, 1.0)
    return weights / np.abs(chosen.token_weights(even, alike, size, 1.0)).mean()
