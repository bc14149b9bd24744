"""Plans which rows run in which micro-batch, without tensors.

With a constant normalizer the gradient of an optimizer step is a plain sum over rows and tokens. So within the rows of
one optimizer step (its *window*) it does not matter which rows share a forward, and rows without signal need none. The
plan uses that freedom to process as few tokens as possible:

- rows without signal are left out (the caller says which);
- completions of one prompt may be *packed* behind one copy of it, where that costs less than repeating it; prefixes
  that completions of a pack have in common, by design (forks) or by accident, run once too;
- packs are sorted by length and cut into at most as many micro-batches as the window has slots, by dynamic
  programming over all contiguous cuts (greedy filling leaves two to three times the padding);
- no micro-batch holds more padded tokens, or more attention pairs, than the largest one of stock TRL would.

Costs are in *tokens*: what one token costs in everything but attention is 1.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_drgrpo.features.fast_path.tree_mask import KEY_COST

Pack = tuple[int, ...]  # rows behind one copy of their prompt; a row that stands alone is a pack of one
MicroBatch = list[Pack]

# Weight of a width squared where attention costs less than that: packs of like widths need less padding side by side.
EVENNESS = 0.25
MOST_WORK = 5e7  # sums that trying every cut may take: about 0.2 s


@dataclass(frozen=True)
class Row:
    """One completion with its prompt, as the planner sees it.

    Args:
        prompt (`Hashable`): Equal for rows with the same prompt tokens.
        prompt_length (`int`): Tokens of the prompt, without padding.
        completion_length (`int`): Tokens of the completion, without padding. 0: nothing to score.
        live (`bool`): Whether the row must be run; rows without signal need not.
        completion (`tuple[int, ...]`, *optional*): The completion's tokens. Without them, the row is taken to share
            nothing but its prompt.
    """

    prompt: Hashable
    prompt_length: int
    completion_length: int
    live: bool = True
    completion: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens of the completion that run. The last one does not: it predicts nothing."""
        return self.completion[:-1]

    @property
    def own_length(self) -> int:
        """Tokens that run behind the prompt when the row shares none of them."""
        return max(self.completion_length - 1, 0)


@dataclass(frozen=True)
class Budget:
    """Size of stock TRL's largest micro-batch: the most that one micro-batch of a plan may hold.

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

    @property
    def pairs(self) -> int:
        """Query-key pairs of one attention head."""
        return self.rows * self.width**2


@dataclass(frozen=True)
class Costs:
    """Cost model for comparing plans.

    Args:
        pair (`float`, *optional*, defaults to `0.0`): Cost of one query-key pair in one layer's attention, in tokens.
            It is what limits how many completions are worth packing behind one prompt.
        forward (`float`, *optional*, defaults to `32.0`): Cost of one more forward and backward pass, however short.
        share_prompts (`bool`, *optional*, defaults to `False`): Whether completions may be packed at all.
        multiple (`int`, *optional*, defaults to `1`): Widths are padded to a multiple of this.
        apart (`bool`, *optional*, defaults to `False`): Whether branches attend apart (`tree_mask.py`), so that a pack
            costs fewer pairs than its width squared.
    """

    pair: float = 0.0
    forward: float = 32.0
    share_prompts: bool = False
    multiple: int = 1
    apart: bool = False

    def width(self, tokens: int) -> int:
        """Padded width of a pack with so many tokens."""
        return -(-tokens // self.multiple) * self.multiple

    def of_attention(self, width: int, pairs: float) -> float:
        """Cost of the attention of a padded pack, which has so many pairs where branches attend apart."""
        return self.pair * (pairs if self.apart else width**2)


def pack_length(rows: Sequence[Row], pack: Pack) -> int:
    """Tokens of a pack: the prompt, then each completion without its last token; shared prefixes count once.

    Example:

    ```python
    >>> rows = [Row("a", 30, 4, completion=(5, 6, 7, 8)), Row("a", 30, 4, completion=(5, 6, 9, 8))]
    >>> pack_length(rows, (0,)), pack_length(rows, (0, 1))  # 30 + 3, and one token more behind the shared 5, 6
    (33, 34)

    ```
    """
    length, previous = rows[pack[0]].prompt_length, ()
    for row in sorted((rows[i] for i in pack), key=lambda row: row.inputs):
        length += row.own_length - shared_length(previous, row.inputs)
        previous = row.inputs
    return length


def pack_pairs(rows: Sequence[Row], pack: Pack) -> float:
    """Query-key pairs of a pack whose branches attend apart, and what blocks cost besides: at most as many as without
    blocks. A chain is causal."""
    if len(pack) == 1:
        return (rows[pack[0]].prompt_length + rows[pack[0]].own_length) ** 2 / 2
    pairs, previous = rows[pack[0]].prompt_length ** 2 / 2, ()
    for row in sorted((rows[i] for i in pack), key=lambda row: row.inputs):
        pairs += _branch_pairs(row, row.own_length - shared_length(previous, row.inputs))
        previous = row.inputs
    return min(pairs, pack_length(rows, pack) ** 2)


def _branch_pairs(row: Row, tokens: int) -> int:
    """Cost in pairs of the last tokens of a row as a block of their own."""
    return (tokens + KEY_COST) * (row.prompt_length + row.own_length) if tokens else 0


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens of the longest common prefix. Over sorted sequences, those of neighbors add up to what all share."""
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))


