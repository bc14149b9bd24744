"""Beam search over steps: the `width` best steps of all beams are continued, the others are given up.

With a process reward model a step's value is that of its path (arXiv 2408.03314, section 5.2, has the same search).
Without one whole continuations are sampled, a step's value is the share of correct ones through it, and the next steps
are those that the continuations begin with: no token is sampled for a value alone.
A search that has ended with budget left begins anew from the prompt, in the same tree.
"""

from collections.abc import Generator

from trl_drgrpo.search.problem import Branch, Problem, rank
from trl_drgrpo.search.tree import Node


def beam(problem: Problem) -> Generator[list[Branch], list[Node | None], None]:
    """Ask for the continuations of each beam, step by step, until the budget is spent."""
    width, children, to_end = problem.settings.width, problem.settings.children, not problem.by_steps
    while True:
        front = [problem.root]
        while front:
            counts = [width * children if node is problem.root else children for node in front]
            ends = yield [Branch(node, count, to_end) for node, count in zip(front, counts, strict=True)]
            if not ends:
                return  # the budget is spent
            found = [node for node in ends if node is not None]
            if to_end:
                found = [child for node in front for child in node.children]
            candidates = [node for node in dict.fromkeys(found) if not node.finish]
            front = sorted(candidates, key=rank, reverse=True)[:width]  # stable: the first sampled of equals
