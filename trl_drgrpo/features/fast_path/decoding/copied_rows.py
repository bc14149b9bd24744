"""Rows that are decoded over copies of transformers' cache: what a test of its selection compares.

Only caches with running states are tested like this, so a run without them does not load the file.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.features.fast_path.decoding.model_inputs import one_token_on, plain_step, select_inputs
from trl_drgrpo.upstream.kv_cache import CACHE, select_rows

if TYPE_CHECKING:
    from trl_drgrpo.features.fast_path.decoding.model_inputs import DecodingModel


class CopiedRows:
    """Rows that are decoded over a copy of transformers' cache.

    Args:
        model ([`~transformers.PreTrainedModel`]): Decoder-only.
        ids (`torch.Tensor` of shape `(n, L)`, int64): Prompts.
        model_kwargs (`dict`): As of [`Forwards`], with the cache after the prompts.
    """

    def __init__(self, model: "DecodingModel", ids: torch.Tensor, model_kwargs: dict[str, Any]):
        self._model = model
        self._ids = ids
        copied_cache = copy.deepcopy(model_kwargs[CACHE])
        self._kwargs = model_kwargs | {CACHE: copied_cache}

    def select(self, rows: torch.Tensor) -> None:
        """Make these rows the batch."""
        self._ids = self._ids[rows]
        self._kwargs = select_inputs(self._kwargs, rows)
        select_rows(self._kwargs[CACHE], rows)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one more token `(n,)` of each row. Returns `(n, V)`: what comes next."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._kwargs = one_token_on(self._kwargs, with_mask=True)
        return plain_step(self._model, self._ids, self._kwargs)


def selected_and_alone(
    model: "DecodingModel",
    ids: torch.Tensor,
    prompts: dict[str, Any],
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Run three copies of each prompt for a token each; one of them leaves, and the others take a second step.

    Args:
        model, ids, prompts: As in [`CopiedRows`].
        logits (`torch.Tensor` of shape `(n, V)`): What comes next behind the prompts.

    Returns:
        Logits `(2n, V)` after the second step, and those of rows that ran alone, without any selection.
    """
    tokens = logits.topk(3).indices  # (n, 3)
    # The first and the last copy stay, so that the selected rows are not neighbors.
    staying = [0, 2]
    # What must come out: the same tokens, each copy in a batch that no selection has touched.
    alone: list[torch.Tensor] = []
    for copy_number in staying:
        rows = CopiedRows(model, ids, prompts)
        next_tokens = tokens[:, copy_number]
        rows.step(next_tokens)
        alone.append(rows.step(next_tokens))
    # Both selections that decoding makes: rows are repeated after the prompts, and later some of them leave.
    group = CopiedRows(model, ids, prompts)
    prompt_numbers = torch.arange(len(ids), device=ids.device)
    group.select(prompt_numbers.repeat_interleave(3))
    group.step(tokens.flatten())
    row_numbers = torch.arange(tokens.numel(), device=ids.device).view_as(tokens)
    group.select(row_numbers[:, staying].flatten())
    selected = group.step(tokens[:, staying].flatten())
    return selected, torch.stack(alone, dim=1).flatten(0, 1)
