import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.fast_path.planner import Budget, Costs, Row, pack_length, plan_window, processed_tokens
from trl_drgrpo.features.fast_path.window import windows


@st.composite
def generation_batches(draw):
    """Rows in groups that share a prompt, and a geometry that stock TRL could run them in."""
    group = draw(st.integers(1, 4))
    rows = []
    for prompt in range(draw(st.integers(1, 5))):
        prompt_length = draw(st.integers(1, 30))
        for _ in range(group):
            rows.append(Row(prompt, prompt_length, draw(st.integers(0, 40)), draw(st.booleans())))
    divisors = [n for n in range(1, len(rows) + 1) if len(rows) % n == 0]
    per_batch = draw(st.sampled_from(divisors))
    width = max(row.prompt_length for row in rows) + max(row.completion_length for row in rows)
    return rows, len(rows) // per_batch, Budget(per_batch, width)


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


@given(generation_batches())
def test_no_contiguous_cut_is_cheaper(batch):
    # brute force over all cuts of the sorted rows, as an oracle of the dynamic program
    rows, slots, budget = batch
    live = sorted((row.length for row in rows if row.live and row.completion_length), reverse=True)[:9]
    chosen = [Row(i, 1, length - 1) for i, length in enumerate(live) if length > 1]
    lengths = [row.length for row in chosen]
    if not lengths:
        return
    best = float("inf")
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        parts = [lengths[a:b] for a, b in itertools.pairwise(edges)]
        if len(parts) <= slots and all(
            len(p) * p[0] <= budget.tokens and len(p) * p[0] ** 2 <= budget.pairs for p in parts
        ):
            best = min(best, sum(len(p) * p[0] + Costs().forward for p in parts))
    try:
        plan = plan_window(chosen, slots, budget)
    except ValueError:
        assert best == float("inf")
        return
    assert sum(processed_tokens(chosen, b, Costs()) + Costs().forward for b in plan) == best


def test_nothing_live_is_an_empty_plan():
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


def test_the_length_of_a_pack_repeats_the_last_prompt_token():
    rows = [Row("a", 10, 4), Row("a", 10, 6)]
    assert pack_length(rows, (0,)) == 14
    assert pack_length(rows, (0, 1)) == 9 + 5 + 7


def test_packs_that_do_not_fit_are_given_up_for_rows():
    # two prompts of four rows in two slots of four rows: either pack alone is within the budget of tokens
    rows = [Row(p, 50, 10) for p in "ab" for _ in range(4)]
    plan = plan_window(rows, 2, Budget(4, 60), Costs(share_prompts=True))
    assert sorted(i for batch in plan for pack in batch for i in pack) == list(range(8))


def test_widths_are_padded_to_the_multiple():
    assert processed_tokens([Row("a", 3, 6)], [(0,)], Costs(multiple=8)) == 16


def test_rows_that_cannot_fit_are_an_error():
    with pytest.raises(ValueError, match="3 rows do not fit into 1 micro-batches of 20 tokens"):
        plan_window([Row(i, 5, 5) for i in range(3)], 1, Budget(2, 10))


@pytest.mark.parametrize(
    ("slots", "accumulation", "expected"), [(8, 4, 2), (8, 8, 1), (2, 8, 1), (3, 2, 3), (2, 3, 2)]
)
def test_windows_are_what_one_optimizer_step_sees(slots, accumulation, expected):
    parts = windows(slots, accumulation)
    assert len(parts) == expected
    assert [slot for part in parts for slot in part] == list(range(slots))
    steps: dict = {}  # slots of one window never straddle two optimizer steps
    for micro_step in range(4 * slots * accumulation):
        generation, slot = divmod(micro_step, slots)
        window = next(i for i, part in enumerate(parts) if slot in part)
        steps.setdefault((generation, window), set()).add(micro_step // accumulation)
    assert all(len(each) == 1 for each in steps.values())
