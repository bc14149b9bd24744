"""The README's Python blocks run as they stand, and its local references exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:30])
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


def test_commands_and_files_exist():
    from trl_drgrpo.cli.main import SUBCOMMANDS

    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in re.findall(r"^trl-drgrpo ([\w-]+)", README, re.MULTILINE):
        assert command in SUBCOMMANDS, command
    for path in re.findall(r"recipes/[\w./-]+\.\w+", README):
        assert (ROOT / path).exists(), path


def test_every_new_field_is_in_the_readme():
    import dataclasses

    from trl import GRPOConfig

    from trl_drgrpo import DrGRPOConfig

    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    new = [field.name for field in dataclasses.fields(DrGRPOConfig) if field.name not in inherited]
    named = {name for name in new if f"`{name}`" in README or f"{name}=" in README}
    assert sorted(set(new) - named) == []
