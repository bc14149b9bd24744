"""Continuous batching with forks against one request per completion."""

import pytest
import torch
from tiny_families import tiny
from transformers import ContinuousBatchingConfig, GenerationConfig

from trl_drgrpo.features.fast_path.decoding.forwards import forked_prefill, returns_forks

# Below transformers 5.18 a page is called a block.
PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
ROOM = {PAGE: 16, "num_blocks": 64, "max_batch_tokens": 256}


@pytest.fixture(scope="module")
def qwen(tokenizer):
    return tiny("Qwen3", tokenizer).eval()


def generate(model, inputs, forks, **settings):
    """Completions in order, and how many tokens were run."""
    small = ContinuousBatchingConfig(**ROOM)
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
