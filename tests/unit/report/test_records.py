"""Statistics of a group that follow from its rewards."""

import math

import pytest

from trl_drgrpo.report.completions import group_of


def test_a_group_and_its_zscores():
    # rewards 1, 0, 0, 1: mean 0.5, sample std sqrt(1/3) = 0.57735; z = 0.5 / (0.57735 + 1e-4) = 0.86588
    rows = [{"reward": reward, "spans": [{"text": "a", "advantage": 0.5}]} for reward in (1.0, 0.0, 0.0, 1.0)]
    group = group_of({"step": 3, "group": 1, "prompt": "p", "rows": rows})
    assert group.baseline == 0.5
    assert group.std == pytest.approx(math.sqrt(1 / 3))
    assert [row.zscore for row in group.rows] == pytest.approx([0.86588, -0.86588, -0.86588, 0.86588], abs=1e-5)


def test_equal_rewards_and_unscorable_rows_have_no_signal():
    group = group_of({"step": 1, "rows": [{"reward": 0.7}, {"reward": 0.7}, {"reward": None}]})
    assert [row.zscore for row in group.rows] == [0.0, 0.0, None]
