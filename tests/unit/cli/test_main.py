"""The command line's errors, exit codes and version."""

import argparse
import shlex

import pytest
from case_tables import cases

from trl_drgrpo.cli import console
from trl_drgrpo.cli.main import command as find
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import RewardError


@pytest.mark.parametrize(("_", "argv", "got", "remedy"), cases("cli.tsv", "command lines"))
def test_errors_are_one_line_on_stderr(_, argv, got, remedy, capsys):
    assert main(shlex.split(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"error: {got}")
    assert remedy in err


def test_without_a_command_there_is_help_and_no_success(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "train-prm" in err


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("TRL_DRGRPO_DEBUG", "1")
    assert main(["train", "--scale_reward", "none"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "names"),
    {
        "label-steps": {"model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "reward"},
        "train-prm": {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "output_dir"},
        "search": {"model_name_or_path": "model", "dataset_name": "dataset_name", "reward_funcs": "reward_funcs"},
        "score": {"reward_funcs": "rewards", "dataset_name": "dataset"},
        "plan": {"model_name_or_path": "model"},
        "merge": {"output_dir": "output"},
    }.items(),
)
def test_flags_have_trls_names_and_the_former_short_ones(command, names):
    parser = argparse.ArgumentParser()
    add_arguments, _, _ = find(command)
    add_arguments(parser)
    options = parser._option_string_actions
    for name, former in names.items():
        assert options[f"--{name}"] is options[f"--{former}"]


def test_only_the_first_process_reports(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "--scale_reward", "none"]) == 2
    assert capsys.readouterr().err == ""
    # A reward may fail on one process only: then that one says so.
    console.report_error(RewardError("reward r", "a text", "a number", "Return numbers."))
    assert capsys.readouterr().err.startswith("error: reward r")
