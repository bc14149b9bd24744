"""Plans which rows run in which micro-batch, without tensors.

With a constant normalizer the gradient of an optimizer step is a plain sum over rows and tokens. So within the rows of
one optimizer step (its *window*) it does not matter which rows share a forward, and rows without advantage need none.
The plan uses that freedom to process as few tokens as possible:

- rows without advantage are skipped (the caller says which);
- completions of one prompt may be *packed* behind one copy of it, where that costs less than repeating it; prefixes
  that completions of a pack have in common, by design (forks) or by accident, run once too;
- where layers hold running states, `branch_planner.py` plans two forwards: prompts, then completions as rows;
- packs are sorted by length and cut into at most as many micro-batches as the window has slots, by dynamic
  programming over all contiguous cuts (greedy filling leaves two to three times the padding);
- no micro-batch holds more padded tokens than the largest one of stock TRL would, nor, where packs are wide, more
  attention pairs.

Costs are in *tokens*: what one token costs in everything but attention is 1.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_drgrpo.features.fast_path.tree_mask import KEY_COST

Pack = Sequence[int]  # rows behind one copy of their prompt; a row that stands alone is a pack of one
MicroBatch = Sequence[Pack]

# Weight of the squared width where branches attend apart, so that attention itself costs less. Without it, one wide
# pack and a narrow one cost as much as two even ones, which need less padding side by side.
EVENNESS = 0.25


@dataclass(frozen=True)
class Row:
    """One completion with its prompt, as the planner sees it.

    Args:
        prompt (`Hashable`): Equal for rows with the same prompt tokens; those tokens, where the row is to be packed.
        prompt_length (`int`): Tokens of the prompt, without padding.
        completion_length (`int`): Tokens of the completion, without padding. 0: nothing to score.
        live (`bool`): True if the row must be run; rows without advantage need not.
        completion (`tuple[int, ...]`, *optional*): The completion's tokens. Without them, the row is taken to share
            nothing but its prompt.
        runs_last (`bool`): True if the last token runs, too, and a row without a completion runs its prompt: for
            losses over whole rows, such as the balance of a router.
    """

    prompt: Hashable
    prompt_length: int
    completion_length: int
    live: bool = True
    completion: tuple[int, ...] = ()
    runs_last: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens of the completion that run. The last one predicts nothing, so by default it does not."""
        return self.completion if self.runs_last else self.completion[:-1]

    @property
    def unshared_length(self) -> int:
        """Tokens that run after the prompt when the row shares none of them."""
        return self.completion_length if self.runs_last else max(self.completion_length - 1, 0)


@dataclass(frozen=True)
class Budget:
    """Size of stock TRL's largest micro-batch, which no micro-batch of a plan exceeds.

    Args:
        rows (`int`): Rows of a stock micro-batch.
        width (`int`): Its padded width: longest prompt plus longest completion of the generation batch.
    """

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Padded tokens."""
        return self.rows * self.width


@dataclass(frozen=True)
class Costs:
    """Cost model for comparing plans.

    Args:
        pair (`float`, *optional*, defaults to `0.0`): Cost of one query-key pair in one layer's attention, in tokens.
            It limits how many completions are worth packing behind one prompt.
        forward (`float`, *optional*, defaults to `32.0`): Cost of one more forward and backward pass, however short.
        share_prompts (`bool`, *optional*, defaults to `False`): True if completions may be packed at all.
        multiple (`int`, *optional*, defaults to `1`): Widths are padded to a multiple of this.
        apart (`bool`, *optional*, defaults to `False`): True if branches attend apart (`tree_mask.py`), so that a pack
            costs fewer pairs than its width squared.
        free_width (`int`, *optional*, defaults to `0`): Packs up to this width may hold more query-key pairs than
            stock TRL's micro-batches. 0 unless the mask is all that attention stores per pair.
        chunk (`int`, *optional*, defaults to `0`): Where completions start from the states of their prompt
            (`branches.py`), so that each is a row of its own: the tokens that states go through at once. Read by
            `branch_planner.py`.
    """

    pair: float = 0.0
    forward: float = 32.0
    share_prompts: bool = False
    multiple: int = 1
    apart: bool = False
    free_width: int = 0
    chunk: int = 0

    def most_pairs(self, budget: Budget) -> int:
        """Return the most query-key pairs of one attention head that a micro-batch may hold."""
        return budget.tokens * max(budget.width, self.free_width)

    def width(self, tokens: int) -> int:
        """Return the padded width of a pack with so many tokens."""
        return -(-tokens // self.multiple) * self.multiple


def pack_length(rows: Sequence[Row], pack: Pack) -> int:
    """Count the tokens of a pack that run: the prompt, then those of each completion; shared prefixes once.

    Example:

    ```python
    >>> rows = [Row("a", 30, 4, completion=(5, 6, 7, 8)), Row("a", 30, 4, completion=(5, 6, 9, 8))]
    >>> pack_length(rows, (0,)), pack_length(rows, (0, 1))  # 30 + 3, and one token more behind the shared 5, 6
    (33, 34)

    ```
    """
    length = rows[pack[0]].prompt_length
    previous = ()
    # Sorted by tokens, a row shares the most with the row before it, as in a dictionary.
    for row in sorted((rows[i] for i in pack), key=lambda row: row.inputs):
        length += row.unshared_length - shared_length(previous, row.inputs)
        previous = row.inputs
    return length


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens of the longest common prefix. Of sorted sequences only neighbors need be compared."""
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))


