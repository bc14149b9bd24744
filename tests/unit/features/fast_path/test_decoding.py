"""Generation from shared prompts against transformers' own loop: the same tokens from the same seed, over families of
models, and where it stands aside."""

import gc
import logging
import re
import weakref
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from decoded import MIXED, PAD, assert_same_tokens, generate
from peft import LoraConfig, get_peft_model
from runs import train
from tiny import random_weights, sizes, tiny_model
from tiny_families import STATES, configuration_with_states, tiny
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2PreTrainedModel,
    GenerationConfig,
    RecurrentGemmaConfig,
)
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding import decoder, forwards, replay
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.decoding.group_cache import NAME, Grid, GroupCache, GroupLayer
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.upstream import kv_cache
from trl_drgrpo.upstream.kv_cache import CACHE
from trl_drgrpo.upstream.private_state import swapped


def with_states(family, tokenizer):
    """A model whose cache holds more than keys and values."""
    return random_weights(AutoModelForCausalLM.from_config, configuration_with_states(family, tokenizer))


def why_not(model):
    """Why a model has no group cache; `None` when it has one, as the test of its first step found."""
    return forwards._why_not[model]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"do_sample": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [["1+2="] * 8 + ["12345+3="] * 8, ["7*8="] * 6, ["a", "bc", "a", "def"]], ids=len)
def test_the_same_tokens_from_the_same_seed(model, settings, prompts):
    assert_same_tokens(model, prompts, **settings)


@pytest.mark.parametrize("lora", [False, True])
def test_the_trainer_generates_the_same_completions(settings, prompts, tokenizer, reward, lora):
    seen = {"fast": [], "stock": [], "rounds": []}

    def run(name, **fields):
        sizes = []

        def watching(completion_ids, **kwargs):
            seen[name].append([list(ids) for ids in completion_ids])
            return reward(completion_ids)

        peft = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if lora else {}
        model = tiny_model(tokenizer)
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        config = {**settings, "max_steps": 1, **fields}
        train(DrGRPOTrainer, config, prompts, tokenizer, watching, model, **peft)
        return sizes[0]

    assert run("fast") == 2
    assert run("stock", fast_generation=False) == 8
    assert run("rounds", generation_rows=4) == 1
    assert seen["fast"] == seen["stock"] == seen["rounds"]


def test_each_prompt_runs_once_and_finished_rows_are_dropped(model, monkeypatch):
    monkeypatch.setitem(forwards._why_not, model, None)  # the model has been tested
    prompts = ["1+2="] * 8 + ["12345+3="] * 8
    ours, stock = (generate(model, prompts, shares)[2] for shares in (True, False))
    assert len(ours) == len(stock)
    assert (ours[0], stock[0]) == ((2, 8), (16, 8))
    rows = [size[0] for size in ours[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 8
    assert {size[0] for size in stock} == {16}
    # rows are kept where a processor knows them by number
    sizes = generate(model, prompts, repetition_penalty=1.3)[2]
    assert [size[0] for size in sizes] == [2, *[16] * (len(sizes) - 1)]


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_rows_end_at_their_limits(model, settings):
    rows, limits = ["7*8="] * 6, [0, 1, 5, 12, 30, 99]
    ends = {"eos_token_id": 3}  # hardly ever; the longest goes on as it would
    free = generate(model, rows, **settings, **ends)[0].tolist()
    limited = generate(model, rows, limits=limits, **settings, **ends)[0].tolist()
    for limit, with_limit, without in zip(limits, limited, free, strict=True):
        assert [token for token in with_limit if token != PAD] == [token for token in without if token != PAD][:limit]


# Rounds of fewer rows


@pytest.mark.parametrize("rows_at_once", [1, 4, 7, 10])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"limits": [40, 3, 9, 1, 0, 30, 40, 2, 2, 40]}], ids=str
)
def test_rounds_sample_what_one_round_samples(model, settings, rows_at_once):
    one_round, state, _ = generate(model, MIXED, **settings)
    in_rounds, state_after_rounds, shapes = generate(model, MIXED, rows_at_once=rows_at_once, **settings)
    assert torch.equal(in_rounds, one_round)
    assert torch.equal(state_after_rounds, state)
    assert max(rows for rows, _ in shapes) <= rows_at_once


