"""The plan against real runs: peak of the CPU allocator over two optimizer steps, measured <= planned <= 1.1 measured.

Sizes are such that activations decide in some runs and weights, the head's tile or gradients in others. Every
completion reaches its limit, as a plan must expect. With shared prompts, the default, it is the same where a step
fits into one micro-batch; else some other mixture of lengths may need more than rows at their limit do, and the plan
is held against the largest of several.
"""

import pytest
import torch
from memory_runs import cut_at_random, measure, trainer_of
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from trl_drgrpo.single_gpu.memory import Planner
from trl_drgrpo.single_gpu.memory.memory_settings import from_keys

PROMPT = 96
WIDE = {"hidden_size": 256, "intermediate_size": 1024}
SMALL = {"hidden_size": 128, "intermediate_size": 512}
NO_CHECKPOINTING = {"gradient_checkpointing": False}
# Per run: the model, the settings, the rank of adapters.
CASES = {
    "weights": ({**WIDE, "layers": 4}, {}, None),
    "lora, no checkpointing": ({**SMALL, "layers": 4}, NO_CHECKPOINTING, 8),
    "vocab": ({"vocab_size": 40000, "layers": 2, "hidden_size": 64, "intermediate_size": 256}, {}, None),
    "activations": ({**SMALL, "layers": 6}, NO_CHECKPOINTING, None),
    "lora": ({**WIDE, "layers": 8}, {}, 16),
    "reference": ({**WIDE, "layers": 6, "tie_word_embeddings": True}, {"beta": 0.1}, None),
    "head, short prompts": (
        {"layers": 3, "hidden_size": 64, "intermediate_size": 128},
        {"max_completion_length": 48, "per_device_train_batch_size": 16, **NO_CHECKPOINTING},
        None,
    ),
    "one micro-batch": (
        {**WIDE, "layers": 4, "llama": True},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
        None,
    ),
    "padded rows": ({**SMALL, "layers": 6}, {"micro_batching": "upstream"}, None),
    "autocast": ({**WIDE, "layers": 6}, {"bf16": True}, None),
    "autocast, cache": (
        {**WIDE, "layers": 4},
        {"bf16": True, "num_generations": 8, "max_completion_length": 96, "optim": "sgd"},
        None,
    ),
}
slow = pytest.mark.slow


def planned_and_measured(tokenizer, folder, model, settings, rank, prompt=PROMPT, short=0, cut=False):
    sizes = {"vocab_size": 2000, "num_attention_heads": 4, "num_key_value_heads": 2, **model}
    kind = LlamaConfig if sizes.pop("llama", False) else Qwen2Config
    stops = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = kind(num_hidden_layers=sizes.pop("layers"), max_position_embeddings=1024, **sizes, **stops)
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "share_prompts": False,
        **settings,
    }
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    lora = LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.05) if rank else None
    trainer = trainer_of(loaded, tokenizer, folder, prompt, lora, short=short, **settings)
    if cut:
        cut_at_random(trainer)
    measured = measure(trainer)
    keys = dict(settings)
    if rank:
        keys |= {"use_peft": True, "lora_r": rank, "lora_target_modules": ["all-linear"], "lora_dropout": 0.05}
    setup = from_keys(keys, prompt, "cpu")
    return Planner(config, setup).estimate(setup), measured


@pytest.mark.parametrize("case", [pytest.param(n, marks=[slow] * (n != "weights")) for n in CASES])
def test_the_plan_is_at_most_a_tenth_above_the_measured_peak(tokenizer, tmp_path, case, record_property):
    # The head needs most where short prompts leave room for more completions.
    short = 8 if "short prompts" in case else 0
    plan, measured = planned_and_measured(tokenizer, tmp_path, *CASES[case], short=short)
    record_property("planned, measured", (plan.tensors, measured.total))
    assert measured.total <= plan.tensors <= 1.10 * measured.total
    # Generation by itself: on a CPU matrix products in bfloat16 take room inside their kernels, which no plan sees.
    generate = sum(held for name, held in plan.phases["generate"].items() if "(estimate)" not in name)
    assert 0.97 * measured.phases["generate"] <= generate <= 1.10 * measured.phases["generate"]


# Prompt, completion, group, micro-batch, micro-batches per step.
ONE_MICRO_BATCH = [
    pytest.param((96, 12, 4, 4, 2), {}, id="2 long prompts"),
    pytest.param((96, 12, 8, 4, 2), {}, id="1 long prompt", marks=slow),
    pytest.param((96, 12, 8, 4, 2), {"gradient_checkpointing": True}, id="checkpointing", marks=slow),
    pytest.param((24, 64, 8, 4, 2), {}, id="1 short prompt", marks=slow),
    pytest.param((192, 128, 8, 4, 2), {}, id="branches apart", marks=slow),
]


def shared(tokenizer, folder, run, settings, **lengths):
    prompt, completion, group, batch, accumulation = run
    settings = {
        "max_completion_length": completion,
        "num_generations": group,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "share_prompts": True,
        "gradient_checkpointing": False,
        **settings,
    }
    return planned_and_measured(tokenizer, folder, {**SMALL, "layers": 6}, settings, None, prompt, **lengths)


@pytest.mark.parametrize(("run", "settings"), ONE_MICRO_BATCH)
def test_shared_prompts_are_planned_as_exactly(tokenizer, tmp_path, run, settings, record_property):
    plan, measured = shared(tokenizer, tmp_path, run, settings)
    record_property("planned, measured", (plan.tensors, measured.total))
    assert measured.total <= plan.tensors <= 1.10 * measured.total


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [(96, 12, 8, 4, 8), (24, 64, 8, 4, 8), (24, 64, 4, 8, 4)],
    ids=["4 long prompts", "4 short prompts", "8 short prompts"],
)
def test_no_mixture_of_lengths_needs_more_than_planned(tokenizer, tmp_path, run, record_property):
    peaks = {}
    for name, lengths in {"limit": {}, "cut": {"cut": True}, "short": {"short": 4}}.items():
        folder = tmp_path / name
        folder.mkdir()
        plan, measured = shared(tokenizer, folder, run, {}, **lengths)
        peaks[name] = measured.total
        assert measured.total <= plan.tensors, name
    record_property("planned, measured", (plan.tensors, peaks))
    assert plan.tensors <= 1.10 * max(peaks.values())


@pytest.mark.slow
@pytest.mark.parametrize(("run", "settings"), [each.values for each in ONE_MICRO_BATCH])
def test_completions_that_end_early_need_less(tokenizer, tmp_path, run, settings):
    plan, measured = shared(tokenizer, tmp_path, run, settings, cut=True)
    assert measured.total <= plan.tensors
