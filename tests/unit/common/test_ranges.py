"""The table of ranges: what it refuses, what it must let through, and that no number of a run is missing from it."""

import dataclasses
import math
import re

import pytest

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import RANGES, refuse_out_of_range

# Fields of losses that are refused as a whole.
OTHER_LOSSES = ("sapo_", "vespo_")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", math.nan),
        ("learning_rate", "1e-6"),
        ("temperature", 0),
        ("top_k", -3),
        ("top_k", 5.0),
        ("top_p", 3),
        ("top_p", 0),
        ("min_p", 2),
        ("repetition_penalty", -1),
        ("weight_decay", -1),
        ("max_grad_norm", -1),
        ("save_steps", -3),
        ("logging_steps", -1),
        ("eval_steps", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("num_train_epochs", 0),
        ("max_steps", -5),
        ("max_steps", 0),
        ("warmup_steps", -1),
        ("adam_beta1", 1),
        ("adam_epsilon", -1e-8),
        ("gradient_accumulation_steps", 0),
        ("save_total_limit", -1),
        ("dataloader_num_workers", -1),
        ("lora_r", 0),
        ("lora_alpha", 0),
        ("lora_dropout", 2),
        ("epsilon_high", -0.1),
        ("delta", 0),
        ("top_entropy_quantile", 1.5),
        ("vllm_gpu_memory_utilization", 1.2),
        ("pad_to_multiple_of", 0),
        ("beta", True),
        ("seed", None),
    ],
)
def test_a_number_out_of_its_range_is_named_with_its_range(field, value):
    with pytest.raises(InputError) as error:
        refuse_out_of_range({field: value})
    assert str(error.value).startswith(f"{field}: got {value!r}; expected ")
    assert str(RANGES[field]) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0),
        ("max_steps", -1),
        ("top_k", 0),
        ("top_k", None),
        ("min_p", None),
        ("save_steps", 0.1),
        ("logging_steps", 0.25),
        ("eval_steps", None),
        ("warmup_steps", 0.03),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", math.inf),
        ("save_total_limit", None),
        ("num_train_epochs", 0.5),
        ("pad_to_multiple_of", "auto"),
        ("epsilon", 10**400),
    ],
)
def test_values_with_a_meaning_stay(field, value):
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
