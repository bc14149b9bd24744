"""The larger of two numbers: a task that a small pretrained chat model gets right some of the time."""

import random
from typing import TYPE_CHECKING

from trl_drgrpo.demo.task import Split, check_draw, split_of

if TYPE_CHECKING:
    from datasets import Dataset


def make_larger_dataset(size: int, split: Split = "train", seed: int = 0) -> "Dataset":
    """Draw questions such as "Which is larger, 73 or 25?", with replacement.

    Args:
        size (`int`): Number of rows, at least 1.
        split (`"train"` or `"held_out"`): The two share no pair of numbers, in either order.
        seed (`int`): The same seed gives the same rows.

    Returns:
        `datasets.Dataset` with the columns `prompt` (`str`) and `answer` (`str`, the larger number).

    Raises:
        InputError: If `size` is below 1 or `split` is unknown.
    """
    from datasets import Dataset

    check_draw(size, split)
    rng = random.Random(f"larger/{split}/{seed}")
    prompts = []
    answers = []
    while len(prompts) < size:
        first, second = rng.sample(range(10, 100), 2)
        if split_of([first, second]) == split:
            prompts.append(f"Which is larger, {first} or {second}?")
            answers.append(str(max(first, second)))
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
