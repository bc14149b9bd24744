"""Credit of turns and states as it is published or commonly built: controls of `trl-drgrpo check --credit`.

Each takes the rows of one group and gives an advantage per step; they are not part of the package's objective.
"""

import math
from collections.abc import Callable, Hashable, Sequence

import torch

from trl_drgrpo.labs.check.enumeration import Trajectory

Group = Sequence[Trajectory]


class PublishedCredit:
    """Advantages `(B, T)` of rows in groups, one step per token, by a rule for one group."""

    def __init__(self, of_group: Callable[[Group], list[list[float]]]):
        self.of_group = of_group

    def __call__(self, rows: Sequence[Trajectory], num_generations: int) -> torch.Tensor:
        groups = [rows[start : start + num_generations] for start in range(0, len(rows), num_generations)]
        credited = [torch.tensor(row, dtype=torch.float64) for group in groups for row in self.of_group(group)]
        return torch.nn.utils.rnn.pad_sequence(credited, batch_first=True)


def same_turn_z_score(group: Group) -> list[list[float]]:
    """Return to go, minus its mean and divided by its std (n - 1) over the rows that reached the same turn."""
    returns = _returns_to_go(group)
    peers = [[row[k] for row in returns if k < len(row)] for k in range(max(map(len, returns)))]
    return [[_standardized(value, peers[k]) for k, value in enumerate(row)] for row in returns]


def state_mean(group: Group) -> list[list[float]]:
    """GiGPO's step advantage (arXiv 2505.10978), undiscounted: all visits of a state are peers, one's own included."""
    return _among_visits(group, lambda value, peers: value - sum(peers) / len(peers))


def state_z_score(group: Group) -> list[list[float]]:
    """The same, divided by the std (n - 1) of the visits."""
    return _among_visits(group, _standardized)


def _among_visits(group: Group, compared: Callable[[float, list[float]], float]) -> list[list[float]]:
    returns = _returns_to_go(group)
    peers: dict[Hashable, list[float]] = {}
    for trajectory, row in zip(group, returns, strict=True):
        for key, value in zip(trajectory.state_keys, row, strict=True):
            peers.setdefault(key, []).append(value)
    return [
        [compared(value, peers[key]) for key, value in zip(trajectory.state_keys, row, strict=True)]
        for trajectory, row in zip(group, returns, strict=True)
    ]


def _returns_to_go(group: Group) -> list[list[float]]:
    return [[sum(row.step_rewards[k:]) for k in range(len(row.step_rewards))] for row in group]


def _standardized(value: float, peers: list[float]) -> float:
    """`(x - mean) / std`; 0 where the peers are one, or all equal."""
    if min(peers) == max(peers):
        return 0.0
    mean = sum(peers) / len(peers)
    return (value - mean) / math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
