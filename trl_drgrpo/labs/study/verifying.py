r"""Rung d: a task of guessing and verifying, in which the model itself finds out that it is incorrect.

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

Declared before the runs. Measured are, at the start, the change of the lengths by one update of each objective, with
differences from Dr. GRPO on the same batches, and the push of each on the decision to check again; after 60 steps, the
gap: tokens behind the first verdict, incorrect answers minus correct ones, mean of the last 20 steps, as a difference
from Dr. GRPO with the same seed. The length bias of an objective is borne out if the 95% interval of that difference
lies above 0. The runs count if true verdicts stay above 99.5% in each (false ones could then make 0.2 tokens of the
gap at most) and the pass rate stays at 4 of 11.

A first study, with 0.5 for a true verdict, 200 steps and 99.9%, did not count by its own rule: the check decayed, in
one run to 91%, where it was trained longest without a length bias. Its runs are kept in
`recipes/results/verify_first.json`, those of the present study for 200 steps in `verify_200_steps.json`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.labs.study.turn_sampling import sample_turn

if TYPE_CHECKING:
    from datasets import Dataset

DIGITS = 4  # of a prompt, and numbers of a check
PASSING = 4  # of the numbers modulo 11, those that pass
GO_ON = 0.6  # probability of one more check in a demonstration, whatever the verdict
CHECK_TOKENS = DIGITS + 1  # numbers and verdict
FIRST_TOKENS = 1 + CHECK_TOKENS  # the guess and the first check
MOST_RECHECKS = 8
MAX_COMPLETION = FIRST_TOKENS + MOST_RECHECKS * CHECK_TOKENS
VERDICT_WEIGHT = 4.0  # of a true verdict, a number that passes being 1
WARM_START_STEPS = 500
SHARPENED = 2.0  # factor of the logits after the warm start; it removes unlikely tokens from the check
_NUMBERS = "0123456789x"
CHANCE = PASSING / len(_NUMBERS)  # that a guess passes
_VERDICTS = {True: "y", False: "n"}


def make_prompts(size: int, seed: int) -> "Dataset":
    """Prompts of four random digits.

    Args:
        size (`int`): Number of rows.
        seed (`int`): Of the digits.

    Returns:
        `datasets.Dataset` with the columns `prompt` and `digits`.
    """
    from datasets import Dataset

    rng = random.Random(seed)
    digits = [_draw(rng) for _ in range(size)]
    return Dataset.from_dict({"prompt": [each + "=" for each in digits], "digits": digits})


def _draw(rng: random.Random) -> str:
    return f"{rng.randrange(10**DIGITS):0{DIGITS}}"


def check(digits: str, guess: str) -> str:
    """The check of a guess as it should be: four numbers and the verdict.

    Args:
        digits (`str`): Of the prompt.
        guess (`str`): A number from 0 to 10, `x` for ten.

    Example:

    ```python
    >>> check("4819", "7")  # 7 + 4 is 0 modulo 11; 8 cubed is 512, so 6; 7 cubed is 343, so 2; 2 + 9 is 0
    '0620y'

    ```
    """
    number, numbers = _NUMBERS.index(guess), []
    for digit in digits:
        number = (number + int(digit)) ** 3 % len(_NUMBERS)
        numbers.append(_NUMBERS[number])
    return "".join(numbers) + _VERDICTS[number < PASSING]


def passes(completions: Sequence[str], digits: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the guess passes its check, whatever verdict the completion writes; else 0.

    Args:
        completions (`Sequence[str]`): B completions.
        digits (`Sequence[str]`): Of the prompts.
    """
    return [float(_truth(text, of) == _VERDICTS[True]) for text, of in zip(completions, digits, strict=True)]


def true_verdict(completions: Sequence[str], digits: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the first verdict is the check's, be it `y` or `n`; else 0. What follows is not looked at.

    Args:
        completions (`Sequence[str]`): B completions.
        digits (`Sequence[str]`): Of the prompts.
    """
    return [
        float(text[CHECK_TOKENS:FIRST_TOKENS] == _truth(text, of))
        for text, of in zip(completions, digits, strict=True)
    ]


def _truth(completion: str, digits: str) -> str | None:
    """The verdict on a completion's guess; `None` if it has none."""
    guess = completion[:1]
    return check(digits, guess)[-1] if guess and guess in _NUMBERS else None


def decisions(lengths: Any, stopped: Any) -> Any:
    """Decisions to check again or to end, one behind each check.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): Tokens of each completion.
        stopped (`np.ndarray` of shape `(B,)`, bool): Those that ended by themselves; the others were cut at the limit.
    """
    return (lengths - stopped - FIRST_TOKENS) // CHECK_TOKENS + stopped


def sampling_rollout(seed: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """Plain sampling at temperature 1, with this package's generation in every arm, for `rollout_func`.

    Args:
        seed (`int`): Not read: the policy samples from torch's generator.
    """

    from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        with shared_prefill(trainer.model):
            completion_ids = sample_turn(trainer, prompt_ids, MAX_COMPLETION, [tokenizer.eos_token_id])
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    return sample


# The model that everything starts from ------------------------------------------------------------------------------


def demonstrate(digits: str, rng: random.Random) -> str:
    """A guess and its check, repeated as often as a coin says, cut at the limit.

    Args:
        digits (`str`): Of the prompt.
        rng (`random.Random`): Draws the guess and the coin; it is advanced.

    Example:

    ```python
    >>> demonstrate("4819", random.Random(1))
    '279x6n79x6n'

    ```
    """
    guess = rng.choice(_NUMBERS)
    own, repeated = check(digits, guess), 1
    while rng.random() < GO_ON:
        repeated += 1
    return (guess + own * repeated)[:MAX_COMPLETION]


def warm_start(folder: Path, seed: int = 0, steps: int = WARM_START_STEPS, batch_size: int = 128) -> Path:
    """Train a small Qwen2 on demonstrations, sharpen it until its checks are exact, and save it.

    Sampled at temperature 1, one trained token in 500 is a slip; with logits twice as large none was found in 4096
    completions. The coin's 0.6 becomes 0.69, alike for both verdicts.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Of weights and demonstrations.
        steps (`int`): Optimizer steps.
        batch_size (`int`): Rows per step.

    Returns:
        `Path`: `folder`.
    """
    import torch
    from transformers import Qwen2ForCausalLM, set_seed

    from trl_drgrpo.labs.demo.build import build_config, imitate, save
    from trl_drgrpo.labs.demo.tokenizer import build_tokenizer

    set_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen2ForCausalLM(build_config(tokenizer))
    imitate(model, _demonstrations(tokenizer, steps, batch_size, seed), steps, lr=3e-3)
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPENED)
    save(model, tokenizer, folder, f"trl_drgrpo.labs.study.verifying, seed {seed}, {steps} steps of {batch_size} rows")
    return folder


def _demonstrations(tokenizer: Any, steps: int, batch_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Batches of demonstrations; the prompt is not learned."""
    from trl_drgrpo.labs.demo.build import pad_rows

    rng = random.Random(-1 - seed)  # not the prompts of a run
    for _ in range(steps):
        rows = []
        for _ in range(batch_size):
            digits = _draw(rng)
            prompt = tokenizer(digits + "=")["input_ids"]
            written = [*tokenizer(demonstrate(digits, rng))["input_ids"], tokenizer.eos_token_id][:MAX_COMPLETION]
            rows.append((prompt + written, [0] * len(prompt) + [1] * len(written)))
        yield pad_rows(rows, tokenizer.pad_token_id)
