"""Expected gradients of forked groups, by enumeration: every parent, every branch of every cut, every group.

A parent is a row of a small policy. It is cut where a rule says so, and further branches are rows of the same policy
that begin alike, each with its probability given what it begins with. Rows carry texts, so the trainer cuts them into
steps as in training, and the rules are those of training (`features/forks/cuts.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from trl_drgrpo.features.forks.cuts import boundaries, cut_behind, first_above
from trl_drgrpo.labs.check.enumeration import Gradients, Objective, SmallPolicy, Trajectory
from trl_drgrpo.labs.check.small_policies import BAD, SEPARATOR
from trl_drgrpo.objective.fork_advantages import Forks

Rule = Callable[
    [Trajectory, int, int], int | None
]  # row, cuts it has, tokens before the last -> tokens before the next
ForkedCredit = Callable[[Sequence[Trajectory], int, Forks], torch.Tensor]  # rows, G, cuts -> advantages (B, T)
PARENTS = 2


@dataclass(frozen=True)
class Tree:
    """One parent with all branches sampled from its cuts.

    Args:
        leaves (`tuple[int, ...]` of length `b ** D`): Rows of the policy; those of a node are consecutive.
        cuts (`tuple` of `b ** D` tuples of `D` ints): Tokens of each leaf before its forks.
        probability (`float`): Of this tree.
    """

    leaves: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    probability: float


def behind_the_first_step(row: Trajectory, level: int, after: int) -> int | None:
    """Cut of `fork_at="drawn"` in a first batch; a further cut lies behind the second step, and so on."""
    return cut_behind(_places(row), 0.0, after)


def behind_a_bad_step(row: Trajectory, level: int, after: int) -> int | None:
    """Cut behind the first bad step, that of `fork_at="doubt"` with an exact judge."""
    places = _places(row)
    doubts = [float(line.startswith(BAD)) for line in str(row.text).splitlines()]
    return first_above(places, doubts[: len(places)], 0.5, after)


def only_failures(row: Trajectory, level: int, after: int) -> int | None:
    """Cut behind the first step of rows that fail in the end: the choice depends on tokens behind the cut."""
    return None if row.outcome else behind_the_first_step(row, level, after)


def compare_forked(
    policy: SmallPolicy,
    credit: ForkedCredit,
    objective: Objective,
    rule: Rule = behind_the_first_step,
    *,
    depth: int = 1,
    branches: int = 2,
    share: Callable[[int], float] = lambda group_size: 1.0,
) -> Iterator[Gradients]:
    """Enumerate the groups of two parents.

    Args:
        policy ([`SmallPolicy`]): The policy to enumerate; its rows have texts.
        credit (`Callable`): Advantages `(B, T)` of rows in groups.
        objective (`Callable`): Its gradient is the exact one.
        rule (`Callable`, *optional*): The rule by which rows are cut.
        depth, branches (`int`): D and b.
        share (`Callable`, *optional*): As in [`compare`].

    Returns:
        Iterator over pairs: the expected gradient, and the exact one.
    """
    trees = list(_trees(policy, rule, branches, depth))
    groups = list(product(trees, repeat=PARENTS))
    size = PARENTS * branches**depth
    batches = [tuple(leaf for tree in group for leaf in tree.leaves) for group in groups]
    forks = Forks(branches, [cuts for group in groups for tree in group for cuts in tree.cuts])
    advantages = credit([policy.rows[leaf] for batch in batches for leaf in batch], size, forks)
    probabilities = torch.tensor([prod(tree.probability for tree in group) for group in groups], dtype=torch.float64)
    gradient = policy.expected_gradient(batches, advantages.view(len(batches), size, -1), probabilities)
    yield gradient / share(size), policy.gradient(objective)


def trained_in_one_leaf(credit: ForkedCredit) -> ForkedCredit:
    """The same credit, with each shared token in the first of its leaves alone, where it weighs 1 of G."""

    def once(rows: Sequence[Trajectory], num_generations: int, forks: Forks) -> torch.Tensor:
        advantages = credit(rows, num_generations, forks).clone()
        for i, cuts in enumerate(forks.cuts):
            shared = [cut for level, cut in enumerate(cuts) if i % forks.branches ** (forks.depth - level)]
            advantages[i, : max(shared, default=0)] = 0.0
        return advantages

    return once


def over_all_leaves(credit: Callable[[Sequence[Trajectory], int], torch.Tensor]) -> ForkedCredit:
    """Credit that takes leaves for independent rows."""
    return lambda rows, num_generations, forks: credit(rows, num_generations)


def _trees(policy: SmallPolicy, rule: Rule, branches: int, depth: int) -> Iterator[Tree]:
    chances = policy.probabilities().tolist()

    def forked(leaf: int, cuts: tuple[int, ...], probability: float) -> Iterator[Tree]:
        """All trees below a leaf that was cut as often as this."""
        if len(cuts) == depth:
            yield Tree((leaf,), (cuts,), probability)
            return
        row = policy.rows[leaf]
        cut = rule(row, len(cuts), cuts[-1] if cuts else 0)
        if cut is None:  # the row once more, though perhaps not judged once more
            alike = [i for i, other in enumerate(policy.rows) if other.text == row.text]
        else:
            alike = _beginning_like(row, cut, policy.rows)
        cuts = (*cuts, len(row.log_probs) if cut is None else cut)
        begun = sum(chances[i] for i in alike)
        for others in product(alike, repeat=branches - 1):
            sampled = prod(chances[i] / begun for i in others)
            below = [list(forked(branch, cuts, 1.0)) for branch in (leaf, *others)]
            for parts in product(*below):
                leaves = tuple(i for part in parts for i in part.leaves)
                all_cuts = tuple(each for part in parts for each in part.cuts)
                yield Tree(leaves, all_cuts, probability * sampled * prod(part.probability for part in parts))

    for parent, chance in enumerate(chances):
        yield from forked(parent, (), chance)


def _places(row: Trajectory) -> list[int]:
    """Tokens before each place where a row can be cut: a character is a token."""
    ends = [k for k, mark in enumerate(str(row.text)) if mark == SEPARATOR]
    return boundaries(ends, len(row.log_probs))


def _beginning_like(row: Trajectory, cut: int, rows: Sequence[Trajectory]) -> list[int]:
    begun = str(row.text)[:cut]
    return [i for i, other in enumerate(rows) if str(other.text).startswith(begun)]
