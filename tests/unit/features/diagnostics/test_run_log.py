import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import read_lines

from trl_drgrpo.features.diagnostics import run_log
from trl_drgrpo.features.diagnostics.run_log import (
    RunLog,
    group_records,
    logged_prompt,
    recorded_groups,
    short_text,
    spans_of,
    to_json,
)
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.steps.alignment import Aligner


@pytest.fixture
def log(tmp_path):
    return RunLog(tmp_path, itertools.count(100.0).__next__)


def test_the_files_hold_what_was_logged(log):
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
    assert read_lines(log.folder / "metrics.jsonl") == [
        {"step": 1, "epoch": 0.5, "mode": "train", "logs": {"kl": None, "reward": 0.25}, "time": 101.0},
        {"step": 1, "epoch": 0.5, "mode": "eval", "logs": {"eval_reward": 1.0}, "time": 102.0},
    ]
    assert read_lines(log.folder / "completions.jsonl") == [{"step": 1, "prompt": "é ?", "time": 103.0}]
    assert read_lines(log.folder / "warnings.jsonl") == [
        {"step": 1, "cause": "kl", "message": "too far", "time": 104.0}
    ]


def test_a_log_that_has_not_started_writes_nothing(log):
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


@pytest.fixture(scope="module")
def spans(tokenizer):
    """`spans(ids, advantages, ...)`: those of a completion, every token trained on unless said otherwise."""
    aligner = Aligner(tokenizer)

    def of(ids, advantages, trained=None, **steps_and_forks):
        return list(spans_of(ids, advantages, trained or [1.0] * len(ids), aligner, **steps_and_forks))

    return of


def test_one_span_for_one_advantage(spans, tokenizer):
    ids = [*tokenizer.encode("aé"), tokenizer.eos_token_id]
    text = "aé" + tokenizer.eos_token
    one = {"text": text, "advantage": 0.5, "step": None, "step_reward": None, "masked": False}
    assert spans(ids, [0.5] * 4) == [one]
    assert spans([], []) == []


def test_steps_and_masked_tokens_cut_spans(spans, tokenizer):
    ids = tokenizer.encode("one two 42 end")  # a token is a byte
    advantages, trained = [0.1] * 4 + [0.2] * 4 + [0.0] * 3 + [0.2] * 3, [1] * 8 + [0] * 3 + [1] * 3
    found = spans(ids, advantages, trained, step_ends=(3, 13), step_rewards=(1.0, None))
    assert [(s["text"], s["advantage"], s["step"], s["step_reward"], s["masked"]) for s in found] == [
        ("one ", 0.1, 0, 1.0, False),
        ("two ", 0.2, 1, None, False),
        ("42 ", 0.0, 1, None, True),
        ("end", 0.2, 1, None, False),
    ]
    closed = spans(
        [*tokenizer.encode("a\n\n"), tokenizer.eos_token_id], [0.5] * 4, step_ends=(2,), step_rewards=(1.0,)
    )
    assert [(s["text"], s["step"]) for s in closed] == [("a\n\n", 0), (tokenizer.eos_token, None)]  # in no step


def test_forks_cut_spans_of_equal_advantage_and_are_counted(spans, tokenizer):
    ids = tokenizer.encode("one two three")
    found = [
        [(s["text"], s["level"]) for s in spans(ids, [0.5] * len(ids), cuts=cuts)]
        for cuts in ([4, 8], [8, len(ids)], [len(ids)] * 2)  # cut twice, once, never
    ]
    assert found == [
        [("one ", 0), ("two ", 1), ("three", 2)],
        [("one two ", 0), ("three", 1)],
        [("one two three", 0)],
    ]


@given(st.data())
def test_spans_always_join_to_the_decoded_completion(spans, tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=30))
    advantages = data.draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=len(ids), max_size=len(ids)))
    ends = sorted({*data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=4)), len(ids) - 1})
    found = spans(ids, advantages, step_ends=ends, step_rewards=[0.0] * len(ends))
    assert "".join(span["text"] for span in found) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(found) == 1 + sum(advantages[t] != advantages[t - 1] or (t - 1) in ends for t in range(1, len(ids)))


def test_groups_are_put_together_from_rows_of_all_ranks():
    rewards = {4: 1.0, 1: None, 0: 3.0, 5: 2.0}
    rows = [{"index": i, "prompt": f"p{i // 2}", "columns": {}, "reward": r} for i, r in rewards.items()]
    groups = group_records(rows, 2, step=7, mode="train")
    assert [(g["group"], g["prompt"], g["G"], g["baseline"]) for g in groups] == [(0, "p0", 2, 3.0), (2, "p2", 2, 1.5)]
    assert groups[0]["std"] is None
    assert groups[1]["std"] == pytest.approx(math.sqrt(0.5), rel=1e-5)
    assert groups[0]["rows"] == [{"reward": 3.0}, {"reward": None}]
    assert {g["step"] for g in groups} == {7}
    assert [g.get("forks") for g in groups] == [None, None]
    forked = group_records(rows, 2, step=7, mode="train", forks=Forks(2, [[1, 2]] * 8))
    assert [g["forks"] for g in forked] == [[2, 2], [2, 2]]


@given(st.integers(1, 200), st.integers(-1, 300))
def test_groups_are_kept_by_their_rule(groups, wanted):
    kept = recorded_groups(groups, wanted)
    assert len(kept) == (groups if wanted < 0 else min(groups, wanted))
    assert kept == sorted(set(kept))
    assert all(0 <= group < groups for group in kept)


def test_prompts_and_columns_as_text():
    class Image:
        mode = "RGB"

        def getpixel(self, at):
            raise NotImplementedError

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": Image()}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": None},
    ]
    assert logged_prompt(chat) == "system: Be brief.\n\nuser: <image>What is it?\n\nassistant: "
    assert logged_prompt(None) == "None"
    assert short_text([Image(), Image()]) == "<image><image>"
    assert short_text({"bytes": b"...", "path": None}) == "<image>"
    assert len(short_text("x" * 10_000)) == 500
