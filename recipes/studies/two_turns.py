r"""A task of two turns for `credit.py`: the environment names the second term once the first sum is written.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from frame import Row
from datasets import Dataset
from small_models import Parts, play, warm_start

from trl_drgrpo.demo.build import add_with_gaps
from trl_drgrpo.demo.task import IM_END

TURN_TOKENS = 4  # of a turn at most: three digits and its end
MAX_COMPLETION = 2 * TURN_TOKENS + 3
_GAP_PROBABILITY = 0.9


def make_prompts(size: int, seed: int) -> Dataset:
    """First sums, in the columns `prompt` and `answer`; the second term follows from the prompt, and the environment
    alone knows how."""
    rng = random.Random(f"two turns/{seed}")
    prompts = [_draw_prompt(rng) for _ in range(size)]
    return Dataset.from_dict({"prompt": prompts, "answer": [_first_sum(p) + second_term(p) for p in prompts]})


def _draw_prompt(rng: random.Random) -> str:
    return f"{rng.randrange(10, 80)}+{rng.randint(1, 9)}="


def _first_sum(prompt: str) -> int:
    return sum(map(int, prompt.rstrip("=").split("+")))


def second_term(prompt: str) -> int:
    """The term that the environment adds, 1 to 9."""
    return 1 + zlib.crc32(prompt.encode()) % 9


def last_number_reward(completions: Sequence[str], answer: Sequence[int], **kwargs: Any) -> list[float]:
    """Outcome reward: 1 if the number behind the environment's line is the sum, else 0."""
    last = [_number(text.rpartition("=")[2]) for text in completions]
    return [float(number == target) for number, target in zip(last, answer, strict=True)]


def turn_reward(prompts: Sequence[str], steps: Sequence[Sequence[str]], **kwargs: Any) -> list[list[float | None]]:
    r"""Step reward: 1 for a turn that adds correctly to the number before it, else 0. The environment's text ends the
    first turn; after `27+8=` it adds 1.

    >>> turn_reward(["27+8=", "27+8="], [["35\n+1=", "37"], ["36\n+1=", "37"]])
    [[1.0, 0.0], [0.0, 1.0]]
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
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def rollout(seed: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """The rollout of the task, for `rollout_func`; `seed` is not read, as the environment leaves nothing to chance."""

    def add(prompts: list[str], trainer: Any) -> dict[str, Any]:
        named = [f"+{second_term(prompt)}=" for prompt in prompts]
        return play(trainer, prompts, TURN_TOKENS, named, TURN_TOKENS, stops="\n")

    return add


def labeled_rows(size: int, seed: int) -> list[Row]:
    """Demonstrations with the verdict of each turn, for [`~trl_drgrpo.process_rewards.train_prm`]."""
    rng = random.Random(f"two turns, labeled/{seed}")
    shown = [_play(rng) for _ in range(size)]
    return [{"prompt": p, "steps": turns, "labels": [bool(v) for v in _judge(p, turns)]} for p, turns in shown]


def _play(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt and both turns of the demonstrator, the environment's text at the end of the first."""
    prompt = _draw_prompt(rng)
    first = add_with_gaps(*map(int, prompt.rstrip("=").split("+")), rng, _GAP_PROBABILITY)
    second = add_with_gaps(first, second_term(prompt), rng, _GAP_PROBABILITY)
    return prompt, [f"{first}\n+{second_term(prompt)}=", str(second)]


def demonstrate(rng: random.Random) -> Parts:
    """A game; the prompt and the environment's tokens are not learned."""
    prompt, (first, second) = _play(rng)
    answer, _, term = first.partition("\n")
    return [(prompt, False), (answer + "\n", True), (term, False), (second + IM_END, True)]


def start(folder: Path, steps: int) -> Path:
    """The demo's model, warm-started on games."""
    return warm_start(folder, demonstrate, steps, demos_model=True)
