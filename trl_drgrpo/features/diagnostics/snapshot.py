"""One generation batch, copied from the device to the host in one transfer, as statistics and run log read it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trl_drgrpo.features.diagnostics.run_log import RecordedRow
from trl_drgrpo.upstream.batches import CreditedBatch


@dataclass(frozen=True)
class OwnRow:
    """One row of this rank for the statistics; see [`BatchRows`]. `weight` is `None` where nothing is corrected."""

    length: int
    trained: int
    gradient_weight: float
    truncated: bool
    text: int
    weight: float | None = None


class BatchSnapshot:
    """A credited generation batch in plain Python numbers.

    Args:
        batch ([`CreditedBatch`]): The batch.
        first_row (`int`): Index of this rank's first row among all ranks' rows.
        stop_token_ids (`Collection[int]`): Tokens that end a completion.
        recorded (`Collection[int]`): Groups, over all ranks, that are to be recorded.

    Attributes:
        rewards (`list[float]` of length `B`): Over all ranks; NaN = unscorable.
        per_func (`list[list[float]]` of shape `(F, B)`): Each function's rewards, over all ranks.
        own (`list[OwnRow]` of length `b`): This rank's rows.
    """

    def __init__(
        self, batch: CreditedBatch, first_row: int, stop_token_ids: Collection[int], recorded: Collection[int]
    ):
        self.batch, self.first_row = batch, first_row
        self._recorded = [
            i for i in range(len(batch.scored.prompts)) if (first_row + i) // batch.num_generations in recorded
        ]
        advantages = batch.token_advantages
        tensors = {
            "rewards": batch.rewards,
            "row advantages": batch.row_advantages,
            **{f"reward {f}": column for f, column in enumerate(batch.scored.rewards_per_func.unbind(dim=1))},
            "tokens": batch.completion_mask.sum(dim=1),
            "trained": batch.trained_mask.sum(dim=1),
            "gradient_weight": advantages.abs().sum(dim=1),
            "token advantages": advantages[self._recorded],
            "token masks": batch.trained_mask[self._recorded],
        }
        if (weights := batch.row_weights) is not None:
            tensors["weights"] = weights
        copied = to_host(tensors)
        self.rewards, self._advantages = copied["rewards"], copied["row advantages"]
        self._token_advantages, self._token_masks = copied["token advantages"], copied["token masks"]
        self.per_func = [copied[f"reward {f}"] for f in range(batch.scored.rewards_per_func.size(1))]
        self.own = [
            # A tool's tokens are in the completion but not trained on; where all of a row is masked, none can be told.
            OwnRow(
                len(ids) - int(tokens - trained),
                int(trained),
                gradient_weight,
                _is_cut(ids, stop_token_ids),
                hash(tuple(ids)),
                weight,
            )
            for ids, tokens, trained, gradient_weight, weight in zip(
                batch.scored.completion_ids,
                copied["tokens"],
                copied["trained"],
                copied["gradient_weight"],
                copied.get("weights", [None] * len(batch.scored.completion_ids)),
                strict=True,
            )
        ]

    def recorded_rows(self, names: Sequence[str], correct: Sequence[bool | None] | None) -> Iterator[RecordedRow]:
        """This rank's rows of the groups that are recorded. `names`: the `F` reward functions; `correct`: `B` values,
        over all ranks."""
        scored, steps, forks = self.batch.scored, self.batch.steps, self.batch.forks
        width = self.batch.trained_mask.size(1)
        for n, i in enumerate(self._recorded):
            row, ids, own = self.first_row + i, list(scored.completion_ids[i]), self.own[i]
            tokens = slice(n * width, n * width + len(ids))
            yield RecordedRow(
                index=row,
                prompt=scored.prompts[i],
                columns=scored.inputs[i],
                token_ids=ids,
                token_advantages=self._token_advantages[tokens],
                trained=[mask > 0 for mask in self._token_masks[tokens]],
                step_ends=steps.steps[i].ends if steps else (),
                step_rewards=steps.rewards[i] if steps else (),
                rewards={name: values[row] for name, values in zip(names, self.per_func, strict=True)},
                reward=self.rewards[row],
                advantage=self._advantages[i],
                length=own.length,
                truncated=own.truncated,
                correct=correct[row] if correct else None,
                cuts=forks.cuts[row] if forks else None,
            )


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Flat lists of numbers from tensors of one device, in one transfer (as float32)."""
    flat: list[Any] = torch.cat([tensor.detach().float().flatten() for tensor in tensors.values()]).tolist()
    result, start = {}, 0
    for name, tensor in tensors.items():
        result[name] = flat[start : start + tensor.numel()]
        start += tensor.numel()
    return result


def _is_cut(ids: Sequence[int], stop_token_ids: Collection[int]) -> bool:
    return bool(len(ids)) and ids[-1] not in stop_token_ids
