"""Rows on which two rewards differ."""

from trl_drgrpo.rewards.scoring import disagreements

# Functions -----------------------------------------------------------------------------------------------------------


def test_none_against_a_number_is_a_difference():
    [pair] = disagreements({"a": [None, None, 1.0, 1.0], "b": [None, 0.0, 1.0 + 1e-9, 0.9]}, tolerance=1e-6)
    assert pair.rows == [1, 3]
