"""Turn the stock micro-batches of one optimizer step into planned ones.

A planned micro-batch is a dict as TRL's, cut to the width of its own rows, with one more key, `PLAN`: which rows run
packed together, how many rows stock TRL would have divided by, and what metrics need to keep their meaning. Plain
types only, so that a checkpoint can hold it.
"""

import math
from itertools import chain
from types import ModuleType
from typing import NotRequired, TypedDict

import torch

from trl_drgrpo.features.fast_path import micro_batch_planner
from trl_drgrpo.features.fast_path.micro_batch_planner import (
    Budget,
    Costs,
    MicroBatch,
    pack_length,
)
from trl_drgrpo.features.fast_path.pack_layout import rows_of
from trl_drgrpo.upstream.batches import (
    OF_COMPLETIONS,
    OF_EITHER,
    OF_PROMPTS,
    OF_THE_BATCH,
    Metrics,
    Rollouts,
    tensors_of,
    token_batch,
    trained_mask,
)

PLAN = "micro_batch_plan"


class WindowTotals(TypedDict):
    """Numbers of a window on all ranks."""

    slots: NotRequired[int]  # micro-batches of the window on each rank
    rows: int
    loss_tokens: int
    leaves_out: bool  # whether rows that have tokens are not run


class MicroBatchPlan(TypedDict):
    """Facts of a planned micro-batch beside its tensors."""

    rows: int  # on the rank that has most of them, fillers included
    nominal_rows: int  # of a stock micro-batch
    packs: MicroBatch
    loss_tokens: int  # of all ranks
    window: NotRequired[WindowTotals]  # in the last micro-batch of a window


class PlannedRollouts(Rollouts):
    """A planned micro-batch."""

    micro_batch_plan: MicroBatchPlan


class WindowSummary(WindowTotals):
    """A rank's window, as the other ranks need it."""

    batches: list[tuple[int, int]]  # rows and loss tokens of each planned micro-batch


def plan_of(inputs: Rollouts) -> MicroBatchPlan | None:
    """Return the plan of a micro-batch; `None`: it was not planned."""
    return inputs.get(PLAN)


def windows(slots: int, accumulation: int) -> list[range]:
    """Group the slots of a generation batch by the optimizer step that they feed, in every iteration.

    Args:
        slots (`int`): `steps_per_generation`.
        accumulation (`int`): `gradient_accumulation_steps`. Where neither divides the other, each slot stands alone.
    """
    # 8 slots, 4 to an optimizer step: two windows of 4. With 8 to a step, or 16, all 8 feed the same one.
    size = 1
    if slots % accumulation == 0:
        size = accumulation
    elif accumulation % slots == 0:
        size = slots
    return [range(start, start + size) for start in range(0, slots, size)]


