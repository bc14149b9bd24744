"""`trl-drgrpo env`: versions and devices, and nothing that names a person or a machine."""

import getpass
import platform
import socket
from pathlib import Path

import trl

from trl_drgrpo.cli import env
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.version import __version__


def test_what_an_issue_needs(monkeypatch, capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    assert shown["trl-drgrpo"].startswith(__version__)
    assert shown["trl"] == trl.__version__
    assert platform.python_version() in shown["Python"]
    assert {"torch", "peft", "datasets", "bitsandbytes", "vllm", "math-verify", "Devices"} <= shown.keys()
    text = "\n".join(lines)
    for private in (str(Path.home()), str(Path.cwd()), socket.gethostname()):
        assert private not in text
    assert getpass.getuser() not in text.replace("-", " ").split()
    monkeypatch.setattr(env, "_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(env.shutil, "which", lambda program: None)
    found = env.facts()
    assert found["no-such-package"] == "not installed"
    assert found["bubblewrap: the sandbox of code_reward"] == "not found"
