"""Continuous batching of transformers with forks, and a training run with all of the fast path around it."""

import logging

import pytest
import torch
from datasets import Dataset
from runs import short_run, train
from tiny_families import tiny
from transformers import ContinuousBatchingConfig, GenerationConfig

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding.forwards import forked_prefill, returns_forks

PROMPTS = ["1+2=", "7*8=", "12345+67890="]
PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # below transformers 5.18
SMALL = {PAGE: 16, "num_blocks": 64, "max_batch_tokens": 256}


def one_dead_group(prompts, completion_ids, **kwargs):
    return [float("1+2" not in text and sum(ids) % 2) for text, ids in zip(prompts, completion_ids, strict=True)]


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    settings = {
        **short_run(tmp_path_factory.mktemp("run")),
        "max_steps": 1,
        "gradient_accumulation_steps": 3,
        "use_cpu": True,
        "bf16": False,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": SMALL,
    }
    return train(DrGRPOTrainer, settings, Dataset.from_dict({"prompt": PROMPTS}), tokenizer, one_dead_group)


def test_a_step_is_taken_on_the_fast_path(run):
    [step] = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert step["grad_norm"] > 0
    assert step["drgrpo/rows_skipped_frac"] >= 1 / 3  # the dead group
    assert step["drgrpo/upstream_token_frac"] < 2 / 3  # and prompts run once


def test_a_cache_without_a_size_is_named_on_a_cpu(run, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, logger="trl_drgrpo"):
        with run.fast_path.generating():
            assert not caplog.records
        monkeypatch.setattr(run, "continuous_batching_config", ContinuousBatchingConfig())
        for _ in range(2):
            with run.fast_path.generating():
                pass
    [said] = [record.getMessage() for record in caplog.records]
    assert "got no num_blocks on a CPU" in said


# Against one request per completion


@pytest.fixture(scope="module")
def qwen(tokenizer):
    return tiny("Qwen3", tokenizer).eval()


def generate(model, inputs, forks, **settings):
    """Completions in order, and how many tokens were run."""
    small = ContinuousBatchingConfig(**SMALL)
    config = GenerationConfig(**{"max_new_tokens": 8, "pad_token_id": 257, "eos_token_id": 256, **settings})
    sizes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    arguments = {"generation_config": config, "continuous_batching_config": small, "progress_bar": False}
    torch.manual_seed(0)
    if forks:
        with forked_prefill(model):
            outputs = model.generate_batch(inputs, **arguments)
    else:
        outputs = model.generate_batch(inputs, **arguments)
    hook.remove()
    assert "generate_batch" not in vars(model)
    assert [output.error for output in outputs.values()] == [None] * len(inputs)
    return [output.generated_tokens for output in outputs.values()], sum(sizes)


def test_forks_write_what_requests_write(qwen, tokenizer):
    inputs = [tokenizer(text)["input_ids"] for text in ("what is 1+2?", "7*8=", "12345+67890=") for _ in range(4)]
    ours, run = generate(qwen, inputs, True, do_sample=False)
    theirs, run_by_each = generate(qwen, inputs, False, do_sample=False)
    assert ours == theirs
    assert (run < run_by_each) == returns_forks(qwen) == hasattr(ContinuousBatchingConfig(), "page_size")
    drawn, _ = generate(qwen, inputs[:4], True, do_sample=True)
    assert len({completion[0] for completion in drawn}) > 1  # the first token is each fork's own


def test_prompts_of_a_call_may_differ_in_number(qwen, tokenizer):
    inputs = [tokenizer(text)["input_ids"] for text in ("7*8=", "7*8=", "1+2=")]
    assert generate(qwen, inputs, True, do_sample=False)[0] == generate(qwen, inputs, False, do_sample=False)[0]
