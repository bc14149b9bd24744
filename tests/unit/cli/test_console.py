"""One process of several reports an error."""

from trl_drgrpo.cli import console
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import RewardError


def test_only_the_first_process_reports(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--scale_reward", "none"]) == 2
    assert capsys.readouterr().err == ""
    # A reward may fail on one process only: then that one says so.
    console.report_error(RewardError("reward r", "a text", "a number", "Return numbers."))
    assert capsys.readouterr().err.startswith("error: reward r")
