"""The cache made for groups against transformers' cache: the same tokens over families, and models that it refuses."""

import logging
import re
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from tiny_families import tiny
from transformers import DynamicCache, Gemma2PreTrainedModel, GenerationConfig

from trl_drgrpo.features.fast_path.decoding import forwards
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.decoding.group_cache import NAME, Grid, GroupCache, GroupLayer
from trl_drgrpo.upstream.private_state import swapped

SHARING = (
    "Llama Qwen2 Qwen3 Mistral Gemma Gemma2 Gemma3Text GPT2 Phi3 Cohere2 Olmo Glm4 Mixtral Qwen3Moe SmolLM3 OPT GptOss"
)
REFUSED = {
    "DeepseekV3": "it changes keys or values after the cache",
    "DiffLlama": "it changes keys or values after the cache",
    "Llama4Text": "its attention is chunked",
    "Falcon": "its attention cannot be replaced",
    "Bloom": "it gets no position_ids",
}
# Left padding, prompts shorter and longer than the windows, groups of different sizes, one prompt that is alone.
PROMPTS = ["what is 1+2? tell me now"] * 4 + ["7*8="] * 3 + ["a"] + ["12345+67890="] * 2


def generate(model, tokenizer, shared, prompts=PROMPTS, **settings):
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": list(range(10))}
    config = GenerationConfig(**{"do_sample": True, "max_new_tokens": 40, **ends, **settings})
    arguments = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    torch.manual_seed(0)
    if not shared:
        return model.generate(**arguments, generation_config=config)
    with shared_prefill(model):
        return model.generate(**arguments, generation_config=config)


def why_not(model):
    """Why a model has no group cache; `None` when it has one, as the test of its first step found."""
    return forwards._why_not[model]


@pytest.fixture
def windowed(tokenizer):
    """A model that has not been tested yet."""
    return tiny("Gemma2", tokenizer).eval()


@pytest.fixture(scope="module")
def expected(tokenizer):
    return generate(tiny("Gemma2", tokenizer).eval(), tokenizer, False)


@pytest.mark.parametrize("family", SHARING.split())
def test_the_same_tokens_over_families(tokenizer, family):
    model = tiny(family, tokenizer).eval()
    attention = model.config._attn_implementation
    ours = generate(model, tokenizer, True)
    assert why_not(model) is None
    assert model.config._attn_implementation == attention
    assert torch.equal(ours, generate(model, tokenizer, False))


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_bfloat16_is_compared_as_such_under_autocast_too(tokenizer, family):
    model = tiny(family, tokenizer).eval()
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, tokenizer, True, max_new_tokens=5)
    assert why_not(model) is None
    model = tiny(family, tokenizer).to(torch.bfloat16).eval()
    generate(model, tokenizer, True, max_new_tokens=5)
    assert why_not(model) is None


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_is_refused_goes_on_with_its_own_cache(tokenizer, family, caplog):
    model = tiny(family, tokenizer).eval()
    attention = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, logger="trl_drgrpo"):
        for _ in range(2):
            ours = generate(model, tokenizer, True, max_new_tokens=20)
    said = [record.getMessage() for record in caplog.records if "cache of their prompt" in record.getMessage()]
    assert said == [f"Completions of this model do not share the KV cache of their prompt: {REFUSED[family]}."]
    assert model.config._attn_implementation == attention
    assert torch.equal(ours, generate(model, tokenizer, False, max_new_tokens=20))


def test_a_softcap_that_the_model_leaves_out_is_refused(tokenizer):
    """Below transformers 5.18 Gemma 2 runs with sdpa, which has no softcap: with groups its logits would be others."""
    if not Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("Gemma 2 has no sdpa here")
    model = tiny("Gemma2", tokenizer).eval()
    model.set_attn_implementation("sdpa")
    ours = generate(model, tokenizer, True, max_new_tokens=5)
    assert "its logits differ" in why_not(model)
    assert torch.equal(ours, generate(model, tokenizer, False, max_new_tokens=5))


def _window_off_by_three(self, visible):
    with swapped(self, window=self.window and self.window - 3):
        return visible(self)


def _without_padding_bias(self, visible):
    return replace(visible(self), bias=None)


def _rolled(self, grid, prompts, places, bias, move=GroupLayer.move):
    move(self, grid, prompts, places.roll(1, 1), bias)


