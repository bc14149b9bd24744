import itertools
import json
import math

import pytest

from trl_drgrpo.features.diagnostics import run_log
from trl_drgrpo.features.diagnostics.run_log import RunLog, to_json


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def log(tmp_path):
    return RunLog(tmp_path, itertools.count(100.0).__next__)


def test_what_stands_in_the_files(log):
    log.start(0, {"device": "cpu"}, {"model": "m"})
    log.metrics(1, 0.5, {"kl": math.nan, "reward": 0.25, "note": "no number"})
    log.metrics(1, 0.5, {"eval_reward": 1.0})
    log.completions([{"step": 1, "prompt": "é \ud83d"}])
    log.completions([])
    log.warning(1, "kl", "too far")
    log.end(2, "finished")
    log.end(3, "failed: later")  # it has ended already
    assert json.loads((log.folder / "run.json").read_text()) == {
        "format": 1,
        "made_by": "trl-drgrpo",
        "model": "m",
        "starts": [{"time": 100.0, "step": 0, "device": "cpu"}],
        "ended": {"time": 105.0, "step": 2, "how": "finished"},
    }
    assert lines(log.folder / "metrics.jsonl") == [
        {"step": 1, "epoch": 0.5, "mode": "train", "logs": {"kl": None, "reward": 0.25}, "time": 101.0},
        {"step": 1, "epoch": 0.5, "mode": "eval", "logs": {"eval_reward": 1.0}, "time": 102.0},
    ]
    assert lines(log.folder / "completions.jsonl") == [{"step": 1, "prompt": "é ?", "time": 103.0}]
    assert lines(log.folder / "warnings.jsonl") == [{"step": 1, "cause": "kl", "message": "too far", "time": 104.0}]


def test_nothing_before_it_starts(log):
    log.metrics(0, None, {"eval_reward": 1.0})
    log.end(0, "finished")
    assert not log.folder.exists()


def test_a_second_start_appends_behind_a_line_that_was_cut_short(log, tmp_path):
    log.start(0, {}, {})
    log.metrics(1, None, {"reward": 1.0})
    file = log.folder / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 2, "lo')
    again = RunLog(tmp_path, itertools.count(200.0).__next__)
    again.start(1, {}, {})
    again.metrics(2, None, {"reward": 2.0})
    written = file.read_text().splitlines()
    assert [json.loads(written[i])["step"] for i in (0, 2)] == [1, 2]
    assert written[1] == '{"step": 2, "lo'
    starts = json.loads((log.folder / "run.json").read_text())["starts"]
    assert [(start["time"], start["step"]) for start in starts] == [(100.0, 0), (200.0, 1)]


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": 3}', ""])
def test_a_damaged_run_file_is_written_anew(log, content):
    log.folder.mkdir()
    (log.folder / "run.json").write_text(content)
    log.start(0, {}, {})
    assert len(json.loads((log.folder / "run.json").read_text())["starts"]) == 1


def test_a_full_disk_is_said_once_and_ends_the_log(log, monkeypatch):
    log.start(0, {}, {})
    monkeypatch.setattr("trl_drgrpo.features.diagnostics.run_log._append", full_disk)
    with pytest.raises(OSError, match="cannot be written .No space left on device.: the run log ends here"):
        log.metrics(0, None, {"reward": 1.0})
    log.metrics(1, None, {"reward": 1.0})
    log.end(3, "finished")
    assert json.loads((log.folder / "run.json").read_text())["ended"] is None  # nothing is written any more


def full_disk(*arguments):
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_made_ends_the_log(tmp_path):
    (tmp_path / "_drgrpo").write_text("a file")
    log = RunLog(tmp_path)
    with pytest.raises(OSError, match="cannot be written"):
        log.start(0, {}, {})
    log.metrics(1, None, {})
    assert (tmp_path / "_drgrpo").read_text() == "a file"


def test_json_is_strict_and_readable():
    assert to_json([1.5, math.inf, {"a": (math.nan,)}]) == '[1.5, null, {"a": [null]}]'
    assert to_json("</script> é") == '"</script> é"'
    to_json("lone \udc80").encode("utf-8")


def test_older_completions_are_thinned_to_a_number_of_bytes(log, tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "COMPLETIONS_BYTES", 4000)
    file = log.folder / "completions.jsonl"
    log.start(0, {}, {})
    for step in range(1, 101):
        if step == 60:  # killed within a line and while thinning; resumed
            file.write_bytes(file.read_bytes()[:-20])
            file.with_suffix(".part").write_text("half a file")
            log = RunLog(tmp_path, itertools.count(1000.0).__next__)
            log.start(59, {}, {})
        log.completions([{"step": step, "mode": "train", "group": group, "prompt": "x" * 40} for group in range(2)])
        assert file.stat().st_size <= 4000
    groups = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    steps = sorted({entry["step"] for entry in groups})
    assert all(sum(entry["step"] == step for entry in groups) == 2 for step in steps if step != 59)
    assert steps[0] == 1
    assert steps[-8:] == list(range(93, 101))  # the newest are whole
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps[: len(gaps) // 2]) > max(gaps[-8:]) == 1  # the older, the thinner
    assert not file.with_suffix(".part").exists()
