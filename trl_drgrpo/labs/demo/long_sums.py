r"""Long list sums: a list-sum task on which credit per line matters.

    6+2+5+6+5+8+6+3+1

    6+2=8
    8+5=14
    14+6=17
    ...
    \boxed{38}

Eight to ten digits are added, so the boxed number is correct only if about eight lines are, and an early mistake
spoils the outcome of all that follows. The demonstrator knows half of the addition table: for every second pair of a
units digit and a term it mostly writes an incorrect result, a different one for each pair. There is no one habit to
unlearn, as with dropped carries; each pair has to be corrected by itself, and a reward for the whole completion does
not say which of them was incorrect. A model that imitates the demonstrator writes about one correct completion in
eight, and two correct lines in three.
"""

import random
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

from trl_drgrpo.labs.demo.task import Split, make_dataset, make_problems

TERMS = (8, 10)
MAX_COMPLETION = 112  # tokens; the longest demonstration has 101
GAP_PROBABILITY = 0.5  # of an incorrect result where the demonstrator does not know the pair
_WRONG_BY = (1, 2, 3, 10)  # never too little: two mistakes do not cancel
WARM_START_STEPS = 200


def add_with_gaps(total: int, term: int, rng: random.Random, probability: float = GAP_PROBABILITY) -> int:
    """Add a digit to a number, knowing half of the addition table.

    Args:
        total, term (`int`): The summands. The units digit of `total` and the term decide whether the pair is known
            and, if it is not, the number that is written in place of the result.
        rng (`random.Random`): Source of randomness; it is advanced.
        probability (`float`): Of an incorrect result where the pair is not known.

    Returns:
        `int`: The result, or more.
    """
    pair = zlib.crc32(f"{total % 10}+{term}".encode())
    wrong = pair % 2 == 0 and rng.random() < probability
    return total + term + (_WRONG_BY[pair // 2 % len(_WRONG_BY)] if wrong else 0)


def demonstrate_with_gaps(numbers: Sequence[int], rng: random.Random, probability: float = GAP_PROBABILITY) -> str:
    r"""A completion of the demonstrator: an addition per line, mistakes carried on.

    Args:
        numbers (`Sequence[int]`): The terms to add.
        rng (`random.Random`): Source of randomness; it is advanced.
        probability (`float`): As in [`add_with_gaps`].

    Returns:
        `str`: The completion, without an end token.
    """
    lines, total = [], numbers[0]
    for term in numbers[1:]:
        result = add_with_gaps(total, term, rng, probability)
        lines.append(f"{total}+{term}={result}")
        total = result
    return "\n".join([*lines, f"\\boxed{{{total}}}"])


def make_long_problems(size: int, split: Split = "train", seed: int = 0) -> list[tuple[int, ...]]:
    """As [`~trl_drgrpo.labs.demo.task.make_problems`], of 8 to 10 digits."""
    return make_problems(size, split, seed, TERMS)


def make_long_dataset(size: int, split: Split = "train", seed: int = 0) -> "Dataset":
    """As [`~trl_drgrpo.labs.demo.task.make_dataset`], of 8 to 10 digits."""
    return make_dataset(size, split, seed, TERMS)


def warm_start(
    folder: Path,
    seed: int = 0,
    steps: int = WARM_START_STEPS,
    batch_size: int = 32,
    gap_probability: float = GAP_PROBABILITY,
) -> Path:
    """Train the demo's model on demonstrations of long sums until it is as fluent and as faulty, and save it.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Of the demonstrations.
        steps (`int`): Optimizer steps; half a minute on one core.
        batch_size (`int`): Rows per step.
        gap_probability (`float`): Of an incorrect result where the demonstrator does not know the pair.

    Returns:
        `Path`: `folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_drgrpo.labs.demo.build import MODEL_DIR, imitate, save, warm_start_batches

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    demonstrate = partial(demonstrate_with_gaps, probability=gap_probability)
    batches = warm_start_batches(tokenizer, steps, batch_size, seed, TERMS, demonstrate)
    imitate(model, batches, steps, lr=2e-3)
    save(model, tokenizer, folder, f"trl_drgrpo.labs.demo.long_sums, seed {seed}, {steps} steps of {batch_size} rows")
    return folder
