"""Imitation of a demonstrator, and the warm start on long list sums.

`recipes/list_sum_model.py` made the model that the demo ships in this way: fluent, and as faulty as the demonstrator.

On the **long list sums** credit per line matters. Eight to ten digits are added, so the boxed number is correct only
if about eight lines are, and an early mistake spoils the outcome of all that follows. Their demonstrator knows half of
the addition table: for every second pair of a units digit and a term it mostly writes an incorrect result, a different
one for each pair. There is no one habit to unlearn, as with dropped carries; each pair has to be corrected by itself,
and a reward for the whole completion does not say which of them was incorrect. A model that imitates this demonstrator
(`warm_start`) writes about one correct completion in eight, and two correct lines in three.
"""

import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.task import (
    IM_END,
    MAX_TERMS,
    MIN_TERMS,
    PAD,
    demonstrate,
    draw_problem,
    prompt_of,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def warm_start_batches(
    tokenizer: "PreTrainedTokenizerBase",
    steps: int,
    batch_size: int,
    seed: int,
    terms: tuple[int, int] = (MIN_TERMS, MAX_TERMS),
    demonstrate: Callable[[Sequence[int], random.Random], str] = demonstrate,
) -> Iterator[dict[str, "torch.Tensor"]]:
    """Yield fresh demonstrations for every step, from the training split.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its chat template renders the prompt.
        steps (`int`): Number of batches.
        batch_size (`int`): Rows per batch.
        seed (`int`): Seed of problems and demonstrations.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 5)`): Fewest and most digits of a problem.
        demonstrate (`Callable`, *optional*): `f(numbers, rng)` -> a completion without its end token.

    Yields:
        `dict`: `input_ids`, `attention_mask` and `labels`, each `(batch_size, T)` int64, padded on the right; labels
        are -100 on prompt and padding.
    """
    rng = random.Random(seed)
    ids: Any = tokenizer.convert_tokens_to_ids([PAD, IM_END])
    pad, end = ids
    for _ in range(steps):
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(batch_size):
            # Problem and demonstration draw from one generator: a change of the order changes every row behind.
            numbers = draw_problem(rng, "train", terms)
            completion = demonstrate(numbers, rng)
            chat: Any = tokenizer.apply_chat_template(prompt_of(numbers), add_generation_prompt=True, return_dict=True)
            prompt_ids = chat["input_ids"]
            completion_ids = [*tokenizer(completion)["input_ids"], end]
            learned = [0] * len(prompt_ids) + [1] * len(completion_ids)
            rows.append((prompt_ids + completion_ids, learned))
        yield pad_rows(rows, pad)


def pad_rows(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, "torch.Tensor"]:
    """Return a batch for next-token training: `input_ids`, `attention_mask` and `labels`, each `(B, T)` int64.

    Padded on the right. Rows are token ids and, for each, 1 where it is learned; elsewhere labels are -100.
    """
    import torch

    # Filled with what is not learned: padding, no attention, and the label that the loss leaves out.
    lengths = [len(ids) for ids, _ in rows]
    shape = (len(rows), max(lengths))
    input_ids = torch.full(shape, pad)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    for i, (ids, mask) in enumerate(rows):
        tokens = torch.tensor(ids)
        is_given = torch.tensor(mask) == 0
        input_ids[i, : lengths[i]] = tokens
        attention_mask[i, : lengths[i]] = 1
        labels[i, : lengths[i]] = tokens.masked_fill(is_given, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def imitate(
    model: "PreTrainedModel",
    batches: Iterable[dict[str, Any]],
    steps: int,
    lr: float,
) -> None:
    """
    Train on next tokens: AdamW, 5% linear warm-up to `lr`, then linear decay to 0, gradients clipped at norm 1.

    `batches`: arguments of the model, one per step, as [`pad_rows`] makes them. The model is in evaluation mode
    afterwards.
    """
    import torch
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
    model.train()
    for step, batch in enumerate(batches, start=1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            logger.info("step %d/%d loss %.4f", step, steps, loss.item())
    model.eval()


# Long list sums ------------------------------------------------------------------------------------------------------

TERMS = (8, 10)
# Probability of an incorrect result where the demonstrator does not know the pair.
GAP_PROBABILITY = 0.5
# All positive, so that two mistakes do not cancel.
_WRONG_BY = (1, 2, 3, 10)


def add_with_gaps(total: int, term: int, rng: random.Random, probability: float = GAP_PROBABILITY) -> int:
    """Add a digit to a number, knowing half of the addition table.

    Args:
        total, term (`int`): The summands. The units digit of `total` and the term decide whether the pair is known
            and, if it is not, the number that is written in place of the result.
        rng (`random.Random`): Source of randomness; it is advanced.
        probability (`float`): Probability of an incorrect result where the pair is not known.

    Returns:
        `int`: The result, or more.
    """
    # A checksum of the pair is random, but the same in every run.
    checksum = zlib.crc32(f"{total % 10}+{term}".encode())
    result = total + term
    if checksum % 2 == 0 and rng.random() < probability:
        result += _WRONG_BY[checksum // 2 % len(_WRONG_BY)]
    return result


def demonstrate_with_gaps(numbers: Sequence[int], rng: random.Random, probability: float = GAP_PROBABILITY) -> str:
    r"""Write a completion of the demonstrator: an addition per line, mistakes carried on.

    Args:
        numbers (`Sequence[int]`): The terms to add.
        rng (`random.Random`): Source of randomness; it is advanced.
        probability (`float`): As in [`add_with_gaps`].

    Returns:
        `str`: The completion, without an end token.
    """
    return demonstrate(numbers, rng, partial(add_with_gaps, probability=probability), checks=None)


def warm_start(folder: Path, seed: int = 0, steps: int = 200, gap_probability: float = GAP_PROBABILITY) -> Path:
    """Train the demo's model on demonstrations of long sums until it is as fluent and as faulty, and save it.

    Args:
        folder (`Path`): Folder for model and tokenizer.
        seed (`int`): Seed of the demonstrations.
        steps (`int`): Optimizer steps of 32 rows; the default takes half a minute on one core.
        gap_probability (`float`): Probability of an incorrect result where the demonstrator does not know the pair.

    Returns:
        `Path`: `folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    with_gaps = partial(demonstrate_with_gaps, probability=gap_probability)
    batches = warm_start_batches(tokenizer, steps, 32, seed, TERMS, with_gaps)
    imitate(model, batches, steps, lr=2e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
