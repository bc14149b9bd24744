import random

from trl_drgrpo.report.push import push_note
from trl_drgrpo.report.records import Group, Row, Run, Span


class Recorded:
    def __init__(self, groups):
        self.groups = groups

    def looked_at(self):
        return enumerate(self.groups)


def run(groups):
    result = Run(name="r", path="r", kind="trl-drgrpo")
    result.completions = Recorded(groups) if groups else None
    return result


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
    note = push_note(run(recorded()))
    assert note.startswith("Push to go on instead of stopping, ")
    assert "under this run's weights; incorrect +" in note
    assert note.endswith("under a mean per row (GRPO).")


def test_nothing_is_said_of_what_is_not_known():
    assert push_note(run([])) is None
    assert push_note(run(recorded(steps=2))) is None
    assert push_note(run(recorded(right=None))) is None
    steps = [Span("a", advantage=1.0), Span("b", advantage=-1.0)]
    assert push_note(run(recorded(spans=steps[:1]))) is not None
    assert push_note(run(recorded(spans=steps))) is None  # credit per step, or forks
