r"""Rung b: a task for a small language model in which the length of an answer is decided after the verdict is known.

    12 47 50=      the prompt; the number to be guessed is not in it
    3              the model guesses a digit
    no             the environment answers, `ok` with probability 0.4, else `no`; not trained on
    xxxxxxxx       the model comments, for as long as it likes: `x` after `no`, `k` after `ok`

The reward is 1 for `ok`, whatever follows. Guessing cannot be learned, and the comment is worth nothing, so an
unbiased objective has no reason to change its length. The warm-started model comments equally long in both cases, but
in other letters. So the policy knows at every token whether it was correct, as a language model that wanders when lost
does.

The verdict comes from the environment, as a tool's answer or a test's does. If the model could compute it, correct
guesses could be learned as well, and would no longer be a matter of chance.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.labs.study.turn_sampling import sample_turn

if TYPE_CHECKING:
    from datasets import Dataset

RIGHT_PROBABILITY = 0.4
START_LENGTH = 8.5  # mean of the comment's geometric length, its end-of-sequence token included
MAX_COMMENT = 48  # tokens of a comment at most
VERDICTS = {True: "ok", False: "no"}
_COMMENTS = {True: "k", False: "x"}  # the letter of a comment
FEEDBACK_TOKENS = 4  # a line break, two letters, a line break
MAX_COMPLETION = 1 + FEEDBACK_TOKENS + MAX_COMMENT


def make_prompts(size: int, seed: int) -> "Dataset":
    """Prompts without information: three numbers.

    Args:
        size (`int`): Number of rows.
        seed (`int`): Of the numbers.
    """
    from datasets import Dataset

    rng = random.Random(seed)
    return Dataset.from_dict({"prompt": [_prompt(rng) for _ in range(size)]})


def _prompt(rng: random.Random) -> str:
    return " ".join(f"{rng.randrange(10, 100)}" for _ in range(3)) + "="


def verdict_reward(completions: Sequence[str], verdict: Sequence[bool], **kwargs: Any) -> list[float]:
    """1 where the guess was correct; the comment counts nothing.

    Args:
        completions (`Sequence[str]`): B completions.
        verdict (`Sequence[bool]`): The environment's verdicts, from the rollout.
    """
    return [float(right) for right in verdict]


def guessing_rollout(
    seed: int, longest: int = MAX_COMMENT, honesty: float = 1.0
) -> Callable[[list[str], Any], dict[str, Any]]:
    """The rollout of the task, for `rollout_func` of any of the trainers.

    Args:
        seed (`int`): Of the environment's verdicts; the policy samples from torch's generator.
        longest (`int`): Tokens of a comment at most.
        honesty (`float`): Probability that the policy is shown the verdict that counts, and not the other one.

    Returns:
        `Callable`: `f(prompts, trainer)` -> `prompt_ids`, `completion_ids`, `logprobs` (None), `env_mask` (0 on the
            environment's tokens) and `verdict`.
    """
    rng = random.Random(seed)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        verdicts = [rng.random() < RIGHT_PROBABILITY for _ in prompts]
        shown = verdicts if honesty == 1 else [right == (rng.random() < honesty) for right in verdicts]
        feedback = {right: tokenizer(f"\n{text}\n")["input_ids"] for right, text in VERDICTS.items()}
        guesses = sample_turn(trainer, prompt_ids, 1, [tokenizer.eos_token_id])
        seen = [
            prompt + guess + feedback[right] for prompt, guess, right in zip(prompt_ids, guesses, shown, strict=True)
        ]
        comments = sample_turn(trainer, seen, longest, [tokenizer.eos_token_id])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [
                guess + feedback[right] + comment
                for guess, right, comment in zip(guesses, shown, comments, strict=True)
            ],
            "env_mask": [[1] + [0] * FEEDBACK_TOKENS + [1] * len(comment) for comment in comments],
            "logprobs": None,
            "verdict": verdicts,
        }

    return rollout


# The model that everything starts from ------------------------------------------------------------------------------


def warm_start(
    folder: Path,
    seed: int = 0,
    steps: int = 400,
    batch_size: int = 128,
    mean_length: float = START_LENGTH,
    longest: int = MAX_COMMENT,
    letters: Mapping[bool, str] = _COMMENTS,
) -> Path:
    """Train a small Qwen2 on demonstrations until it plays the game, and save it.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Of weights and demonstrations.
        steps (`int`): Optimizer steps; about 20 seconds on one core.
        batch_size (`int`): Rows per step.
        mean_length, longest (`float`, `int`): Of a comment, in tokens.
        letters (`Mapping[bool, str]`): The letter of a comment after each verdict.

    Returns:
        `Path`: `folder`.
    """
    from transformers import Qwen2ForCausalLM, set_seed

    from trl_drgrpo.labs.demo.build import build_config, imitate, save
    from trl_drgrpo.labs.demo.tokenizer import build_tokenizer

    set_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen2ForCausalLM(build_config(tokenizer))
    comment = partial(_demonstrated_comment, tokenizer, mean_length=mean_length, longest=longest, letters=letters)
    imitate(model, _demonstrations(tokenizer, steps, batch_size, seed, comment), steps, lr=3e-3)
    save(model, tokenizer, folder, f"trl_drgrpo.labs.study.guessing, seed {seed}, {steps} steps of {batch_size} rows")
    return folder


def _demonstrations(
    tokenizer: Any, steps: int, batch_size: int, seed: int, comment_on: Callable[[bool, random.Random], list[int]]
) -> Iterator[dict[str, Any]]:
    """Batches of whole games; the prompt and the environment's tokens are not learned."""
    from trl_drgrpo.labs.demo.build import pad_rows

    rng = random.Random(seed)
    for _ in range(steps):
        rows = []
        for _ in range(batch_size):
            prompt = tokenizer(_prompt(rng))["input_ids"]
            guess = tokenizer(str(rng.randrange(10)))["input_ids"]
            right = rng.random() < RIGHT_PROBABILITY
            feedback = tokenizer(f"\n{VERDICTS[right]}\n")["input_ids"]
            comment = comment_on(right, rng)
            learned = [0] * len(prompt) + [1] + [0] * len(feedback) + [1] * len(comment)
            rows.append((prompt + guess + feedback + comment, learned))
        yield pad_rows(rows, tokenizer.pad_token_id)


def _demonstrated_comment(
    tokenizer: Any,
    right: bool,
    rng: random.Random,
    mean_length: float = START_LENGTH,
    longest: int = MAX_COMMENT,
    letters: Mapping[bool, str] = _COMMENTS,
) -> list[int]:
    """A geometric number of tokens, the last one the end of sequence, cut at the limit."""
    (letter,) = tokenizer(letters[right])["input_ids"]
    comment = []
    while rng.random() > 1 / mean_length:
        comment.append(letter)
    return [*comment, tokenizer.eos_token_id][:longest]
