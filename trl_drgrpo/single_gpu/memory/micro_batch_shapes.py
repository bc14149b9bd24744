"""The micro-batches that a run may come to: how many packs, how wide, with how many tokens to score.

Where micro-batches are planned (`micro_batching="exact"`), their shape depends on which rows have an advantage and on
how long they are. So the planner of the fast path itself is asked about windows of several kinds: every row at its
limit; all shorter; long ones beside short ones; forks; short prompts; groups of which few rows are left; as many rows
as just fill a micro-batch. Its answers are the shapes a run is planned for, less those that another one exceeds in
every way. The kinds are samples, not a proof. Masks are bounded: as wide as a pack of so many tokens can get.

A micro-batch may hold as many tokens as stock TRL's, padded to the longest prompt and completion of the generation. So
a prompt and a completion at their limits are always among the rows, though perhaps among those without advantage. A
live group has two rows at least, since deviations from a mean add up to 0; but where a generation serves several
optimizer steps its rows are shuffled, and a window may hold one row of each group.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from trl_drgrpo.features.fast_path.micro_batch_planner import (
    Budget,
    Costs,
    MicroBatch,
    Row,
    pack_length,
    plan_window,
)
from trl_drgrpo.features.fast_path.pack_layout import Line
from trl_drgrpo.features.fast_path.sharing import costs_of, mask_form
from trl_drgrpo.features.fast_path.tree_mask import cut_into_blocks
from trl_drgrpo.features.fast_path.window import windows
from trl_drgrpo.single_gpu.memory.memory_settings import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# More rows than this (or than two stock micro-batches) in a window do not make its micro-batches any larger.
ENOUGH_ROWS = 128


@dataclass(frozen=True, order=True)
class Shape:
    """The tensors of one micro-batch.

    Args:
        packs (`int`), width (`int`): The ids are of shape `(packs, width)`.
        scored (`int`): Tokens that go through the head.
        layout (`int`): Rows times their longest completion, the shape of TRL's token losses.
        padded (`int`): Rows times their longest prompt and completion, as TRL hands them over.
        masked (`bool`): Whether there is a mask of `(packs, 1, width, width)`.
        later (`bool`): Whether gradients of an earlier micro-batch of the step are there when it runs.
        apart (`tuple[int, int]`, *optional*): Where branches attend apart: tokens whose keys and values are copied for
            blocks, and query-key pairs of the blocks' masks.
    """

    packs: int
    width: int
    scored: int
    layout: int
    padded: int
    masked: bool
    later: bool = False
    apart: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all packs, padding included."""
        return self.packs * self.width

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the tensors, each of which costs memory."""
        mask = self.tokens * self.width * self.masked
        sizes_apart = self.apart or (0, 0)
        return (self.tokens, mask, self.scored, self.layout, self.padded, self.later, *sizes_apart)

    def exceeds(self, other: "Shape") -> bool:
        """Tell whether it needs at least what the other one needs, in every tensor. Of two alike, one does."""
        if self.sizes == other.sizes:
            return self > other
        return all(size >= limit for size, limit in zip(self.sizes, other.sizes, strict=True))


def shares_prompts(config: "PreTrainedConfig", setup: Setup) -> bool:
    """Tell whether completions may be packed behind their prompt, so that a forward may come with a block mask.

    The fast path refuses to share prompts in some kinds of attention.
    """
    takes_masks = not isinstance(mask_form(config), str)
    return setup.exact and setup.share_prompts and setup.group > 1 and takes_masks


def trained_shapes(config: "PreTrainedConfig", setup: Setup) -> tuple[Shape, ...]:
    """Return the shapes of micro-batches that are trained on; none exceeds another.

    With `micro_batching="upstream"` it is TRL's only one.
    """
    # Micro-batches of an optimizer step that one generation serves: the fast path plans them together.
    window = len(windows(setup.steps_per_generation, setup.accumulation)[0])
    # Rows of a live group in a window: two at least, or one where a generation's rows are shuffled over windows.
    fewest = 2 if window == setup.steps_per_generation else 1
    return _shapes(config, setup, setup.batch * window, window, fewest)


def scored_shapes(config: "PreTrainedConfig", setup: Setup) -> tuple[Shape, ...]:
    """Return the shapes of forwards that score all rows of a generation batch, whether or not they are trained on."""
    return _shapes(config, setup, setup.generated_rows, None, setup.group)


def _shapes(config: "PreTrainedConfig", setup: Setup, rows: int, slots: int | None, fewest: int) -> tuple[Shape, ...]:
    """Return the shapes of windows of `rows` rows, at most `slots` micro-batches each (`None`: any number)."""
    if not setup.exact:
        return (_stock(setup, masked=True, later=setup.accumulation > 1),)
    # Nothing else of the setup matters, so runs that differ in other settings share an entry of the cache.
    lengths = Setup(batch=setup.batch, prompt=setup.prompt, completion=setup.completion, group=setup.group)
    costs = costs_of(config, setup.device, shares_prompts(config, setup))
    return _planned(costs, lengths, rows, slots, fewest)


def _stock(setup: Setup, masked: bool, later: bool) -> Shape:
    """Return TRL's own micro-batch: every row by itself, at its limit."""
    completion_tokens = setup.batch * setup.completion
    return Shape(
        packs=setup.batch,
        width=setup.width,
        scored=completion_tokens,
        layout=completion_tokens,
        padded=setup.batch * setup.width,
        masked=masked,
        later=later,
    )


