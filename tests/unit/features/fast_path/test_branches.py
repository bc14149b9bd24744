"""Completions that start from the states of their prompt: the same values and gradients, and a self-test that sees
what goes wrong."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny import InDouble, random_weights, tiny_model
from tiny_families import configuration_with_states
from transformers import AutoModelForCausalLM

from trl_drgrpo.features.fast_path.branch_agreement import why_not_branched
from trl_drgrpo.features.fast_path.branches import branch_rows
from trl_drgrpo.features.fast_path.pack_layout import pack_rows, scored_only
from trl_drgrpo.features.fast_path.sharing import starts_from_states
from trl_drgrpo.upstream import prompt_cache
from trl_drgrpo.upstream.batches import TokenBatch

# Short convolutions; a delta rule; Mamba 2 beside attention, and in one layer with it.
FAMILIES = ("Lfm2", "Qwen3_5Text", "NemotronH", "FalconH1")
# Longer than the chunks of a state, and shorter than the kernel of a convolution.
PROMPTS = (70, 1, 19)
# Completions of one token, shorter than a kernel, and longer than a chunk.
COMPLETIONS = ((66, 1, 3, 2), (5, 5), (1, 1))
ALONE = SimpleNamespace(in_lockstep=False, router_balance=None)
PACKS = [(0, 1, 2, 3), (4, 5), (6, 7)]


def model_of(family, tokenizer):
    return random_weights(AutoModelForCausalLM.from_config, configuration_with_states(family, tokenizer))


def tokens():
    """Rows in TRL's layout."""
    generator = torch.Generator().manual_seed(1)
    width = max(max(lengths) for lengths in COMPLETIONS)
    left = max(PROMPTS)
    ids, masks = [], []
    for prompt_length, lengths in zip(PROMPTS, COMPLETIONS, strict=True):
        prompt = torch.randint(20, (left,), generator=generator)
        for length in lengths:
            ids.append(torch.cat([prompt, torch.randint(20, (width,), generator=generator)]))
            masks.append(torch.cat([torch.arange(left) >= left - prompt_length, torch.arange(width) < length]))
    return TokenBatch(torch.stack(ids), torch.stack(masks).long(), width)


def log_probs(model, packed):
    inputs = {"input_ids": packed.input_ids, "attention_mask": packed.attention_mask}
    if packed.position_ids is not None:
        inputs["position_ids"] = packed.position_ids
    before = packed.prompts.run_first(model.base_model) if packed.prompts else nullcontext()
    with before, scored_only(model.base_model, packed):
        logits = model(**inputs, use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, packed.targets.unsqueeze(-1)).squeeze(-1)


