r"""The length bias in a model that guesses, and then finds out by itself that it is incorrect.

Question: does it take an environment that says so (`guessing.py`), or is the model's own knowledge enough?

    4819=        the prompt: digits d1 to d4
    7            the model guesses a number z0 from 0 to 10 (`x` is ten)
    0620y        it computes z <- (z + d)^3 mod 11 for each digit, and whether the last z is below 4: `y`, else `n`
    0620y0620y   it checks again, as often as it likes, and ends

The guess cannot be learned. Cubing permutes the numbers modulo 11, so every guess is correct in 4 of 11 prompts; it
takes four steps to compute in which ones, and the model can write those down only afterwards. The check can be
computed, and the warm-started model does so without mistakes. Nobody tells it the verdict: every token behind the
prompt is its own. Tokens behind the first verdict earn nothing.

The reward is 1 for a number that passes, and 4 for a true first verdict, whatever it says and whatever follows:
without it nothing keeps the check from decaying in training. Neither part depends on the length.

Arms and measure: those of `length_bias.py`, with the push of each objective on the decision to check again; lengths
are tokens behind the first verdict. Rule, declared before the runs: an objective shows the bias if the 95% interval of
its gap after 60 steps, minus that of Dr. GRPO with the same seed, lies above 0. The runs count if true verdicts stay
above 99.5% in each (false ones could then make 0.2 tokens of the gap at most) and the pass rate stays at 4 of 11.

A first study, with 0.5 for a true verdict, 200 steps and 99.9%, did not count by its own rule: the check decayed, in
one run to 91%, where it was trained longest without a length bias. Its runs are kept in
`recipes/results/verify_first.json`, those of the present study for 200 steps in `verify_200_steps.json`.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from frame import main
from datasets import Dataset
from length_bias import Task, study
from small_models import Parts, play, warm_start

from trl_drgrpo.demo.task import IM_END
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

DIGITS = 4  # of a prompt, and numbers of a check
PASSING = 4  # of the numbers modulo 11, those that pass
GO_ON = 0.6  # probability of one more check in a demonstration, whatever the verdict
CHECK_TOKENS = DIGITS + 1  # numbers and verdict
FIRST_TOKENS = 1 + CHECK_TOKENS  # the guess and the first check
MAX_COMPLETION = FIRST_TOKENS + 8 * CHECK_TOKENS
NUMBERS = "0123456789x"
VERDICTS = {True: "y", False: "n"}


def make_prompts(size: int, seed: int) -> Dataset:
    """Prompts of four random digits, in the columns `prompt` and `digits`."""
    rng = random.Random(seed)
    digits = [_draw(rng) for _ in range(size)]
    return Dataset.from_dict({"prompt": [each + "=" for each in digits], "digits": digits})


def _draw(rng: random.Random) -> str:
    return f"{rng.randrange(10**DIGITS):0{DIGITS}}"


def check(digits: str, guess: str) -> str:
    """The check of a guess as it should be: four numbers and the verdict.

    >>> check("4819", "7")  # 7 + 4 is 0 modulo 11; 8 cubed is 512, so 6; 7 cubed is 343, so 2; 2 + 9 is 0
    '0620y'
    """
    number, numbers = NUMBERS.index(guess), ""
    for digit in digits:
        number = (number + int(digit)) ** 3 % len(NUMBERS)
        numbers += NUMBERS[number]
    return numbers + VERDICTS[number < PASSING]


def passes(completions: Sequence[str], digits: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the guess passes its check, whatever verdict the completion writes; else 0."""
    return [float(_truth(text, of) == VERDICTS[True]) for text, of in zip(completions, digits, strict=True)]


def true_verdict(completions: Sequence[str], digits: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the first verdict is the check's, be it `y` or `n`; else 0. What follows is not looked at."""
    both = zip(completions, digits, strict=True)
    return [float(text[CHECK_TOKENS:FIRST_TOKENS] == _truth(text, of)) for text, of in both]


def _truth(completion: str, digits: str) -> str | None:
    """The verdict on a completion's guess; `None` if it has none."""
    guess = completion[:1]
    return check(digits, guess)[-1] if guess and guess in NUMBERS else None


def decisions(lengths: Any, stopped: Any) -> Any:
    """Decisions to check again or to end, one behind each check, `(B,)`.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): Tokens of each completion.
        stopped (`np.ndarray` of shape `(B,)`, bool): Those that ended by themselves; the others were cut at the limit.
    """
    return (lengths - stopped - FIRST_TOKENS) // CHECK_TOKENS + stopped


def rollout(seed: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """Plain sampling at temperature 1, with this package's generation in every arm; `seed` is not read."""

    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        with shared_prefill(trainer.model):
            return play(trainer, prompts, MAX_COMPLETION)

    return sample


def demonstrate(rng: random.Random) -> Parts:
    """A guess and its check, repeated as often as a coin says, cut at the limit."""
    digits = _draw(rng)
    text = rng.choice(NUMBERS)
    own = check(digits, text)
    text += own
    while rng.random() < GO_ON:
        text += own
    text = text[:MAX_COMPLETION]
    return [(digits + "=", False), (text if len(text) == MAX_COMPLETION else text + IM_END, True)]


@torch.no_grad()
def sharpen(model: Any) -> None:
    """Doubles the logits. Sampled at temperature 1, one trained token in 500 is a slip; with logits twice as large
    none was found in 4096 completions. The coin's 0.6 becomes 0.69, alike for both verdicts."""
    model.model.norm.weight.mul_(2.0)


def start(folder: Path, steps: int) -> Path:
    return warm_start(folder, demonstrate, steps, finish=sharpen, seed=-1)  # not the prompts of a run


TASK = Task(
    start,
    make_prompts,
    passes,
    MAX_COMPLETION,
    rollout,
    warm_start_steps=500,
    fixed_tokens=FIRST_TOKENS,
    verdict=true_verdict,
    verdict_weight=4.0,
    chance=PASSING / len(NUMBERS),
    decisions=decisions,
)
STUDY = study("verify", TASK, seeds=8, steps=60)

if __name__ == "__main__":
    main(STUDY)
