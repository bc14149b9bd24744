import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.diagnostics.statistics import step_statistics


def test_golden_statistics():
    # rows: (1, 0), (1, None), () with outcomes 0, 1, 1
    stats = step_statistics([[1.0, 0.0], [1.0, None], []], [0.0, 1.0, 1.0])
    assert stats["process/steps_mean"] == 2.0  # 4 steps in 2 completions that have any
    assert stats["process/unscorable_frac"] == 0.25
    assert stats["process/reward_mean"] == pytest.approx(2 / 3)
    # two steps: middles at 1/4 and 3/4 of the completion, so quarters 2 and 4
    assert stats["process/reward_quarter_2"] == 1.0
    assert stats["process/reward_quarter_4"] == 0.0
    assert "process/reward_quarter_1" not in stats
    # row means .5 and 1 with outcomes 0 and 1: perfectly correlated
    assert stats["process/outcome_correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize("outcomes", [[1.0, 1.0], [None, 1.0], [math.nan, 0.0]])
def test_a_correlation_that_is_not_defined_is_left_out(outcomes):
    assert "process/outcome_correlation" not in step_statistics([[0.0], [1.0]], outcomes)


def test_nothing_from_nothing():
    assert step_statistics([[], []], [0.0, 1.0]) == {}
    assert step_statistics([[None]], [0.0]) == {"process/steps_mean": 1.0, "process/unscorable_frac": 1.0}


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=9), min_size=1, max_size=6))
def test_every_scored_step_is_in_one_quarter(rewards):
    stats = step_statistics(rewards, [0.0] * len(rewards))
    quarters = [stats[key] for key in stats if "quarter" in key]
    scored = [s for row in rewards for s in row if s is not None]
    assert bool(quarters) == bool(scored)
    assert all(min(scored) - 1e-9 <= q <= max(scored) + 1e-9 for q in quarters)