@lru_cache(maxsize=256)
def _planned(costs: Costs, setup: Setup, rows: int, slots: int | None, fewest: int) -> tuple[Shape, ...]:
    shapes: set[Shape] = set()
    if slots == 1 and rows > setup.group:
        # Packs of different widths may not fit into a single micro-batch: its rows stand alone then.
        shapes.add(_stock(setup, masked=False, later=False))
    for kind, widest in _kinds_of_windows(setup, rows, fewest):
        budget = Budget(setup.batch, widest)
        for window in _trimmed(kind, budget, fewest):
            # As many micro-batches as stock TRL would need for these rows.
            micro_batches = None
            if slots is not None:
                micro_batches = min(slots, math.ceil(len(window) / setup.batch))
            # They run in this order, behind slots that run nothing, so only the first one meets no gradients.
            plan = plan_window(window, micro_batches, budget, costs)
            for number, batch in enumerate(plan):
                shapes.add(_shape(window, batch, costs, later=number > 0))
    if costs.share_prompts:
        shapes = _with_bounds(shapes, setup, rows, costs)
    # Sorted, so that the order does not depend on the hashes of a set.
    largest = []
    for shape in sorted(shapes):
        if not any(larger.exceeds(shape) for larger in shapes):
            largest.append(shape)
    return tuple(largest)


