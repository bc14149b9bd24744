"""Run logs become runs: whole, half-written, resumed, damaged, and folders that are none; and their completions."""

import json
import math
import os
import random
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import START, about, append_lines, group_line, write_run_log
from runs import write_lines

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_log import RunLog
from trl_drgrpo.report.records import JsonLines, RecordedCompletions, Starts, conversation, group_of
from trl_drgrpo.report.run_folders import read_run, read_runs


@pytest.fixture
def folder(tmp_path):
    return write_run_log(tmp_path / "first", steps=20, every=5)


def looked_at(run):
    return dict(run.completions.looked_at())


def test_a_whole_run(folder):
    run = read_run(folder)
    assert (run.name, run.kind, run.status) == ("first", "trl-drgrpo", "finished at step 200")
    assert run.objective["loss_normalizer"] == 512
    assert run.facts["rewards"] == "math_reward + 0.1 format_reward"
    assert run.facts["correct"] == "math_reward at least 1.0"
    assert [entry.step for entry in run.logged if entry.mode == "train"] == list(range(1, 21))
    assert [warning.cause for warning in run.warnings] == ["dead_groups_too_hard", "kl_out_of_range"]
    groups = looked_at(run)
    assert sorted(group.step for group in groups.values()) == [5, 10, 15, 20]
    assert run.completions.groups == 4
    assert run.notes == []
    (folder / "_drgrpo" / "run.json").write_text(json.dumps(about(right={"reward": "r", "threshold": None})))
    run = read_run(folder / "_drgrpo")
    assert (run.name, run.facts["correct"]) == ("first", "r is 1 (of 0 and 1)")


