"""The rows of a scored generation batch, in TRL's layout: which tensors it holds, how rows are cut out and joined."""

from collections.abc import Sequence
from typing import Any

import torch

from trl_drgrpo.upstream.batches import TokenBatch

OF_PROMPTS = ("prompt_ids", "prompt_mask")  # (B, P), padded on the left
OF_COMPLETIONS = (  # (B, T), padded on the right
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)
OF_EITHER = ("advantages", "importance_sampling_ratio")  # (B,), (B, 1) or (B, T)
OF_THE_BATCH = ("num_items_in_batch",)
KNOWN = frozenset((*OF_PROMPTS, *OF_COMPLETIONS, *OF_EITHER, *OF_THE_BATCH))


def unknown_keys(inputs: dict[str, Any]) -> list[str]:
    """Keys whose rows cannot be cut out: images and whatever a newer TRL may add."""
    return sorted(key for key, value in inputs.items() if key not in KNOWN and value is not None)


def row_of(inputs: dict[str, Any], index: int) -> dict[str, torch.Tensor]:
    """One row, without padding columns, on the CPU."""
    prompt, completion = inputs["prompt_mask"][index].bool(), inputs["completion_mask"].size(1)
    row = {}
    for key, value in inputs.items():
        if value is None or key in OF_THE_BATCH:
            continue
        row[key] = value[index].cpu()
        if key in OF_PROMPTS:
            row[key] = row[key][prompt.cpu()]
        elif key not in OF_COMPLETIONS and row[key].dim() and row[key].size(0) not in (1, completion):
            raise ValueError(f"{key}: a row of {tuple(row[key].shape)} is neither per row nor per token")
    return row


def whole_row(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """A row of nothing but tokens, as [`row_of`] gives one."""
    row = {"prompt_ids": torch.tensor(prompt_ids), "completion_ids": torch.tensor(completion_ids)}
    return row | {key.replace("_ids", "_mask"): torch.ones_like(ids) for key, ids in row.items()}


def token_batch(inputs: dict[str, Any], compute_entropy: bool = False) -> TokenBatch:
    """The tokens of a micro-batch, to be scored."""
    return TokenBatch(
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].size(1),
        compute_entropy=compute_entropy,
    )


def joined_rows(rows: Sequence[dict[str, torch.Tensor]], pad_token_id: int, device: Any) -> dict[str, torch.Tensor]:
    """Rows as one batch: prompts padded on the left, completions on the right.

    Args:
        rows (`Sequence[dict[str, torch.Tensor]]`): From [`row_of`], not empty.
        pad_token_id (`int`): For token ids; everything else is padded with 0.
        device (`torch.device`): Where the batch goes.
    """
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if values[0].dim():
            side = "left" if key in OF_PROMPTS else "right"
            pad = pad_token_id if key.endswith("_ids") else 0
            batch[key] = torch.nn.utils.rnn.pad_sequence(
                values, batch_first=True, padding_value=pad, padding_side=side
            ).to(device)
        else:
            batch[key] = torch.stack(values).to(device)
    return batch
