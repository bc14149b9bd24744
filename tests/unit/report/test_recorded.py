"""The index of a run log's completions."""

import os
from itertools import pairwise

import pytest
from report_runs import write_run_log

from trl_drgrpo.features.diagnostics.run_log import RunLog
from trl_drgrpo.report.completions import RecordedCompletions
from trl_drgrpo.report.records import JsonLines, Starts


def test_what_the_run_log_writes_is_indexed_without_being_parsed(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    log.start(0, {}, {})
    groups = [
        {"step": 3, "mode": "train", "group": number, "prompt": "?", "rows": [], "columns": {}} for number in (0, 2)
    ]
    log.completions(groups)
    monkeypatch.setattr(JsonLines, "parse", lambda self, line: pytest.fail("parsed"))
    assert RecordedCompletions(log.folder / "completions.jsonl", Starts([])).groups == 2


def test_only_part_of_a_large_file_is_parsed(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=400, every=1)
    path = folder / "_drgrpo" / "completions.jsonl"
    completions = RecordedCompletions(path, Starts([]), parsed_bytes=os.path.getsize(path) // 4)
    groups = dict(completions.looked_at())
    steps = sorted(group.step for group in groups.values())
    assert completions.groups == 400
    assert 150 <= len(steps) <= 190  # the newest hundred and a quarter of the rest
    assert steps[-100:] == list(range(301, 401))
    assert max(b - a for a, b in pairwise(steps)) <= 5
    assert not completions.rows_are_exact
    assert completions.rows == 3200  # scaled up from groups of 8
