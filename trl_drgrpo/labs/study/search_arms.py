"""The arms of the study of search: strategies, sources of values, and the sizes of a run."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from trl_drgrpo.labs.demo.process import line_is_right, line_reward
from trl_drgrpo.labs.study.credit_arms import shuffled
from trl_drgrpo.process_rewards.step_verifiers import step_verifier


@dataclass(frozen=True)
class SearchSizes:
    """Settings that all arms share.

    Args:
        budgets (`tuple[int, ...]`): Sampled tokens per problem, ascending.
        problems (`int`): Of a seed.
        max_completion_length, width, children, exploration: As in a search.
        noise (`float`): Share of the steps for which the mediocre process reward model reverses the verdict.
    """

    budgets: tuple[int, ...] = (256, 512, 1024)
    problems: int = 16
    max_completion_length: int = 112
    width: int = 2
    children: int = 3
    exploration: float = 0.5
    noise: float = 0.2


@dataclass(frozen=True)
class SearchArm:
    """One way to search.

    Args:
        strategy (`str`): As in a search.
        values (`str`): Source of values, a key of `VALUES`.
    """

    strategy: str
    values: str

    @property
    def label(self) -> str:
        """In tables."""
        return f"`{self.strategy}`, {VALUES[self.values]}"


VALUES = {
    "verifier": "verdicts",
    "good": "faithful PRM",
    "mediocre": "mediocre PRM",
    "shuffled": "shuffled PRM",
}
ARMS = {
    f"{strategy}/{values}": SearchArm(strategy, values)
    for strategy in ("best_of_n", "beam", "puct")
    for values in VALUES
}


def process_rewards(values: str, seed: int, noise: float) -> Any:
    """The step reward function behind a source of values; None for the verifier's verdicts.

    Args:
        values (`str`): A key of `VALUES`.
        seed (`int`): Of noise and shuffle.
        noise (`float`): As in [`SearchSizes`].
    """
    if values == "verifier":
        return None
    if values == "mediocre":
        return step_verifier(partial(_mistaken, seed=seed, noise=noise), name="mediocre")
    return line_reward if values == "good" else shuffled(line_reward, Random(seed))


def _mistaken(
    prompt: Any, previous_steps: Sequence[str], step: str, seed: int = 0, noise: float = 0.0
) -> float | None:
    """The rule's verdict, reversed for a fixed share of all lines: equal lines get equal verdicts."""
    verdict = line_is_right(prompt, previous_steps, step)
    draw = zlib.crc32(f"{seed}/{prompt}/{previous_steps}/{step}".encode()) / 2**32
    return verdict if verdict is None or draw >= noise else 1.0 - verdict
