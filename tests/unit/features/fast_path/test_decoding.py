"""Shared prefill and dropped rows against transformers' own loop: the same tokens from the same seed."""

import pytest
import torch
from runs import train
from tiny import tiny_model
from transformers import GenerationConfig

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding import decoder, forwards
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

GREEDY = {"do_sample": False}
SAMPLING = [
    {},
    {"temperature": 0.7},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    GREEDY,
]


def generate(model, tokenizer, prompts, shared, **settings):
    """Tokens, the state of the random generator afterwards, and the batch sizes of the model's forwards."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    config = GenerationConfig(
        **{"do_sample": True, "max_new_tokens": 40, **settings},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    sizes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(0)
    arguments = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    try:
        if shared:
            with shared_prefill(model):
                tokens = model.generate(**arguments, generation_config=config)
        else:
            tokens = model.generate(**arguments, generation_config=config)
    finally:
        hook.remove()
    return tokens, torch.random.get_rng_state(), sizes


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
@pytest.mark.parametrize("prompts", [["1+2="] * 8 + ["12345+3="] * 8, ["7*8="] * 6, ["a", "bc", "a", "def"]], ids=len)
def test_the_same_tokens_from_the_same_seed(model, tokenizer, settings, prompts):
    model.eval()
    ours, our_state, _ = generate(model, tokenizer, prompts, True, **settings)
    stock, state, _ = generate(model, tokenizer, prompts, False, **settings)
    assert torch.equal(ours, stock)
    assert torch.equal(our_state, state)  # what comes after the generation is the same run, too
    assert "generate" not in vars(model)


def test_each_prompt_runs_once_and_finished_rows_are_dropped(model, tokenizer, monkeypatch):
    model.eval()
    monkeypatch.setitem(forwards._why_not, model, None)  # the model has been tested
    prompts = ["1+2="] * 8 + ["12345+3="] * 8
    _, _, ours = generate(model, tokenizer, prompts, True)
    _, _, stock = generate(model, tokenizer, prompts, False)
    assert stock[0] == (16, 8)
    assert ours[0] == (2, 8)
    assert len(ours) == len(stock)
    rows = [size[0] for size in ours[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 8
    assert {size[0] for size in stock} == {16}


def test_rows_are_kept_where_a_processor_knows_them_by_number(model, tokenizer, monkeypatch):
    model.eval()
    monkeypatch.setitem(forwards._why_not, model, None)
    _, _, sizes = generate(model, tokenizer, ["1+2="] * 8, True, repetition_penalty=1.3)
    assert sizes[0][0] == 1
    assert {size[0] for size in sizes[1:]} == {8}


@pytest.mark.parametrize(
    "settings", [{"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}]
)
def test_what_it_cannot_do_is_left_to_transformers(model, tokenizer, settings, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(decoder, "decode", never)
    model.eval()
    ours = generate(model, tokenizer, ["1+2="] * 4, True, **settings)[0]
    assert torch.equal(ours, generate(model, tokenizer, ["1+2="] * 4, False, **settings)[0])


def test_a_model_with_sliding_windows(tokenizer):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.3,
        eos_token_id=list(range(25)),
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    prompts = ["what is 1+2?"] * 5 + ["7*8="] * 5
    ours, _, sizes = generate(model, tokenizer, prompts, True)
    assert torch.equal(ours, generate(model, tokenizer, prompts, False)[0])
    assert sizes[0][0] == 2


@pytest.mark.parametrize("family", ["Mamba", "FalconH1", "Lfm2", "Qwen3Next"])
def test_models_with_a_running_state_are_left_to_transformers(tokenizer, family, monkeypatch):
    import transformers

    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(decoder, "decode", never)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    extra = {
        "Mamba": {"state_size": 8},
        "FalconH1": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        "Lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1]},
        "Qwen3Next": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    }[family]
    config = getattr(transformers, f"{family}Config")(**sizes, **extra, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.full((4, 5), 7)
    generation = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    with shared_prefill(model):
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert model.generate(**arguments, generation_config=generation).shape[0] == 4


def test_options_of_the_model_count_where_the_call_is_silent(model, tokenizer, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(decoder, "decode", never)
    model.generation_config.use_cache = False
    assert generate(model.eval(), tokenizer, ["1+2="] * 4, True)[0].shape[0] == 4


def test_an_error_leaves_the_model_as_it_was(model):
    with pytest.raises(KeyError), shared_prefill(model):
        raise KeyError
    assert "generate" not in vars(model)


@pytest.mark.parametrize("lora", [False, True])
def test_the_trainer_generates_the_same_completions(settings, prompts, tokenizer, reward, lora):
    from peft import LoraConfig

    seen = {True: [], False: []}

    def run(fast):
        sizes = []

        def watching(completion_ids, **kwargs):
            seen[fast].append([list(ids) for ids in completion_ids])
            return reward(completion_ids)

        peft = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if lora else {}
        model = tiny_model(tokenizer)
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        config = {**settings, "fast_generation": fast, "max_steps": 1}
        train(DrGRPOTrainer, config, prompts, tokenizer, watching, model, **peft)
        return sizes[0]

    assert run(True) == 2
    assert run(False) == 8
    assert seen[True] == seen[False]


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_model_trains_on_what_it_kept_of_a_generation(tokenizer, is_buffer):
    model = tiny_model(tokenizer).eval()
    norm = model.model.norm

    def scaled(module, args):
        (states,) = args
        kept = torch.ones_like(states[0, 0])  # made anew in each forward without gradients, and kept
        if not torch.is_grad_enabled():
            module.register_buffer("kept", kept) if is_buffer else setattr(module, "kept", kept)
        return (states * module.kept,)

    hook = norm.register_forward_pre_hook(scaled)
    tokens, _, _ = generate(model, tokenizer, ["1+2="] * 4, True)
    assert not tokens.is_inference()
    model(input_ids=tokens, labels=tokens).loss.backward()
    hook.remove()


@pytest.mark.parametrize("is_quantized", [True, False])
def test_no_forward_of_a_generation_records_gradients(tokenizer, is_quantized):
    model, recorded = tiny_model(tokenizer).eval(), set()
    model.is_quantized = is_quantized  # its layers keep tensors, so it decodes outside of inference mode
    model.lm_head.register_forward_hook(lambda module, args, output: recorded.add(output.requires_grad))
    generate(model, tokenizer, ["1+2="] * 4, True)
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


def test_scores_that_are_not_finite_are_an_error():
    scores = torch.zeros(2, 5)
    scores[1, 3] = torch.inf
    with pytest.raises(RuntimeError, match="inf"):
        decoder._sampled(scores, torch.arange(2), 2)
