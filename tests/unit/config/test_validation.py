"""A configuration refuses numbers out of range, its own and those that TRL fills in."""

from types import SimpleNamespace

import pytest

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.rules import validate, validate_batch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k: got -1; expected a whole number, at least 0. 0 switches it off."),
        ({"lr_scheduler_type": "linaer"}, "lr_scheduler_type: got 'linaer'; expected one of linear, "),
        ({"log_level": "loud"}, "log_level: got 'loud'; expected one of "),
        ({"generation_kwargs": {"top_p": 3}}, "generation_kwargs: top_p: got 3; expected a finite number, above 0"),
        ({"optim": "adamw"}, "optim: got 'adamw'; expected one of adamw_torch, "),
        ({"eval_strategy": "step"}, "eval_strategy: got 'step'; expected one of no, steps, epoch. Did you mean"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level: got 'row'; expected one of token, seq"),
        ({"chat_template_kwargs": -1}, "chat_template_kwargs: got -1; expected a mapping"),
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs: tokenize: got a key that TRL sets itself",
        ),
        ({"generation_kwargs": "abc"}, "generation_kwargs: got 'abc'; expected a mapping or None"),
        (
            {"generation_kwargs": '{"temprature": 1}'},
            "generation_kwargs: temprature: got an unknown key; expected a key",
        ),
        ({"generation_kwargs": {"num_beams": "x"}}, "generation_kwargs: num_beams: got 'x'; expected a whole number"),
        (
            {"generation_kwargs": {"do_sample": False}},
            "generation_kwargs: do_sample: got False; expected sampling. A group needs different completions",
        ),
        (
            {"generation_kwargs": {"top_k": 5, "num_beams": 4}},
            "generation_kwargs: num_beams: got 4; expected sampling",
        ),
        ({"generation_kwargs": {"temperature": 0}}, "generation_kwargs: temperature: got 0; expected a finite number"),
        (
            {"generation_kwargs": {"max_new_tokens": 5}},
            "generation_kwargs: max_new_tokens: got 5; expected nothing. Set max_completion_length in its place",
        ),
        ({"generation_kwargs": {"max_length": 5}}, "generation_kwargs: max_length: got 5; expected nothing"),
        ({"use_vllm": True, "generation_kwargs": {"max_tokens": 5}}, "generation_kwargs: max_tokens: got 5; expected"),
        ({"generation_kwargs": {1: 2}}, "generation_kwargs: 1: got a key of type int; expected text"),
        ({"generation_kwargs": {"suppress_tokens": 5}}, "generation_kwargs: suppress_tokens: got 5; expected a list"),
        ({"cache_implementation": "false"}, "cache_implementation: got 'false'; expected one of static, "),
        ({"accelerator_config": {"foo": 1}}, "accelerator_config: foo: got an unknown key; expected a key of accel"),
        ({"accelerator_config": {"split_batches": 3}}, "accelerator_config: split_batches: got 3; expected True or"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "gradient_accumulation_kwargs: num_steps: got a key that TRL sets itself",
        ),
        ({"model_init_kwargs": float("nan")}, "model_init_kwargs: got nan; expected a mapping"),
        ({"lr_scheduler_kwargs": {"foo": 1}}, "lr_scheduler_kwargs: foo: got an unknown key"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}},
            "lr_scheduler_kwargs: powr: got an unknown key; expected a key of lr_scheduler_kwargs. Did you mean po",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "lr_scheduler_type, lr_scheduler_kwargs: got None; expected values that fit. ValueError: One of min_lr",
        ),
        (
            {"optim_args": "foo=1"},
            "optim_args: got the key 'foo'; expected a key that adamw_torch_fused reads. Remove",
        ),
        (
            {"optim": "sgd", "optim_args": "momentun=0.9"},
            "optim_args: got the key 'momentun'; expected a key that sgd reads. Did you mean momentum?",
        ),
        (
            {"optim": "sgd", "optim_args": "momentum=x"},
            "optim_args: got 'momentum=x'; expected values that fit. could",
        ),
        ({"optim_args": "foo"}, "optim_args: got 'foo'; expected key=value"),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrent": True}},
            "gradient_checkpointing_kwargs: use_reentrent: got",
        ),
        ({"bf16_full_eval": "no"}, "bf16_full_eval: got 'no'; expected True or False"),
        ({"ddp_backend": "foo"}, "ddp_backend: got 'foo'; expected one of nccl, gloo"),
        (
            {"fp16": True, "bf16": True, "use_cpu": True},
            "fp16: got True; expected a value that fits the others. At most",
        ),
        (
            {"dataloader_prefetch_factor": 2},
            "dataloader_prefetch_factor: got 2; expected a value that fits the others",
        ),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: got True; expected a value that fits the others"),
        (
            {"save_steps": 1.5},
            "save_steps: got 1.5; expected a value that fits the others. --save_steps must be an int",
        ),
        ({"debug": "foo"}, "debug: got 'foo'; expected a value that fits the others"),
        (
            {"eval_strategy": "steps", "per_device_eval_batch_size": 3},
            "per_device_eval_batch_size: got 3; expected a value that fits the others",
        ),
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
        {"optim": "sgd", "optim_args": "momentum=0.9", "generation_kwargs": {"no_repeat_ngram_size": 3}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-8}'},
        {"accelerator_config": {"even_batches": False}, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"logging_steps": 10.0, "save_steps": 0.5, "max_steps": 20},
        {"max_completion_length": None, "loss_normalizer": 9, "generation_kwargs": {"max_length": 64}},
    ],
)
def test_what_trl_fills_in_is_in_range_as_well(fields):
    """`validate` runs again when a trainer takes the configuration: texts are enumerations by then, steps are set."""
    validate(DrGRPOConfig(**fields))


