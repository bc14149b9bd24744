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
    own = {"--config", "--dry_run", "--dry-run"}
    assert set(ours._option_string_actions) - own == set(theirs._option_string_actions)


def test_every_flag_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in flags.read_flags())
    assert "(default: default_optim)" in text  # an expression is shown as it is written