def plan_window(rows: Sequence[Row], slots: int | None, budget: Budget, costs: Costs = Costs()) -> list[MicroBatch]:
    """The cheapest micro-batches for the rows of one optimizer step.

    Args:
        rows (`Sequence[Row]`): The window's rows.
        slots (`int`, *optional*): At most so many micro-batches; `None`: as many as it takes.
        budget ([`Budget`]): Bounds of a micro-batch. At least `len(rows) / slots` rows of full width fit, as in TRL.
        costs ([`Costs`], *optional*): See there.

    Returns:
        `list[MicroBatch]`: Longest first, none empty, at most `slots`; each live row with a completion is in exactly
        one pack. Empty when no row is live.

    Raises:
        `ValueError`: The rows cannot fit: a row is wider than the budget, or the slots are too few for them.

    Example:

    ```python
    >>> rows = [Row("a", 30, n, live=n != 900) for n in (20, 900, 500, 20)]  # the second one carries no signal
    >>> plan_window(rows, slots=2, budget=Budget(rows=2, width=930))
    [[(2,)], [(0,), (3,)]]

    ```
    """
    live = [i for i, row in enumerate(rows) if row.live and row.completion_length > 0]
    if not live:
        return []
    groups = _by_prompt(rows, live, costs)
    # Packs are coarser than rows: where they do not fit, smaller ones may, and rows alone fit where TRL's do.
    for together in (2**k for k in range(budget.rows.bit_length() if costs.share_prompts else 1)):
        widest = min(budget.tokens // together, math.isqrt(budget.pairs // together))
        packs = [pack for group in groups for pack in _cheapest_packs(rows, group, widest, costs)]
        cut = _cut(rows, packs, slots, budget, costs)
        if cut is not None:
            return cut
    cut = _cut(rows, [(i,) for i in live], slots, budget, costs)
    if cut is None:
        raise ValueError(f"{len(live)} rows do not fit into {slots} micro-batches of {budget.tokens} tokens")
    return cut


def processed_tokens(rows: Sequence[Row], batch: MicroBatch, costs: Costs) -> int:
    """Padded tokens that the forward of a micro-batch runs over."""
    return len(batch) * costs.width(max(pack_length(rows, pack) for pack in batch)) if batch else 0


def _by_prompt(rows: Sequence[Row], live: list[int], costs: Costs) -> list[list[int]]:
    if not costs.share_prompts:
        return [[i] for i in live]
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in live:
        groups[rows[i].prompt].append(i)
    return list(groups.values())


def _cheapest_packs(rows: Sequence[Row], group: list[int], widest: int, costs: Costs) -> list[Pack]:
    """The rows of one prompt, cut into packs of this width at most (or of one row) at the least cost.

    Packs are neighbors in one of two orders: longest first, or sorted by tokens, so that rows with a common prefix
    stand together. The cheaper one is taken. A branch itself costs nothing (the mask is as large without it), so no
    prefix is too short to be shared.
    """
    by_length = sorted(group, key=lambda i: -rows[i].completion_length)
    by_tokens = sorted(group, key=lambda i: rows[i].inputs)
    shared = _shared_tokens(rows, by_tokens)
    cost, packs = _cheapest_cut(rows, by_length, shared, widest, costs)
    if any(shared.values()):
        other_cost, others = _cheapest_cut(rows, by_tokens, shared, widest, costs)
        if other_cost < cost:
            return others
    return packs


def _shared_tokens(rows: Sequence[Row], by_tokens: list[int]) -> dict[tuple[int, int], int]:
    """Common prefix of any two of the rows, which are sorted by their tokens."""
    neighbors = [shared_length(rows[a].inputs, rows[b].inputs) for a, b in itertools.pairwise(by_tokens)]
    shared = {}
    for first, a in enumerate(by_tokens):
        least = itertools.accumulate(neighbors[first:], min)
        for b, length in zip(by_tokens[first + 1 :], least, strict=True):
            shared[a, b] = shared[b, a] = length
    return shared


def _cheapest_cut(
    rows: Sequence[Row], order: list[int], shared: dict[tuple[int, int], int], widest: int, costs: Costs
) -> tuple[float, list[Pack]]:
    """The rows of one prompt in this order, cut into packs at the least cost; the last pack first."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first k rows: the cost, and where its last pack starts
    for end in range(1, len(order) + 1):
        options = []
        length = rows[order[0]].prompt_length
        branches, prompt = 0, length**2 / 2
        for start in reversed(range(end)):
            row = order[start]
            own = rows[row].own_length - max((shared[row, i] for i in order[start + 1 : end]), default=0)
            length += own
            branches += _branch_pairs(rows[row], own)
            width = costs.width(length)
            if width <= widest or end - start == 1:
                pairs = length**2 / 2 if end - start == 1 else min(prompt + branches, length**2)
                cost = width + costs.of_attention(width, pairs)
                if costs.apart:
                    cost += EVENNESS * costs.pair * width**2
                options.append((best[start][0] + cost, start))
        best.append(min(options))
    packs, end = [], len(order)
    while end:
        start = best[end][1]
        packs.append(tuple(order[start:end]))
        end = start
    return best[-1][0], packs


def _cut(
    rows: Sequence[Row], packs: list[Pack], slots: int | None, budget: Budget, costs: Costs
) -> list[MicroBatch] | None:
    """The packs, longest first, cut into micro-batches at the least cost; `None` where they do not fit."""
    lengths = [costs.width(pack_length(rows, pack)) for pack in packs]
    order = sorted(range(len(packs)), key=lambda i: (-lengths[i], packs[i]))
    widths = np.array([lengths[i] for i in order], dtype=np.float64)
    count = len(order)
    fits = np.minimum(budget.tokens // np.maximum(widths, 1), max(budget.pairs, 1) // np.maximum(widths, 1) ** 2)
    fits = np.clip(fits, 1, count).astype(np.int64)  # packs that fit beside each other, the first as wide as this one
    pairs = np.cumsum([0.0, *(pack_pairs(rows, packs[i]) for i in order)]) if costs.apart else None
    slots = min(slots or count, count)
    ends = _cheapest_ends(widths, fits, pairs, costs)
    if len(ends) - 1 <= slots:
        return [[packs[i] for i in order[start:end]] for start, end in itertools.pairwise(ends)]
    # Slots are short, so micro-batches are large, and a cut some packs further on costs about the same: of large
    # windows cuts are tried in steps of a share of what fits. The steps may take one slot too many: then every cut is.
    steps = next((n for n in (count, 256, 64) if _work(_edges(fits, n), fits, slots) < MOST_WORK), 12)
    for fineness in (steps, count):
        ends = _cheapest_edges(_edges(fits, fineness), widths, fits, pairs, slots, costs)
        if ends is not None:
            return [[packs[i] for i in order[start:end]] for start, end in itertools.pairwise(ends)]
    return None


def _cheapest_ends(widths: np.ndarray, fits: np.ndarray, pairs: np.ndarray | None, costs: Costs) -> list[int]:
    """Where micro-batches end, the first number being 0, at the least cost with as many of them as it takes."""
    count = len(widths)
    of_pack = widths if pairs is not None else widths + costs.pair * widths**2
    shared = np.zeros(count + 1) if pairs is None else costs.pair * pairs
    begins, _ = _begins(np.arange(count + 1), fits)
    before = np.zeros(count)  # least cost up to a pack, less what later ones of its micro-batch add
    total, start = 0.0, np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        before[end - 1] = total - (end - 1) * of_pack[end - 1] - shared[end - 1]
        options = before[begins[end] : end] + end * of_pack[begins[end] : end]
        best = int(options.argmin())
        start[end] = begins[end] + best
        total = float(options[best] + shared[end] + costs.forward)
    ends = [count]
    while ends[-1]:
        ends.append(int(start[ends[-1]]))
    return ends[::-1]


def _edges(fits: np.ndarray, fineness: int) -> np.ndarray:
    """Where cuts are tried: as many as `fineness` within the largest micro-batch that begins at one of them."""
    edges = [0]
    while edges[-1] < len(fits):
        edges.append(min(len(fits), edges[-1] + max(1, int(fits[edges[-1]]) // fineness)))
    return np.array(edges)


def _begins(edges: np.ndarray, fits: np.ndarray) -> tuple[np.ndarray, int]:
    """The edge at which the largest micro-batch begins that ends at each edge, and the most edges that one spans."""
    begins = np.searchsorted(edges[:-1] + fits[edges[:-1]], edges)
    return begins, int((np.arange(len(edges)) - begins).max())


def _work(edges: np.ndarray, fits: np.ndarray, slots: int) -> int:
    return len(edges) * _begins(edges, fits)[1] * (slots + 100)


def _cheapest_edges(
    edges: np.ndarray, widths: np.ndarray, fits: np.ndarray, pairs: np.ndarray | None, slots: int, costs: Costs
) -> list[int] | None:
    """Those of the edges, first and last one among them, between which packs make micro-batches at the least cost."""
    count = len(edges) - 1
    begins, most = _begins(edges, fits)
    # cost[j, d]: a micro-batch from edge j - most + d up to edge j, as wide as its first pack
    begin = np.arange(count + 1)[:, None] - most + np.arange(most)
    first = edges[np.maximum(begin, 0)]
    size, width = edges[:, None] - first, widths[first]
    attention = size * width**2 if pairs is None else pairs[edges][:, None] - pairs[first]
    cost = np.where(begin >= begins[:, None], size * width + costs.pair * attention + costs.forward, np.inf)
    total = np.full(most + count + 1, np.inf)  # of the packs up to an edge; the first ones are no edges
    total[most] = 0.0
    windows = np.lib.stride_tricks.sliding_window_view(total[:-1], most)
    chosen: list[np.ndarray] = []
    best, layers, furthest = np.inf, 0, 0
    for layer in range(1, slots + 1):
        furthest = int(np.searchsorted(begins, furthest, side="right"))  # edges that so many micro-batches reach
        through = windows[layer:furthest] + cost[layer:furthest]
        back = through.argmin(axis=1)
        chosen.append(back.astype(np.int32))
        total[most : most + layer] = np.inf
        total[most + layer : most + furthest] = through[np.arange(len(back)), back]
        if total[-1] < best:
            best, layers = total[-1], layer
        elif np.isfinite(best):  # the least cost falls, then rises, with the number of micro-batches
            break
    if not np.isfinite(best):
        return None
    ends = [count]
    for layer in range(layers, 0, -1):
        ends.append(ends[-1] - most + int(chosen[layer - 1][ends[-1] - layer]))
    return [int(edges[end]) for end in reversed(ends)]
