"""Presets: the same values in Python, in recipes and in what is trained with; nothing that was given is lost."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from tiny_families import configuration_with_states, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config

from trl_drgrpo import DrGRPOConfig, lora_preset, preset_arguments
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.lora_presets import PRESETS, preset_values
from trl_drgrpo.single_gpu.peft_adapters import limit_to_language_model

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        *((kind, ATTENTION | MLP) for kind in ("Qwen2", "Qwen3", "Llama", "Gemma2")),
        ("Phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("GPT2", {"c_attn", "c_proj", "c_fc"}),
        ("Qwen3Moe", ATTENTION),  # experts and router too where peft knows them; never the head
    ],
)
def test_all_linear_layers_but_the_head_are_adapted(tokenizer, kind, layers, tied):
    model = tiny(kind, tokenizer, tie_word_embeddings=tied)
    wrapped = get_peft_model(model, lora_preset())
    adapted = {name.partition(".lora_A")[0] for name, _ in wrapped.named_parameters() if ".lora_A" in name}
    assert not any(part in name for name in adapted for part in ("lm_head", "embed", "wte"))
    assert layers <= {name.rpartition(".")[2] for name in adapted}
    if kind != "Qwen3Moe":
        assert layers == {name.rpartition(".")[2] for name in adapted}


@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_is_the_same_in_python_and_in_a_recipe(name):
    python, recipe = lora_preset(name), preset_values(name, {})
    model_args = ModelConfig(**{key: value for key, value in recipe.items() if key in _fields(ModelConfig)})
    built, wanted = get_peft_config(model_args).to_dict(), python.to_dict()
    assert built == wanted
    quantization = get_quantization_config(model_args)
    if name == "lora":
        assert python.quantization_config is quantization is None
    else:
        for config in (quantization, python.quantization_config):
            assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
            assert config.bnb_4bit_compute_dtype == getattr(torch, model_args.dtype)
    training = preset_arguments(name)
    assert training.pop("model_init_kwargs") == {"dtype": recipe["dtype"]}
    assert training == {key: value for key, value in recipe.items() if key in _fields(DrGRPOConfig)}


def _fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_given_values_win_over_a_preset(tmp_path):
    values = preset_values("qlora", {"learning_rate": 3e-5, "lora_r": 4, "optim": "sgd", "dtype": "bfloat16"})
    assert not {"learning_rate", "lora_r", "optim", "dtype"} & values.keys()
    assert values["load_in_4bit"] is True
    inside = preset_values("qlora", {"model_init_kwargs": {"dtype": "bfloat16"}})
    model_args = ModelConfig(**{key: value for key, value in inside.items() if key in _fields(ModelConfig)})
    assert get_quantization_config(model_args).bnb_4bit_compute_dtype == torch.bfloat16
    given = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float16"}, "learning_rate": 3e-5}
    arguments = preset_arguments("lora", **given)
    assert (arguments["model_init_kwargs"], arguments["learning_rate"]) == (given["model_init_kwargs"], 3e-5)
    config = DrGRPOConfig(**preset_arguments("lora", output_dir=str(tmp_path)))
    # Ten times the full fine-tuning rate.
    assert config.learning_rate == pytest.approx(10 * GRPOConfig.learning_rate)
    assert lora_preset(r=4, target_modules=["q_proj"]).target_modules == {"q_proj"}


def test_on_an_accelerator_bfloat16_and_the_paged_optimizer(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert lora_preset("qlora").quantization_config.bnb_4bit_compute_dtype == torch.bfloat16
    values = preset_values("qlora", {})
    assert (values["optim"], values["dtype"]) == ("paged_adamw_8bit", "bfloat16")
    assert "optim" not in preset_values("lora", {})
    on_cpu = preset_values("qlora", {"use_cpu": True})
    assert (on_cpu.get("optim"), on_cpu["dtype"]) == (None, "float32")
    assert "optim" not in preset_arguments("qlora", use_cpu=True)
    # An old card: bfloat16 only by emulation.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert preset_values("qlora", {})["dtype"] == "float32"


def test_saved_adapters_are_plain_lora(tmp_path, model):
    config = lora_preset("qlora", r=2)
    assert isinstance(config.quantization_config, BitsAndBytesConfig)
    get_peft_model(model, config).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "adapter_config.json").read_text())
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert type(loaded) is LoraConfig
    assert (loaded.r, loaded.lora_alpha, loaded.lora_dropout) == (2, 32, 0.0)


def test_the_stock_trainer_takes_it_as_plain_lora(build):
    arguments = {"trainer_class": GRPOTrainer, "peft_config": lora_preset("qlora", r=2)}
    trainer = build(**arguments, use_cpu=True, bf16=False)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert any("lora_A" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lora_preset("qlorra"), "preset: got 'qlorra'; expected one of lora, qlora. Did you mean 'qlora'?"),
        (lambda: lora_preset(None), "Pick one of them."),
        (lambda: preset_arguments("full"), "preset: got 'full'"),
        (lambda: lora_preset(rank=4), "rank: got an unknown field"),
        (lambda: lora_preset(lora_alfa=4), "Did you mean lora_alpha?"),
        (lambda: lora_preset(learning_rate=1e-4), "Training arguments go into preset_arguments"),
        (lambda: lora_preset(r=0), "r: got 0; expected a whole number, at least 1"),
        (lambda: lora_preset(r="8"), "r: got '8'"),
        (lambda: preset_values("lora", {"load_in_4bit": True}), "A 4-bit base is the preset 'qlora'."),
        (lambda: preset_values("qlora", {"load_in_4bit": False}), "load_in_4bit: got False with the preset"),
        (lambda: preset_values("qlora", {"load_in_8bit": True}), "load_in_8bit: got True"),
        (lambda: preset_values("lora", {"use_peft": False}), "use_peft: got False"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_without_bitsandbytes_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'^preset: got .qlora., but .* `pip install "trl-drgrpo\[qlora\]"`'):
        lora_preset("qlora")


@pytest.mark.parametrize("family", ["NemotronH", "FalconH1"])
def test_a_preset_leaves_out_layers_that_peft_refuses(family, tokenizer):
    """Kernels of Mamba read the weight of `out_proj` past an adapter."""
    preset = lora_preset("lora", r=2)
    with pytest.raises(ValueError, match="out_proj"):
        get_peft_model(model_with_states(family, tokenizer), preset)
    model = model_with_states(family, tokenizer)
    limit_to_language_model(preset, model)
    names = [name for name, _ in get_peft_model(model, preset).named_parameters() if "lora_A" in name]
    layers = {name.partition(".lora_A")[0].rpartition(".")[2] for name in names}
    assert "in_proj" in layers
    assert "out_proj" not in layers


def model_with_states(family, tokenizer):
    return AutoModelForCausalLM.from_config(configuration_with_states(family, tokenizer))
