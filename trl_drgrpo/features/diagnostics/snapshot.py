"""One generation batch, copied from the device to the host in one transfer, as statistics and run log read it."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.features.diagnostics.run_log import prompt_text, readable, short_text, spans_of
from trl_drgrpo.upstream.batches import CreditedBatch

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.steps.alignment import Aligner


_NO_COLUMNS = ("prompt", "completion", "completions", "completion_ids")


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
        own (`dict[str, list]`, each of length `b`): This rank's rows, as columns of [`BatchRows`].
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
        ids = batch.scored.completion_ids
        written = zip(ids, copied["tokens"], copied["trained"], strict=True)
        self.own: dict[str, list[Any]] = {
            # A tool's tokens are in the completion but not trained on; where all of a row is masked, none can be told.
            "lengths": [len(row) - int(tokens - trained) for row, tokens, trained in written],
            "trained": [int(tokens) for tokens in copied["trained"]],
            "gradient_weights": copied["gradient_weight"],
            "truncated": [len(row) > 0 and row[-1] not in stop_token_ids for row in ids],
            "texts": [hash(tuple(row)) for row in ids],
        }
        if weights is not None:
            self.own["weights"] = copied["weights"]

    def records(
        self, names: Sequence[str], correct: Sequence[bool | None] | None, aligner: "Aligner"
    ) -> Iterator[dict[str, Any]]:
        """This rank's rows of the groups that are recorded, as they stand in `completions.jsonl`, with what their
        group needs under `index`, `prompt`, `columns`. `names`: the `F` reward functions; `correct`: `B` values, over
        all ranks."""
        scored, steps, forks = self.batch.scored, self.batch.steps, self.batch.forks
        width = self.batch.trained_mask.size(1)
        for n, i in enumerate(self._recorded):
            row, ids = self.first_row + i, list(scored.completion_ids[i])
            tokens = slice(n * width, n * width + len(ids))
            spans = spans_of(
                ids,
                self._token_advantages[tokens],
                self._token_masks[tokens],
                aligner,
                step_ends=steps.steps[i].ends if steps else (),
                step_rewards=steps.rewards[i] if steps else (),
                cuts=forks.cuts[row] if forks else None,
            )
            columns = {name: short_text(value) for name, value in scored.inputs[i].items() if name not in _NO_COLUMNS}
            yield {
                "index": row,
                "prompt": prompt_text(scored.prompts[i]),
                "columns": columns,
                "spans": list(spans),
                "rewards": {name: readable(values[row]) for name, values in zip(names, self.per_func, strict=True)},
                "reward": readable(self.rewards[row]),
                "advantage": readable(self._advantages[i]),
                "length": self.own["lengths"][i],
                "truncated": self.own["truncated"][i],
                "right": correct[row] if correct else None,
            }


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Flat lists of numbers from tensors of one device, in one transfer (as float32)."""
    flat: list[Any] = torch.cat([tensor.detach().float().flatten() for tensor in tensors.values()]).tolist()
    result, start = {}, 0
    for name, tensor in tensors.items():
        result[name] = flat[start : start + tensor.numel()]
        start += tensor.numel()
    return result
