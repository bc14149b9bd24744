"""A configuration refuses numbers out of range, its own and those that TRL fills in; the table lacks none of them."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import GenerationConfig

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import RANGES, refuse_out_of_range
from trl_drgrpo.config.field_kinds import SAMPLING_KINDS
from trl_drgrpo.config.rules import validate, validate_batch

CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "configurations.yaml").read_text())


@pytest.mark.parametrize(("fields", "message"), CASES["refused"], ids=str)
def test_a_configuration_refuses_them_in_one_line(fields, message):
    younger = "activation_checkpointing_kwargs"  # transformers 5.17 has the other name alone
    if younger in fields and younger not in DrGRPOConfig.__dataclass_fields__:
        pytest.skip(f"no field {younger} on this transformers")
    with pytest.raises(InputError) as error:
        DrGRPOConfig(**fields)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", CASES["taken"], ids=str)
def test_a_configuration_takes_them_as_does_a_trainer_later(fields):
    """Texts are enumerations by then, and steps are set."""
    validate(DrGRPOConfig(**fields))


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (4, {}, None),  # two parents of a group, the third on the next process
        (6, {}, None),
        (3, {}, "2 (fork_depth=1) with 3 rows per process; expected a multiple of 2 rows"),
        (6, {"num_generations": 12, "fork_depth": 2}, "2 (fork_depth=2) with 6 rows per process; expected a multiple"),
        # a round of one prompt gives each process half a group
        (12, {"num_generations": 6, "forks": 3, "dynamic_sampling": True}, None),
        (12, {"num_generations": 4, "dynamic_sampling": True}, None),
        (18, {"num_generations": 6, "curriculum": True}, "2 (fork_depth=1) with 3 rows per process"),
    ],
)
def test_the_branches_of_a_parent_stay_on_one_process(rows, fields, message):
    """Of two; the check runs where a trainer takes the configuration, before a model loads."""
    values = {**vars(DrGRPOConfig()), "forks": 2, "num_generations": 6, "per_device_train_batch_size": rows, **fields}
    values |= {"steps_per_generation": 1, "generation_batch_size": 2 * rows, "world_size": 2}
    config = SimpleNamespace(**values)
    if message is None:
        validate_batch(config)
        return
    with pytest.raises(InputError) as error:
        validate_batch(config)
    assert str(error.value).startswith(f"forks: got {message}")


# Fields of losses that are refused as a whole.
OTHER_LOSSES = ("sapo_", "vespo_")


@pytest.mark.parametrize(("field", "values"), CASES["outside"].items())
def test_a_number_out_of_its_range_is_named_with_its_range(field, values):
    for value in values:
        with pytest.raises(InputError) as error:
            refuse_out_of_range({field: value})
        assert str(error.value).startswith(f"{field}: got {value!r}; expected {RANGES[field]}")


def test_values_inside_a_range_are_accepted():
    refuse_out_of_range({"epsilon": 10**400})
    for field, values in CASES["inside"].items():
        for value in values:
            refuse_out_of_range({field: value})


def test_the_words_of_a_range():
    assert str(RANGES["top_p"]) == "a finite number, above 0 and at most 1"
    assert str(RANGES["lora_dropout"]) == "a finite number, at least 0 and below 1"
    assert str(RANGES["outcome_weight"]) == "a finite number"
    assert str(RANGES["num_generations"]) == "a whole number, at least 2"


def test_every_number_of_a_configuration_has_a_range():
    """A number that a newer TRL or transformers adds is to be thought about, too."""
    fields = {f.name: getattr(f.type, "__name__", str(f.type)) for f in dataclasses.fields(DrGRPOConfig)}
    numbers = {name for name, kind in fields.items() if {"int", "float"} & set(re.split(r"\s*\|\s*", kind))}
    assert {name for name in numbers - set(RANGES) if not name.startswith(OTHER_LOSSES)} == set()
    of_recipes = {"lora_r", "lora_alpha", "lora_dropout", "early_stopping_patience"}
    assert set(RANGES) - set(fields) == of_recipes


def test_the_kinds_of_sampling_keys_are_those_that_transformers_documents():
    """Its documentation is the only place that has them; a key that is new there has no kind here, and takes any."""
    words = {bool: "bool", int: "int", float: "float", str: "str", list[int]: "list[int]"}
    words |= {str | list[str]: "str` or `list[str]"}
    documented = dict(re.findall(r"(\w+) \(`([^`]+(?:` or `[^`]+)?)`", GenerationConfig.__doc__))
    for kind, names in SAMPLING_KINDS.items():
        told = {name: documented[name] for name in names.split() if name in documented}
        if kind in words:
            assert set(told.values()) <= {words[kind]}
    assert set(" ".join(SAMPLING_KINDS.values()).split()) <= set(vars(GenerationConfig()))
