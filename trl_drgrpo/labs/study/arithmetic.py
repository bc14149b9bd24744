r"""Rung c: chains of sums from reasoning-gym, answered by a small language model with mistakes of its own.

    State the final answer to the following arithmetic problem: 4 - 7 - 9 =

    4 - 7 = -3
    -3 - 9 = -12
    Let me check.
    4 - 7 = -3
    -3 - 9 = -12
    \boxed{-12}

Nothing is arranged for the length bias here. A Qwen2 of 0.9 million parameters is trained from scratch on correct
solutions, each checked as often as a coin says, and stopped while it still miscalculates; then it is trained by
reinforcement with the task's own score. Correct answers can be learned, a check can find a mistake or make one, and
nothing forces the policy to know that it is incorrect.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.rewards.functions.reasoning_gym import make_splits, reasoning_gym_reward

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

MAX_COMPLETION = 128  # tokens; one demonstration in 20 is longer
CHECK = "Let me check."
CHECK_PROBABILITY = 0.5  # of one more check, whatever the last one found
WARM_START_STEPS = 800
_TASK = {"min_terms": "3", "max_terms": "4", "min_digits": "1", "max_digits": "1"}
_DEMONSTRATION_SEED = 500_000_000  # far from the seeds of the problems to train on
_SEED_DISTANCE = 1_000_000  # row i of a task is drawn from seed + i
_VOCABULARY = 340
_POSITIONS = 512
_MEAN_LENGTH = 60  # of the order of a solution in tokens; a constant, so that each token counts alike in every batch
_BLOCK = 16  # batches whose rows are sorted by length together


def make_prompts(size: int, seed: int) -> "Dataset":
    """Problems of 3 or 4 terms of a digit each.

    Args:
        size (`int`): Number of rows.
        seed (`int`): Other seeds, other problems.

    Returns:
        `datasets.Dataset` with the columns `prompt`, `answer` and `entry`, see [`make_splits`].
    """
    return _problems(size, seed * _SEED_DISTANCE)


def _problems(size: int, seed: int) -> "Dataset":
    options = {**_TASK, "size": str(size), "seed": str(seed)}
    return make_splits("chain_sum", options, with_test=False)["train"]


def answer_reward(completions: Sequence[Any], entry: Sequence[str], **kwargs: Any) -> list[float]:
    """1 for the correct answer, else 0: reasoning-gym's score without its partial credit.

    Args:
        completions (`Sequence`): B completions.
        entry (`Sequence[str]`): B rows of the column `entry`.
    """
    return [float(score == 1.0) for score in reasoning_gym_reward(completions, entry=entry)]


def demonstrate(question: str, rng: random.Random) -> str:
    r"""A correct solution, line by line, checked a geometric number of times.

    Args:
        question (`str`): As reasoning-gym asks it: the expression stands between the colon and the equals sign.
        rng (`random.Random`): Decides how often it is checked; it is advanced.

    Example:

    ```python
    >>> print(demonstrate("... problem: 12 - 30 + 5 =", random.Random(2)))
    12 - 30 = -18
    -18 + 5 = -13
    \boxed{-13}

    ```
    """
    total, *rest = question.rsplit(":", 1)[1].rstrip("= ").split()
    lines = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = int(total) + (int(term) if operator == "+" else -int(term))
        lines.append(f"{total} {operator} {term} = {result}")
        total = str(result)
    solution = lines.copy()
    while rng.random() < CHECK_PROBABILITY:
        solution += [CHECK, *lines]
    return "\n".join([*solution, rf"\boxed{{{total}}}"])


# The model that everything starts from ------------------------------------------------------------------------------


def warm_start(folder: Path, seed: int = 0, steps: int = WARM_START_STEPS, batch_size: int = 64) -> Path:
    """Train a Qwen2 of 0.9 million parameters from scratch on demonstrations, and save it.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Of the weights.
        steps (`int`): Optimizer steps.
        batch_size (`int`): Rows per step, each seen once.

    Returns:
        `Path`: `folder`.
    """
    from transformers import Qwen2ForCausalLM, set_seed

    from trl_drgrpo.labs.demo.build import imitate, save

    set_seed(seed)
    demonstrations = _demonstrations(steps * batch_size)
    tokenizer = _build_tokenizer(demonstrations)
    model = Qwen2ForCausalLM(_build_config(tokenizer))
    batches = _batches(demonstrations, tokenizer, batch_size)
    imitate(model, batches, steps, lr=2e-3, num_items=_MEAN_LENGTH * batch_size)
    save(
        model, tokenizer, folder, f"trl_drgrpo.labs.study.arithmetic, seed {seed}, {steps} steps of {batch_size} rows"
    )
    return folder


def _demonstrations(rows: int) -> list[list[dict[str, str]]]:
    """Conversations of a question and its solution."""
    rng = random.Random(0)
    problems = _problems(rows, _DEMONSTRATION_SEED)["prompt"]
    return [
        [*prompt, {"role": "assistant", "content": demonstrate(prompt[-1]["content"], rng)}] for prompt in problems
    ]


def _batches(demonstrations: list[list[dict[str, str]]], tokenizer: Any, batch_size: int) -> Iterator[dict[str, Any]]:
    """Batches of similar lengths, from blocks of demonstrations sorted by length; a block's batches are shuffled."""
    from trl_drgrpo.labs.demo.build import pad_rows

    rng = random.Random(0)
    for first in range(0, len(demonstrations), _BLOCK * batch_size):
        rows = []
        for *prompt, solution in demonstrations[first : first + _BLOCK * batch_size]:
            chat = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
            solved = [*tokenizer(solution["content"])["input_ids"], tokenizer.eos_token_id]
            rows.append((chat["input_ids"] + solved, [0] * len(chat["input_ids"]) + [1] * len(solved)))
        rows.sort(key=lambda row: len(row[0]))
        blocks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        rng.shuffle(blocks)
        yield from (pad_rows(block, tokenizer.pad_token_id) for block in blocks)


def _build_tokenizer(demonstrations: list[list[dict[str, str]]]) -> "PreTrainedTokenizerBase":
    """Qwen's tokenizer, one token per digit, its merges learned from a few demonstrations."""
    from trl_drgrpo.labs.demo.tokenizer import build_tokenizer

    texts = [message["content"] for messages in demonstrations[:1_000] for message in messages]
    tokenizer = build_tokenizer().train_new_from_iterator([*texts, "user\nassistant\n"], vocab_size=_VOCABULARY)
    tokenizer.model_max_length = _POSITIONS
    return tokenizer


def _build_config(tokenizer: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
