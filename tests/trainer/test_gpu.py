"""What a CPU cannot show: autocast to bfloat16, 4-bit weights and generation on an accelerator. Run by `make gpu`."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from runs import logged, train, weights
from tiny import random_weights, tiny_model
from tiny_families import configuration_with_states, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding import replay
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.decoding.replay import record

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture
def on_gpu(settings):
    return {**settings, "use_cpu": False, "bf16": True}


ours = partial(train, DrGRPOTrainer)


def last_loss(trainer):
    return logged(trainer, "loss")[-1]


@pytest.mark.parametrize("extra", [{}, {"beta": 0.1}, {"forks": 2, "step_separator": ["tokens:3"]}])
def test_trains_in_bfloat16(extra, on_gpu, prompts, tokenizer, reward, saved_model):
    trainer = ours({**on_gpu, **extra}, prompts, tokenizer, reward, model=saved_model)  # a reference is loaded anew
    assert next(trainer.model.parameters()).device.type == "cuda"
    assert all(p.isfinite().all() for p in weights(trainer).values())


def test_the_fast_path_computes_the_same_in_float32(on_gpu, prompts, tokenizer, reward):
    on_gpu = {**on_gpu, "bf16": False, "fast_generation": False}  # the same random numbers, the same rows
    exact = ours(on_gpu, prompts, tokenizer, reward)
    stock = ours({**on_gpu, "micro_batching": "upstream"}, prompts, tokenizer, reward)
    for name, value in weights(exact).items():
        assert torch.allclose(value, weights(stock)[name], atol=1e-3), name


def generate(model, new_tokens=150, **settings):
    """Tokens of eight completions of two prompts."""
    prompts = torch.randint(40, 200, (2, 30), generator=torch.Generator().manual_seed(0))
    ids = prompts.repeat_interleave(4, dim=0).cuda()
    wanted = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": 1, "suppress_tokens": [1], **settings}
    config = GenerationConfig(pad_token_id=0, **wanted)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)


def assert_same_tokens(model, new_tokens):
    """As transformers' own loop writes them."""
    theirs = generate(model, new_tokens)
    with shared_prefill(model):
        assert torch.equal(generate(model, new_tokens), theirs)


@pytest.fixture
def recordings(monkeypatch):
    """How many steps were recorded as CUDA graphs."""
    made = []
    # Noted by the device alone: a step that is kept would keep its buffers.
    monkeypatch.setattr(replay, "record", lambda step, device: made.append(device) or record(step, device))
    return made


@pytest.mark.parametrize("lora", [False, True])
def test_recorded_steps_write_the_same_tokens(lora, tokenizer, recordings):
    model = tiny_model(tokenizer).to("cuda").eval()
    if lora:
        adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, adapter)
    assert_same_tokens(model, 150)
    assert len(recordings) >= 2  # buffers grew


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Gemma2", "Gemma3Text", "GPT2", "Qwen3Moe", "Mixtral", "GptOss"]
)
def test_families_write_the_same_tokens_recorded_or_not(family, tokenizer):
    model = tiny(family, tokenizer).to("cuda").eval()
    assert_same_tokens(model, 100)


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Lfm2", "NemotronH", "Bamba"])
def test_running_states_write_the_same_tokens_recorded_or_not(family, tokenizer, recordings):
    configuration = configuration_with_states(family, tokenizer)
    model = random_weights(AutoModelForCausalLM.from_config, configuration).to("cuda").eval()
    assert_same_tokens(model, 100)
    assert len(recordings) >= 2  # or its steps wait for the GPU


def test_rows_leave_recorded_steps(tokenizer, recordings):
    model = tiny_model(tokenizer).to("cuda").eval()
    with shared_prefill(model):
        torch.manual_seed(0)
        tokens = generate(model, do_sample=True, eos_token_id=list(range(100, 108)))
    assert len(recordings) >= 3
    torch.manual_seed(0)
    assert torch.equal(generate(model, do_sample=True, eos_token_id=list(range(100, 108))), tokens)


def test_a_step_that_waits_for_the_gpu_is_not_recorded(tokenizer, caplog):
    def waiting(module, args, output):
        output[0].sum().item()

    model = tiny_model(tokenizer).to("cuda").eval()
    model.get_decoder().layers[0].register_forward_hook(waiting)
    assert_same_tokens(model, 30)
    assert "without recorded steps: RuntimeError: called a synchronizing CUDA operation" in caplog.text


def test_a_recording_that_fails_leaves_random_numbers_as_they_were(tokenizer, caplog):
    def reading(module, args, output):  # nothing that a step which is not recorded would refuse
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()

    model = tiny_model(tokenizer).to("cuda").eval()
    model.get_decoder().layers[0].register_forward_hook(reading)
    assert_same_tokens(model, 30)
    assert "without recorded steps" in caplog.text
    assert torch.rand(8, device="cuda").isfinite().all()
    cached = torch.empty(2**28, device="cuda").nbytes  # and the allocator still gives memory back
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - cached


def test_generations_hold_no_memory_afterwards(tokenizer, recordings):
    model = tiny_model(tokenizer).to("cuda").eval()
    reserved = []
    for _ in range(4):
        with shared_prefill(model):
            generate(model)
        reserved.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert recordings
    assert reserved[1] == reserved[3]


def test_lora_on_four_bits(on_gpu, prompts, tokenizer, reward, saved_model):
    pytest.importorskip("bitsandbytes")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = ours(
        on_gpu, prompts, tokenizer, reward, model=saved_model, peft_config=lora, quantization_config=quantized
    )
    adapters = {name: p for name, p in weights(trainer).items() if "lora_B" in name}
    assert any(p.abs().sum() > 0 for p in adapters.values())
    assert {p.dtype for p in adapters.values()} == {torch.float32}


def test_a_resumed_run_is_the_same_run(on_gpu, prompts, tokenizer, reward, tmp_path):
    saved = {**on_gpu, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = ours(saved, prompts, tokenizer, reward)
    again = ours(saved, prompts, tokenizer, reward, resume=f"{saved['output_dir']}/checkpoint-2")
    assert last_loss(again) == pytest.approx(last_loss(whole), rel=1e-3)