class Window:
    """The rows of one optimizer step, on one rank.

    Args:
        micro_batches (`list[dict]`): TRL's, in their order.
        skip (`bool`): True if rows without advantage may be skipped.
        budget ([`Budget`]): Size that no micro-batch exceeds.
        costs ([`Costs`]): Cost model of the plan.
        whole (`bool`, *optional*, defaults to `False`): True if every token of every row runs.
    """

    def __init__(
        self,
        micro_batches: list[Rollouts],
        *,
        skip: bool,
        budget: Budget,
        costs: Costs,
        whole: bool = False,
    ):
        self.slots = len(micro_batches)
        self.nominal_rows = micro_batches[0]["completion_ids"].size(0)
        self.inputs = _joined(micro_batches)
        self.loss_tokens: list[int] = trained_mask(self.inputs).sum(dim=1).tolist()
        live = None
        if not whole:
            live = is_live(self.inputs, skip).tolist()
        self.rows = rows_of(token_batch(self.inputs), live, whole)
        self.costs = costs
        self.plan: list[MicroBatch] = planner_for(costs).plan_window(self.rows, self.slots, budget, costs)

    def summary(self) -> WindowSummary:
        """Return numbers for the other ranks: rows and loss tokens of each planned micro-batch, and of the window."""
        batches = []
        tokens_run = 0
        for batch in self.plan:
            rows = list(chain.from_iterable(batch))
            tokens = sum(self.loss_tokens[i] for i in rows)
            tokens_run += tokens
            batches.append((len(rows), tokens))
        return {
            "batches": batches,
            "rows": len(self.rows),
            "loss_tokens": sum(self.loss_tokens),
            "leaves_out": tokens_run < sum(self.loss_tokens),  # a row runs once or not at all
        }

    def micro_batches(self, everyone: list[WindowSummary], keep_slots: bool) -> list[PlannedRollouts]:
        """Fill the slots of the window from the end, because the last one carries the synchronization of gradients.

        Args:
            everyone (`list[dict]`): The [`Window.summary`] of every rank, in order.
            keep_slots (`bool`): Run something in every slot, because a skipped one would leave other processes
                waiting; else a slot that runs nothing has tensors of no rows.
        """
        batches_of_ranks = [summary["batches"] for summary in everyone]
        # Every rank uses as many slots as the one with most micro-batches. A window that trains nothing uses one,
        # which gives gradients of zeros: the optimizer steps there, too.
        used = self.slots
        if not keep_slots:
            used = max(1, *map(len, batches_of_ranks))
        planned = []
        for place in range(used):
            batch = []
            if place < len(self.plan):
                batch = self.plan[place]
            # The same on all ranks: most rows of any (TRL divides by them, so at least 1), and the tokens of all.
            rows = 1
            loss_tokens = 0
            for batches in batches_of_ranks:
                if place < len(batches):
                    rows_of_rank, tokens_of_rank = batches[place]
                    rows = max(rows, rows_of_rank)
                    loss_tokens += tokens_of_rank
            planned.append(self._micro_batch(batch, rows, loss_tokens))
        # Metrics are summed until the last micro-batch of the window says what to divide them by.
        planned[-1]["micro_batch_plan"]["window"] = {
            "slots": self.slots,
            "rows": sum(summary["rows"] for summary in everyone),
            "loss_tokens": sum(summary["loss_tokens"] for summary in everyone),
            "leaves_out": any(summary["leaves_out"] for summary in everyone),
        }
        return [self._micro_batch([], 0, 0) for _ in range(self.slots - used)] + planned

    def _micro_batch(self, batch: MicroBatch, rows: int, loss_tokens: int) -> PlannedRollouts:
        chosen = list(chain.from_iterable(batch))
        # All ranks run as many rows in a slot: TRL divides by them, so they must be equal. Fillers are copies of the
        # first row with masks of 0, so they have no loss.
        fillers = rows - len(chosen)
        row_numbers = chosen + [0] * fillers
        index = torch.tensor(row_numbers, dtype=torch.long, device=self.inputs["completion_ids"].device)
        prompt_width = max([1, *(self.rows[i].prompt_length for i in row_numbers)])
        completion_width = max([1, *(self.rows[i].completion_length for i in chosen)])
        inputs = {}
        for key, values in tensors_of(self.inputs).items():
            if key not in OF_THE_BATCH:
                values = values[index]  # a copy: fillers are written into it
                if key in OF_PROMPTS:  # padded on the left
                    values = values[:, -prompt_width:]
                elif values.dim() == 2:  # (B, T), padded on the right, or (B, 1)
                    values = values[:, :completion_width]
                if fillers and key in (*OF_COMPLETIONS, *OF_EITHER):
                    values[len(chosen) :] = 0
            inputs[key] = values
        # The rows of a pack now stand side by side: packs (7, 2) and (5,) become 0, 1 and 2.
        packs = []
        start = 0
        for pack in batch:
            packs.append(list(range(start, start + len(pack))))
            start += len(pack)
        plan: MicroBatchPlan = {
            "rows": rows,
            "nominal_rows": self.nominal_rows,
            "packs": packs,
            "loss_tokens": loss_tokens,
        }
        return PlannedRollouts(**Rollouts(**inputs), micro_batch_plan=plan)

    def statistics(self) -> dict[str, int]:
        """Count tokens that run, those of them that are no padding, tokens that stock TRL would run, and rows."""
        width = self.inputs["prompt_ids"].size(1) + self.inputs["completion_ids"].size(1)
        packs = list(chain.from_iterable(self.plan))
        planner = planner_for(self.costs)
        return {
            "processed": sum(planner.processed_tokens(self.rows, batch, self.costs) for batch in self.plan),
            "useful": sum(pack_length(self.rows, pack) for pack in packs),
            "upstream": len(self.rows) * width,
            "rows": len(self.rows),
            "run": sum(map(len, packs)),
        }


