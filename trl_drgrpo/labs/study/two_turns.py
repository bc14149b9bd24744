r"""A task of two turns: the environment names the second term once the first sum is written.

    27+8=          the prompt
    35             the model's first turn: a number and a line break
    +1=            the environment
    36             the model's second turn

The outcome is 1 if the last number is the true sum, so a mistake in the first turn spoils whatever follows. A turn is
a step; it is correct if it adds correctly to the number before it. The demonstrator is that of the long list sums: it
knows half of the addition table.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.labs.demo.long_sums import add_with_gaps
from trl_drgrpo.labs.study.turn_sampling import sample_turn

if TYPE_CHECKING:
    from datasets import Dataset

TURN_TOKENS = 4  # of a turn at most: three digits and its end
MAX_COMPLETION = 2 * TURN_TOKENS + 3
WARM_START_STEPS = 200
_GAP_PROBABILITY = 0.9
_NUMBER = re.compile(r"\d+")


def make_prompts(size: int, seed: int) -> "Dataset":
    """First sums; the second term follows from the prompt, and the environment alone knows how.

    Args:
        size (`int`): Number of rows.
        seed (`int`): Of the numbers.

    Returns:
        `datasets.Dataset` with the columns `prompt` (text) and `answer` (`int`).
    """
    from datasets import Dataset

    rng = random.Random(f"two turns/{seed}")
    prompts = [_draw_prompt(rng) for _ in range(size)]
    return Dataset.from_dict(
        {"prompt": prompts, "answer": [_first_sum(prompt) + second_term(prompt) for prompt in prompts]}
    )


def _draw_prompt(rng: random.Random) -> str:
    return f"{rng.randrange(10, 80)}+{rng.randint(1, 9)}="


def _first_sum(prompt: str) -> int:
    return sum(map(int, prompt.rstrip("=").split("+")))


def second_term(prompt: str) -> int:
    """The term that the environment adds, 1 to 9."""
    return 1 + zlib.crc32(prompt.encode()) % 9


def last_number_reward(completions: Sequence[str], answer: Sequence[int], **kwargs: Any) -> list[float]:
    """Outcome reward: 1 if the number behind the environment's line is the sum, else 0.

    Args:
        completions (`Sequence[str]`): B completions, the environment's text included.
        answer (`Sequence[int]`): B sums.
    """
    last = [_number(text.rpartition("=")[2]) for text in completions]
    return [float(number == target) for number, target in zip(last, answer, strict=True)]


def turn_reward(prompts: Sequence[str], steps: Sequence[Sequence[str]], **kwargs: Any) -> list[list[float | None]]:
    r"""Step reward: 1 for a turn that adds correctly to the number before it, else 0.

    Args:
        prompts (`Sequence[str]`): B prompts.
        steps (`Sequence[Sequence[str]]`): The turns of each completion; the environment's text ends the first.

    Example: after `27+8=` the environment adds 1.

    ```python
    >>> turn_reward(["27+8=", "27+8="], [["35\n+1=", "37"], ["36\n+1=", "37"]])
    [[1.0, 0.0], [0.0, 1.0]]

    ```
    """
    return [_judge(prompt, turns) for prompt, turns in zip(prompts, steps, strict=True)]


def _judge(prompt: str, turns: Sequence[str]) -> list[float | None]:
    verdicts: list[float | None] = []
    due: int | None = _first_sum(prompt)
    for text in turns:
        total = _number(text)
        verdicts.append(float(total is not None and total == due))
        due = None if total is None else total + second_term(prompt)
    return verdicts


def _number(text: str) -> int | None:
    match = _NUMBER.match(text)
    return int(match[0]) if match else None


def rollout(seed: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """The rollout of the task, for `rollout_func`.

    Args:
        seed (`int`): Not read: the environment leaves nothing to chance, and the policy samples from torch's
            generator.

    Returns:
        `Callable`: `f(prompts, trainer)` -> `prompt_ids`, `completion_ids`, `logprobs` (None) and `env_mask` (0 on
            the environment's tokens).
    """

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        (line_break,) = tokenizer("\n")["input_ids"]
        ends = [line_break, tokenizer.eos_token_id]
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        named = [tokenizer(f"+{second_term(prompt)}=")["input_ids"] for prompt in prompts]
        first = sample_turn(trainer, prompt_ids, TURN_TOKENS, ends)
        seen = [prompt + turn + term for prompt, turn, term in zip(prompt_ids, first, named, strict=True)]
        second = sample_turn(trainer, seen, TURN_TOKENS, ends)
        turns = list(zip(first, named, second, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [one + term + two for one, term, two in turns],
            "env_mask": [[1] * len(one) + [0] * len(term) + [1] * len(two) for one, term, two in turns],
            "logprobs": None,
        }

    return play


# The model that everything starts from, and what a process reward model learns from ---------------------------------


def labeled_rows(size: int, seed: int) -> list[dict[str, Any]]:
    """Demonstrations with the verdict of each turn, for [`~trl_drgrpo.process_rewards.train_prm`].

    Args:
        size (`int`): Number of rows.
        seed (`int`): Of prompts and mistakes.
    """
    rng = random.Random(f"two turns, labeled/{seed}")
    rows = []
    for _ in range(size):
        prompt, turns = _demonstrate(rng)
        rows.append({"prompt": prompt, "steps": turns, "labels": [bool(v) for v in _judge(prompt, turns)]})
    return rows


def _demonstrate(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt and both turns, the environment's text at the end of the first."""
    prompt = _draw_prompt(rng)
    start, term = map(int, prompt.rstrip("=").split("+"))
    first = add_with_gaps(start, term, rng, _GAP_PROBABILITY)
    second = add_with_gaps(first, second_term(prompt), rng, _GAP_PROBABILITY)
    return prompt, [f"{first}\n+{second_term(prompt)}=", str(second)]


def warm_start(folder: Path, seed: int = 0, steps: int = WARM_START_STEPS, batch_size: int = 128) -> Path:
    """Train a small Qwen2 on demonstrations until it plays the game, and save it.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Of weights and demonstrations.
        steps (`int`): Optimizer steps.
        batch_size (`int`): Rows per step.

    Returns:
        `Path`: `folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_drgrpo.labs.demo.build import MODEL_DIR, imitate, save

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    imitate(model, _demonstrations(tokenizer, steps, batch_size, seed), steps, lr=2e-3)
    save(model, tokenizer, folder, f"trl_drgrpo.labs.study.two_turns, seed {seed}, {steps} steps of {batch_size} rows")
    return folder


def _demonstrations(tokenizer: Any, steps: int, batch_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Batches of whole games; the prompt and the environment's tokens are not learned."""
    from trl_drgrpo.labs.demo.build import pad_rows

    rng = random.Random(seed)
    for _ in range(steps):
        rows = []
        for _ in range(batch_size):
            prompt, (first, second) = _demonstrate(rng)
            answer, _, term = first.partition("\n")
            parts = [(prompt, 0), (answer + "\n", 1), (term, 0), (second, 1)]
            ids = [(tokenizer(text)["input_ids"], learned) for text, learned in parts]
            ids.append(([tokenizer.eos_token_id], 1))
            rows.append(([i for part, _ in ids for i in part], [learned for part, learned in ids for _ in part]))
        yield pad_rows(rows, tokenizer.pad_token_id)
