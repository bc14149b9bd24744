"""When a checkpoint folder counts as complete, which is the newest, and which run an output folder holds."""

import json
import os
import re

import pytest
import torch
import xxhash

from trl_drgrpo.cli.job import run_folder
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume import checkpoints
from trl_drgrpo.features.resume.checkpoints import (
    PART_FILE,
    STATE_FILE,
    begin_checkpoint,
    choose_start,
    delete_old_checkpoints,
    delete_run,
    file_marks,
    finish_checkpoint,
    newest_complete_checkpoint,
    read_state,
    run_in,
    why_incomplete,
)
from trl_drgrpo.features.resume.restoring import load_rollouts
from trl_drgrpo.features.resume.resume import save_rollouts


def written(output_dir, step, run_id="a", saved_at=1.0, **files):
    """A complete checkpoint."""
    folder = output_dir / f"checkpoint-{step}"
    begin_checkpoint(folder)
    for name, content in {"trainer_state.json": b"{}", **files}.items():
        (folder / name).write_bytes(content)
    finish_checkpoint(folder, {"run_id": run_id, "saved_at": saved_at})
    return folder


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path, 3, **{"optimizer.pt": b"12345", "README.md": b"a card"})


def flip(path):
    """Another bit pattern of the same size, at another time: clocks of file systems are coarser than a test."""
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, (0, 0))


def swap(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_a_complete_one(folder):
    marks = json.loads((folder / STATE_FILE).read_text())["files"]
    assert {name: mark["bytes"] for name, mark in marks.items()} == {"optimizer.pt": 5, "trainer_state.json": 2}
    assert marks["optimizer.pt"]["xxh3_128"] == xxhash.xxh3_128(b"12345").hexdigest()
    assert not (folder / PART_FILE).exists()
    (folder / "README.md").write_text("a card that somebody has edited")
    assert why_incomplete(folder) == ""


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "optimizer.pt").write_bytes(b""), "optimizer.pt has 0 bytes instead of 5"),
        (lambda f: (f / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda f: flip(f / "optimizer.pt"), "optimizer.pt was changed after it was written (its checksum differs)"),
        (lambda f: flip(f / STATE_FILE), f"{STATE_FILE} cannot be read (Expecting value: line 1 column 1 (char 0))"),
        (lambda f: (f / STATE_FILE).write_text("[]"), f"{STATE_FILE} cannot be read (no mapping)"),
        (lambda f: swap(f / STATE_FILE, '"bytes": 5', '"bytes": 6'), f"{STATE_FILE} cannot be read (its checksum"),
        (lambda f: (f / "trainer_state.json").write_text("{"), "trainer_state.json cannot be read"),
        (lambda f: (f / "trainer_state.json").write_text("[]"), "trainer_state.json holds no state"),
        (lambda f: (f / "trainer_state.json").unlink(), "it holds no trainer_state.json"),
        (begin_checkpoint, "it is incomplete: the run died while saving it"),
    ],
)
def test_a_damaged_one_is_refused_and_skipped(damage, reason, folder, caplog):
    damage(folder)
    reason = re.escape(reason)
    with pytest.raises(InputError, match=f"^resume_from_checkpoint: got .*checkpoint-3, but {reason}.*; expected"):
        choose_start(folder.parent, str(folder), overwrite=False)
    with pytest.raises(InputError, match=reason):
        run_folder({"resume_from_checkpoint": str(folder)}, dry_run=True).__enter__()
    assert newest_complete_checkpoint(folder.parent) is None
    assert re.search(f"{folder} is skipped: {reason}", caplog.text)


def test_sizes_are_judged_without_reading(folder, monkeypatch):
    flip(folder / "optimizer.pt")
    assert why_incomplete(folder, checksums=False) == ""
    monkeypatch.setattr(checkpoints, "_checksum", lambda *a: pytest.fail("was read"))
    (folder / "optimizer.pt").write_bytes(b"")
    assert why_incomplete(folder) == "optimizer.pt has 0 bytes instead of 5"


