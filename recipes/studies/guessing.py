r"""The length bias in a language model whose answer's length is decided after its verdict is known.

Question: the same as in `tabular.py`, through the real trainers.

    12 47 50=      the prompt; the number to be guessed is not in it
    3              the model guesses a digit
    no             the environment answers, `ok` with probability 0.4, else `no`; not trained on
    xxxxxxxx       the model comments, for as long as it likes: `x` after `no`, `k` after `ok`

The reward is 1 for `ok`, whatever follows. Guessing cannot be learned, and the comment is worth nothing, so an
unbiased objective has no reason to change its length. The warm-started model comments equally long in both cases, but
in other letters. So the policy knows at every token whether it was correct, as a language model that wanders when lost
does. The verdict comes from the environment, as a tool's answer or a test's does. If the model could compute it,
correct guesses could be learned as well, and would no longer be a matter of chance.

Arms, measure and rule: those of `length_bias.py`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from frame import main
from datasets import Dataset
from length_bias import Task, study
from small_models import Parts, play, warm_start

from trl_drgrpo.demo.task import IM_END

RIGHT_PROBABILITY = 0.4
START_LENGTH = 8.5  # mean of the comment's geometric length, its end token included
MAX_COMMENT = 48  # tokens of a comment at most
VERDICTS = {True: "ok", False: "no"}
COMMENTS = {True: "k", False: "x"}  # the letter of a comment
FEEDBACK_TOKENS = 4  # a line break, two letters, a line break
MAX_COMPLETION = 1 + FEEDBACK_TOKENS + MAX_COMMENT


def make_prompts(size: int, seed: int) -> Dataset:
    """Prompts without information: three numbers."""
    rng = random.Random(seed)
    return Dataset.from_dict({"prompt": [_prompt(rng) for _ in range(size)]})


def _prompt(rng: random.Random) -> str:
    return " ".join(f"{rng.randrange(10, 100)}" for _ in range(3)) + "="


def verdict_reward(completions: Sequence[str], verdict: Sequence[bool], **kwargs: Any) -> list[float]:
    """1 where the guess was correct, as the rollout's environment says; the comment counts nothing."""
    return [float(right) for right in verdict]


def rollout(seed: int, longest: int = MAX_COMMENT, honesty: float = 1.0) -> Callable[[list[str], Any], dict[str, Any]]:
    """The rollout of the task, for `rollout_func` of any of the trainers.

    Args:
        seed (`int`): Of the environment's verdicts; the policy samples from torch's generator.
        longest (`int`): Tokens of a comment at most.
        honesty (`float`): Probability that the policy is shown the verdict that counts, and not the other one.
    """
    rng = random.Random(seed)

    def guess(prompts: list[str], trainer: Any) -> dict[str, Any]:
        verdicts = [rng.random() < RIGHT_PROBABILITY for _ in prompts]
        shown = verdicts if honesty == 1 else [right == (rng.random() < honesty) for right in verdicts]
        feedback = [f"\n{VERDICTS[right]}\n" for right in shown]
        return {**play(trainer, prompts, 1, feedback, longest), "verdict": verdicts}

    return guess


def demonstrate(
    rng: random.Random,
    mean_length: float = START_LENGTH,
    longest: int = MAX_COMMENT,
    letters: Mapping[bool, str] = COMMENTS,
) -> Parts:
    """A game with a comment of geometric length, the last token its end, cut at the limit."""
    prompt, guess = _prompt(rng), str(rng.randrange(10))
    right, letter_count = rng.random() < RIGHT_PROBABILITY, 0
    while rng.random() > 1 / mean_length:
        letter_count += 1
    comment = letters[right] * letter_count + IM_END if letter_count < longest else letters[right] * longest
    return [(prompt, False), (guess, True), (f"\n{VERDICTS[right]}\n", False), (comment, True)]


def start(folder: Path, steps: int, **changes: Any) -> Path:
    """The warm-started model; `changes` go to [`demonstrate`]."""
    return warm_start(folder, partial(demonstrate, **changes), steps)


TASK = Task(
    start,
    make_prompts,
    verdict_reward,
    MAX_COMPLETION,
    rollout,
    warm_start_steps=400,
    environment_tokens=FEEDBACK_TOKENS,
    fixed_tokens=1,  # the guess
)
STUDY = study("length_bias_guessing", TASK, seeds=5)

if __name__ == "__main__":
    main(STUDY)