@pytest.mark.parametrize("do_sample", [False, True])
def test_transformers_loop_runs_in_rounds(model, do_sample):
    prompts = ["7*8="] * 8
    one_round, _, _ = generate(model, prompts, shares=False, do_sample=do_sample)
    in_rounds, _, shapes = generate(model, prompts, shares=False, do_sample=do_sample, rows_at_once=4)
    assert {rows for rows, _ in shapes} == {4}
    if not do_sample:
        assert torch.equal(in_rounds, one_round)
        return
    # The first round is a generation of its rows alone, and the next one goes on from there: other samples.
    first_round, _, _ = generate(model, prompts[:4], shares=False)
    width = first_round.size(1)
    assert torch.equal(in_rounds[:4, :width], first_round)
    assert not torch.equal(in_rounds[4:], in_rounds[:4])


def test_a_call_that_cannot_be_cut_by_rows_is_one_round(model, caplog):
    ids = torch.tensor([[97]] * 4)
    config = GenerationConfig(max_new_tokens=2, pad_token_id=PAD)
    with shared_prefill(model, rows_at_once=2):
        for _ in range(2):
            model.generate(input_ids=ids, position_ids=torch.zeros_like(ids), generation_config=config)
    assert [message for message in caplog.messages if message.startswith("generation_rows has no effect")] == [
        "generation_rows has no effect: generate is called with position_ids, not cut by rows."
    ]


# What is left to transformers


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size is 2"),
        ("an option of the model", "use_cache is False"),  # where the call is silent
        ("Rwkv", "its forward takes a cache as state"),
        ("a moved name", "transformers has changed: GenerationMixin.generate no longer takes a_new_name"),
    ],
    ids=str,
)
def test_settings_beyond_our_decoder_are_left_to_transformers_with_a_reason(
    model, tokenizer, settings, reason, monkeypatch, caplog
):
    monkeypatch.setattr(decoder, "decode", lambda *args, **kwargs: pytest.fail("was decoded here"))
    if isinstance(settings, str) and settings in STATES:
        model, settings = with_states(settings, tokenizer), {"max_new_tokens": 5}
    elif settings == "a moved name":
        monkeypatch.setattr(kv_cache, "DECODING_SEAMS", {"GenerationMixin.generate": ("a_new_name",)})
        settings = {}
    elif isinstance(settings, str):
        model.generation_config.use_cache, settings = False, {}
    speed = Speed()
    for _ in range(2):
        assert_same_tokens(model, ["1+2="] * 4, speed=speed, **settings)
    said = [message for message in caplog.messages if message.startswith("Fast path without")]
    assert said == [f"Fast path without prompts run once, group cache, recorded steps, dropped rows: {reason}."]
    assert set(speed.facts().values()) == {reason}


def test_an_error_leaves_the_model_as_it_was(model):
    seen = []

    def failing(module, args, kwargs):
        seen.append(module.config._attn_implementation)
        if len(seen) == 6:
            raise KeyError("elsewhere")

    attention = model.config._attn_implementation
    hook = model.model.register_forward_pre_hook(failing, with_kwargs=True)
    with pytest.raises(KeyError, match="elsewhere"):
        generate(model, MIXED)
    hook.remove()
    assert seen[-1] == NAME
    assert model.config._attn_implementation == attention
    assert "generate" not in vars(model)


@pytest.mark.parametrize("shared", [True, False])
def test_too_little_memory_says_what_to_change(model, shared):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    hook = model.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        generate(model, ["x" * 400] * 6, shared)
    hook.remove()
    said = str(raised.value)
    assert said.startswith(
        "generation: got 6 completions of up to 40 tokens for 1 prompts of up to 400 that do not fit"
    )
    assert ("each prompt is held 6 times" in said) == (not shared)
    assert "et generation_rows below 6 (" in said
    assert said.endswith("(Tried to allocate 2 GiB)")


# Inference mode and random numbers


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_model_trains_on_what_it_kept_of_a_generation(model, is_buffer):
    def scaled(module, args):
        (states,) = args
        kept = torch.ones_like(states[0, 0])  # made anew in each forward without gradients, and kept
        if not torch.is_grad_enabled():
            module.register_buffer("kept", kept) if is_buffer else setattr(module, "kept", kept)
        return (states * module.kept,)

    hook = model.model.norm.register_forward_pre_hook(scaled)
    tokens, _, _ = generate(model, ["1+2="] * 4)
    model(input_ids=tokens, labels=tokens).loss.backward()
    hook.remove()


