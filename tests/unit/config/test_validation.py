"""A configuration refuses numbers out of range, its own and those that TRL fills in."""

import pytest

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.validation import validate


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature: got 0.0; expected a finite number, above 0"),
        ({"top_k": -1}, "top_k: got -1; expected a whole number, at least 0. 0 switches it off."),
        ({"lr_scheduler_type": "linaer"}, "lr_scheduler_type: got 'linaer'; expected one of linear, "),
        ({"log_level": "loud"}, "log_level: got 'loud'; expected one of "),
        ({"generation_kwargs": {"top_p": 3}}, "generation_kwargs: top_p: got 3; expected a finite number, above 0"),
        ({"max_steps": -5}, "max_steps: got -5; expected a whole number, at least 1, or -1."),
        ({"optim": "adamw"}, "optim: got 'adamw'; expected one of adamw_torch, "),
        ({"eval_strategy": "step"}, "eval_strategy: got 'step'; expected one of no, steps, epoch. Did you mean"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level: got 'row'; expected one of token, seq"),
        ({"logging_steps": 0}, "logging_steps: got 0; expected a number above 0 with logging_strategy 'steps'"),
        (
            {"use_vllm": True, "vllm_max_model_length": 256, "max_completion_length": 256},
            "max_completion_length: got 256 with vllm_max_model_length=256; expected less than 256",
        ),
    ],
)
def test_a_configuration_refuses_them(fields, message):
    with pytest.raises(InputError) as error:
        DrGRPOConfig(**fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_vllm": True, "top_k": -1},
        {"logging_strategy": "no", "logging_steps": 0},
        {"eval_strategy": "steps", "lr_scheduler_type": "cosine", "save_strategy": "epoch", "pad_to_multiple_of": 8},
        {"logging_steps": 10.0, "save_steps": 0.5, "max_steps": 20},
    ],
)
def test_what_trl_fills_in_is_in_range_as_well(fields):
    """`validate` runs again when a trainer takes the configuration: texts are enumerations by then, steps are set."""
    validate(DrGRPOConfig(**fields))
