"""A model in training is tested without dropout and noise: it is served, and its generator is left where it was."""

import torch
from transformers import GenerationConfig

from trl_drgrpo.features.fast_path.decoding import forwards
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.noise import without_noise


def test_modules_are_in_training_again(model):
    model.train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    with without_noise(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before


def noise(module, args, output):
    """As NEFTune's hook."""
    return output + torch.randn_like(output) if module.training else output


def test_noise_does_not_cost_the_group_cache_and_the_test_draws_none(model):
    model.train()
    model.model.embed_tokens.register_forward_hook(noise)
    prompts = torch.randint(5, 200, (1, 8)).repeat(4, 1)
    config = GenerationConfig(do_sample=True, max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    drawn = []
    for _ in range(2):  # the first call tests the model
        torch.manual_seed(0)
        with torch.no_grad(), shared_prefill(model):
            ids = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        drawn.append((ids, torch.get_rng_state()))
        assert forwards._why_not[model] is None
    (first, state), (second, same_state) = drawn
    assert torch.equal(first, second)
    assert torch.equal(state, same_state)
