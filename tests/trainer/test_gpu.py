"""What a CPU cannot show: autocast to bfloat16, 4-bit weights and generation on an accelerator. Run by `make gpu`."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from runs import logged, train, weights
from tiny import tiny_model
from transformers import BitsAndBytesConfig, GenerationConfig

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture
def on_gpu(settings):
    return {**settings, "use_cpu": False, "bf16": True}


ours = partial(train, DrGRPOTrainer)


def last_loss(trainer):
    return logged(trainer, "loss")[-1]


@pytest.mark.parametrize("extra", [{}, {"beta": 0.1}, {"forks": 2, "step_separator": ["tokens:3"]}])
def test_trains_in_bfloat16(extra, on_gpu, prompts, tokenizer, reward):
    trainer = ours({**on_gpu, **extra}, prompts, tokenizer, reward)
    assert next(trainer.model.parameters()).device.type == "cuda"
    assert all(p.isfinite().all() for p in weights(trainer).values())


def test_the_fast_path_computes_the_same_in_float32(on_gpu, prompts, tokenizer, reward):
    on_gpu = {**on_gpu, "bf16": False, "fast_generation": False}  # the same random numbers, the same rows
    exact = ours(on_gpu, prompts, tokenizer, reward)
    stock = ours({**on_gpu, "micro_batching": "upstream"}, prompts, tokenizer, reward)
    for name, value in weights(exact).items():
        assert torch.allclose(value, weights(stock)[name], atol=1e-3), name


def test_generation_samples_the_same_tokens(tokenizer):
    model = tiny_model(tokenizer).to("cuda").eval()
    ids = torch.randint(40, 200, (2, 30), device="cuda").repeat_interleave(4, dim=0)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "generation_config": GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0),
    }
    theirs = model.generate(**arguments)
    with shared_prefill(model):
        assert torch.equal(model.generate(**arguments), theirs)


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
