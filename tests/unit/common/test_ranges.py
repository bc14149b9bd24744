"""The table of ranges: what it refuses, what it must let through, and that no number of a run is missing from it."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import RANGES, refuse_out_of_range

# Fields of losses that are refused as a whole.
OTHER_LOSSES = ("sapo_", "vespo_")


CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "configurations.yaml").read_text())


@pytest.mark.parametrize(("field", "values"), CASES["outside"].items())
def test_a_number_out_of_its_range_is_named_with_its_range(field, values):
    for value in values:
        with pytest.raises(InputError) as error:
            refuse_out_of_range({field: value})
        assert str(error.value).startswith(f"{field}: got {value!r}; expected {RANGES[field]}")


def test_values_with_a_meaning_stay():
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
