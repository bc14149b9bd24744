"""Turns of the policy in a custom rollout."""

from collections.abc import Sequence
from typing import Any


def sample_turn(trainer: Any, rows: Sequence[list[int]], tokens: int, ends: Sequence[int]) -> list[list[int]]:
    """At most `tokens` tokens behind each row, sampled at temperature 1 from the whole distribution.

    Args:
        trainer ([`trl.GRPOTrainer`]): Owns the policy and the tokenizer.
        rows (`Sequence[list[int]]`): Token ids so far.
        tokens (`int`): Of a turn at most.
        ends (`Sequence[int]`): Ids that end a turn, each the last one of it.

    Returns:
        `list[list[int]]`: The new ids of each row.
    """
    import torch
    from transformers import GenerationConfig

    model, pad = trainer.model, trainer.processing_class.pad_token_id
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    with torch.no_grad():
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
                eos_token_id=list(ends),
                pad_token_id=pad,
            ),
        )
    return [_until(row, ends) for row in generated[:, width:].tolist()]


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)
