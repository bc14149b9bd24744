import re
import subprocess

from trl_drgrpo.labs import provenance as module
from trl_drgrpo.labs.provenance import provenance, study_command


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
    installed = tmp_path / "venv" / "site-packages" / "trl_drgrpo" / "labs" / "provenance.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(installed))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "abc1234\n", ""))
    assert module.commit() is None


def test_the_command_of_a_study_is_what_was_typed():
    assert study_command("signal", 5, 3) == "trl-drgrpo study signal --seeds 5 --jobs 3"
    assert study_command("tabular", 5) == "trl-drgrpo study tabular --seeds 5"
