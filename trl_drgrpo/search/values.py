"""Values of what was found: the verifier's verdict on finished completions, a process reward model's on steps.

Both are called as the trainer calls them, with the continuations of all problems under way at once. A path's value is
that of its scored steps (`min`, `product` or `last`); without a process reward model it is the verdict, 1 or 0. One
value per sampled continuation is backed up from where it ends.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trl_drgrpo.process_rewards.scoring import StepScorer, log_nothing
from trl_drgrpo.process_rewards.steps import Steps
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.search.problem import PATH_VALUES, Node, Problem, SearchSettings

Found = Sequence[tuple[Problem, Node]]


class Appraiser:
    """Verifier and process reward model of a search.

    Args:
        settings ([`SearchSettings`]): Of the search.
        verifier (`Callable`, *optional*): Outcome reward function.
        prm (`Callable`, *optional*): Step reward function; values come from it where there is one.
    """

    def __init__(self, settings: SearchSettings, verifier: Callable | None, prm: Callable | None):
        on_error = settings.on_reward_error
        self.settings = settings
        self.verifier = None if verifier is None else checked_reward(verifier, on_error)
        self.prm = None if prm is None else StepScorer([prm], settings.segmenter(), on_error=on_error)

    def appraise(self, found: Found) -> None:
        """Judge the ends of continuations and back their values up.

        Args:
            found (sequence of pairs): For each sampled continuation its problem and the node where it ends.
        """
        ends = {id(node): (problem, node) for problem, node in found}.values()
        if self.prm is not None:
            self._score(self.prm, [(p, node) for p, node in ends if not all(step.is_scored for step in node.path())])
        if self.verifier is not None:
            self._verify(self.verifier, [(p, node) for p, node in ends if node.finish and not node.is_verified])
        for _, node in found:
            if (value := self.value(node)) is not None:
                node.back_up(value)

    def value(self, node: Node) -> float | None:
        """Value of the path to a node; None where nothing could be scored."""
        if self.prm is None:
            return self.accepted(node)
        scores = [step.score for step in node.path() if step.score is not None]
        return PATH_VALUES[self.settings.path_value](scores) if scores else None

    def accepted(self, node: Node) -> float | None:
        """1.0 if a finished completion is correct, else 0.0; None where the verifier gave no reward."""
        return None if node.outcome is None else float(node.outcome > self.settings.accept_above)

    def _verify(self, verifier: Callable, found: Found) -> None:
        if not found:
            return
        ids = [list(problem.completion_ids(node)) for problem, node in found]
        output = verifier(**_call(found), completion_ids=ids)
        rewards = asyncio.run(output) if inspect.iscoroutine(output) else output
        for (_, node), reward in zip(found, rewards, strict=True):
            node.outcome, node.is_verified = reward, True

    def _score(self, prm: StepScorer, found: Found) -> None:
        """Scores of the steps that were not seen yet; those at the end without text have none."""
        paths = [(problem, node, node.readable_path()) for problem, node in found]
        paths = [path for path in paths if path[2]]
        if not paths:
            return
        ends = [(problem, node) for problem, node, _ in paths]
        scores = prm.score_steps(
            [Steps(tuple(s.raw for s in steps), tuple(s.num_tokens - 1 for s in steps)) for *_, steps in paths],
            [list(problem.completion_ids(node)) for problem, node in ends],
            **_call(ends),
        )
        for (*_, steps), row in zip(paths, scores.rewards, strict=True):
            for step, score in zip(steps, row, strict=True):
                if not step.is_scored:
                    step.score, step.is_scored = score, True


def _call(found: Found) -> dict[str, Any]:
    """Arguments that the trainer passes to every reward function."""
    names = dict.fromkeys(name for problem, _ in found for name in problem.columns)
    return {
        **{name: [problem.columns.get(name) for problem, _ in found] for name in names},
        "prompts": [problem.prompt for problem, _ in found],
        "completions": [problem.completion(node) for problem, node in found],
        "trainer_state": None,
        "log_metric": log_nothing,
        "log_extra": log_nothing,
    }
