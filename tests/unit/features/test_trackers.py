"""What trackers are sent, with stand-ins for their modules."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from trl_drgrpo.features.trackers import CURVES, GROUPS, Trackers, group_table
from trl_drgrpo.upstream.description import DescriptionGuard

ROW = {
    "spans": [{"text": "2+"}, {"text": "2=4"}],
    "rewards": {"accuracy": 1.0, "length": None},
    "reward": 1.0,
    "advantage": 0.5,
    "length": 5,
    "truncated": False,
    "right": True,
}
OTHER = {**ROW, "spans": [], "rewards": {"accuracy": 0.0}, "reward": 0.0, "advantage": -0.5, "right": False}
GROUP = {"step": 3, "mode": "train", "group": 1, "prompt": "2+2=", "baseline": 0.5, "rows": [ROW, OTHER]}
SUMMARY = {"train_runtime": 1.0}


class Tracker(ModuleType):
    """The part of wandb's and trackio's modules that is used."""

    def __init__(self, name, fails=False):
        super().__init__(name)
        self.fails, self.logged = fails, []
        self.Table, self.Image = (lambda columns, data: (columns, data)), (lambda path: path)

    def log(self, values):
        if self.fails:
            raise RuntimeError("no run")
        self.logged.append(values)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Sends the logs of a run with new groups to stand-ins."""
    trackers = {name: Tracker(name) for name in ("wandb", "trackio")}
    for name, tracker in trackers.items():
        monkeypatch.setitem(sys.modules, name, tracker)

    def run(logs, report_to=("wandb", "trackio"), groups=(GROUP,), main=True, log_completions=False):
        diagnostics = SimpleNamespace(newest_groups=list(groups))
        feature = Trackers(SimpleNamespace(diagnostics=diagnostics, describing=DescriptionGuard()))
        args = SimpleNamespace(report_to=list(report_to), log_completions=log_completions, output_dir=tmp_path)
        history = [{"step": step, "reward": step / 10} for step in (1, 2)]
        state = SimpleNamespace(is_world_process_zero=main, global_step=3, log_history=history)
        for each in logs:
            feature.on_log(args, state, None, logs=each)
        return feature.describing.failures

    run.trackers = trackers
    return run


def names(tracker):
    return [name for values in tracker.logged for name in values if name != "train/global_step"]


def test_the_table_has_a_row_per_completion():
    columns, rows = group_table([GROUP])
    assert len(columns) == len(set(columns))  # also where a reward is named length
    first, second = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (first["completion"], first["rewards/accuracy"]) == ("2+2=4", 1.0)
    assert (first["length"], first["correct"], first["truncated"]) == (5, True, False)
    assert (first["baseline"], first["advantage"], first["step"], first["group"]) == (0.5, 0.5, 3, 1)
    assert (second["completion"], second["advantage"], second["correct"]) == ("", -0.5, False)


def test_each_tracker_gets_the_table_once(run):
    assert run([{"reward": 1.0}, {"reward": 1.0}]) == {}
    for tracker in run.trackers.values():
        assert names(tracker) == [GROUPS]
        assert tracker.logged[0]["train/global_step"] == 3


def test_the_picture_comes_with_the_summary(run, tmp_path):
    pytest.importorskip("matplotlib")
    run([SUMMARY], report_to=["trackio"])
    assert names(run.trackers["trackio"]) == [GROUPS, CURVES]
    assert (tmp_path / "_drgrpo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run.trackers["wandb"].logged == []


def test_nothing_is_sent_without_trackers_from_other_processes_or_beside_trls_table(run, tmp_path):
    run([SUMMARY], report_to=["tensorboard"])
    run([SUMMARY], main=False)
    run([{"reward": 1.0}], log_completions=True)
    run([{"reward": 1.0}], groups=())
    assert not any(tracker.logged for tracker in run.trackers.values())
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_costs_a_log_line(run, caplog):
    run.trackers["wandb"].fails = True
    assert run([{"reward": 1.0}]) == {"drgrpo/groups for wandb": 1}
    assert names(run.trackers["trackio"]) == [GROUPS]
    assert caplog.text.count("the run goes on without it") == 1