def test_a_run_in_progress(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=5, ended=None)
    with (folder / "_drgrpo" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time": 17900')
    run = read_run(folder)
    assert "running or killed" in run.status
    assert "last entry at step 5" in run.status
    assert run.logged[-1].step == 5
    assert run.notes == ["metrics.jsonl: 1 unreadable line (cut off or damaged), left out."]


def test_garbage_lines_and_torn_groups_are_counted(folder):
    path = folder / "_drgrpo" / "completions.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([b"\xff\x00garbage", b"[1, 2]", b"[" * 100_000, *lines[:-1], lines[-1][:200]]))
    run = read_run(folder)
    assert run.completions.groups == 3
    assert run.notes == ["completions.jsonl: 4 unreadable lines (cut off or damaged), left out."]
    path.write_bytes(b"\n".join([lines[0].replace(b'"rows": [', b'"rows": [[[', 1), *lines[1:]]) + b"\n")
    run = read_run(folder)
    assert len(looked_at(run)) == run.completions.groups == 3  # that it is broken is seen when it is read


def test_steps_repeated_by_a_resumed_run_are_left_out(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=10, every=2)
    log = folder / "_drgrpo"
    starts = [{"time": START, "step": 0}, {"time": START + 1000, "step": 6}]
    (log / "run.json").write_text(json.dumps(about(starts=starts)))
    again = group_line(random.Random(5), 8, 0, time=START + 1008)
    append_lines(log / "completions.jsonl", again)
    new = {"step": 7, "time": START + 1007, "mode": "train", "logs": {"reward": 0.5}}
    append_lines(log / "metrics.jsonl", new)
    run = read_run(folder)
    # steps 7 to 10 of the first start came after step 6, at which the second one began
    assert [entry.step for entry in run.logged] == [1, 2, 3, 4, 5, 6, 7]
    assert run.logged[-1].metrics == {"reward": 0.5}
    groups = looked_at(run)
    assert sorted(group.step for group in groups.values()) == [2, 4, 6, 8]
    assert next(g.prompt for g in groups.values() if g.step == 8) == again["prompt"]
    assert run.resumed_at == [6]
    assert any("4 logged entries were done again after a crash" in note for note in run.notes)


def test_a_run_started_anew_in_the_folder_of_another_is_alone(tmp_path):
    folder = write_run_log(tmp_path / "run", steps=10, every=2)
    log = folder / "_drgrpo"
    starts = [{"time": START - 50, "step": 0}, {"time": START + 60, "step": 2}, {"time": START + 1000, "step": 0}]
    (log / "run.json").write_text(json.dumps(about(starts=starts)))
    for step, mode in ((0, "eval"), (1, "train")):
        line = {"step": step, "time": START + 1001, "mode": mode, "logs": {"reward": 0.5}}
        append_lines(log / "metrics.jsonl", line)
    run = read_run(folder)
    assert [(entry.step, entry.mode) for entry in run.logged] == [(0, "eval"), (1, "train")]
    assert run.completions is None
    assert run.resumed_at == []
    assert run.facts["started"] == f"{datetime.fromtimestamp(START + 1000, UTC):%Y-%m-%d %H:%M} UTC"


@pytest.mark.parametrize("gone", ["run.json", "metrics.jsonl", "completions.jsonl", "warnings.jsonl"])
def test_any_file_may_be_missing_or_torn(folder, gone):
    path = folder / "_drgrpo" / gone
    content = path.read_text()
    path.unlink()
    run = read_run(folder)
    assert run.kind == "trl-drgrpo"
    assert (run.completions is None) == (gone == "completions.jsonl")
    assert bool(run.notes) == (gone == "run.json")
    path.write_text(content[:100])
    run = read_run(folder)
    assert len(run.logged) == (20 if gone != "metrics.jsonl" else 0)
    assert (run.objective == {}) == (gone == "run.json")
    assert len(run.notes) == 1
    assert ("run.json cannot be read" in run.notes[0]) == (gone == "run.json")


def test_values_of_other_types_and_beyond_every_type_are_survived(folder):
    log = folder / "_drgrpo"
    odd = {"objective": [1], "settings": "x", "right": 3, "rewards": {"names": "r"}, "formula": 5}
    for starts in ([{"time": "t"}, 7], 7):
        (log / "run.json").write_text(json.dumps(about(**odd, starts=starts)))
        assert read_run(folder).formula == []
    rows = [7, {"spans": "text", "rewards": [], "reward": "1", "length": 2.5, "right": 1}]
    write_lines(log / "completions.jsonl", [{"step": 1, "rows": rows}])
    logged = [{"step": "1"}, {"step": 10**400}, {"step": 2, "logs": {"reward": "x", "kl": 1e400}}]
    write_lines(log / "metrics.jsonl", [*logged, {"step": 3, "time": 10**400, "logs": {"reward": 10**400}}])
    run = read_run(folder)
    (group,) = looked_at(run).values()
    assert [(row.reward, row.length, row.right) for row in group.rows] == [(None, None, None)] * 2
    assert [entry.metrics for entry in run.logged] == [{"reward": None, "kl": None}, {"reward": None}]
    assert any("metrics.jsonl: 2 unreadable lines" in note for note in run.notes)


def test_another_format_is_refused(folder):
    (folder / "_drgrpo" / "run.json").write_text(json.dumps(about(format=2)))
    with pytest.raises(InputError, match="got format 2; expected format 1. Another version"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("nothing", "nothing there; expected the output folder of a run"),
        ("", "a folder with empty/, model.safetensors; expected a run: _drgrpo/"),
        ("empty", "an empty folder"),
        ("model.safetensors", "a file"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path, name, got):
    (tmp_path / "model.safetensors").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=f"got {got}"):
        read_run(tmp_path / name)
    with pytest.raises(InputError, match="got no folder; expected at least one"):
        read_runs([])


def test_runs_get_different_names(tmp_path):
    for parent in ("a", "b"):
        write_run_log(tmp_path / parent / "run", steps=2)
    assert [run.name for run in read_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([tmp_path / "a/run"] * 2)] == ["a/run", "a/run (2)"]


def test_a_group_and_its_zscores():
    # rewards 1, 0, 0, 1: mean 0.5, sample std sqrt(1/3) = 0.57735; z = 0.5 / (0.57735 + 1e-4) = 0.86588
    rows = [{"reward": reward, "spans": [{"text": "a", "advantage": 0.5}]} for reward in (1.0, 0.0, 0.0, 1.0)]
    group = group_of({"step": 3, "group": 1, "prompt": "p", "rows": rows})
    assert (group.baseline, group.std) == (0.5, pytest.approx(math.sqrt(1 / 3)))
    assert [row.zscore for row in group.rows] == pytest.approx([0.86588, -0.86588, -0.86588, 0.86588], abs=1e-5)
    equal = group_of({"step": 1, "rows": [{"reward": 0.7}, {"reward": 0.7}, {"reward": None}]})  # one is unscorable
    assert [row.zscore for row in equal.rows] == [0.0, 0.0, None]


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(content)
    assert all(isinstance(line, dict) for line in JsonLines(path))
    assert RecordedCompletions(path, Starts([])).groups <= content.count(b"\n") + 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=4), st.integers(0, 60))
def test_steps_of_the_last_start_are_never_superseded(starts, step):
    assert not Starts(starts).superseded(step, max(time for time, _ in starts))
    assert not Starts(starts).superseded(step, None)


def test_lines_of_the_run_log_are_indexed_without_parsing(tmp_path, monkeypatch):
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


def test_conversations_become_text():
    turns = [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}]
    assert conversation("plain") == "plain"
    assert conversation(turns[:1]) == "4"
    assert conversation(turns) == "[assistant] 4\n[tool] ok"
    parts = [{"type": "text", "text": "é"}]
    assert conversation([{"role": "user", "content": parts}]) == '[{"type": "text", "text": "é"}]'