def _with_bounds(shapes: set[Shape], setup: Setup, rows: int, costs: Costs) -> set[Shape]:
    """Return the shapes, those of most tokens with bounds of tokens and masks for lengths that were not tried.

    A pack may have any width between a prompt and its whole group. So some lengths fill a micro-batch without a gap,
    with one pack per group, and need the largest mask that any packs of so many tokens need, as forks do, too.
    """
    budget = Budget(setup.batch, setup.width)
    # A row's last token is scored, but is no input of a forward.
    whole_group = setup.prompt + setup.group * max(setup.completion - 1, 0)
    groups = math.ceil(rows / setup.group)
    most = max(shape.tokens for shape in shapes)
    tokens = max(most, min(budget.tokens, groups * whole_group))
    most_pairs = costs.most_pairs(budget)
    bounded = set()
    for shape in shapes:
        if shape.tokens == most:
            # A pack is no wider than a prompt with its whole group, nor than its own pairs of tokens allow.
            widest = max(shape.width, min(whole_group, math.isqrt(most_pairs)))
            attended = max(min(tokens * widest, most_pairs), tokens * shape.width)
            # Of equal packs: `packs * width = tokens` and `packs * width**2 = attended`.
            packs = max(1, tokens**2 // attended)
            width = min(math.ceil(tokens / packs), budget.tokens // packs)  # rounded up, but within the budget
            shape = replace(shape, packs=packs, width=width, masked=True)
        bounded.add(shape)
    return bounded


def _trimmed(window: list[Row], budget: Budget, fewest: int) -> Iterator[list[Row]]:
    """Yield a window, then as many of its rows as just fill one micro-batch: rows alone, and whole groups."""
    yield window
    live: list[Row] = []
    groups: dict[object, list[int]] = defaultdict(list)
    longest_row = 0
    for number, row in enumerate(window):
        if row.live:
            live.append(row)
            groups[row.prompt].append(number)
            longest_row = max(longest_row, row.prompt_length + row.unshared_length)
    longest_group = max(pack_length(window, tuple(group)) for group in groups.values())
    # One row more would need another micro-batch, so these may have the most tokens.
    rows_in_budget = budget.tokens // longest_row
    groups_in_budget = budget.tokens // longest_group
    for rows in {rows_in_budget, groups_in_budget * len(live) // len(groups)}:
        if max(fewest, 1) <= rows < len(live):
            yield live[:rows]


def _kinds_of_windows(setup: Setup, rows: int, fewest: int) -> Iterator[tuple[list[Row], int]]:
    """Yield windows of `rows` rows, in whose groups `fewest` rows or more are run, and the generation's widest row."""
    group = min(setup.group, rows)
    longest = setup.completion
    most_rows = min(rows, max(ENOUGH_ROWS, 2 * setup.batch))
    count = max(1, most_rows // group)
    fewest_left = min(fewest, group)
    # Sets: of short prompts and small groups, some are the same.
    prompts_tried = {math.ceil(setup.prompt * quarters / 4) for quarters in (1, 2, 3, 4)}
    rows_tried = {fewest_left, max(min(2, group), fewest_left), group}
    for prompt in sorted(prompts_tried):
        for rows_left in sorted(rows_tried):
            for group_lengths in _lengths_in_a_group(longest, rows_left):
                # The generation has a row at both limits: one of these, a row of their groups that is left out, or
                # one in a group of its own.
                has_longest = prompt == setup.prompt and (max(group_lengths) == longest or rows_left < group)
                long_group: list[Row] = []
                widest = setup.width
                prompts = count
                if fewest == 1:  # shuffled: the row is in another window, and this one may hold more groups
                    prompts = count * group // rows_left
                elif not has_longest and count > 1:
                    long_group = [Row("long", setup.prompt, longest, live=fewest == group)] * group
                    prompts -= 1
                elif not has_longest:  # one prompt per generation: it is the longest
                    widest = prompt + (max(group_lengths) if rows_left == group else longest)
                window = []
                for number in range(prompts):
                    window += [Row(number, prompt, length) for length in group_lengths]
                forked = [replace(row, completion=_forked(number, row)) for number, row in enumerate(window)]
                yield window + long_group, widest
                yield forked + long_group, widest


def _lengths_in_a_group(longest: int, rows: int) -> Iterator[list[int]]:
    """Yield the lengths of a group's rows: all at the limit, all shorter, and long ones beside short ones."""
    for part in (1, 2, 4):
        yield [max(1, longest // part)] * rows
    # In equal steps: 100, 75, 50, 25 for 4 rows of at most 100 tokens.
    yield [max(1, longest * rank // rows) for rank in range(rows, 0, -1)]


def _forked(number: int, row: Row) -> tuple[int, ...]:
    """Return a completion's tokens, half of which the next or the previous row has as well."""
    half = row.completion_length // 2
    shared_token = -(number // 2) - 1  # negative: no row's own number
    return (shared_token,) * half + (number,) * (row.completion_length - half)


def _shape(rows: list[Row], batch: MicroBatch, costs: Costs, later: bool) -> Shape:
    """Return the shape of a planned micro-batch."""
    longest_pack = 0
    scored = 0
    rows_of_batch: list[Row] = []
    for pack in batch:
        length = pack_length(rows, pack)
        longest_pack = max(longest_pack, length)
        # A prefix that rows share is scored once; each row's last token is none of its inputs.
        scored += length - rows[pack[0]].prompt_length + len(pack)
        rows_of_batch += [rows[number] for number in pack]
    count = len(rows_of_batch)
    longest_prompt = max(row.prompt_length for row in rows_of_batch)
    longest_completion = max(row.completion_length for row in rows_of_batch)
    return Shape(
        packs=len(batch),
        width=costs.width(longest_pack),
        scored=scored,
        layout=count * longest_completion,
        padded=count * (longest_prompt + longest_completion),
        masked=count > len(batch),
        later=later,
        apart=_apart(rows, batch) if costs.apart and costs.share_prompts else None,
    )


def _apart(rows: list[Row], batch: MicroBatch) -> tuple[int, int]:
    """Return `Shape.apart` of a micro-batch whose branches attend apart."""
    copied = 0
    score_entries = 0
    if all(len(pack) == 1 for pack in batch):  # nothing is shared, and no mask is made
        return copied, score_entries
    # Rows that share nothing but their prompt come without tokens, and a pack is laid out by its tokens.
    rows_with_tokens = []
    for number, row in enumerate(rows):
        completion = row.completion or (number,) * row.completion_length
        rows_with_tokens.append(replace(row, prompt=(0,) * row.prompt_length, completion=completion))
    for pack in batch:
        ends = Line(pack, rows_with_tokens).ends
        stem, *branches = cut_into_blocks(ends)
        for branch in branches:  # attends to the stem and to itself
            attended = len(stem) + len(branch)
            copied += attended
            score_entries += len(branch) * attended
        if not branches and min(ends) < len(ends):  # one block, which needs a mask
            score_entries += len(stem) ** 2
    return copied, score_entries
