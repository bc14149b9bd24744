"""Entries of a run log that still count."""

from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.report.records import Starts


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=4), st.integers(0, 60))
def test_nothing_of_the_last_start_is_superseded(starts, step):
    assert not Starts(starts).superseded(step, max(time for time, _ in starts))
    assert not Starts(starts).superseded(step, None)
