"""What a trainer cannot work with is one error before a model loads."""

import importlib.util

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_bases import nf4
from tiny_vision import pictures
from transformers import BitsAndBytesConfig
from trl.rewards import accuracy_reward, think_format_reward
from walk import Walk

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer, lora_preset
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import step_verifier


def of_prompts(*values):
    return Dataset.from_dict({"prompt": list(values)})


def no_steps(steps, **kwargs):
    return []


def rule(prompt, previous_steps, step, solution, tolerance=0.1, **columns):
    return 1.0


def of_a_step(prompt, previous_steps, step, **columns):
    return 1.0


DATA = [
    (
        {"train_dataset": Dataset.from_dict({"question": ["?"] * 8})},
        r'.*expected a column .prompt.\. Rename yours: .*\("question", "prompt"\)',
    ),
    ({"train_dataset": of_prompts("?")}, "train_dataset: got 1 prompts; expected at least 2"),
    ({"train_dataset": {"train": of_prompts("?")}}, "train_dataset: got dict"),
    ({"eval_dataset": {"x": of_prompts(*[""] * 8)}}, ".*an empty text as the prompt"),
    (
        {"args": {"max_completion_length": None, "loss_normalizer": 64}, "tools": [Walk().go]},
        "max_completion_length: got None together with tools",
    ),
    *[
        (
            {"args": {field: True}, "train_dataset": pictures(8)},
            f"{field}: got True with the column image; expected prompts without images",
        )
        for field in ("dynamic_sampling", "curriculum")
    ],
]
REWARDS = [
    ({"reward_funcs": lambda completions, solution, **columns: []}, ".*solution"),
    ({"reward_funcs": lambda completions, answer, **columns: [], "eval_dataset": of_prompts("?")}, ".*answer"),
    ({"reward_funcs": None}, "reward_funcs: got none; .* No reward source provided. Pass `reward_f"),
    ({"reward_funcs": [len, 1.0]}, "reward_funcs: got float at position 1"),
    ({"reward_funcs": "math_reward"}, "reward_funcs: got math_reward, a name for recipes; .*resolve_reward"),
    ({"args": {"reward_weights": [1.0, 2.0]}}, "reward_weights: got 2 weights; expected 1"),
    ({"args": {"correct_reward": "acuracy"}}, "correct_reward: got 'acuracy'; expected one of length_reward"),
]
STEP_REWARDS = [
    ({"step_reward_funcs": lambda steps, solution, **columns: []}, ".*solution"),
    ({"step_reward_funcs": step_verifier(rule)}, ".*reward rule: .*'solution'"),
    (
        {"step_reward_funcs": of_a_step},
        r".*'of_a_step', which scores one step; .* Wrap it: .*step_verifier\(of_a_step\)",
    ),
    (
        {"step_reward_funcs": no_steps, "args": {"process_role": "baseline"}, "reward_funcs": None},
        "process_role: got 'baseline' without reward_funcs",
    ),
    (
        {"step_reward_funcs": no_steps, "args": {"importance_sampling_level": "sequence"}},
        "importance_sampling_level: got 'sequence' with step_reward_funcs",
    ),
    (
        {"step_reward_funcs": no_steps, "args": {"mask_truncated_completions": True}},
        "mask_truncated_completions: got True with the step rewards of 'no_steps'; expected False",
    ),
]
FORKED = {"forks": 2, "step_separator": ["tokens:1"]}
FORKS = [
    ({"args": FORKED, "tools": [Walk().go]}, "forks: got 2 with tools; expected 1"),
    ({"args": FORKED, "rollout_func": print}, "forks: got 2 with rollout_func; expected 1"),
    ({"args": FORKED, "environment_factory": Walk}, "forks: got 2 with environment_factory; expected 1"),
    (
        {"args": FORKED, "train_dataset": pictures(8)},
        "forks: got 2 with the column image; expected prompts without images",
    ),
    (
        {"args": {**FORKED, "fork_at": "doubt", "fork_threshold": 0.5}},
        "fork_at: got 'doubt' without step_reward_funcs; expected scores of steps",
    ),
]
ENVIRONMENTS = [
    (
        {"environment_factory": Walk, "args": {"step_separator": ["#"]}},
        r"step_separator: got .*\('#'\) with Walk.get_turn_rewards\(\); expected 'turn'",
    ),
    ({"environment_factory": Walk()}, "environment_factory: got Walk; expected a class or a function"),
    ({"environment_factory": {"a": None}}, "environment_factory: got NoneType for 'a'"),
    (
        {"environment_factory": type("Odd", (Walk,), {"state_key": 3})},
        "Odd.state_key: got int; expected a method",
    ),
    (
        {"args": {"max_turn_length": 4}},
        "max_turn_length: got 4 without tools; expected None",
    ),
    (
        {"environment_factory": Walk, "args": {"mask_truncated_completions": True}},
        "mask_truncated_completions: got True with the step rewards of",
    ),
    (
        {"environment_factory": Walk, "args": {"process_role": "baseline"}, "reward_funcs": None},
        "process_role: got 'baseline' without reward_func",
    ),
]
ADAPTERS = [
    ({"peft_config": {"r": 4}}, "peft_config: got dict; expected a peft configuration"),
    ({"peft_config": lora_preset(inference_mode=True)}, "peft_config.inference_mode: got True"),
    ({"peft_config": LoraConfig(r=0)}, "peft_config.r: got 0"),
    ({"peft_config": LoraConfig(task_type="SEQ_CLS")}, "peft_config.task_type: got SEQ_CLS; expected CAUSAL_LM"),
    ({"peft_config": lora_preset(target_modules=["q_proj", "lm_head"])}, ".*got lm_head among them"),
    ({"quantization_config": nf4()}, "peft_config: got quantization_config without an adapter"),
    ({"args": {"model_init_kwargs": {"quantization_config": nf4()}}}, ".*without an adapter"),
]
MERGED = {"use_vllm": True, "vllm_lora": "merged", "use_cpu": True, "bf16": False}
IN_4_BITS = BitsAndBytesConfig(load_in_4bit=True)
EIGHT = BitsAndBytesConfig(load_in_8bit=True)
QUANTIZED = [
    (
        {"args": {**MERGED, "model_init_kwargs": in_model}, "quantization_config": given},
        rf"use_vllm: got True with a quantized base model \({said}\)",
    )
    for given, in_model, said in [
        (IN_4_BITS, None, "load_in_4bit"),
        (EIGHT, None, "load_in_8bit"),
        (None, {"quantization_config": IN_4_BITS}, "load_in_4bit"),
        (None, {"quantization_config": {"load_in_8bit": True}}, "load_in_8bit"),
        (None, {"load_in_4bit": True}, "load_in_4bit"),
        ({"quant_method": "fp8"}, None, "fp8"),
    ]
]

