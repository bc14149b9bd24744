import os

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.folders import check_writable


def test_a_folder_that_can_be_made_leaves_nothing_behind(tmp_path):
    check_writable("output_dir", str(tmp_path / "new" / "newer"))
    check_writable("output_dir", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_and_a_system_that_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^output_dir: got .*file/x, but .*file is a file; expected a folder"):
        check_writable("output_dir", str(tmp_path / "file" / "x"))
    if os.path.isdir("/proc"):  # permission bits let root write there
        with pytest.raises(InputError, match=r"^output_dir: got /proc/x, which cannot be written to \("):
            check_writable("output_dir", "/proc/x")
