r"""The length bias on a task that was not made to show it: chains of sums from reasoning-gym.

Question: does the bias appear where nothing is arranged for it?

    State the final answer to the following arithmetic problem: 4 - 7 - 9 =

    4 - 7 = -3
    -3 - 9 = -12
    Let me check.
    4 - 7 = -3
    -3 - 9 = -12
    \boxed{-12}

A Qwen2 of 0.9 million parameters is trained from scratch on correct solutions, each checked as often as a coin says,
and stopped while it still miscalculates; then it is trained by reinforcement with the task's own score. Correct
answers can be learned, a check can find a mistake or make one, and nothing forces the policy to know that it is
incorrect.

Arms, measure and rule: those of `length_bias.py`.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from frame import main
from datasets import Dataset
from length_bias import Task, study
from small_models import save, token_row
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from trl_drgrpo.demo.build import imitate, pad_rows
from trl_drgrpo.demo.task import build_tokenizer
from trl_drgrpo.rewards.functions.reasoning_gym import make_splits, reasoning_gym_reward

MAX_COMPLETION = 128  # tokens; one demonstration in 20 is longer
CHECK = "Let me check."
CHECK_PROBABILITY = 0.5  # of one more check, whatever the last one found
_TASK = {"min_terms": "3", "max_terms": "4", "min_digits": "1", "max_digits": "1"}
_DEMONSTRATION_SEED = 500_000_000  # far from the seeds of the problems to train on
_SEED_DISTANCE = 1_000_000  # row i of a task is drawn from seed + i
_ROWS = 64  # of a batch of the warm start
_BLOCK = 16  # batches whose rows are sorted by length together
_MEAN_LENGTH = 60  # of the order of a solution in tokens; a constant, so that each token counts alike in every batch


def make_prompts(size: int, seed: int) -> Dataset:
    """Problems of 3 or 4 terms of a digit each, in the columns `prompt`, `answer` and `entry`."""
    return _problems(size, seed * _SEED_DISTANCE)


def _problems(size: int, seed: int) -> Dataset:
    options = {**_TASK, "size": str(size), "seed": str(seed)}
    return make_splits("chain_sum", options, with_test=False)["train"]


def answer_reward(completions: Sequence[Any], entry: Sequence[str], **kwargs: Any) -> list[float]:
    """1 for the correct answer, else 0: reasoning-gym's score without its partial credit."""
    return [float(score == 1.0) for score in reasoning_gym_reward(completions, entry=entry)]


def demonstrate(question: str, rng: random.Random) -> str:
    r"""A correct solution, line by line, checked a geometric number of times.

    >>> print(demonstrate("... problem: 12 - 30 + 5 =", random.Random(2)))
    12 - 30 = -18
    -18 + 5 = -13
    \boxed{-13}
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


def demonstrations(rows: int) -> list[tuple[list[dict[str, str]], str]]:
    """Prompts and their solutions."""
    rng = random.Random(0)
    problems = _problems(rows, _DEMONSTRATION_SEED)["prompt"]
    return [(prompt, demonstrate(prompt[-1]["content"], rng)) for prompt in problems]


def make_tokenizer(shown: Sequence[tuple[list[dict[str, str]], str]]) -> Any:
    """Qwen's tokenizer, one token per digit, its merges learned from a few demonstrations."""
    texts = [text for prompt, solution in shown[:1_000] for text in (prompt[-1]["content"], solution)]
    tokenizer = build_tokenizer().train_new_from_iterator([*texts, "user\nassistant\n"], vocab_size=340)
    tokenizer.model_max_length = 512
    return tokenizer


def batches(shown: Sequence[tuple[list[dict[str, str]], str]], tokenizer: Any, size: int) -> Iterator[Any]:
    """Batches of similar lengths, from blocks of demonstrations sorted by length; a block's batches are shuffled."""
    rng = random.Random(0)
    for first in range(0, len(shown), _BLOCK * size):
        rows = []
        for prompt, solution in shown[first : first + _BLOCK * size]:
            chat = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            rows.append(token_row(tokenizer, [(chat, False), (solution + tokenizer.eos_token, True)]))
        rows.sort(key=lambda row: len(row[0]))
        blocks = [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(blocks)
        count = {"num_items_in_batch": _MEAN_LENGTH * size}
        yield from (pad_rows(block, tokenizer.pad_token_id) | count for block in blocks)


def start(folder: Path, steps: int) -> Path:
    """The model, trained from scratch unless it is there; each demonstration is seen once."""
    if (folder / "model.safetensors").is_file():
        return folder
    set_seed(0)
    shown = demonstrations(steps * _ROWS)
    tokenizer = make_tokenizer(shown)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    imitate(model, batches(shown, tokenizer, _ROWS), steps, lr=2e-3)
    save(model, tokenizer, folder)
    return folder


TASK = Task(start, make_prompts, answer_reward, MAX_COMPLETION, warm_start_steps=800, learnable=True, batches=8)
STUDY = study("length_bias_arithmetic", TASK, seeds=3, steps=40, learning_rate=5e-5)

if __name__ == "__main__":
    main(STUDY)
