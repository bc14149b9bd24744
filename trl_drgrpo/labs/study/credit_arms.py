"""The arms of the study of step credit: signals that score steps, and uses of their scores.

Four signals: the rule, a process reward model trained on the rule's labels (PRM), that model's scores shuffled among
the steps of a batch, and an adversary that gives 1 to incorrect steps, else 0. Three uses of each: a reward with the
credit of the DeepSeekMath paper, a reward with `to_go`, and a baseline.

As a baseline a signal has to estimate the outcome, not the last step, so there the scores are multiplied up to each
step, with `STEP_TO_COME` for every step that is still due: after an incorrect step the value stays 0, after each
correct one it rises.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

StepRewardFunc = Callable[..., list[list[float | None]]]

OUTCOME = "outcome"
STEP_TO_COME = 0.8  # the probability that any step to come is correct
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
        """The fields of [`DrGRPOConfig`] that it changes, without the separator."""
        return {} if self.use is None else USES[self.use][1]

    def step_rewards(
        self, rule: StepRewardFunc, prm: StepRewardFunc, due: Callable[[Any], int], seed: int
    ) -> StepRewardFunc | None:
        """The step reward function of the arm, if it has one.

        Args:
            rule, prm (`Callable`): Step reward functions.
            due (`Callable`): From a prompt to the number of steps of a correct answer.
            seed (`int`): Of the shuffle.
        """
        if self.signal is None:
            return None
        scores = prm if self.signal in ("prm", "shuffled") else rule
        if self.signal == "shuffled":
            scores = shuffled(scores, random.Random(seed))
        if self.signal == "adversarial":
            scores = reversed_scores(scores)
        return expected_outcome(scores, due) if self.use == "baseline" else scores


ARMS = {arm.name: arm for arm in (Arm(), *(Arm(signal, use) for signal in SIGNALS for use in USES))}


def expected_outcome(scores: StepRewardFunc, due: Callable[[Any], int]) -> StepRewardFunc:
    """After each step, the product of the scores so far and of `STEP_TO_COME` for each step that is still due.

    Args:
        scores (`Callable`): A step reward function; where it gives no score, the product stays.
        due (`Callable`): From a prompt to the number of steps of a correct answer.

    Example:

    ```python
    >>> (row,) = expected_outcome(lambda **call: [[1.0, None, 0.5]], due=len)(prompts=["abcd"])
    >>> [round(value, 3) for value in row]
    [0.512, 0.64, 0.4]

    ```
    """

    def scored(prompts: Sequence[Any], **call: Any) -> list[list[float | None]]:
        estimates: list[list[float | None]] = []
        for prompt, row in zip(prompts, scores(prompts=prompts, **call), strict=True):
            so_far = accumulate((1.0 if score is None else score for score in row), mul)
            left = (max(due(prompt) - written, 0) for written in range(1, len(row) + 1))
            estimates.append([product * STEP_TO_COME**steps for product, steps in zip(so_far, left, strict=False)])
        return estimates

    return _named("expected_outcome", scored)


def reversed_scores(scores: StepRewardFunc) -> StepRewardFunc:
    """1 minus the score: pays for mistakes.

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
