"""Inputs of a model in a decoding loop: those of some rows, and those of the next token."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class DecodingModel(PreTrainedModel):
        """A decoder-only model, with what `GenerationMixin` adds to it."""

        generate: Callable[..., Any]
        prepare_inputs_for_generation: Callable[..., dict[str, Any]]


ROW_INPUTS = ("attention_mask", "position_ids")


def plain_step(model: "DecodingModel", ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """Run the last token of each row over transformers' cache. Returns `(n, V)`: what comes next."""
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
    return model(**inputs, return_dict=True).logits[:, -1]


def one_token_on(model_kwargs: dict[str, Any], with_mask: bool) -> dict[str, Any]:
    """Return the inputs with the mask and the positions one token longer."""
    longer = dict(model_kwargs)
    mask = model_kwargs.get("attention_mask")
    if with_mask and mask is not None:
        new_column = mask.new_ones(len(mask), 1)
        longer["attention_mask"] = torch.cat([mask, new_column], dim=1)
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        longer["position_ids"] = positions[..., -1:] + 1
    return longer


def select_values(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return these rows of `(B, L)`, or of `(axes, B, L)`: positions along several axes (M-RoPE)."""
    if rows is None:
        return values
    return values.index_select(-2, rows)


def select_inputs(model_kwargs: dict[str, Any], rows: torch.Tensor | None) -> dict[str, Any]:
    """Return the inputs of these rows; the cache stays as it is."""
    selected = dict(model_kwargs)
    for name in ROW_INPUTS:
        values = selected.get(name)
        if values is not None:
            selected[name] = select_values(values, rows)
    return selected
