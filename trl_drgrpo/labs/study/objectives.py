r"""The compared objectives, each as the weight it gives to a token.

On policy (ratio 1, no KL) every objective of this family has a gradient of one form,

    sum_i c_i * sum_{t < |o_i|} grad log pi(o_it),        c_i = A_i / d_i,

so two choices say it all: the advantage `A_i` (divided by the group's std or not) and the divisor `d_i` (`B * |o_i|`
for a mean per row, `sum_j |o_j|` for a mean over the batch's tokens, `B * L` for a constant). Dr. GRPO is `r_i - mean`
over `B * L`; the others differ from it in one choice or in both, so the two biases can be told apart.

Pure numbers, no torch. Rows `g * G` to `(g + 1) * G - 1` are the group of prompt g.
"""

from dataclasses import dataclass

import numpy as np

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import STD_FLOOR


@dataclass(frozen=True)
class Objective:
    """One member of the family.

    Args:
        label (`str`): For tables and legends: the settings of TRL, `loss_type` and whether `scale_rewards` is on.
        divides_by_std (`bool`): Whether advantages are divided by the group's standard deviation.
        divisor (`str`): Divisor of a token's loss: `"row"` (its row's length, times B), `"batch"` (the tokens
            of the batch) or `"constant"` (`B * L`).
    """

    label: str
    divides_by_std: bool
    divisor: str

    def advantages(self, rewards: np.ndarray, num_generations: int) -> np.ndarray:
        """Advantages of rows, `(B,)`, 0 in groups of equal rewards.

        Args:
            rewards (`np.ndarray` of shape `(B,)`): Rewards, none missing.
            num_generations (`int`): G, at least 2.
        """
        groups = _grouped(rewards, num_generations)  # (P, G)
        advantages = groups - groups.mean(axis=1, keepdims=True)
        advantages[groups.max(axis=1) == groups.min(axis=1)] = 0.0  # equal rewards leave a rounding residue
        if self.divides_by_std:
            advantages = advantages / (groups.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR)
        return advantages.reshape(-1)

    def token_weights(
        self, rewards: np.ndarray, lengths: np.ndarray, num_generations: int, loss_normalizer: float
    ) -> np.ndarray:
        """`c_i`, the weight of every token of row i in the update direction, `(B,)`.

        Args:
            rewards (`np.ndarray` of shape `(B,)`): Rewards.
            lengths (`np.ndarray` of shape `(B,)`): Completion lengths in tokens, at least 1.
            num_generations (`int`): G.
            loss_normalizer (`float`): L, in tokens; read by a constant divisor only.
        """
        advantages = self.advantages(rewards, num_generations)
        divisors = {
            "row": len(advantages) * lengths,
            "batch": np.full(len(advantages), lengths.sum()),
            "constant": np.full(len(advantages), len(advantages) * loss_normalizer),
        }
        return advantages / divisors[self.divisor]


OBJECTIVES = {
    "grpo": Objective("grpo", divides_by_std=True, divisor="row"),
    "grpo_without_std": Objective("grpo, no std", divides_by_std=False, divisor="row"),
    "dapo": Objective("dapo (TRL's default)", divides_by_std=True, divisor="batch"),
    "dr_grpo_with_std": Objective("dr_grpo, std on", divides_by_std=True, divisor="constant"),
    "dr_grpo": Objective("dr_grpo, no std", divides_by_std=False, divisor="constant"),
}


def gradient_weight(num_generations: int, divides_by_std: bool) -> list[float]:
    """`sum_i |A_i|` of a group with k correct answers, for k = 0 to G: the pull of the update on such a prompt.

    Args:
        num_generations (`int`): G.
        divides_by_std (`bool`): With the std of GRPO, or without it.

    Returns:
        `list[float]` of length `G + 1`. Without std `2 k (G - k) / G`, largest at half; with it the square root of
        that shape: prompts that are nearly always or nearly never solved weigh more than their share.

    Example:

    ```python
    >>> gradient_weight(4, divides_by_std=False)
    [0.0, 1.5, 2.0, 1.5, 0.0]

    ```
    """
    objective = Objective("", divides_by_std, "constant")
    groups = [np.array([1.0] * right + [0.0] * (num_generations - right)) for right in range(num_generations + 1)]
    return [float(np.abs(objective.advantages(group, num_generations)).sum()) for group in groups]


def _grouped(values: np.ndarray, num_generations: int) -> np.ndarray:
    if num_generations < 2 or len(values) % num_generations:
        got = f"{num_generations} for {len(values)} rows"
        raise InputError("num_generations", got, "at least 2, and a divisor of the rows", "Pass whole groups.")
    return np.asarray(values, dtype=np.float64).reshape(-1, num_generations)


gradient_mass = gradient_weight  # its name in 0.1.0, until 0.3