def test_rollouts_may_be_lost_but_not_changed(folder, caplog):
    cpu = torch.device("cpu", 0)  # as accelerate names it where there are several processes
    save_rollouts(folder, 0, [{"completion_ids": torch.tensor([[1, 2]]), "num_images": [0], "ref": None}])
    finish_checkpoint(folder, {"run_id": "a"})
    files = file_marks(folder)
    (loaded,) = load_rollouts(folder, 0, cpu, files)
    assert (loaded["completion_ids"].tolist(), loaded["num_images"], loaded["ref"]) == ([[1, 2]], [0], None)
    rollouts = folder / "drgrpo_rollouts_0.pt"
    content = bytearray(rollouts.read_bytes())
    content[content.index(torch.tensor([1, 2]).numpy().tobytes())] = 3  # torch loads it without a word
    rollouts.write_bytes(content)
    os.utime(rollouts, (0, 0))
    assert load_rollouts(folder, 0, cpu, {})[0]["completion_ids"].tolist() == [[3, 2]]
    assert load_rollouts(folder, 0, cpu, files) is load_rollouts(folder, 1, cpu, files) is None  # no second rank
    assert "are not used: drgrpo_rollouts_0.pt was changed after it was written" in caplog.text
    assert "drgrpo_rollouts_1.pt cannot be read (FileNotFoundError" in caplog.text
    assert why_incomplete(folder) == ""


# Which of several: (step, run, time of writing) -> the newest


def damaged(folder):
    flip(folder / "trainer_state.json")


def of_plain_trl(folder):
    (folder / STATE_FILE).unlink()


@pytest.mark.parametrize(
    ("folders", "changed", "newest", "said"),
    [
        ([(9, "a", 10.0), (10, "a", 20.0)], {}, 10, ""),
        (
            [(4, "a", 1.0), (5, "a", 2.0), (2, "b", 3.0)],
            {},
            2,
            "it belongs to run a, but the last run to save here is b",
        ),
        (
            [(4, "a", 1.0), (8, "a", 2.0), (5, "a", 3.0)],
            {},
            5,
            "resumed from an earlier step: checkpoint-5 was written",
        ),
        (
            [(1, "a", 1.0), (3, "b", 2.0), (4, "b", 3.0)],
            {4: damaged},
            3,
            "checkpoint-4 is skipped: trainer_state.json",
        ),
        ([(1, "a", 1.0), (3, "b", 2.0)], {3: damaged}, None, "checkpoint-1 is skipped: it belongs to run a"),
        ([(1, "a", 1.0), (2, "a", 2.0)], {2: of_plain_trl}, 1, "plain TRL wrote it, and it may be incomplete"),
        ([(1, "a", 1.0)], {1: of_plain_trl}, 1, ""),
    ],
    ids=["one run", "two runs", "went back", "damage", "damage, another run", "TRL on top of ours", "TRL's alone"],
)
def test_the_newest_is_of_the_run_that_wrote_last(folders, changed, newest, said, tmp_path, caplog):
    for each in folders:
        written(tmp_path, *each)
    for step, change in changed.items():
        change(tmp_path / f"checkpoint-{step}")
    assert newest_complete_checkpoint(tmp_path) == (tmp_path / f"checkpoint-{newest}" if newest else None)
    assert said in caplog.text
    assert ("is skipped" in caplog.text) == bool(said)