MUTANTS = {
    "none": {},
    "window": {"visible": partialmethod(_window_off_by_three, GroupLayer.visible)},
    "padding": {"visible": partialmethod(_without_padding_bias, GroupLayer.visible)},
    "compaction": {"move": _rolled},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_finds_mutants(windowed, expected, tokenizer, mutant, monkeypatch):
    monkeypatch.setitem(forwards.AGREEMENT, torch.float32, torch.inf)  # else the first step finds two of them
    with swapped(GroupLayer, **MUTANTS[mutant]):
        assert torch.equal(generate(windowed, tokenizer, True), expected) == (mutant == "none")


@pytest.mark.parametrize("mutant", ["window", "padding"])
def test_the_first_step_is_compared(windowed, expected, tokenizer, mutant):
    with swapped(GroupLayer, **MUTANTS[mutant]):
        ours = generate(windowed, tokenizer, True)
    assert re.match("its logits differ by", why_not(windowed))
    assert torch.equal(ours, expected)


def test_what_transformers_held_of_the_prompts_is_freed(model, tokenizer):
    caches = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs["past_key_values"]), with_kwargs=True
    )
    generate(model.eval(), tokenizer, True, max_new_tokens=4)
    hook.remove()
    assert isinstance(caches[0], DynamicCache)
    assert caches[0].layers == []
    assert isinstance(caches[-1], GroupCache)


def test_an_error_gives_the_model_its_attention_back(model, tokenizer):
    seen = []

    def failing(module, args, kwargs):
        seen.append(module.config._attn_implementation)
        if len(seen) == 6:
            raise KeyError("elsewhere")

    attention = model.config._attn_implementation
    hook = model.model.register_forward_pre_hook(failing, with_kwargs=True)
    with pytest.raises(KeyError, match="elsewhere"):
        generate(model.eval(), tokenizer, True)
    hook.remove()
    assert seen[-1] == NAME
    assert model.config._attn_implementation == attention


def prefilled(prompts, columns, heads=2, width=4):
    cache = DynamicCache()
    cache.update(torch.randn(prompts, heads, columns, width), torch.randn(prompts, heads, columns, width), 0)
    return cache


def test_a_prompt_is_held_once_and_rows_leave_without_a_copy():
    cache = GroupCache(prefilled(2, 50), [0] * 8 + [1] * 8, None, most=100)
    [layer] = cache.layers
    assert layer.prompt_keys.numel() == layer.prompt_values.numel() == 2 * 2 * 50 * 4
    token = torch.randn(16, 2, 1, 4)
    layer.update(token, token)
    buffers = layer.keys
    cache.keep(torch.arange(13))
    assert layer.keys is buffers
    assert layer.grid.slots.tolist() == list(range(13))
    cache.keep(torch.arange(1, 8))  # the second prompt has nobody left
    assert (layer.grid.shape, layer.grid.is_full) == ((1, 7), True)
    assert torch.equal(layer.keys[0, :, :, 0].transpose(0, 1), token[1:8, :, 0])
    assert layer.prompt_keys.numel() == 2 * 50 * 4


def test_buffers_grow_in_blocks_and_forget_what_no_window_reaches():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    cache = prefilled(1, 5)
    window = DynamicSlidingWindowLayer(8)
    window.update(cache.layers[0].keys, cache.layers[0].values)
    cache.layers.append(window)
    group = GroupCache(cache, [0, 0], None, most=200)
    sizes = []
    for _ in range(150):
        for layer in group.layers:
            layer.update(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
        sizes.append([layer.keys.size(3) for layer in group.layers])
    assert sorted({size[0] for size in sizes}) == [64, 128, 192]
    assert {size[1] for size in sizes} <= {64, 71}
    assert group.layers[1].visible().own_keys.size(1) == 8
    assert group.layers[0].get_seq_length() == 155


def test_rows_find_their_places():
    grid = Grid.of([0, 1, 0, 1, 1], 2, "cpu")
    rows = torch.arange(1.0, 6)[:, None]
    assert grid.spread(rows)[..., 0].tolist() == [[1, 3, 1], [2, 4, 5]]
    assert torch.equal(grid.gather(grid.spread(rows)), rows)


@pytest.mark.parametrize("shared", [True, False])
def test_too_little_memory_says_what_to_change(model, tokenizer, shared):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    hook = model.register_forward_pre_hook(full)
    config = GenerationConfig(max_new_tokens=40, pad_token_id=0)
    ids = torch.full((6, 400), 7)
    with shared_prefill(model, shares=shared), pytest.raises(torch.OutOfMemoryError) as raised:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    hook.remove()
    said = str(raised.value)
    assert said.startswith(
        "generation: got 6 completions of up to 40 tokens for 1 prompts of up to 400 that do not fit"
    )
    assert ("each prompt is held 6 times" in said) == (not shared)
    assert said.endswith("(Tried to allocate 2 GiB)")