def outcome(model, *layouts):
    """Log-probabilities, and the gradients of a weighted sum of them."""
    values = sum(packed.unpack(log_probs(model, packed)) for packed in layouts)
    weights = torch.linspace(-0.5, 2.0, values.numel(), dtype=values.dtype).view(values.shape)
    model.zero_grad()
    (values * weights).sum().backward()
    return values, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_as_alone_and_so_is_the_gradient(family, multiple, tokenizer):
    model = model_of(family, tokenizer).double()
    batch = tokens()
    packed = branch_rows(batch, PACKS, multiple=multiple)
    width = -(-65 // multiple) * multiple  # the last token predicts nothing
    assert packed.input_ids.shape == (8, width)
    assert packed.prompts.input_ids.shape == (3, -(-70 // multiple) * multiple)
    with InDouble():
        expected, expected_gradients = outcome(model, pack_rows(batch, [(row,) for row in range(8)]))
        values, gradients = outcome(model, packed)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("packs", [[(6, 7)], [(1,)], [(4, 5), (6, 7)], [(7, 6), (2, 0)]])
def test_any_packs_run_and_other_rows_get_zeros(packs, tokenizer):
    model = model_of("Lfm2", tokenizer)
    batch = tokens()
    packed = branch_rows(batch, packs)
    rows = sorted(itertools.chain.from_iterable(packs))
    assert packed.input_ids.size(1) >= 2  # one token over a cache would be a decoding step
    with torch.no_grad():
        alone = pack_rows(batch, [(row,) for row in rows])
        expected = alone.unpack(log_probs(model, alone))
        values = packed.unpack(log_probs(model, packed))
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    assert values.any(dim=1).nonzero().squeeze(1).tolist() == rows


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_run_again_in_backward_have_the_same_gradient(family, tokenizer):
    model = model_of(family, tokenizer).train()
    packed = branch_rows(tokens(), PACKS)
    expected, expected_gradients = outcome(model, packed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    for layer in prompt_cache.checkpointed_layers(model):
        next(layer.children()).register_forward_pre_hook(lambda *_: runs.append(0))
    values, gradients = outcome(model, packed)
    assert len(runs) == 2 * 2 * len(prompt_cache.checkpointed_layers(model)) > 0  # prompts and rows, twice
    torch.testing.assert_close(values, expected)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient)


# The self-test


def why_not(model):
    return why_not_branched(ALONE, model, lambda packed: log_probs(model, packed))


@pytest.mark.parametrize("family", [*FAMILIES, "OlmoHybrid", "Bamba"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_self_test_accepts_models_and_leaves_them_as_they_were(family, checkpointing, tokenizer):
    model = model_of(family, tokenizer).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    state = torch.get_rng_state()
    assert starts_from_states(model.config)
    assert why_not(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def leaking(states):
    """Rows start from what is another row's."""
    return states.roll(1, dims=0)


def cut_off(states):
    return states.detach()


def forgotten(states):
    return torch.zeros_like(states)


@pytest.mark.parametrize("change", [leaking, cut_off, forgotten])
@pytest.mark.parametrize("family", ["Qwen3_5Text", "FalconH1"])
@pytest.mark.parametrize("kind", ["conv_states", "recurrent_states", "keys"])
def test_the_self_test_sees_what_happens_to_a_state(family, kind, change, tokenizer, monkeypatch):
    right = prompt_cache._rows
    made = prompt_cache.cache_of_branches

    def wrong(prompts, prompt_of_row):
        cache = made(prompts, prompt_of_row)
        for layer in cache.layers:
            if kind == "keys" and getattr(layer.notes, "keys_and_values", None):
                keys, values = layer.notes.keys_and_values
                notes = {**vars(layer.notes), "keys_and_values": (change(keys), values)}
                layer.notes = type(layer.notes)(**notes)
            states = getattr(layer, kind, None)
            if kind != "keys" and states is not None:
                dict.update(states, {number: change(right(state, prompt_of_row)) for number, state in states.items()})
                states._prompt_of_row = torch.arange(len(prompt_of_row))
        return cache

    monkeypatch.setattr("trl_drgrpo.features.fast_path.branches.cache_of_branches", wrong)
    reason = why_not(model_of(family, tokenizer))
    assert "differ by" in reason
    assert ("gradients" in reason) == (change is cut_off)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Rwkv", "its forward takes a cache as state"),
        ("Jamba", "log-probabilities from the states of a prompt and of rows alone differ by"),
    ],
)
def test_models_that_cannot_start_from_states_have_a_reason(family, reason, tokenizer):
    assert why_not(model_of(family, tokenizer)).startswith(reason)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("in_lockstep", True, "ranks with a part of the model run one forward at a time"),
        ("router_balance", object(), "the load-balancing loss reads the router in one forward"),
    ],
)
def test_two_forwards_in_one_are_not_run_where_something_counts_forwards(field, value, reason, tokenizer):
    trainer = SimpleNamespace(**{**vars(ALONE), field: value})
    assert why_not_branched(trainer, model_of("Lfm2", tokenizer), None) == reason


def test_reentrant_checkpointing_is_refused(tokenizer):
    """It runs layers without a graph, so states would come without their gradient."""
    model = model_of("Lfm2", tokenizer).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert why_not(model).startswith("it fails from the states of a prompt")


def test_models_of_attention_alone_take_masks(tokenizer):
    assert not starts_from_states(tiny_model(tokenizer).config)
