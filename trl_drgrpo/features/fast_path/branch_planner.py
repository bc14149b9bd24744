"""Plans of micro-batches in which completions start from the states of their prompt (`branches.py`).

A micro-batch runs each of its prompts once, padded to the longest of them, then each completion as a row, padded to
the longest. Within a group, and then over the packs of all groups, longest completions come first, and dynamic
programming finds the cheapest contiguous cut. Rows alone may still cost less: a row that starts from a state fills up
chunks of its own. Costs are in tokens, as in `micro_batch_planner.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING

from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Costs, MicroBatch, Pack, Row
from trl_drgrpo.features.fast_path.micro_batch_planner import plan_window as plan_rows_alone

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Time and memory of a token that fills up a chunk, in tokens. Forward and backward of Nemotron-H and Falcon-H1 with
# chunks of 128 and 256, and of Qwen3.5 (128 wide, 4 layers, CPU, 2026-11-27): at most 0.7.
FILLING = 3 / 4
DELTA_RULE_CHUNK = 64  # an argument of transformers' function, and of no configuration


def state_chunk(config: "PreTrainedConfig") -> int:
    """Return the tokens that running states go through at once; where nothing is said, as in the gated delta rule."""
    text = config.get_text_config()
    for name in ("chunk_size", "mamba_chunk_size"):  # Mamba 2 and Nemotron-H; Falcon-H1 and Bamba
        if getattr(text, name, None):
            return getattr(text, name)
    return DELTA_RULE_CHUNK


@dataclass(frozen=True)
class Extent:
    """Padded sizes of packs side by side, in one micro-batch.

    Args:
        packs, rows (`int`): How many.
        prompt_width, width (`int`): Tokens of the longest prompt, and of the longest completion behind it.
        row_width (`int`): Tokens of the longest prompt with its completion.
        chunk (`int`): As in [`Costs`].
    """

    packs: int
    rows: int
    prompt_width: int
    width: int
    row_width: int
    chunk: int

    @classmethod
    def of(cls, row: Row, costs: Costs) -> "Extent":
        """Return the extent of one row."""
        width = costs.width(max(row.unshared_length, 2))  # the layout has two columns at least
        row_width = costs.width(row.prompt_length + row.unshared_length)
        return cls(1, 1, costs.width(row.prompt_length), width, row_width, costs.chunk)

    def joined(self, other: "Extent", same_prompt: bool) -> "Extent":
        """Return the extent with other rows, of the same pack or of other packs."""
        return Extent(
            packs=1 if same_prompt else self.packs + other.packs,
            rows=self.rows + other.rows,
            prompt_width=max(self.prompt_width, other.prompt_width),
            width=max(self.width, other.width),
            row_width=max(self.row_width, other.row_width),
            chunk=self.chunk,
        )

    @property
    def shares(self) -> bool:
        """Tell whether a pack has several rows. If none has, each row runs with its prompt in one forward."""
        return self.rows > self.packs

    @property
    def tokens(self) -> int:
        """Count the padded tokens that run."""
        if self.shares:
            return self.packs * self.prompt_width + self.rows * self.width
        return self.rows * self.row_width

    @property
    def work(self) -> float:
        """Return the cost of the tokens, and of those that fill up their chunks."""
        if self.shares:
            work_of_prompts = self.packs * _filled(self.prompt_width, self.chunk)
            return work_of_prompts + self.rows * _filled(self.width, self.chunk)
        return self.rows * _filled(self.row_width, self.chunk)

    @property
    def pairs(self) -> int:
        """Count the query-key pairs of one attention head."""
        if self.shares:
            pairs_of_prompts = self.packs * self.prompt_width**2
            return pairs_of_prompts + self.rows * self.width * (self.prompt_width + self.width)
        return self.rows * self.row_width**2

    def fits(self, budget: Budget, costs: Costs, side_by_side: int = 1) -> bool:
        """Tell whether so many of them take no more memory than a micro-batch may.

        No more rows than in stock TRL's micro-batch: so they hold no more keys, values and states, and score no more
        tokens, whose logits may need the most memory of all.
        """
        fits_rows = side_by_side * self.rows <= budget.rows or not self.shares
        fits_work = side_by_side * self.work <= budget.rows * _filled(budget.width, self.chunk)
        fits_pairs = side_by_side * self.pairs <= costs.most_pairs(budget)
        return fits_rows and fits_work and fits_pairs and side_by_side * self.tokens <= budget.tokens

    def cost(self, costs: Costs) -> float:
        """Return the cost of a micro-batch."""
        if self.shares:  # two forwards: the prompts, then the rows
            return self.work + costs.pair * self.pairs + 2 * costs.forward
        # Causal attention leaves out half of the pairs.
        return self.work + costs.pair * self.pairs / 2 + costs.forward


def _filled(width: int, chunk: int) -> float:
    """Return the cost of a row: its tokens, and at a lower price those that fill up its last chunk."""
    return width + FILLING * (-width % chunk)


def extent_of(rows: Sequence[Row], batch: MicroBatch, costs: Costs) -> Extent:
    """Return the extent of a micro-batch that is not empty."""
    extents = []
    for pack in batch:
        extents_of_rows = (Extent.of(rows[i], costs) for i in pack)
        extents.append(reduce(_of_one_prompt, extents_of_rows))
    return reduce(_of_other_prompts, extents)


def processed_tokens(rows: Sequence[Row], batch: MicroBatch, costs: Costs) -> int:
    """Count the padded tokens of the forwards of a micro-batch."""
    return extent_of(rows, batch, costs).tokens


def cost_from_states(rows: Sequence[Row], plan: Sequence[MicroBatch], costs: Costs) -> float:
    """Return the cost of a plan."""
    return sum(extent_of(rows, batch, costs).cost(costs) for batch in plan)


_of_one_prompt = partial(Extent.joined, same_prompt=True)
_of_other_prompts = partial(Extent.joined, same_prompt=False)


def plan_window(
    rows: Sequence[Row],
    slots: int | None,
    budget: Budget,
    costs: Costs,
) -> list[MicroBatch]:
    """Find the cheapest micro-batches of completions from states, or of rows alone, as the planner of packs does.

    Args:
        rows (`Sequence[Row]`): The window's rows.
        slots (`int`, *optional*): The most micro-batches; `None`: as many as it takes.
        budget ([`Budget`]): Bounds of a micro-batch.
        costs ([`Costs`]): The cost model, with a `chunk`.

    Returns:
        `list[MicroBatch]`: Longest completions first, none empty, at most `slots`.
    """
    alone = plan_rows_alone(rows, slots, budget, replace(costs, share_prompts=False))
    shared = _with_shared_prompts(rows, alone, slots, budget, costs)
    if shared is None or cost_from_states(rows, alone, costs) <= cost_from_states(rows, shared, costs):
        return alone
    return shared


def _with_shared_prompts(
    rows: Sequence[Row],
    alone: list[MicroBatch],
    slots: int | None,
    budget: Budget,
    costs: Costs,
) -> list[MicroBatch] | None:
    """Find micro-batches of the rows of a plan, most of them behind a shared prompt; `None` where they do not fit."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for (row,) in chain.from_iterable(alone):
        groups[rows[row].prompt].append(row)
    # As in the planner of packs: wide packs first, then packs half as wide, until they fit into the slots.
    for halving in range(budget.rows.bit_length()):
        side_by_side = 2**halving
        packs: list[Pack] = []
        for group in groups.values():
            longest_first = sorted(group, key=lambda i: (-rows[i].completion_length, i))
            extents = [Extent.of(rows[i], costs) for i in longest_first]
            # Packs of a group may run in one micro-batch, so a cut between them costs no forward.
            free_forwards = replace(costs, forward=0.0)
            for part in _cheapest_parts(extents, _of_one_prompt, budget, free_forwards, side_by_side):
                packs.append(tuple(longest_first[part.start : part.stop]))
        packs.sort(key=lambda pack: (-rows[pack[0]].unshared_length, -rows[pack[0]].prompt_length, *pack))
        extents = [extent_of(rows, [pack], costs) for pack in packs]
        # A price on each micro-batch is raised until they are few enough. At about this bound, one micro-batch costs
        # more than all the tokens that its cuts could save.
        forward = max(costs.forward, 1.0)
        while forward < 4 * len(packs) * budget.tokens:
            parts = _cheapest_parts(extents, _of_other_prompts, budget, replace(costs, forward=forward))
            if slots is None or len(parts) <= slots:
                return [packs[part.start : part.stop] for part in parts]
            forward *= 4
    return None


def _cheapest_parts(
    extents: Sequence[Extent],
    joined: Callable[[Extent, Extent], Extent],
    budget: Budget,
    costs: Costs,
    side_by_side: int = 1,
) -> list[range]:
    """Cut extents into contiguous parts, so many of which fit, at the least cost. Each fits by itself, at least alone.

    Dynamic programming over the end of the last part, as in the planner of packs.
    """
    best = [(0.0, 0)]  # for the first k extents: the cost, and the start of the last part
    for end in range(1, len(extents) + 1):
        extent = extents[end - 1]
        options = [(best[end - 1][0] + extent.cost(costs), end - 1)]
        for start in reversed(range(end - 1)):
            extent = joined(extents[start], extent)
            if not extent.fits(budget, costs, side_by_side):
                break
            options.append((best[start][0] + extent.cost(costs), start))
        best.append(min(options))
    # Walk back from the last end to the first start.
    parts = []
    end = len(extents)
    while end:
        start = best[end][1]
        parts.append(range(start, end))
        end = start
    return parts[::-1]