@pytest.mark.parametrize("is_quantized", [True, False])
def test_no_forward_of_a_generation_records_gradients(model, is_quantized):
    recorded = set()
    model.is_quantized = is_quantized  # its layers keep tensors, so it decodes outside of inference mode
    model.lm_head.register_forward_hook(lambda module, args, output: recorded.add(output.requires_grad))
    generate(model, ["1+2="] * 4)
    assert recorded == {False}


@pytest.mark.parametrize("rows", [1, 32])
def test_random_numbers_of_live_rows_are_those_of_all(rows, monkeypatch):
    monkeypatch.setattr(decoder, "BLOCK", 700)  # several blocks, the last one not full
    live = torch.arange(rows)[:: 3 if rows > 3 else 1]
    like = torch.empty(len(live), 101)
    torch.manual_seed(0)
    expected = torch.empty(rows, 101).exponential_(1)[live]
    state = torch.random.get_rng_state()
    for draws_uniform in (decoder._draws_uniform(), False):
        monkeypatch.setattr(decoder, "_draws_uniform", lambda is_so=draws_uniform: is_so)
        torch.manual_seed(0)
        torch.testing.assert_close(decoder.exponential(live, rows, like), expected, rtol=1e-6, atol=0)
        assert torch.equal(torch.random.get_rng_state(), state)


# Running states

SELECTED = [family for family in STATES if family not in ("RecurrentGemma", "Rwkv")]
WITHOUT_GROUPS = {
    "DeepseekV32": "its cache has layers of other kinds (DynamicIndexedLayer)",
    "GlmMoeDsa": "its cache has layers of other kinds (DynamicIndexedLayer)",
    "Mamba2": "its cache holds no keys and values",
}


@pytest.mark.parametrize("family", SELECTED)
def test_prompts_of_running_states_run_once(tokenizer, family, caplog):
    model, speed = with_states(family, tokenizer), Speed()
    if reason := kv_cache.why_no_cache(model):  # Mamba, before transformers 5.24
        assert_same_tokens(model, speed=speed)
        pytest.skip(reason)
    for settings in ({}, {"do_sample": False}):
        assert_same_tokens(model, ["7*8="] * 6, speed=speed, **settings)
        assert_same_tokens(model, MIXED, speed=speed, **settings)  # padding, too, reaches a state as in transformers
    sizes = generate(model, MIXED, speed=speed, eos_token_id=list(range(60)))[2]
    assert sizes[0][0] == 4
    assert sizes[-1][0] < len(MIXED)
    facts = speed.facts()
    assert (facts["prompts run once"], facts["dropped rows"]) == ("yes", "yes")
    said = [message for message in caplog.messages if message.startswith("Fast path without")]
    refusal = WITHOUT_GROUPS.get(family)
    assert facts["group cache"] == (refusal or "yes")
    assert said == ([f"Fast path without group cache, recorded steps: {refusal}."] if refusal else [])


RECORDED_STATES = [family for family in SELECTED if family not in WITHOUT_GROUPS]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ("Qwen3_5Text", "Lfm2") else pytest.mark.slow)
        for each in RECORDED_STATES
    ],
)
def test_steps_of_running_states_are_replayed_over_the_same_addresses(family, tokenizer, replaying, caplog):
    speed = Speed()
    assert_same_tokens(with_states(family, tokenizer), max_new_tokens=40, speed=speed)
    assert speed.facts()["recorded steps"] == "yes"
    assert speed.uses[SpeedPart.RECORDED_STEPS] > len(replaying) > 1  # rows left


