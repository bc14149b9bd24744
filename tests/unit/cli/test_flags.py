"""The static list of keys against the dataclasses themselves, and `--help` without anything heavy."""

import dataclasses
import re
from inspect import get_annotations

import pytest
from processes import loaded_after

from trl_drgrpo.cli import flags, train
from trl_drgrpo.cli.main import SUBCOMMANDS, main
from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.rewards.recipe_rewards import REWARDS


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([command, "--help"] for command in SUBCOMMANDS)])
def test_help_loads_nothing_heavy(argv):
    code = f"from trl_drgrpo.cli.main import main\ntry: main({argv!r})\nexcept SystemExit as e: assert e.code == 0"
    assert loaded_after(code) == []


def test_a_misspelt_key_fails_before_anything_heavy_is_loaded(tmp_path):
    (tmp_path / "recipe.yaml").write_text("scale_reward: false\n")
    argv = ["train", "--config", str(tmp_path / "recipe.yaml")]
    assert loaded_after(f"from trl_drgrpo.cli.main import main\nassert main({argv!r}) == 2") == []


@pytest.mark.parametrize("name", [*flags.DATACLASSES, "DatasetConfig"])
def test_the_keys_read_from_source_are_the_fields_of_the_dataclass(name):
    read, declared = flags.dataclass_flags(name), flags.import_dataclass(name)
    fields = {entry.name: entry for entry in dataclasses.fields(declared) if entry.init}
    # Not the fields' own types: TRL's parser writes `X` over `X | None` in them.
    types = {key: kind for base in reversed(declared.__mro__) for key, kind in get_annotations(base).items()}
    assert list(read) == list(fields)  # the order too
    for key, flag in read.items():
        entry, kind = fields[key], types[key]
        annotation = kind.__name__ if isinstance(kind, type) else str(kind)
        if not isinstance(flag.default, flags.Unread):
            made = entry.default_factory
            assert flag.default == (entry.default if made is dataclasses.MISSING else made()), key
        assert flag.help == str(entry.metadata.get("help", "")).replace("%%", "%"), key
        choices = entry.metadata.get("choices")
        assert flag.choices in (None, flags.literal_choices(annotation) if choices is None else tuple(choices)), key
        assert members(flag.annotation) == members(annotation), key


def members(annotation: str) -> set[str]:
    """`SchedulerType | str` and `transformers.trainer_utils.SchedulerType | str` are the same."""
    plain = re.sub(r"\b(\w+\.)+(?=\w)", "", annotation)
    if union := re.fullmatch(r"Union\[(.*)\]", plain):
        plain = union.group(1).replace(", ", " | ")
    return set(plain.replace("NoneType", "None").split(" | "))


@pytest.fixture
def fresh():
    """Nothing of what was read before, nor afterwards."""
    cached = (flags._home, flags.dataclass_flags, flags.read_flags)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_class_that_moved_is_searched_for(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(flags._HOMES, "GRPOConfig", ("trl", "trainer/no_such_file.py"))
        assert {"loss_normalizer", "learning_rate", "epsilon_high"} < set(flags.dataclass_flags("DrGRPOConfig"))
        assert flags.import_dataclass("GRPOConfig").__module__ == "trl.trainer.grpo_config"
        with pytest.raises(UpstreamError, match="NoConfig: no installed package has this class"):
            flags.dataclass_flags("NoConfig")


@pytest.mark.usefixtures("fresh")
def test_a_key_of_two_dataclasses_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(flags, "DATACLASSES", (*flags.DATACLASSES, "GRPOScriptArguments"))
        with pytest.raises(UpstreamError, match="dataset_name"):
            flags.read_flags()


def help_of(*argv, capsys):
    with pytest.raises(SystemExit) as exited:
        main(list(argv))
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_every_flag_is_in_the_whole_help(capsys):
    text = help_of("train", "--help_all", capsys=capsys)
    assert all(f"--{name} " in text for name in flags.read_flags())
    assert "(default: default_optim)" in text  # an expression is shown as it is written
    listed = {name: entry.help for name, entry in REWARDS.items()}
    assert [name for name, about in listed.items() if name not in text or about not in text] == []


def test_the_help_shows_what_people_use(capsys):
    text = help_of("train", "--help", capsys=capsys)
    shown = [name for name in flags.read_flags() if f"  --{name} " in text]
    assert 25 < len(shown) < 45
    assert sum(map(len, train._USUAL.values())) == len(shown)  # no key that a newer TRL has dropped
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[2:] == list(train._USUAL)  # after the example and the options
    assert "'rloo'" in text  # the choices stand in the help, or are appended to it
    assert "One of auto" in text
    assert "The effective batch" not in text  # the second sentence about num_generations
    assert text.count("--learning_rate") == 1
    assert "--learning-rate" not in text
    assert text.count("\n") < 175
    outcome_rewards = [name for name, entry in REWARDS.items() if entry.role == "outcome"]
    assert [name for name in outcome_rewards if name not in text] == []


def test_bias_takes_the_same_flags_and_shows_its_own(capsys):
    assert "--batches" in help_of("bias", "--help", capsys=capsys)
