"""The name of the cache in the installed transformers, in older and newer ones, and what decoding relies on."""

import runpy

import pytest
import torch
from tiny import tiny_model
from transformers import DynamicCache, cache_utils

from trl_drgrpo.upstream import kv_cache
from trl_drgrpo.upstream.kv_cache import CACHE, cache_name, cache_of, check_decoding, moved_in_decoding


def before(self, input_ids, past_key_values=None): ...


def since(self, input_ids, cache=None): ...


def later(self, input_ids, memory=None): ...


@pytest.mark.parametrize(("method", "name"), [(before, "past_key_values"), (since, "cache"), (later, None)])
def test_the_name_is_that_of_the_installed_version(method, name):
    assert cache_name(method) == name


def test_a_model_takes_and_gives_its_cache_under_the_name(tokenizer):
    model, ids = tiny_model(tokenizer), torch.tensor([[65, 66, 67]])
    whole = model(input_ids=ids).logits[:, -1]
    cache = cache_of(model(input_ids=ids[:, :2], use_cache=True))
    assert type(cache) is DynamicCache
    last = model(input_ids=ids[:, 2:], use_cache=True, **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(last, whole)
    assert cache.get_seq_length() == 3


def test_the_methods_that_decoding_relies_on_are_where_they_were():
    assert set(check_decoding().values()) == {""}
    assert moved_in_decoding() is None


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (later, "GenerationMixin.prepare_inputs_for_generation no longer takes next_sequence_length, "),
        (None, "GenerationMixin.prepare_inputs_for_generation is gone"),
    ],
)
def test_a_moved_part_of_decoding_is_named(method, said, monkeypatch):
    monkeypatch.setattr(kv_cache.GenerationMixin, "prepare_inputs_for_generation", method)
    assert said in moved_in_decoding()


@pytest.mark.parametrize(
    ("name", "moved"),
    [("LinearAttentionLayer", "LinearAttentionLayer.reorder_cache is gone"), ("DynamicLayer", "DynamicLayer.update")],
)
def test_a_class_that_is_gone_is_named_and_ends_no_import(name, moved, monkeypatch):
    monkeypatch.delattr(cache_utils, name)
    without = runpy.run_path(kv_cache.__file__)
    assert moved in without["moved_in_decoding"]()


@pytest.mark.parametrize(
    ("owner", "said"),
    [(kv_cache.GenerationConfig, "no longer has beams"), (cache_utils.DynamicSlidingWindowLayer, "cannot be made")],
)
def test_an_attribute_that_has_moved_is_named(owner, said, monkeypatch):
    monkeypatch.setattr(kv_cache, "GenerationConfig", owner)
    monkeypatch.setitem(kv_cache.DECODING_ATTRIBUTES, "GenerationConfig", ("beams",))
    assert f"GenerationConfig {said}" in moved_in_decoding()
