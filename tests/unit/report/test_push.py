"""The push on the decision to stop, said in a sentence."""

import random

from report_runs import write_run_log

from trl_drgrpo.report.completions import RecordedCompletions
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.curves import push_note, push_rows
from trl_drgrpo.report.reading import read_run
from trl_drgrpo.report.records import Group, Row, Span


def note_of(groups):
    return push_note([push_rows(group) for group in groups])


def recorded(steps=30, **changes):
    rng = random.Random(0)
    groups = []
    for step in range(steps):
        for index in range(2):
            rows = []
            for _ in range(4):
                correct = rng.random() < 0.5
                rows.append(Row([], reward=float(correct), length=1 + int(rng.expovariate(0.1)), truncated=False))
                rows[-1].right = correct
            mean = sum(row.reward for row in rows) / 4
            for row in rows:
                row.advantage = row.reward - mean
                for name, value in changes.items():
                    setattr(row, name, value)
            groups.append(Group(step, "train", index, "?", rows))
    return groups


def test_the_push_is_said_with_intervals():
    note = note_of(recorded())
    assert note.startswith("Push to go on instead of stopping, ")
    assert "under this run's weights; incorrect +" in note
    assert note.endswith("under a mean per row (GRPO).")


def test_nothing_is_said_of_what_is_not_known():
    assert note_of([]) is None
    assert note_of(recorded(steps=2)) is None
    assert note_of(recorded(right=None)) is None
    steps = [Span("a", advantage=1.0), Span("b", advantage=-1.0)]
    assert note_of(recorded(spans=steps[:1])) is not None
    assert note_of(recorded(spans=steps)) is None  # credit per step, or forks


def test_a_report_parses_each_group_once(tmp_path, monkeypatch):
    parsed = []
    load = RecordedCompletions.load
    monkeypatch.setattr(RecordedCompletions, "load", lambda self, number: parsed.append(number) or load(self, number))
    contents = report_contents([read_run(write_run_log(tmp_path / "run", steps=40, every=1))], max_groups=0)
    assert sorted(parsed) == list(range(40))
    assert contents["runs"][0]["groups"] == []
