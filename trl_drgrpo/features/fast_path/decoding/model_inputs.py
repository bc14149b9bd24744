"""Inputs of a model in a decoding loop: those of some rows, and those of the next token."""

from typing import Any

import torch

ROW_INPUTS = ("attention_mask", "position_ids")


def plain_step(model: Any, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """Run the last token of each row over transformers' cache. Returns `(n, V)`: what comes next."""
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
    return model(**inputs, return_dict=True).logits[:, -1]


def one_token_on(model_kwargs: dict[str, Any], with_mask: bool) -> dict[str, Any]:
    """Return the inputs with the mask and the positions one token longer."""
    longer = dict(model_kwargs)
    if with_mask and (mask := model_kwargs.get("attention_mask")) is not None:
        longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if (positions := model_kwargs.get("position_ids")) is not None:
        longer["position_ids"] = positions[..., -1:] + 1
    return longer


def select_values(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return these rows of `(B, L)`, or of `(axes, B, L)`: positions along several axes (M-RoPE)."""
    return values if rows is None else values.index_select(-2, rows)


def select_inputs(model_kwargs: dict[str, Any], rows: torch.Tensor | None) -> dict[str, Any]:
    """Return the inputs of these rows; the cache stays as it is."""
    return {
        key: select_values(value, rows) if key in ROW_INPUTS and value is not None else value
        for key, value in model_kwargs.items()
    }