PROBLEMS = Dataset.from_dict({"prompt": ["?"] * 8, "solution": ["1"] * 8})
PACKAGES = [
    *[
        ({"without": "bitsandbytes", **given}, message)
        for config in (IN_4_BITS, {"load_in_8bit": True})
        for given, message in (
            ({"quantization_config": config}, r'quantization_config: .* `pip install "trl-drgrpo\[qlora\]"`'),
            ({"args": {"model_init_kwargs": {"quantization_config": config}}}, ".*bitsandbytes is not installed"),
        )
    ],
    (
        {"without": "math_verify", "reward_funcs": accuracy_reward, "train_dataset": PROBLEMS},
        r'.*TRL\'s accuracy_reward, .* `pip install "trl-drgrpo\[math\]"`',
    ),
    # another one of TRL's goes on to the model
    ({"without": "math_verify", "reward_funcs": think_format_reward}, "model_name_or_path: got "),
    (
        {"without": "vllm", "args": {"use_vllm": True}},
        r'use_vllm: got True, but vllm .* `pip install "trl-drgrpo\[vllm\]"`',
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [*PACKAGES, *DATA, *REWARDS, *STEP_REWARDS, *FORKS, *ENVIRONMENTS, *ADAPTERS, *QUANTIZED],
)
def test_inputs_are_checked_before_a_model_loads(changes, message, settings, prompts, reward, monkeypatch):
    """The model id does not exist: had it been looked up, the error would be another one. `without`: a package that is
    not installed."""
    find, without = importlib.util.find_spec, changes.get("without")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == without else find(name, *rest))
    changes = {name: value for name, value in changes.items() if name != "without"}
    args = DrGRPOConfig(**{**settings, **changes.get("args", {})})
    arguments = {"reward_funcs": reward, "train_dataset": prompts, **changes, "args": args}
    with pytest.raises(InputError, match=f"^{message}"):
        DrGRPOTrainer("nobody/no-such-model", **arguments)


def test_args_of_another_kind(prompts, reward):
    with pytest.raises(InputError, match="^args: got dict"):
        DrGRPOTrainer("nobody/no-such-model", reward, {"beta": 0.1}, prompts)