def planner_for(costs: Costs) -> ModuleType:
    """Return the planner for the way in which a model shares prompts."""
    if costs.chunk:
        from trl_drgrpo.features.fast_path import branch_planner

        return branch_planner
    return micro_batch_planner


def is_live(inputs: Rollouts, skip: bool) -> torch.Tensor:
    """Return rows with a token that is trained on and, where others may be skipped, with an advantage: `(B,)` bool.

    An advantage of exactly 0 means no gradient: groups of equal rewards get it by comparing rewards
    ([`group_advantages`]), so no rounding residue is mistaken for one.
    """
    mask = trained_mask(inputs).bool()
    if not skip:
        return mask.any(dim=1)
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    return (mask & (advantages != 0)).any(dim=1)


def _joined(micro_batches: list[Rollouts]) -> Rollouts:
    joined = {}
    for key, value in micro_batches[0].items():
        if key in OF_THE_BATCH and value is not None:
            joined[key] = value
        elif value is not None:
            joined[key] = torch.cat([batch[key] for batch in micro_batches])
    return Rollouts(**joined)


class WindowMetrics:
    """Metrics of TRL's loss that keep their meaning when rows are regrouped and left out.

    TRL logs each micro-batch's mean over tokens and later averages these means. With micro-batches of unequal size
    that would weigh tokens unequally, and rows that are left out would be missing. Here numerators and denominators
    are summed over the window of an optimizer step and logged once, at its end.

    - `clip_ratio/*`: over all rows. A token without advantage is never counted as clipped, so rows that were left out
      add 0 to the numerator and their tokens to the denominator;
    - `kl`: over all rows (none is left out with a KL term);
    - `entropy`: over the rows that were run;
    - `aux_loss`: the mean over stock micro-batches, of which each planned one has its share.

    Args:
        clips_rows (`bool`): True if importance ratios are per sequence, so that clip ratios count rows, not tokens.
    """

    def __init__(self, clips_rows: bool):
        self.clips_rows = clips_rows
        self._logged: list[tuple[float, float, dict[str, list[float]]]] = []  # rows, loss tokens, metrics

    def add(self, plan: MicroBatchPlan, metrics: Metrics, ranks: int) -> None:
        """Add the metrics of one micro-batch: means over its tokens or rows on all `ranks`, extremes over its rows."""
        self._logged.append((plan["rows"] * ranks, plan["loss_tokens"], metrics))

    def finish(self, window: WindowTotals) -> Metrics:
        """Return the metrics of the window, one value each, and start the next window.

        Args:
            window (`dict`): `rows` and `loss_tokens` of the window on all ranks, `slots` on each, and `leaves_out`:
                True if it leaves out rows that have tokens.
        """
        logged = self._logged
        self._logged = []
        names = dict.fromkeys(chain.from_iterable(metrics for _, _, metrics in logged))
        result = {}
        for name in names:
            is_of_clips = name.startswith("clip_ratio/")
            unit = "rows" if is_of_clips and self.clips_rows else "loss_tokens"
            values = []
            weights = []
            for rows, tokens, metrics in logged:
                weight = rows if unit == "rows" else tokens
                for value in metrics.get(name, []):
                    values.append(value)
                    weights.append(weight)
            if name == "aux_loss":  # shares, not means (`router_balance.py`): they add up to that of all slots
                result[name] = [sum(values) / window.get("slots", 1)]
                continue
            extreme = {"min": min, "max": max}.get(name.rpartition("_")[2])
            if is_of_clips and extreme:
                ratios = [value for value in values if not math.isnan(value)]  # NaN: fillers alone
                if ratios and window["leaves_out"]:
                    ratios.append(0.0)  # the clip ratio of a row that was left out
                if ratios:
                    result[name] = [extreme(ratios)]
                continue
            # Rows that were left out count in the mean of the clip ratios. No other metric exists for them.
            total_weight = window[unit] if is_of_clips else sum(weights)
            if is_of_clips or total_weight:  # else nothing was run, so there is no mean
                total = sum(value * weight for value, weight in zip(values, weights, strict=True))
                result[name] = [total / max(total_weight, 1)]
        return result
