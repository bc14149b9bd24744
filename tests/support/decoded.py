"""Generations by this package's loop and by transformers' own, from the same seed."""

import torch
from transformers import GenerationConfig

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

# Left padding, prompts shorter and longer than the windows, groups of different sizes, one prompt that is alone.
MIXED = ["what is 1+2? tell me now"] * 4 + ["7*8="] * 3 + ["a"] + ["12345+67890="] * 2
PAD = 257


def generate(model, prompts, shares=True, limits=None, speed=None, training=False, rows_at_once=None, **settings):
    """Return the tokens that `generate` adds to the prompts, the state of the random generator afterwards, and the
    shapes of the forwards."""
    model.train(training)
    rows = [list(prompt.encode()) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ends = {"pad_token_id": PAD, "eos_token_id": list(range(10)), "suppress_tokens": [PAD]}
    config = GenerationConfig(**{"do_sample": True, "max_new_tokens": 40, **ends, **settings})
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(0)
    try:
        with shared_prefill(model, shares, limits, speed, rows_at_once):
            tokens = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    finally:
        hook.remove()
    assert "generate" not in vars(model)
    assert not tokens.is_inference()
    return tokens[:, width:], torch.random.get_rng_state(), shapes


def assert_same_tokens(model, prompts=MIXED, **settings):
    speed = settings.pop("speed", None)
    ours, our_state, _ = generate(model, prompts, speed=speed, **settings)
    theirs, state, _ = generate(model, prompts, shares=False, **settings)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_state, state)  # what comes after the generation is the same run, too
