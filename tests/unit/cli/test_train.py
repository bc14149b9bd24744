"""The flags of `trl-drgrpo train`."""

import argparse

import pytest

from trl_drgrpo.cli import flags, train
from trl_drgrpo.cli.main import main


def test_the_flags_are_those_of_trls_parser():
    from trl import TrlParser

    theirs = TrlParser([flags.import_dataclass(name) for name in flags.DATACLASSES])
    ours = argparse.ArgumentParser()
    train.add_arguments(ours)
    own = {"--config", "--dry_run", "--dry-run", "--help_all", "--help-all"}
    assert set(ours._option_string_actions) - own == set(theirs._option_string_actions)


def help_of(*argv, capsys):
    with pytest.raises(SystemExit) as exited:
        main(list(argv))
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_the_whole_help(capsys):
    text = help_of("train", "--help_all", capsys=capsys)
    assert all(f"--{name} " in text for name in flags.read_flags())
    assert "(default: default_optim)" in text  # an expression is shown as it is written


def test_the_help_shows_what_people_use(capsys):
    text = help_of("train", "--help", capsys=capsys)
    shown = [name for name in flags.read_flags() if f"  --{name} " in text]
    assert 25 < len(shown) < 45
    assert sum(map(len, train._USUAL.values())) == len(shown)  # no key that a newer TRL has dropped
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[1:-1] == list(train._USUAL)  # after the options, before the example
    assert "'rloo'" in text  # the choices stand in the help, or are appended to it
    assert "One of auto" in text
    assert "The effective batch" not in text  # the second sentence about num_generations
    assert text.count("--learning_rate") == 1
    assert "--learning-rate" not in text
    assert text.count("\n") < 170


def test_bias_takes_the_same_flags_and_shows_its_own(capsys):
    assert "--batches" in help_of("bias", "--help", capsys=capsys)