FORKED = {"forks": 2, "num_generations": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_generations": 4},
        {"fork_depth": 2},
        {"forks": 4},
        {"fork_at": "entropy", "fork_threshold": 1.5},
        {"fork_at": "doubt", "fork_threshold": 0},
        {"generation_kwargs": {"min_new_tokens": 0, "suppress_tokens": [1]}},
        {"generation_kwargs": {"presence_penalty": 0.0}, "use_vllm": True},
        {"step_separator": ["turn", "\n"]},
        {"step_credit": "min_increments"},
    ],
)
def test_forks_that_fit(fields):
    DrGRPOConfig(**{**FORKED, **fields})


A_PARENT = "at least two parents per prompt, each with forks ** fork_depth completions. Set num_generations to"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forks": 0}, "forks: got 0; expected a whole number, at least 1"),
        (
            {"forks": 3},
            f"forks: got 3 (fork_depth=1) with num_generations=8; expected {A_PARENT} a "
            "multiple of forks ** fork_depth = 3, for example 6.",
        ),
        (
            {"forks": 8},
            f"forks: got 8 (fork_depth=1) with num_generations=8; expected {A_PARENT} a "
            "multiple of forks ** fork_depth = 8, for example 16.",
        ),
        (
            {"fork_depth": 3},
            f"forks: got 2 (fork_depth=3) with num_generations=8; expected {A_PARENT} a "
            "multiple of forks ** fork_depth = 8, for example 16.",
        ),
        ({"fork_depth": 0}, "fork_depth: got 0; expected a whole number, at least 1 and at most 16"),
        ({"fork_at": "entropie"}, "fork_at: got 'entropie'; expected one of drawn, entropy, doubt. Did you mean"),
        ({"fork_at": "entropy"}, "fork_threshold: got None with fork_at='entropy'; expected a number. Set it in nats"),
        ({"fork_threshold": 0.5}, "fork_threshold: got 0.5 with fork_at='drawn'; expected None"),
        ({"fork_threshold": float("nan"), "fork_at": "doubt"}, "fork_threshold: got nan; expected a finite number"),
        ({"forks": 1, "fork_depth": 2}, "fork_depth: got 2 with forks=1; expected 1. Set forks=2"),
        ({"forks": 1, "fork_at": "doubt"}, "fork_at: got 'doubt' with forks=1; expected 'drawn'"),
        ({"forks": 1, "fork_threshold": 1.0}, "fork_threshold: got 1.0 with forks=1; expected None"),
        ({"step_separator": "turn"}, "step_separator: got 'turn' with forks; expected separators, 're:<pattern>'"),
        ({"process_role": "baseline"}, "process_role: got 'baseline' with forks; expected 'reward'"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions: got True with forks; expected False"),
        ({"step_baseline": "deepseekmath"}, "step_baseline: got 'deepseekmath' with forks; expected 'to_go'"),
        ({"step_baseline": "none"}, "step_baseline: got 'none' with forks; expected 'to_go'"),
        (
            {"importance_sampling_level": "sequence"},
            "importance_sampling_level: got 'sequence' with forks; expected 'token'. One ratio per row",
        ),
        (
            {"generation_kwargs": {"min_new_tokens": 4}},
            "generation_kwargs: min_new_tokens: got 4 with forks; expected nothing. It would see only a branch",
        ),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, "generation_kwargs: presence_penalty: got 0.5 with forks"),
        (
            {"generation_kwargs": {"stop": ["\n\nQ:"]}},
            "generation_kwargs: stop: got ['\\n\\nQ:'] with",
        ),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex: got 'a+' with forks; expected None"),
    ],
)
def test_forks_that_cannot_be(fields, message):
    with pytest.raises(InputError) as error:
        DrGRPOConfig(**{**FORKED, **fields})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


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
    values = {**vars(DrGRPOConfig()), **FORKED, "num_generations": 6, "per_device_train_batch_size": rows, **fields}
    values |= {"steps_per_generation": 1, "generation_batch_size": 2 * rows, "world_size": 2}
    config = SimpleNamespace(**values)
    if message is None:
        validate_batch(config)
        return
    with pytest.raises(InputError) as error:
        validate_batch(config)
    assert str(error.value).startswith(f"forks: got {message}")
