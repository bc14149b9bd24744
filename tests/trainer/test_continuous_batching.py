"""A training run with continuous batching of transformers and all of the fast path around it."""

import pytest
import torch
from datasets import Dataset
from runs import short_run, train
from transformers import ContinuousBatchingConfig

from trl_drgrpo import DrGRPOTrainer

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
