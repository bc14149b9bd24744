import errno
import os
import socket

import filelock
import pytest
from runs import written_elsewhere

from trl_drgrpo.common.disk import check_writable, sole_writer
from trl_drgrpo.common.errors import InputError


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