def test_running_states_that_move_or_are_not_replayed_are_refused(tokenizer, replaying, monkeypatch):
    """A step that fails, or is compared, begins from the states that it was given: the tokens stay the same."""
    recorded, failures = replay.record, []

    def reason(change):
        model, speed = with_states("Qwen3_5Text", tokenizer), Speed()
        with monkeypatch.context() as patched:
            change(patched)
            assert_same_tokens(model, max_new_tokens=20, speed=speed)
        return speed.facts()["recorded steps"]

    def failing(step, device):  # behind the step, as a capture does
        step()
        failures.append(device)
        raise RuntimeError("called a synchronizing CUDA operation")

    def failing_once(step, device):
        return recorded(step, device) if failures else failing(step, device)

    def stale(step, device):  # the states that are written lie elsewhere
        logits, again = recorded(step, device)

        def replayed():
            states = step.__self__._running_states()
            values = [state.clone() for state in states]
            logits.copy_(again())
            for state, value in zip(states, values, strict=True):
                state.copy_(value)
            return logits

        return logits, replayed

    update = kv_cache.LinearAttentionLayer.update_recurrent_state

    def moving(layer, *args, **kwargs):
        layer.recurrent_states[0] = update(layer, *args, **kwargs).clone()
        return layer.recurrent_states[0]

    assert reason(lambda patched: patched.setattr(replay, "record", failing_once)) == "yes"
    assert "called a synchronizing" in reason(lambda patched: patched.setattr(replay, "record", failing))
    assert reason(lambda patched: patched.setattr(replay, "record", stale)) == "its running states differ"
    moved = reason(lambda patched: patched.setattr(kv_cache.LinearAttentionLayer, update.__name__, moving))
    assert moved == "its steps put running states elsewhere"


@pytest.mark.parametrize("family", ["Qwen3_5Text", "FalconH1"])
def test_running_states_under_lora_limits_and_kept_rows(tokenizer, family):
    model = with_states(family, tokenizer)
    assert_same_tokens(model, MIXED, repetition_penalty=1.3)  # no row leaves
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    assert_same_tokens(adapted)
    assert_same_tokens(adapted, limits=[8, 1, 5, 12, 30, 40, 40, 3, 2, 1])
    tokens = generate(adapted, MIXED)[0]
    adapted(input_ids=tokens, labels=tokens).loss.backward()


def _states_as_they_are(self, rows):
    """Like the `batch_select_indices` of a layer of both kinds."""
    if not isinstance(self, LinearAttentionLayer):
        return
    for layer in type(self).__mro__:
        if layer is not LinearAttentionCacheLayerMixin and hasattr(layer, "batch_select_indices"):
            layer.batch_select_indices(self, rows)
            return


def _states_of_the_first_row(self, rows, select=LinearAttentionCacheLayerMixin.reorder_cache):
    select(self, torch.zeros_like(rows))


def _rows_rolled(self, rows, select=LinearAttentionCacheLayerMixin.reorder_cache):
    select(self, rows.roll(1) if len(rows) < self.conv_states[0].size(0) else rows)  # where rows leave


@pytest.mark.parametrize("mutant", [None, _states_as_they_are, _states_of_the_first_row, _rows_rolled])
@pytest.mark.parametrize("prompts", [["7*8="] * 6, MIXED], ids=len)
@pytest.mark.parametrize("family", ["Lfm2", "Qwen3_5Text", "FalconH1"])
def test_rows_of_states_are_compared_before_they_are_used(tokenizer, family, prompts, mutant):
    model, speed = with_states(family, tokenizer), Speed()
    settings = {"eos_token_id": list(range(60))}
    expected = generate(model, prompts, shares=False, **settings)[0]
    swap = {} if mutant is None else {"reorder_cache": mutant}
    with swapped(LinearAttentionCacheLayerMixin, **swap):
        assert torch.equal(generate(model, prompts, speed=speed, **settings)[0], expected)
    reason = speed.facts()["prompts run once"]
    assert (reason == "yes") == (mutant is None)
    assert speed.facts()["dropped rows"] == reason


@pytest.mark.parametrize("mutant", [_states_of_the_first_row, _rows_rolled])
def test_tokens_show_states_of_other_rows(tokenizer, mutant, monkeypatch):
    model, settings = with_states("Qwen3_5Text", tokenizer), {"eos_token_id": list(range(60))}
    expected = generate(model, MIXED, shares=False, **settings)[0]
    monkeypatch.setattr(forwards, "differs", lambda *args: None)
    with swapped(LinearAttentionCacheLayerMixin, reorder_cache=mutant):
        assert not torch.equal(generate(model, MIXED, **settings)[0], expected)


def test_states_outside_of_the_cache_are_refused(tokenizer):
    layers = {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "num_key_value_heads": 1}
    config = RecurrentGemmaConfig(**sizes(tokenizer, intermediate_size=64, **layers))
    model, speed = random_weights(AutoModelForCausalLM.from_config, config), Speed()
    for prompts in (["7*8="] * 6, MIXED):
        assert_same_tokens(model, prompts, speed=speed)
        assert speed.facts()["prompts run once"] == "it keeps running states outside of its cache"


