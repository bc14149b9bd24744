"""A full disk: one error that says what is safe, and a run that goes on from there."""

import errno
import os
import re
import socket
import subprocess

import filelock
import pytest
import torch
from runs import written_elsewhere
from safetensors import SafetensorError

from trl_drgrpo.common import disk
from trl_drgrpo.common.disk import check_writable, room_needed, sole_writer
from trl_drgrpo.common.errors import DiskFullError, InputError, RewardError
from trl_drgrpo.features.resume.checkpoints import newest_complete_checkpoint


def write(folder, error):
    with room_needed(folder, lambda: "All is safe."):
        raise error


@pytest.mark.parametrize(
    ("error", "file"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/optimizer.pt"), "/a/optimizer.pt"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "{folder}/config.json"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the weights in {folder}"),
    ],
)
def test_every_error_of_a_full_disk_is_one_error(error, file, tmp_path):
    (tmp_path / "config.json").touch()
    file = re.escape(file.format(folder=tmp_path))
    message = rf"^disk full: {file} could not be written, [\d,]+\.\d MB are free there\. All is safe\.$"
    with pytest.raises(DiskFullError, match=message) as raised:
        write(tmp_path, error)
    assert raised.value.__cause__ is error


def test_the_reason_may_be_behind_the_error(tmp_path):
    error = RuntimeError("unexpected pos 768 vs 662")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFullError, match=f"^disk full: {tmp_path}/new could"):
        write(tmp_path / "new", error)


def test_torch_gives_no_reason_so_the_disk_is_asked(tmp_path, monkeypatch):
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598")
    with pytest.raises(RuntimeError, match="enforce fail"):
        write(tmp_path, error)

    def full(dir):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", full)
    with pytest.raises(DiskFullError):
        write(tmp_path, error)


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), SafetensorError("shared tensors"), ValueError("another")]
)
def test_other_errors_stay_what_they_are(error, tmp_path):
    with pytest.raises(type(error)) as raised:
        write(tmp_path, error)
    assert raised.value is error


def test_said_once_where_blocks_are_nested(tmp_path):
    outer, inner = room_needed(tmp_path, lambda: "outer"), room_needed(tmp_path, lambda: "inner")
    with pytest.raises(DiskFullError, match="inner") as raised, outer, inner:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "outer" not in str(raised.value)


@pytest.fixture
def settings(settings):
    return settings | {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def full_at(name, save):
    def saves(content, path, *args, **kwargs):
        if str(path).endswith(name):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save(content, path, *args, **kwargs)

    return saves


def test_a_failed_write_is_not_called_saved(build, tmp_path, monkeypatch):
    trainer = build()
    monkeypatch.setattr(torch, "save", full_at("training_args.bin", torch.save))
    with pytest.raises(
        DiskFullError, match="No checkpoint of this run is saved. Free disk space, then start it again"
    ):
        trainer.save_model(str(tmp_path / "model"))


def test_a_failing_reward_stays_the_error_when_the_disk_is_full_too(build, monkeypatch, caplog):
    calls = []

    def fails(completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            monkeypatch.setattr(torch, "save", full_at("optimizer.pt", torch.save))
            raise RuntimeError("judge is down")
        return [float(sum(ids) % 3) for ids in completion_ids]

    with pytest.raises(RewardError, match="judge is down"):
        build(fails, save_strategy="no").train()
    assert "the run up to here cannot be saved. disk full: " in caplog.text


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint of the tiny model, but not two. Only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("taken", [0, 150_000], ids=["by torch", "by safetensors"])
def test_a_disk_that_is_really_full(taken, build, small_disk):
    (small_disk / "other.bin").write_bytes(bytes(taken))
    trainer = build(output_dir=str(small_disk / "run"))
    with pytest.raises(DiskFullError) as raised:
        trainer.train()
    half = small_disk / "run" / "checkpoint-2"
    file = f"the weights in {half}" if taken else f"{half}/optimizer.pt"
    assert str(raised.value).startswith(f"disk full: {file} could not be written, ")
    assert f"The run up to {small_disk}/run/checkpoint-1 is saved." in str(raised.value)
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert newest_complete_checkpoint(small_disk / "run") == small_disk / "run" / "checkpoint-1"


def test_a_folder_that_can_be_made_leaves_nothing_behind(tmp_path):
    check_writable("output_dir", str(tmp_path / "new" / "newer"))
    check_writable("output_dir", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_and_a_system_that_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^output_dir: got .*file/x, but .*file is a file; expected a folder"):
        check_writable("output_dir", str(tmp_path / "file" / "x"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=r"^output_dir: got .*loop/x, but .*loop is a link that leads nowhere; exp"):
        check_writable("output_dir", str(tmp_path / "loop" / "x"))
    with pytest.raises(InputError, match=r"^output: got .*loop, a link that leads nowhere; expected a file to write"):
        sole_writer("output", tmp_path / "loop", is_file=True).__enter__()
    with pytest.raises(InputError, match=r"^output_dir: got zz.*which cannot be written to \(File name too long\)"):
        check_writable("output_dir", "z" * 300)
    if os.path.isdir("/proc"):  # permission bits let root write there
        with pytest.raises(InputError, match=r"^output_dir: got /proc/x, which cannot be written to \("):
            check_writable("output_dir", "/proc/x")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_one_process_writes_and_its_death_is_the_end_of_that(kind, tmp_path):
    target, is_file = tmp_path / "new" / "target", kind == "file"
    with written_elsewhere(target, is_file) as holder:
        link = tmp_path / "link"
        link.symlink_to(target.parent)
        for name in (target, link / "target"):
            with pytest.raises(InputError) as refused, sole_writer("output_dir", name, is_file=is_file):
                pytest.fail("two at a time")
            assert str(refused.value) == (
                f"output_dir: got {name}, to which process {holder.pid} on {socket.gethostname()} is writing; "
                f"expected a {kind} to which no other process writes. Wait until it has ended, or choose another one."
            )
    for _ in range(2):  # one after the other, and one in the other
        with sole_writer("output_dir", target, is_file=is_file), sole_writer("output_dir", target, is_file=is_file):
            pass
    assert [path.name for path in target.parent.rglob("*")] == ([] if is_file else ["target"])  # no lock
    other = tmp_path / "other"
    with sole_writer("output_dir", other):
        assert other.exists()
    assert not other.exists()
    with sole_writer("output_dir", other):
        (other / "result").touch()
    assert list(other.iterdir()) == [other / "result"]


def test_a_file_system_without_locks_is_said_and_stops_nobody(tmp_path, monkeypatch, caplog):
    def acquire(self, *args, **kwargs):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with sole_writer("output_dir", tmp_path):
        assert caplog.messages == [
            f"{tmp_path} cannot be locked (No locks available): do not start a second run there."
        ]
