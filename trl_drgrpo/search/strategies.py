"""Strategies of a search: the nodes that it continues, and the values that decide.

Verifier and process reward model are called as the trainer calls them, with the continuations of all problems under
way at once. A path's value is that of its scored steps (`min`, `product` or `last`); without a process reward model it
is the verdict, 1 or 0. One value per sampled continuation is backed up from where it ends.

The strategies are generators that yield branches and get back the nodes where the continuations end, valued.

**Best of N**: whole completions, as many as the budget pays for; the best one is selected in the end. The baseline of
every search. Without a process reward model the verifier selects, which is rejection sampling.

**Beam search** over steps: the `width` best steps of all beams are continued, the others are given up. With a process
reward model a step's value is that of its path (arXiv 2408.03314, section 5.2, has the same search). Without one whole
continuations are sampled, a step's value is the share of correct ones through it, and the next steps are those that
the continuations begin with: no token is sampled for a value alone. A search that has ended with budget left begins
anew from the prompt, in the same tree.

**PUCT** over steps: the tree grows where values are high and where little was looked at.

    a* = argmax_a  Q(s, a) + c * P(a | s) * sqrt(sum_b N(s, b)) / (1 + N(s, a))

`Q` is the mean of the values backed up through a step, `N` their number, `P` the share of the samples from `s` that
began with it: the policy's own probabilities, as far as they were sampled. From the root down to a node that was not
continued yet; `children` continuations of it are sampled, valued and backed up. Source: AlphaGo Zero (Silver et al.,
Nature 550, 2017, Methods), after PUCB (Rosin, 2011). Differs in: the actions are sampled steps instead of all legal
moves, there is no noise at the root, and a step without a value counts as good as its parent. `c` is meant for values
from 0 to 1. Without a process reward model the continuations go to the end, the verifier's verdicts are the values,
and the steps of each become nodes: rollouts and expansion are one.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import Any

from trl_drgrpo.process_rewards.step_scorer import StepScorer, log_nothing
from trl_drgrpo.process_rewards.steps import Steps
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.search.problem import PATH_VALUES, Branch, Node, Problem, SearchSettings, rank

Ends = Sequence[tuple[Problem, Node]]  # of continuations: their problems, and the nodes where they end


class Appraiser:
    """Verifier and process reward model of a search.

    Args:
        settings ([`SearchSettings`]): Settings of the search.
        verifier (`Callable`, *optional*): Outcome reward function.
        prm (`Callable`, *optional*): Step reward function; where there is one, values come from it.
    """

    def __init__(self, settings: SearchSettings, verifier: Callable | None, prm: Callable | None):
        self.settings = settings
        self.verifier = None
        if verifier is not None:
            self.verifier = checked_reward(verifier, settings.on_reward_error)
        self.prm = None
        if prm is not None:
            self.prm = StepScorer([prm], settings.segmenter(), on_error=settings.on_reward_error)

    def appraise(self, ends: Ends) -> None:
        """Judge the ends of continuations and back their values up.

        Args:
            ends (sequence of pairs): For each sampled continuation its problem and the node where it ends.
        """
        unscored = []
        unverified = []
        # Equal continuations end in one node: it is judged once, but backed up once for each of them.
        for problem, node in dict.fromkeys(ends):
            if node.readable_path() and not all(step.is_scored for step in node.path()):
                unscored.append((problem, node))
            if node.finish and not node.is_verified:
                unverified.append((problem, node))
        if self.prm is not None and unscored:
            self._score(self.prm, unscored)
        if self.verifier is not None and unverified:
            self._verify(self.verifier, unverified)
        for _, node in ends:
            value = self.value(node)
            if value is not None:
                node.back_up(value)

    def value(self, node: Node) -> float | None:
        """Return the value of the path to a node; None where nothing could be scored."""
        if self.prm is None:
            return self.accepted(node)
        scores = [step.score for step in node.path() if step.score is not None]
        if not scores:  # `min` of nothing is an error, and 0 would be a verdict
            return None
        return PATH_VALUES[self.settings.path_value](scores)

    def accepted(self, node: Node) -> bool | None:
        """Tell whether a finished completion is correct; None where the verifier gave no reward."""
        if node.outcome is None:
            return None
        return node.outcome > self.settings.accept_above

    def _verify(self, verifier: Callable, ends: Ends) -> None:
        rewards = verifier(**_call(ends))
        if inspect.iscoroutine(rewards):
            rewards = asyncio.run(rewards)
        for (_, node), reward in zip(ends, rewards, strict=True):
            node.outcome = reward
            node.is_verified = True  # also where the reward is None: the verifier is not asked again

    def _score(self, prm: StepScorer, ends: Ends) -> None:
        """Score steps that the model has not seen yet. Steps without text at the end of a path have no score."""
        paths = []
        steps = []
        for _, node in ends:
            path = node.readable_path()
            texts = tuple(step.raw for step in path)
            last_tokens = tuple(step.num_tokens - 1 for step in path)
            paths.append(path)
            steps.append(Steps(texts, last_tokens))
        # The whole path goes in, as a model reads the steps before; a step that has a score keeps it.
        scores = prm.score_steps(steps, **_call(ends))
        for path, row in zip(paths, scores.rewards, strict=True):
            for step, score in zip(path, row, strict=True):
                if not step.is_scored:
                    step.score = score
                    step.is_scored = True


def _call(ends: Ends) -> dict[str, Any]:
    """Return the arguments that the trainer passes to every reward function."""
    problems = [problem for problem, _ in ends]
    columns: dict[str, Any] = {}
    # Rows of one file may have different columns: one that a row lacks is `None` there.
    for name in dict.fromkeys(chain(*(problem.columns for problem in problems))):
        columns[name] = [problem.columns.get(name) for problem in problems]
    # Behind the columns, none of which can take the place of an argument.
    return columns | {
        "prompts": [problem.prompt for problem in problems],
        "completions": [problem.completion(node) for problem, node in ends],
        "completion_ids": [list(problem.completion_ids(node)) for problem, node in ends],
        "trainer_state": None,
        "log_metric": log_nothing,
        "log_extra": log_nothing,
    }


def best_of_n(problem: Problem) -> Generator[list[Branch], list[Node | None], None]:
    """Ask for completions until the budget does not pay for a longest one any more."""
    # Completions are shorter than the longest as a rule, so each round leaves a budget for another one.
    longest = problem.room(problem.root)
    while problem.budget.left >= longest:
        yield [Branch(problem.root, problem.budget.left // longest, to_end=True)]


def beam(problem: Problem) -> Generator[list[Branch], list[Node | None], None]:
    """Ask for the continuations of each beam, step by step, until the budget is spent."""
    width = problem.settings.width
    children = problem.settings.children
    # Without a process reward model a step has no value of its own, so whole continuations are sampled for one.
    to_end = not problem.by_steps
    while True:
        front = [problem.root]
        while front:
            count = children
            if front == [problem.root]:
                count *= width  # as many first steps as later rounds sample from all beams together
            ends = yield [Branch(node, count, to_end) for node in front]
            if not ends:
                return  # the budget is spent
            # The next steps: where the sampled steps end, or the first steps of the continuations to the end.
            new_nodes = ends
            if to_end:
                new_nodes = chain(*(node.children for node in front))
            candidates = []
            for node in dict.fromkeys(new_nodes):  # equal steps are one node
                if node is not None and not node.finish:
                    candidates.append(node)
            front = sorted(candidates, key=rank, reverse=True)[:width]  # stable: the first sampled of equals


def puct(problem: Problem) -> Generator[list[Branch], list[Node | None], None]:
    """Ask for the continuations of one node at a time, until the budget is spent or the tree has no open node left."""
    settings = problem.settings
    while not problem.root.is_closed:
        node = select(problem.root, settings.exploration)
        ends = yield [Branch(node, settings.children, to_end=not problem.by_steps)]
        if not ends:
            return  # the budget is spent
        if node.children:  # without children, the budget has cut all continuations short
            node.is_expanded = True
        # Closed nodes are not selected: a finished completion has nothing to continue, nor has a node above such only.
        for end in ends:
            if end is not None and end.finish:
                end.is_closed = True
                _close(end.parent)
        _close(node)


def select(root: Node, exploration: float) -> Node:
    """Return the node to continue: the first on the way down that was not continued yet."""
    node = root
    while node.is_expanded:
        open_children = [child for child in node.children if not child.is_closed]
        node = max(open_children, key=lambda child: score(child, exploration))
    return node


def score(child: Node, exploration: float) -> float:
    """Return PUCT's score of a child among its siblings.

    Example:

    ```python
    >>> parent = Node(visits=4, total=2.0)
    >>> often = Node(samples=3, visits=3, total=1.5, parent=parent)
    >>> parent.children = [often, Node(samples=1, visits=1, parent=parent)]
    >>> [score(child, 1.0) for child in parent.children]
    [0.875, 0.25]

    ```
    """
    parent = child.parent or child
    siblings = parent.children or [child]
    mean = child.mean
    if mean is None:  # a step without a value counts as good as its parent
        mean = parent.mean or 0.0
    visits = sum(sibling.visits for sibling in siblings)
    samples = sum(sibling.samples for sibling in siblings)
    prior = child.samples / max(samples, 1)
    return mean + exploration * prior * math.sqrt(visits) / (1 + child.visits)


def _close(node: Node | None) -> None:
    """Close a node and those above it, as far as nothing below them is open."""
    while node is not None and node.is_expanded:
        if not all(child.is_closed for child in node.children):
            return
        node.is_closed = True
        node = node.parent
