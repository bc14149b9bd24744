"""The two divisors of GRPO, drawn: a token's weight by the length of its answer, an advantage by the pass rate."""

from typing import Any

import numpy as np

from trl_drgrpo.common.drawing import COLORS, ROLES, new_figure
from trl_drgrpo.labs.study.objectives import OBJECTIVES

_TOKENS = 100  # length of all answers but the first


def draw_divisors(num_generations: int = 8) -> Any:
    """The length bias of one group in the left panel, the difficulty bias in the right one.

    Args:
        num_generations (`int`, *optional*, defaults to `8`): G, at least 2.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, (by_length, by_group) = new_figure(1, 2, 11, 3.6)
    lengths = np.unique(np.geomspace(_TOKENS / 10, _TOKENS * 10, 40).astype(int))
    arms = (("grpo", 1, "--"), ("dapo", 1, ":"), ("dapo", 16, "-."), ("dr_grpo", 1, "-"))
    for (name, prompts, dash), color in zip(arms, COLORS, strict=False):
        weights = [_first_weight(name, prompts * num_generations, num_generations, n) for n in (_TOKENS, *lengths)]
        label = OBJECTIVES[name].label + (f", {prompts} group{'s' * (prompts > 1)}" if name == "dapo" else "")
        by_length.plot(lengths, np.array(weights[1:]) / weights[0], dash, color=color, label=label)
    by_length.set(
        xscale="log",
        yscale="log",
        title="By the length of the answer",
        xlabel=f"tokens of the answer (others: {_TOKENS})",
        ylabel=f"weight of its tokens ({_TOKENS} tokens = 1)",
    )
    correct = range(1, num_generations)
    for name, dash, suffix in (("dr_grpo_with_std", "o--", "std on"), ("dr_grpo", "D-", "no std")):
        groups = [np.repeat([1.0, 0.0], [k, num_generations - k]) for k in correct]
        advantages = [OBJECTIVES[name].advantages(group, num_generations) for group in groups]
        for row, role in ((0, "correct"), (-1, "incorrect")):
            values = [group[row] for group in advantages]
            fill = "white" if suffix == "std on" else ROLES[role]
            by_group.plot(correct, values, dash, color=ROLES[role], mfc=fill, label=f"{role} answer, {suffix}")
    by_group.set(title="By the group", xlabel=f"correct answers of {num_generations}", ylabel="advantage")
    for axes in (by_length, by_group):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _first_weight(objective: str, rows: int, num_generations: int, length: int) -> float:
    lengths = np.full(rows, _TOKENS)
    lengths[0] = length
    rewards = (np.arange(rows) % 2).astype(float)
    return OBJECTIVES[objective].token_weights(rewards, lengths, num_generations, 1.0)[0]