def test_the_time_of_writing_never_goes_back(tmp_path, monkeypatch):
    for step, clock in ((1, 100.0), (2, 50.0), (3, 200.0)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        begin_checkpoint(tmp_path / f"checkpoint-{step}")
        finish_checkpoint(tmp_path / f"checkpoint-{step}", {"run_id": "a"})
    times = [read_state(tmp_path / f"checkpoint-{step}")["saved_at"] for step in (1, 2, 3)]
    assert times == [100.0, 101.0, 200.0]


# Which run a folder holds


def write(output_dir, *names):
    for name in names:
        path = output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], ""),
        (["notes.txt", "data/train.jsonl", "card/curves.png", "checkpoint-notes.md"], ""),
        (["_drgrpo/run.json", "_drgrpo/metrics.jsonl"], ""),  # of a run that died before its first checkpoint
        (["checkpoint-1/drgrpo_state.part", "checkpoint-1/trainer_state.json"], ""),  # or in the middle of it
        (["checkpoint-1/notes.txt"], ""),
        (["model/model.safetensors", "results.json"], ""),  # a demo's
        (["model.safetensors", "config.json"], ""),  # a base model
        (["checkpoint-1/trainer_state.json"], "checkpoint-1"),  # of plain TRL
        (["checkpoint-1/drgrpo_state.json", "checkpoint-9/trainer_state.json"], "checkpoint-9 and 1 more checkpoint"),
        ([f"checkpoint-{step}/drgrpo_state.json" for step in (8, 9, 10)], "checkpoint-10 and 2 more checkpoints"),
        (["model.safetensors", "training_args.bin"], "a saved model, model.safetensors"),
        (["model-00001-of-00002.safetensors", "training_args.bin"], "a saved model, model-00001-of-00002.safetensors"),
        (["adapter_model.safetensors", "training_args.bin"], "a saved model, adapter_model.safetensors"),
    ],
)
def test_a_folder_with_a_run_is_refused_with_the_ways_out(files, found, tmp_path):
    write(tmp_path, *files)
    assert run_in(tmp_path) == found
    assert (
        choose_start(tmp_path, None, overwrite=True) is choose_start(tmp_path / "new", None, overwrite=False) is None
    )
    if not found:
        assert choose_start(tmp_path, None, overwrite=False) is None
        return
    with pytest.raises(InputError, match=f"^output_dir: got .*, which holds another run \\({found}\\)") as refused:
        choose_start(tmp_path, None, overwrite=False)
    go_on = "resume_from_checkpoint=True), or --resume" if "checkpoint" in found else "no checkpoint to resume from"
    replace = "To replace it: DrGRPOConfig(overwrite_output_dir=True), or --overwrite_output_dir true"
    assert refused.value.remedy.startswith(replace)
    for way in (go_on, "another output_dir"):
        assert way in refused.value.remedy


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    folder = written(tmp_path / "mine", 1, "a")
    written(tmp_path / "copy", 2, "a")
    for output_dir, resume in (("mine", True), ("mine", str(folder)), ("new", str(folder)), ("copy", str(folder))):
        assert choose_start(tmp_path / output_dir, resume, overwrite=False) == folder
    written(tmp_path / "other", 2, "b")
    with pytest.raises(InputError, match="other, which holds another run"):
        choose_start(tmp_path / "other", str(folder), overwrite=False)
    (folder / "trainer_state.json").unlink()  # what cannot be resumed is no leave to begin anew
    with pytest.raises(InputError, match=r"which holds another run \(checkpoint-1\)"):
        choose_start(tmp_path / "mine", True, overwrite=False)


@pytest.mark.parametrize("resume", [True, "checkpoint-1"])
def test_a_run_is_not_kept_and_deleted(resume, tmp_path):
    with pytest.raises(InputError, match=f"true beside resume_from_checkpoint {str(resume).lower()}; expected one of"):
        choose_start(tmp_path, resume, overwrite=True)


def test_deleting_a_run_leaves_the_rest_and_never_half_a_run(tmp_path, monkeypatch, caplog):
    folders = [written(tmp_path, 2, "a"), written(tmp_path, 1, "a")]
    write(tmp_path, "_drgrpo/run.json", "model.safetensors", "notes.txt", "checkpoint-notes.md")

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_run(tmp_path)
    assert newest_complete_checkpoint(tmp_path) is None
    assert run_in(tmp_path) == ""
    for said in (f"overwrite_output_dir: deleted {folders[0]}, {folders[1]}", ""):
        caplog.clear()
        delete_run(tmp_path)
        assert (said in caplog.text) if said else not caplog.text
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-notes.md", "model.safetensors", "notes.txt"]


