"""The supported range of TRL, and the provenance of numbers."""

import re
import subprocess

import pytest

from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.upstream import versions as module
from trl_drgrpo.upstream.versions import TRL_SUPPORTED, provenance, require_supported_trl


@pytest.mark.parametrize("version", ["1.15.9", "2.0.0", "0.26.0"])
def test_a_trl_outside_the_range_is_refused(version):
    with pytest.raises(UpstreamError, match=f"^trl: got {version}; expected >=1.16,<2"):
        require_supported_trl(version)


def test_the_range_is_the_one_pyproject_declares():
    tomllib = pytest.importorskip("tomllib")
    with open("pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert f"trl>={TRL_SUPPORTED[0]},<{TRL_SUPPORTED[1]}" in dependencies


def test_numbers_say_where_they_come_from():
    made = provenance("trl-drgrpo check")
    assert made["command"] == "trl-drgrpo check"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert made["commit"] is None or re.fullmatch(r"[0-9a-f]{7,}\+?", made["commit"])
    assert re.search(r"\d+ CPU cores$", made["host"])
    assert {"trl-drgrpo", "trl", "torch"} <= made["versions"].keys()


def test_a_machine_without_git_has_no_commit(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert module.provenance("x")["commit"] is None


def test_an_installed_package_has_no_commit_of_what_is_around_it(monkeypatch, tmp_path):
    (tmp_path / ".git").mkdir()  # the user's project, with a virtual environment in it
    installed = tmp_path / "venv" / "site-packages" / "trl_drgrpo" / "upstream" / "versions.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(installed))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "abc1234\n", ""))
    assert module.commit() is None