# Keys and values of groups

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


@pytest.mark.parametrize("family", [*SHARING.split(), *REFUSED])
def test_the_same_tokens_over_families_and_a_refusal_is_said_once(tokenizer, family, caplog):
    model = tiny(family, tokenizer)
    attention = model.config._attn_implementation
    speed = Speed()
    with caplog.at_level(logging.WARNING, logger="trl_drgrpo"):
        for _ in range(2):
            assert_same_tokens(model, max_new_tokens=40 if family not in REFUSED else 20, speed=speed)
            assert model.config._attn_implementation == attention
    refusal = f"Fast path without group cache, recorded steps: {REFUSED.get(family)}."
    said = [message for message in caplog.messages if message.startswith("Fast path")]
    assert said == ([refusal] if family in REFUSED else [])
    assert why_not(model) == REFUSED.get(family)
    facts = speed.facts()
    assert (facts["prompts run once"], facts["dropped rows"]) == ("yes", "yes")
    assert facts["group cache"] == REFUSED.get(family, "yes")


def test_a_refusal_leaves_the_random_numbers_where_they_were(tokenizer):
    """A resumed run tries anew what the unbroken run has refused before."""
    model = tiny("GPT2", tokenizer, embd_pdrop=0.5, attn_pdrop=0.5, resid_pdrop=0.5)
    tokens, state, _ = generate(model, MIXED, training=True)
    assert why_not(model) == "its attention uses dropout"
    again, state_again, _ = generate(model, MIXED, training=True)
    assert torch.equal(tokens, again)
    assert torch.equal(state, state_again)


@pytest.fixture
def replaying(monkeypatch):
    """Recorded steps, without a GPU: one that is replayed runs once more, and over the memory it was recorded over.
    Gives the grids of the recordings."""
    recorded = []

    def record(step, device):
        groups = step.__self__._groups

        def memory():
            buffers = [buffer for layer in groups.groups for buffer in (layer.keys, layer.values)]
            for layer in groups.states:
                buffers += [*layer.conv_states.values(), *layer.recurrent_states.values()]
            return [buffer.data_ptr() for buffer in buffers if buffer is not None]

        def again():
            assert memory() == recorded_over
            return step()

        recorded_over = memory()
        recorded.append(groups.grid)
        return step(), again

    monkeypatch.setattr(forwards, "why_not_recorded", lambda model, device: None)
    monkeypatch.setattr(replay, "record", record)
    return recorded


RECORDED = {"Llama", "Mistral", "Gemma3Text", "GPT2", "GptOss"}  # others differ in what is not attention


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in RECORDED else pytest.mark.slow) for each in SHARING.split()],
)
def test_steps_of_fixed_shapes_give_the_same_tokens(tokenizer, family, replaying, caplog):
    assert_same_tokens(tiny(family, tokenizer), max_new_tokens=80)
    assert "recorded steps" not in caplog.text
    assert len({grid.shape for grid in replaying}) >= 2  # rows left


@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Gemma3Text"])
def test_a_step_is_recorded_anew_when_buffers_move(tokenizer, family, replaying):
    """Those of a window move to others of the same size."""
    assert_same_tokens(tiny(family, tokenizer), MIXED[3:5], max_new_tokens=200, eos_token_id=[PAD])  # none ends
    assert len(replaying) >= 3


def test_steps_are_recorded_on_one_gpu_that_nobody_debugs(model, monkeypatch):
    gpu = torch.device("cuda")
    assert forwards.why_not_recorded(model, gpu) is None
    assert forwards.why_not_recorded(model, torch.device("cpu"))
    monkeypatch.setattr(model, "hf_device_map", {"": 0}, raising=False)
    assert forwards.why_not_recorded(model, gpu) is None
    monkeypatch.setattr(model, "hf_device_map", {"model": 0, "lm_head": 1})
    assert forwards.why_not_recorded(model, gpu)
    monkeypatch.setattr(model, "hf_device_map", {})
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert forwards.why_not_recorded(model, gpu)


