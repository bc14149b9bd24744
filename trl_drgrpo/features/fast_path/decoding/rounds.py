"""Generation in rounds of fewer rows, where the keys and values of all rows do not fit into memory.

With this package's loop the tokens are those of a single round, up to rounding: every round draws the random numbers
of all rows and takes its own. transformers' loop draws for the rows that it has, so there a round goes on behind the
numbers of the one before.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from trl_drgrpo.features.fast_path.noise import random_state

logger = logging.getLogger(__name__)

_BY_ROW = ("input_ids", "attention_mask")  # arguments of `generate` that have a row for each completion


def in_rounds(
    generate: Callable[..., torch.Tensor],
    limits: Sequence[int] | None,
    kwargs: dict[str, Any],
    rows_at_once: int,
    draws_all: bool,
) -> torch.Tensor:
    """Generate so many rows at a time.

    Args:
        generate (`Callable`): Takes limits and arguments of `model.generate`, and of a round its first row and the
            rows to draw for.
        limits (`Sequence[int]`, *optional*): Tokens that each row may write.
        kwargs (`dict[str, Any]`): Arguments of `model.generate`.
        rows_at_once (`int`): Rows of a round.
        draws_all (`bool`): Whether each round draws the random numbers of all rows.

    Returns:
        `torch.Tensor` of shape `(B, L + T)`, int64: As from a single round, padded behind a row's end.
    """
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or len(ids) <= rows_at_once:
        return generate(limits, kwargs)
    # A tensor that is not known to have a row for each completion cannot be cut.
    tensors = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    unknown_tensors = [name for name in tensors if name not in _BY_ROW]
    if unknown_tensors:
        _say_one_round(", ".join(unknown_tensors))
        return generate(limits, kwargs)
    rows = len(ids)
    device = ids.device
    rewind = random_state(device)
    longest = 0
    state_after_longest = rewind
    outputs = []
    for first in range(0, rows, rows_at_once):
        these = slice(first, first + rows_at_once)
        if draws_all:  # only then: rounds of a loop that draws for the rows it has would all sample the same
            rewind()
        of_rows = {name: kwargs[name][these] for name in _BY_ROW if name in kwargs}
        limits_of_rows = None
        if limits is not None:
            limits_of_rows = limits[these]
        output = generate(limits_of_rows, {**kwargs, **of_rows}, first_row=first, rows_drawn=rows)
        outputs.append(output)
        if output.size(1) > longest:
            longest = output.size(1)
            state_after_longest = random_state(device)
    # A single round goes on until its longest row ends: there it leaves the generator.
    if draws_all:
        state_after_longest()
    pad_token_id = getattr(kwargs.get("generation_config"), "pad_token_id", None) or 0
    padded = [functional.pad(output, (0, longest - output.size(1)), value=pad_token_id) for output in outputs]
    return torch.cat(padded)


@cache
def _say_one_round(arguments: str) -> None:
    logger.warning("generation_rows has no effect: generate is called with %s, not cut by rows.", arguments)