# What is deleted, and what is not


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_the_clock_does_not_say_which_checkpoint_is_the_oldest(tmp_path):
    for number, step in enumerate((1, 2, 3)):
        checkpoint = tmp_path / f"checkpoint-{step}"
        begin_checkpoint(checkpoint)
        finish_checkpoint(checkpoint, {"run_id": "a"})
        os.utime(checkpoint, (10**9 - 10**6 * number,) * 2)  # put back between any two
        delete_old_checkpoints(checkpoint, 2, None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_the_order_of_deleting_is_that_of_writing(tmp_path):
    plain = tmp_path / "checkpoint-90"  # of plain TRL
    plain.mkdir()
    for step, time in ((50, 1.0), (100, 2.0), (60, 3.0), (70, 4.0)):  # went back to 50
        written(tmp_path, step, saved_at=time)
    newest = tmp_path / "checkpoint-70"
    for limit, left in ((0, 5), (None, 5), (5, 5), (4, 4)):
        delete_old_checkpoints(newest, limit, None)
        assert len(names(tmp_path)) == left
    assert not plain.exists()
    delete_old_checkpoints(newest, 3, str(tmp_path / "checkpoint-50"))  # the best one stays
    assert names(tmp_path) == ["checkpoint-50", "checkpoint-60", "checkpoint-70"]
    delete_old_checkpoints(newest, 1, str(tmp_path / "checkpoint-50"))
    assert names(tmp_path) == ["checkpoint-50", "checkpoint-70"]
    delete_old_checkpoints(newest, 1, None)
    assert names(tmp_path) == ["checkpoint-70"]


OTHERS = (
    "checkpoint-best-7",
    "checkpoint-notes",
    "checkpoint-best",
    "checkpoint-7-old",
    "checkpoint-²",
    "old-checkpoint-3",
)


def test_other_folders_named_like_checkpoints_are_left_alone(tmp_path, caplog):
    for name in OTHERS:
        (tmp_path / name).mkdir()
    for step in (1, 2):
        newest = written(tmp_path, step)
    delete_old_checkpoints(newest, 1, None)
    assert not (tmp_path / "checkpoint-1").exists()
    delete_run(tmp_path)
    assert not newest.exists()
    assert all((tmp_path / name).is_dir() for name in OTHERS)
    assert run_in(tmp_path) == ""


@pytest.fixture
def linked(tmp_path):
    """A run, and one that has links to its checkpoint and to its log."""
    theirs = written(tmp_path / "theirs", 3, saved_at=1.0, **{"model.safetensors": b"theirs"})
    (tmp_path / "theirs" / "_drgrpo").mkdir()
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "checkpoint-3").symlink_to(theirs)
    (ours / "_drgrpo").symlink_to(tmp_path / "theirs" / "_drgrpo")
    return theirs, ours


def test_a_link_is_deleted_and_its_target_stays(linked):
    theirs, ours = linked
    delete_run(ours)
    assert list(ours.iterdir()) == []
    assert why_incomplete(theirs) == ""
    assert (theirs.parent / "_drgrpo").is_dir()


def test_a_linked_checkpoint_that_is_the_oldest(linked):
    theirs, ours = linked
    newest = written(ours, 4, saved_at=2.0)
    delete_old_checkpoints(newest, 1, None)
    assert names(ours) == ["checkpoint-4"]
    assert why_incomplete(theirs) == ""


def test_no_checkpoint_is_written_through_a_link(linked):
    theirs, ours = linked
    begin_checkpoint(ours / "checkpoint-3")
    assert why_incomplete(theirs) == ""
    assert not (ours / "checkpoint-3").is_symlink()
    again = ours / "checkpoint-5"
    again.mkdir()
    (again / "model.safetensors").symlink_to(theirs / "model.safetensors")
    begin_checkpoint(again)
    (again / "model.safetensors").write_bytes(b"ours")
    assert (theirs / "model.safetensors").read_bytes() == b"theirs"
