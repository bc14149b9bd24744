"""Best of N: whole completions, as many as the budget pays for; the best one is selected in the end.

The baseline of every search: N follows from the budget. Without a process reward model the verifier selects, which is
rejection sampling.
"""

from collections.abc import Generator

from trl_drgrpo.search.problem import Branch, Problem
from trl_drgrpo.search.tree import Node


def best_of_n(problem: Problem) -> Generator[list[Branch], list[Node | None], None]:
    """Ask for completions until the budget does not pay for a longest one any more."""
    while (count := problem.budget.left // problem.room(problem.root)) > 0:
        yield [Branch(problem.root, count, to_end=True)]
