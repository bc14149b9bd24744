"""What scores the steps of an arm, and what the scores are used for.

Four signals: the rule, a process reward model trained on the rule's labels (PRM), that model's scores shuffled among
the steps of a batch, and an adversary that gives 1 to wrong steps and 0 to right ones. Three uses of each: a reward
with the credit of the DeepSeekMath paper, a reward with `to_go`, and a baseline.

As a baseline a signal has to say how the completion stands, not how the last step was, so there the scores are taken
as their minimum so far: a wrong answer stays wrong. The shuffle and the adversary spoil what comes out of that.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

StepRewardFunc = Callable[..., list[list[float | None]]]

OUTCOME = "outcome"
SIGNALS = {
    "rule": "faithful rule",
    "prm": "trained PRM",
    "shuffled": "shuffled PRM",
    "adversarial": "adversarial PRM",
}
USES: dict[str, tuple[str, dict[str, Any]]] = {  # and the fields of the configuration
    "deepseekmath": ("reward, `deepseekmath`", {"step_credit": "return_to_go", "step_baseline": "deepseekmath"}),
    "to_go": ("reward, `to_go`", {"step_credit": "return_to_go", "step_baseline": "to_go"}),
    "baseline": ("baseline", {"process_role": "baseline"}),
}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        signal (`str`, *optional*): A key of [`SIGNALS`]; none: the outcome reward only.
        use (`str`, *optional*): A key of [`USES`].
    """

    signal: str | None = None
    use: str | None = None

    @property
    def name(self) -> str:
        """Its name in the results."""
        return OUTCOME if self.signal is None else f"{self.signal}/{self.use}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return "outcome only" if self.use is None else f"{SIGNALS[self.signal or '']} as {USES[self.use][0]}"

    @property
    def fields(self) -> dict[str, Any]:
        """What it changes in [`DrGRPOConfig`], the separator left out."""
        return {} if self.use is None else USES[self.use][1]

    def step_rewards(self, rule: StepRewardFunc, prm: StepRewardFunc, seed: int) -> StepRewardFunc | None:
        """What scores its steps.

        Args:
            rule, prm (`Callable`): Step reward functions.
            seed (`int`): Of the shuffle.
        """
        if self.signal is None:
            return None
        scores = prm if self.signal in ("prm", "shuffled") else rule
        if self.use == "baseline":
            scores = so_far(scores)
        if self.signal == "shuffled":
            return shuffled(scores, random.Random(seed))
        return reversed_scores(scores) if self.signal == "adversarial" else scores


ARMS = {arm.name: arm for arm in (Arm(), *(Arm(signal, use) for signal in SIGNALS for use in USES))}


def so_far(scores: StepRewardFunc) -> StepRewardFunc:
    """The smallest score up to each step; a step without one keeps that of the step before.

    Args:
        scores (`Callable`): A step reward function.

    Example:

    ```python
    >>> so_far(lambda **call: [[1.0, 0.2, 0.9], [None, 0.5, None]])()
    [[1.0, 0.2, 0.2], [None, 0.5, 0.5]]

    ```
    """
    return _named("so_far", lambda **call: [list(accumulate(row, _smaller)) for row in scores(**call)])


def _smaller(before: float | None, score: float | None) -> float | None:
    known = [each for each in (before, score) if each is not None]
    return min(known) if known else None


def reversed_scores(scores: StepRewardFunc) -> StepRewardFunc:
    """1 minus the score: pays for what is wrong.

    Args:
        scores (`Callable`): A step reward function.
    """
    return _named("adversarial", lambda **call: _mapped(scores(**call), lambda score: 1.0 - score))


def shuffled(scores: StepRewardFunc, rng: random.Random) -> StepRewardFunc:
    """The same scores, each given to a step drawn from all of the batch.

    Args:
        scores (`Callable`): A step reward function.
        rng (`random.Random`): Source of randomness; it is advanced.
    """

    def scored(**call: Any) -> list[list[float | None]]:
        rows = scores(**call)
        pool = [score for row in rows for score in row if score is not None]
        rng.shuffle(pool)
        return _mapped(rows, lambda _: pool.pop())

    return _named("shuffled", scored)


def _mapped(rows: Sequence[Sequence[float | None]], change: Callable[[float], float]) -> list[list[float | None]]:
    return [[None if score is None else change(score) for score in row] for row in rows]


def _named(name: str, function: StepRewardFunc) -> StepRewardFunc:
    function.__name__ = name
    return function