def test_a_step_that_fails_once_is_recorded_again(model, replaying, monkeypatch, caplog):
    calls, recorded = [], replay.record

    def loading(step, device):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("called a synchronizing CUDA operation")
        return recorded(step, device)

    monkeypatch.setattr(replay, "record", loading)
    assert_same_tokens(model, max_new_tokens=20)
    assert replaying
    assert "recorded steps" not in caplog.text


def test_a_recording_and_its_cache_are_gone_after_a_generation(model, replaying, monkeypatch):
    """By their references: a graph that waits for the garbage collector holds memory in training."""
    seen = []

    class Recording:
        def __init__(self, logits):
            self.logits = logits

        def __call__(self):
            return self.logits

    def record(step, device):
        replays, made = step.__self__, Recording(step())
        seen.extend(map(weakref.ref, [replays, *replays._groups.layers, made]))
        return made.logits, made

    monkeypatch.setattr(replay, "record", record)
    monkeypatch.setattr(forwards, "differs", lambda *args: None)
    gc.collect()
    gc.disable()
    try:
        generate(model, MIXED, max_new_tokens=20)
        assert [each() for each in seen] == [None] * len(seen)
    finally:
        gc.enable()
    assert seen


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_model_that_cannot_be_recorded_says_so_once(model, replaying, monkeypatch, caplog, error):
    def failing(step, device):
        raise error("called a synchronizing CUDA operation")

    monkeypatch.setattr(replay, "record", failing)
    speed = Speed()
    for _ in range(2):
        assert_same_tokens(model, max_new_tokens=20, speed=speed)
    assert caplog.text.count(f"without recorded steps: {error.__name__}: called a synchronizing CUDA operation") == 1


def test_a_replay_that_computes_something_else_is_not_used(model, replaying, monkeypatch, caplog):
    def stale(step, device):  # as where a step holds on to what was a number of Python
        logits = step()
        return logits, lambda: logits.clone()

    monkeypatch.setattr(replay, "record", stale)
    assert_same_tokens(model, max_new_tokens=20)
    assert "its logits differ" in caplog.text


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_bfloat16_is_compared_as_such_under_autocast_too(tokenizer, family):
    model = tiny(family, tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, MIXED, max_new_tokens=5)
    assert why_not(model) is None
    model = tiny(family, tokenizer).to(torch.bfloat16)
    generate(model, MIXED, max_new_tokens=5)
    assert why_not(model) is None


def test_a_softcap_that_the_model_leaves_out_is_refused(tokenizer):
    """Below transformers 5.18 Gemma 2 runs with sdpa, which has no softcap: with groups its logits would be others."""
    if not Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("Gemma 2 has no sdpa here")
    model = tiny("Gemma2", tokenizer)
    model.set_attn_implementation("sdpa")
    assert_same_tokens(model, max_new_tokens=5)
    assert "its logits differ" in why_not(model)


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


@pytest.mark.parametrize(
    ("mutant", "compared"), [("window", True), ("padding", True), *((name, False) for name in MUTANTS)]
)
def test_the_first_step_is_compared_and_the_tokens_show_mutants(tokenizer, mutant, compared, monkeypatch):
    model = tiny("Gemma2", tokenizer)
    expected = generate(model, MIXED, shares=False)[0]
    if not compared:
        monkeypatch.setitem(forwards.AGREEMENT, torch.float32, torch.inf)
    with swapped(GroupLayer, **MUTANTS[mutant]):
        assert torch.equal(generate(model, MIXED)[0], expected) == (compared or mutant == "none")
    assert bool(re.match("its logits differ by", why_not(model) or "")) == compared


def test_the_cache_of_the_prompts_is_freed(model):
    caches = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: caches.append(kwargs[CACHE]), with_kwargs=True)
    generate(model, MIXED, max_new_tokens=4)
    hook.remove()
    assert isinstance(caches[0], DynamicCache)
    assert caches[0].layers == []
    assert isinstance(caches[-1], GroupCache)


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
    grid, rows = Grid.of([0, 1, 0, 1, 1], 2, "cpu"), torch.arange(1.0, 6)[:, None]
    assert grid.spread(rows)[..., 0].tolist() == [[1, 3, 1], [2, 4, 5]]
    assert torch.equal(grid.gather(grid.spread(rows)), rows)


def test_buffers_grow_in_blocks_and_forget_what_no_window_reaches():
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
