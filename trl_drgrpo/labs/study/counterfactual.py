r"""Token weights of other objectives for the rewards and lengths of a run.

A run log keeps groups of completions with rewards and lengths (`record_groups`). That is all the weights of
`objectives.py` need, so for each recorded answer the weight of its tokens is known under every objective: the weights
of this run's update, had another objective been given the same answers. The model that would have come of it is
another question, which only another run answers.
"""

from dataclasses import dataclass

import numpy as np

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.report.records import Group, Run


@dataclass(frozen=True)
class CounterfactualWeights:
    """The recorded answers of a run, N of them, by step and group.

    Args:
        steps (`np.ndarray` of shape `(N,)`, int): Optimizer step that was first trained on them.
        groups (`np.ndarray` of shape `(N,)`, int): Number of the group within its step.
        rewards (`np.ndarray` of shape `(N,)`): Combined outcome rewards.
        right (`np.ndarray` of shape `(N,)`, bool): Verdicts; all false where the run does not record them.
        lengths (`np.ndarray` of shape `(N,)`, int): Tokens.
        advantages (`np.ndarray` of shape `(N,)`): Outcome advantages as recorded; NaN where none is.
        token_weights (`dict[str, np.ndarray]` of shape `(N,)`): Per key of `OBJECTIVES`, the weight of each token of
            the answer in the update direction, the recorded groups of a step being the batch.
        groups_left_out (`int`): Groups in which a reward or a length is missing.
    """

    steps: np.ndarray
    groups: np.ndarray
    rewards: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    advantages: np.ndarray
    token_weights: dict[str, np.ndarray]
    groups_left_out: int

    def pulls(self, objective: str) -> np.ndarray:
        """Sum of the token weights of each answer, `(N,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
        """
        return self.token_weights[objective] * self.lengths

    def share(self, objective: str, chosen: np.ndarray) -> float:
        """Share of the chosen answers in `sum |pull|`, 0 to 1; NaN if that sum is 0.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
            chosen (`np.ndarray` of shape `(N,)`, bool): Mask of the answers.
        """
        pulls = np.abs(self.pulls(objective))
        return float(pulls[chosen].sum() / pulls.sum()) if pulls.sum() > 0 else float("nan")


def counterfactual_weights(run: Run) -> CounterfactualWeights:
    """The weights of a run's recorded training groups under every objective.

    Step rewards are not part of it: weights are those of the outcome reward with the group's mean as baseline. With
    `record_groups=-1` a step's batch is complete; with fewer groups "batch" (DAPO) divides by the tokens of those.

    Args:
        run ([`Run`]): From `trl_drgrpo.report.reading.read_run`.

    Returns:
        [`CounterfactualWeights`].

    Raises:
        [`InputError`]: No group was recorded, or the run does not say its L.
    """
    normalizer = run.objective.get("loss_normalizer")
    recorded = [group for _, group in run.completions.looked_at() if group.mode == "train"] if run.completions else []
    usable = sorted((group for group in recorded if _is_whole(group)), key=lambda group: (group.step, group.index))
    if not usable or not isinstance(normalizer, int | float):
        got = f"a run of {run.kind} with {len(usable)} complete groups recorded and loss_normalizer={normalizer}"
        remedy = "Train with DrGRPOTrainer, run_log=True and record_groups=-1."
        raise InputError(run.path, got, "a run log with recorded groups and L", remedy)
    rows = [(group, row) for group in usable for row in group.rows]
    steps = np.array([group.step for group, _ in rows])
    rewards = np.array([row.reward for _, row in rows], dtype=float)
    lengths = np.array([row.length for _, row in rows])
    return CounterfactualWeights(
        steps=steps,
        groups=np.array([group.index for group, _ in rows]),
        rewards=rewards,
        right=np.array([row.right is True for _, row in rows]),
        lengths=lengths,
        advantages=np.array([row.advantage for _, row in rows], dtype=float),
        token_weights=_weights(steps, rewards, lengths, len(usable[0].rows), normalizer),
        groups_left_out=len(recorded) - len(usable),
    )


def _is_whole(group: Group) -> bool:
    return len(group.rows) > 1 and all(row.reward is not None and row.length for row in group.rows)


def _weights(
    steps: np.ndarray, rewards: np.ndarray, lengths: np.ndarray, num_generations: int, normalizer: float
) -> dict[str, np.ndarray]:
    """Weights step by step: each step is a batch of its own."""
    weights = {name: np.empty(len(steps)) for name in OBJECTIVES}
    for step in np.unique(steps):
        batch = steps == step
        for name, objective in OBJECTIVES.items():
            weights[name][batch] = objective.token_weights(rewards[batch], lengths[batch], num_generations, normalizer)
    return weights
