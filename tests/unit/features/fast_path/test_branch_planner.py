"""Plans of completions that start from the states of their prompt."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from planned_rows import generation_batches

from trl_drgrpo.features.fast_path import micro_batch_planner
from trl_drgrpo.features.fast_path.branch_planner import cost_from_states, extent_of, plan_window, processed_tokens
from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Costs, Row

pairs = st.sampled_from([0.0, 1e-3, 0.1])
forwards = st.sampled_from([1.0, 64.0])


def test_completions_start_from_states_only_where_that_is_cheaper():
    costs = Costs(forward=32.0, share_prompts=True, chunk=64)
    long_prompts = [Row(prompt, 512, 64) for prompt in "ab" for _ in range(8)]
    plan = plan_window(long_prompts, 2, Budget(8, 576), costs)
    assert [sorted(pack) for (pack,) in plan] == [list(range(8)), list(range(8, 16))]
    assert processed_tokens(long_prompts, plan[0], costs) == 512 + 8 * 63
    # A prompt and its completion fill a chunk as a completion alone does.
    short_prompts = [Row("a", 60, 64) for _ in range(8)]
    assert plan_window(short_prompts, 2, Budget(8, 124), replace(costs, chunk=256)) == [[(i,) for i in range(8)]]


def test_a_micro_batch_scores_no_more_rows_than_stock():
    """2,048 tokens and 16 of each row are 2,304 of 4,160, but logits of 16 rows may need more than those of 2."""
    rows = [Row("a", 2048, 17) for _ in range(16)]
    plan = plan_window(rows, 8, Budget(2, 2080), Costs(share_prompts=True, chunk=16))
    assert [[len(pack) for pack in batch] for batch in plan] == [[2]] * 8


def test_long_and_short_completions_of_a_prompt_are_not_padded_to_each_other():
    rows = [Row("a", 100, length) for length in (1000, 20, 20, 1000, 20, 20)]
    plan = plan_window(rows, 2, Budget(6, 1100), Costs(forward=32.0, share_prompts=True, chunk=16))
    assert sorted(sorted(pack) for batch in plan for pack in batch) == [[0, 3], [1, 2, 4, 5]]


@given(generation_batches(), pairs, forwards)
def test_every_live_row_runs_once_within_slots_and_budget_at_no_more_than_rows_alone(batch, pair, forward):
    rows, slots, budget = batch
    costs = Costs(pair, forward, share_prompts=True, chunk=16)
    plan = plan_window(rows, slots, budget, costs)
    run = [i for micro_batch in plan for pack in micro_batch for i in pack]
    assert sorted(run) == [i for i, row in enumerate(rows) if row.live and row.completion_length]
    assert len(plan) <= slots
    for micro_batch in plan:
        extent = extent_of(rows, micro_batch, costs)
        assert extent.tokens <= budget.tokens
        assert not extent.shares or (extent.rows <= budget.rows and extent.pairs <= costs.most_pairs(budget))
        assert all(len({rows[i].prompt for i in pack}) == 1 for pack in micro_batch)
    alone = micro_batch_planner.plan_window(rows, slots, budget, Costs(pair, forward))
    assert cost_from_states(rows, plan, costs) <= cost_from_states(rows, alone, costs)
