"""Damaged lines are counted, not fatal."""

from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.report.completions import RecordedCompletions
from trl_drgrpo.report.records import JsonLines, Starts


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(content)
    assert all(isinstance(line, dict) for line in JsonLines(path))
    assert RecordedCompletions(path, Starts([])).groups <= content.count(b"\n") + 1