def plan_window(
    rows: Sequence[Row],
    slots: int | None,
    budget: Budget,
    costs: Costs = Costs(),
) -> list[MicroBatch]:
    """Find the cheapest micro-batches for the rows of one optimizer step.

    Args:
        rows (`Sequence[Row]`): The window's rows.
        slots (`int`, *optional*): The most micro-batches; `None`: as many as it takes.
        budget ([`Budget`]): Bounds of a micro-batch. At least `len(rows) / slots` rows of full width fit, as in TRL.
        costs ([`Costs`], *optional*): The cost model.

    Returns:
        `list[MicroBatch]`: Longest first, none empty, at most `slots`; each live row with a completion is in exactly
        one pack, and so are rows without one that run their prompt. Empty when no row is live.

    Raises:
        `ValueError`: The slots are too few for the rows. A row wider than the budget gets a micro-batch of its own.

    Example:

    ```python
    >>> rows = [Row("a", 30, n, live=n != 900) for n in (20, 900, 500, 20)]  # the second one has no advantage
    >>> plan_window(rows, slots=2, budget=Budget(rows=2, width=930))
    [[(2,)], [(0,), (3,)]]

    ```
    """
    live = []
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        runs = row.completion_length > 0 or row.runs_last
        if row.live and runs:
            live.append(i)
            groups[row.prompt].append(i)
    if not live:
        return []
    # Wide packs share the most but may not fit into the slots: then packs half as wide are tried, and so on. Rows
    # alone, which come last, fit wherever TRL's own micro-batches do.
    halvings = budget.rows.bit_length() if costs.share_prompts else 0
    for halving in range(halvings):
        side_by_side = 2**halving
        widest = min(budget.tokens // side_by_side, math.isqrt(costs.most_pairs(budget) // side_by_side))
        packs: list[Pack] = []
        for group in groups.values():
            packs += _cheapest_packs(rows, group, widest, costs)
        batches = _cut_into_batches(rows, packs, slots, budget, costs)
        if batches is not None:
            return batches
    batches = _cut_into_batches(rows, [(i,) for i in live], slots, budget, costs)
    if batches is None:
        raise ValueError(f"{len(live)} rows do not fit into {slots} micro-batches of {budget.tokens} tokens")
    return batches


def processed_tokens(rows: Sequence[Row], batch: MicroBatch, costs: Costs) -> int:
    """Count the padded tokens of the forward of a micro-batch."""
    if not batch:
        return 0
    longest = max(pack_length(rows, pack) for pack in batch)
    return len(batch) * costs.width(longest)


def _cheapest_packs(
    rows: Sequence[Row],
    group: list[int],
    widest: int,
    costs: Costs,
) -> list[Pack]:
    """Cut the rows of one prompt into packs of this width at most (or of one row) at the least cost.

    Packs are neighbors in one of two orders: longest first, or sorted by tokens, so that rows with a common prefix
    stand together. The cheaper of the two is returned. A branch itself costs nothing (the mask is as large without
    it), so no prefix is too short to be shared.
    """
    by_length = sorted(group, key=lambda i: -rows[i].completion_length)
    by_tokens = sorted(group, key=lambda i: rows[i].inputs)
    shared = _shared_tokens(rows, by_tokens)
    cost, packs = _cheapest_cut(rows, by_length, shared, widest, costs)
    if any(shared.values()):  # else there is no prefix to bring together
        cost_by_tokens, packs_by_tokens = _cheapest_cut(rows, by_tokens, shared, widest, costs)
        if cost_by_tokens < cost:
            return packs_by_tokens
    return packs


def _shared_tokens(rows: Sequence[Row], by_tokens: list[int]) -> dict[tuple[int, int], int]:
    """Return the length of the common prefix of any two of the rows, which are sorted by their tokens."""
    of_neighbors = []
    for a, b in itertools.pairwise(by_tokens):
        of_neighbors.append(shared_length(rows[a].inputs, rows[b].inputs))
    shared = {}
    for first, a in enumerate(by_tokens):
        # Two sorted rows share the least that any neighbors between them share. So a group of n rows is compared n - 1
        # times, not n * (n - 1) / 2 times.
        lengths = itertools.accumulate(of_neighbors[first:], min)
        for b, length in zip(by_tokens[first + 1 :], lengths, strict=True):
            shared[a, b] = length
            shared[b, a] = length
    return shared


def _cheapest_cut(
    rows: Sequence[Row],
    order: list[int],
    shared: dict[tuple[int, int], int],
    widest: int,
    costs: Costs,
) -> tuple[float, list[Pack]]:
    """Cut the rows of one prompt, in this order, into packs at the least cost; return the cost and the packs.

    Dynamic programming over the end of the last pack: the best cut of the first `end` rows is the best cut of the
    first `start`, and one pack of the rows between. The last pack comes first.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first k rows: the cost, and the start of the last pack
    prefix = [0] * len(order)  # for each row: the most tokens that it shares with a later one, up to `end`
    prompt_length = rows[order[0]].prompt_length
    for end in range(1, len(order) + 1):
        options = []
        length = prompt_length
        pairs = prompt_length**2 / 2  # causal attention leaves out half of them
        # The pack grows backwards from `end`, so that its length and pairs are sums, not computed anew.
        for start in reversed(range(end)):
            row = rows[order[start]]
            is_alone = start == end - 1
            if not is_alone:  # the last row of the pack is a later one now, too
                prefix[start] = max(prefix[start], shared[order[start], order[end - 1]])
            new_tokens = row.unshared_length - prefix[start]
            length += new_tokens
            if new_tokens:  # a block of its own, as in `tree_mask.py`
                pairs += (new_tokens + KEY_COST) * (prompt_length + row.unshared_length)
            width = costs.width(length)
            if width > widest and not is_alone:
                continue  # the pack gets no narrower, but `prefix` of the rows before it is still to be updated
            if not costs.apart:
                cost = width + costs.pair * width**2
            else:
                # A row alone attends causally. At worst, a pack is one block, which computes every pair.
                pairs_apart = length**2 / 2 if is_alone else min(pairs, length**2)
                cost = width + costs.pair * pairs_apart + EVENNESS * costs.pair * width**2
            options.append((best[start][0] + cost, start))
        best.append(min(options))
    packs = []
    end = len(order)
    while end:
        start = best[end][1]
        packs.append(tuple(order[start:end]))
        end = start
    return best[-1][0], packs


def _cut_into_batches(
    rows: Sequence[Row],
    packs: list[Pack],
    slots: int | None,
    budget: Budget,
    costs: Costs,
) -> list[MicroBatch] | None:
    """Cut the packs, longest first, into micro-batches at the least cost; return `None` where they do not fit."""
    lengths = [costs.width(pack_length(rows, pack)) for pack in packs]
    # Ties are broken by the rows themselves, so that the plan does not depend on how the packs were found.
    order = sorted(range(len(packs)), key=lambda i: (-lengths[i], *packs[i]))
    widths = np.array([max(lengths[i], 1) for i in order], dtype=np.float64)
    # Packs that fit side by side, when this pack is the first of them and so the widest.
    fits_tokens = budget.tokens // widths
    fits_pairs = max(costs.most_pairs(budget), 1) // widths**2
    fits = np.minimum(fits_tokens, fits_pairs).clip(1, len(order)).astype(np.int64)
    prices = widths
    if not costs.apart:  # else attention costs the same in whatever micro-batch the branches are
        prices = widths + costs.pair * widths**2
    ends = _cheapest_ends(prices, fits, costs.forward, slots or len(order))
    if ends is None:
        return None
    batches = []
    for start, end in itertools.pairwise(ends):
        batches.append([packs[i] for i in order[start:end]])
    return batches


def _cheapest_ends(
    prices: np.ndarray,
    fits: np.ndarray,
    forward: float,
    slots: int,
) -> list[int] | None:
    """Find the ends of micro-batches, after a first 0, at the least cost; `None` where packs need more slots.

    A micro-batch costs the price of its first pack, times its packs, and `forward`. Prices fall and fits rise along
    the order, so the least cost is convex in the number of micro-batches (the Monge property), and a price on each,
    raised until they are few enough, finds it: A. Aggarwal, B. Schieber, T. Tokuyama, "Finding a minimum-weight k-link
    path in graphs with the concave Monge property and applications", 1994.
    """

    def cost(ends: list[int], forward: float = 0.0) -> float:
        # The first of the ends, 0, is counted as a forward as well: the same constant in every cut.
        return float(np.diff(ends) @ prices[ends[:-1]]) + forward * len(ends)

    many = _priced_ends(prices, fits, forward)
    if len(many) - 1 <= slots:
        return many
    few = [0]  # greedy: the fewest micro-batches that hold the packs
    while few[-1] < len(prices):
        few.append(min(few[-1] + int(fits[few[-1]]), len(prices)))
    if len(few) - 1 > slots:
        return None
    # `few` fits into the slots, `many` does not. The price is raised until no cut between them is cheaper.
    while True:
        price = (cost(few) - cost(many)) / (len(many) - len(few))  # at which both cost the same
        ends = _priced_ends(prices, fits, price)
        # Equal costs are summed in another order, so they differ by rounding. Without the margin the loop may not end.
        if cost(ends, price) > (1 - 1e-12) * cost(few, price):
            # Nothing is cheaper at this price, so a mixture is as good: `many` up to some place, then `few`, in as
            # many micro-batches as there are slots. `turn` is the first place where that end of `many`, counted from
            # the `missing` ones ahead, does not lie behind that of `few`.
            missing = slots + 1 - len(few)
            turn = next(i for i in range(len(few)) if many[i + missing + 1] <= few[i + 1])
            return many[: turn + missing + 1] + few[turn + 1 :]
        if len(ends) - 1 > slots:
            many = ends
        else:
            few = ends


def _priced_ends(prices: np.ndarray, fits: np.ndarray, forward: float) -> list[int]:
    """Find the cheapest ends as [`_cheapest_ends`] does, with as many micro-batches as it takes.

    A micro-batch from `start` to `end` costs `(end - start) * prices[start]`. Kept as `least cost up to start, minus
    start * prices[start]`, it needs only `end * prices[start]` added, for all starts in one numpy operation.
    """
    count = len(prices)
    # For each end, the start of the largest micro-batch that ends there. `start + fits[start]` rises, so it can be
    # searched.
    first_starts = np.searchsorted(np.arange(count) + fits, np.arange(count + 1))
    partial_costs = np.zeros(count)
    total = 0.0
    best_starts = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = first_starts[end]
        partial_costs[end - 1] = total - (end - 1) * prices[end - 1]
        options = partial_costs[first:end] + end * prices[first:end]
        best = int(options.argmin())
        best_starts[end] = first + best
        total = float(options[best] + forward)
    # Walk back from the last end to the first start.
    ends = [count]
    while ends[-1]:
        ends.append(int(best_starts[ends[-1]]))
    return ends[::-1]
