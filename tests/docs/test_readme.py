"""The Python blocks of the README and of the migrating page run as they stand; local references exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MIGRATING = (ROOT / "recipes" / "guides" / "migrating.md").read_text()


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


BLOCKS = [*python_blocks(README), *python_blocks(MIGRATING)]


def test_there_are_blocks():
    assert len(python_blocks(README)) >= 3
    assert len(python_blocks(MIGRATING)) >= 3


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
    new = [
        field.name
        for field in dataclasses.fields(DrGRPOConfig)
        if field.name not in inherited and "Former" not in field.metadata["help"]
    ]
    named = {name for name in new if f"`{name}`" in README or f"{name}=" in README}
    assert sorted(set(new) - named) == []


@pytest.mark.parametrize(
    ("fields", "becomes"),
    [
        ({}, "dr_grpo"),
        ({"loss_type": "dapo", "scale_rewards": "group", "use_bias_correction_kl": True}, "dr_grpo"),
        ({"loss_type": "dr_grpo", "scale_rewards": True}, "dr_grpo"),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, "dr_grpo"),
        ({"loss_type": "grpo"}, None),
        ({"loss_type": "bnpo"}, None),
        ({"loss_type": "cispo"}, None),
        ({"scale_rewards": "batch"}, None),
        ({"multi_objective_aggregation": "normalize_then_sum"}, None),
        ({"sync_ref_model": True, "beta": 0.1}, None),
        ({"max_completion_length": None}, None),
    ],
)
def test_what_the_migrating_page_says_of_a_plain_configuration(fields, becomes):
    from trl import GRPOConfig

    from trl_drgrpo import DrGRPOConfig
    from trl_drgrpo.common.errors import InputError

    plain = GRPOConfig(use_cpu=True, bf16=False, report_to="none", **fields)
    if becomes is None:
        with pytest.raises(InputError):
            DrGRPOConfig.from_grpo_config(plain)
        return
    read = DrGRPOConfig.from_grpo_config(plain)
    assert (read.loss_type, read.scale_rewards, read.use_bias_correction_kl) == (becomes, "none", False)
    for name in fields:
        assert f"`{name}" in MIGRATING


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "recipes" / "guides").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(page):
    def anchor(heading):
        return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")

    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            assert heading in [anchor(each) for each in re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)]
