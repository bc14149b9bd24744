import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_rows import generation_batches

from trl_drgrpo.features.fast_path import micro_batch_planner
from trl_drgrpo.features.fast_path.micro_batch_planner import (
    EVENNESS,
    Budget,
    Costs,
    Row,
    pack_length,
    plan_window,
    processed_tokens,
)

costs = st.builds(
    Costs, pair=st.sampled_from([0.0, 1e-3, 0.1]), forward=st.sampled_from([1.0, 64.0]), share_prompts=st.booleans()
)


@given(generation_batches(), costs)
def test_every_live_row_runs_exactly_once_within_slots_and_budget(batch, costs):
    rows, slots, budget = batch
    plan = plan_window(rows, slots, budget, costs)
    run = [i for micro_batch in plan for pack in micro_batch for i in pack]
    assert sorted(run) == [i for i, row in enumerate(rows) if row.live and row.completion_length]
    assert len(plan) <= slots
    assert all(plan)
    for micro_batch in plan:
        assert processed_tokens(rows, micro_batch, costs) <= budget.tokens
        for pack in micro_batch:
            assert len({rows[i].prompt for i in pack}) == 1
            assert costs.share_prompts or len(pack) == 1


@given(generation_batches(), costs, st.booleans())
def test_no_contiguous_cut_is_cheaper(batch, costs, apart):
    # brute force over all cuts of the sorted rows, as an oracle of the dynamic program and its price on micro-batches
    rows, slots, budget = batch
    costs = replace(costs, share_prompts=False, apart=apart)
    live = [pack_length(rows, (i,)) for i, r in enumerate(rows) if r.live and r.completion_length]
    lengths = sorted(live, reverse=True)[:9]
    chosen = [Row(i, 1, length) for i, length in enumerate(lengths)]

    def cost(part):
        return len(part) * (part[0] + (0 if apart else costs.pair * part[0] ** 2)) + costs.forward

    best = float("inf")
    for cuts in itertools.product([False, True], repeat=max(len(lengths) - 1, 0)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        parts = [lengths[a:b] for a, b in itertools.pairwise(edges) if b]
        if len(parts) <= slots and all(
            len(p) * p[0] <= budget.tokens and len(p) * p[0] ** 2 <= costs.most_pairs(budget) for p in parts
        ):
            best = min(best, sum(map(cost, parts)))
    try:
        plan = plan_window(chosen, slots, budget, costs)
    except ValueError:
        assert best == float("inf")
        return
    assert sum(cost([lengths[i] for (i,) in batch]) for batch in plan) == pytest.approx(best)


def test_many_rows_take_few_passes_over_them(monkeypatch):
    passes = []
    priced = micro_batch_planner._priced_ends
    monkeypatch.setattr(micro_batch_planner, "_priced_ends", lambda *args: passes.append(0) or priced(*args))
    lengths = random.Random(0).choices(range(2, 1000), k=8192)
    rows = [Row(i, 20, length) for i, length in enumerate(lengths)]
    assert len(plan_window(rows, 1024, Budget(8, 1020), Costs())) <= 1024
    assert 0 < len(passes) < 50  # each takes time in proportion to the rows


def test_a_batch_without_live_groups_has_an_empty_plan():
    assert plan_window([Row("a", 3, 5, live=False), Row("a", 3, 0)], 2, Budget(1, 8)) == []


def test_completions_are_packed_only_where_that_is_cheaper():
    # alone 8 * (500 + 20) = 4160 tokens; packed 499 + 8 * 21 = 667
    rows = [Row("a", 500, 20) for _ in range(8)]
    share = Costs(pair=1e-4, share_prompts=True)
    assert plan_window(rows, 1, Budget(8, 520), share) == [[tuple(range(8))]]
    assert plan_window(rows, 1, Budget(8, 520), Costs(pair=1e-4)) == [[(i,) for i in range(8)]]
    # short prompts, long completions: a packed row sees a block mask of (499 + 8 * 401)^2 pairs
    rows = [Row("a", 5, 400) for _ in range(8)]
    assert plan_window(rows, 1, Budget(8, 405), Costs(pair=1e-3, share_prompts=True)) == [[(i,) for i in range(8)]]


def test_packs_may_hold_more_pairs_than_stock_where_pairs_take_no_memory():
    rows = [Row(prompt, 256, 128) for prompt in "abcd" for _ in range(8)]  # packs of 1,272 tokens
    costs, budget = Costs(pair=1e-4, forward=2048.0, share_prompts=True), Budget(8, 384)
    assert [len(batch) for batch in plan_window(rows, 4, budget, costs)] == [2, 2, 2, 2]  # halves of the groups
    free = replace(costs, free_width=2048)
    assert [[len(pack) for pack in batch] for batch in plan_window(rows, 4, budget, free)] == [[8, 8], [8, 8]]
    wider = plan_window(rows, 4, budget, replace(costs, free_width=500))
    assert max(len(batch) * pack_length(rows, batch[0]) ** 2 for batch in wider) <= 8 * 384 * 500


completions = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def of(prompt, prompt_length, completion):
    return Row(prompt, prompt_length, len(completion), completion=completion)


@given(
    st.lists(completions, min_size=1, max_size=6),
    st.sampled_from([1, 4]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.booleans(),
)
def test_shared_prefixes_count_once_and_packs_are_the_cheapest_of_two_orders(group, multiple, pair, apart):
    rows = [of("a", 3, completion) for completion in group]
    share = Costs(pair=pair, forward=0.0, share_prompts=True, multiple=multiple, apart=apart)

    def cost(pack):
        length = 3 + len({rows[i].completion[:k] for i in pack for k in range(1, len(rows[i].completion))})
        assert pack_length(rows, pack) == length
        width = share.width(length)
        is_causal = len(pack) == 1 or length == 3  # one row, or the prompt alone; other packs so small are one block
        pairs = length**2 / (2 if is_causal else 1)
        return width + pair * (pairs + EVENNESS * width**2 if apart else width**2)

    orders = [
        sorted(range(len(rows)), key=lambda i: -len(group[i])),
        sorted(range(len(rows)), key=lambda i: group[i][:-1]),
    ]
    cuts = [
        sum(cost(tuple(order[a:b])) for a, b in itertools.pairwise([0, *edges, len(rows)]))
        for order in orders
        for count in range(len(rows))
        for edges in itertools.combinations(range(1, len(rows)), count)
    ]
    (plan,) = plan_window(rows, None, Budget(100, 100), replace(share, forward=1e6))
    assert sum(cost(pack) for pack in plan) == pytest.approx(min(cuts))


def test_long_completions_share_a_prompt_where_branches_attend_apart():
    # a block mask of all eight has (300 + 8 * 399)^2 pairs, which cost as much as 12,000 tokens; apart, 22% of them
    rows = [Row("a", 300, 400) for _ in range(8)]
    plans = [plan_window(rows, 1, Budget(8, 1300), Costs(1e-3, share_prompts=True, apart=each)) for each in (0, 1)]
    assert len(plans[1][0]) < len(plans[0][0])


def test_siblings_stand_together_where_a_group_is_cut():
    # two families, lengths interleaved; a pack of all eight would be dear
    families = [tuple(range(base, base + 60)) for base in (0, 100)]
    rows = [of("a", 10, families[i % 2] + tuple(200 + 50 * i + t for t in range(20 + i))) for i in range(8)]
    (batch,) = plan_window(rows, 1, Budget(8, 100), Costs(pair=1e-2, share_prompts=True))
    assert sorted(sorted(pack) for pack in batch) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_without_shared_prefixes_packs_are_as_without_tokens():
    lengths = (7, 30, 12, 30, 4, 22, 9, 15)
    rows = [of("a", 40, tuple(100 * i + t for t in range(n))) for i, n in enumerate(lengths)]
    share = Costs(pair=1e-2, share_prompts=True)
    plan = plan_window(rows, 1, Budget(8, 70), share)
    assert plan == plan_window([replace(row, completion=()) for row in rows], 1, Budget(8, 70), share)
    assert plan == [[(5, 7, 2, 6, 0, 4), (1, 3)]]  # longest first


def test_packs_that_do_not_fit_are_made_smaller_first():
    # four groups of four rows in two slots: packs of four would be too many, packs of two are not
    rows = [of(p, 10, (*range(20), *(100 * row + t for t in range(20)))) for p in "abcd" for row in range(4)]
    plan = plan_window(rows, 2, Budget(8, 50), Costs(pair=1e-4, share_prompts=True))
    assert all(len(pack) > 1 for batch in plan for pack in batch)
    assert sum(pack_length(rows, pack) for batch in plan for pack in batch) <= 0.7 * 16 * 49


def test_rows_that_cannot_fit_are_an_error():
    with pytest.raises(ValueError, match="3 rows do not fit into 1 micro-batches of 20 tokens"):
        plan_window([Row(i, 5, 5) for i in range(3)], 1, Budget(2, 10))
