"""Checkpoints with a vision tower, used for text: adapters, quantization, merging, loading as a part, the plan."""

import json

import families
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors import safe_open
from tiny import save_tiny
from tiny_multimodal import MULTIMODAL, adapted_layers, save_multimodal
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from trl_drgrpo import lora_preset
from trl_drgrpo.check.small import small_model
from trl_drgrpo.evaluation.models import Loading, load_model
from trl_drgrpo.single_gpu.memory import Planner, Setup, Skeleton, read_config, text_part
from trl_drgrpo.single_gpu.merging import merge_adapter

SHORT = {"max_steps": 2, "learning_rate": 1e-2}
ALL_LINEAR = {"r": 4, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    made = {}

    def folder(model_type):
        if model_type not in made:
            made[model_type] = save_multimodal(tmp_path_factory.mktemp(model_type), tokenizer, model_type)
        return made[model_type]

    return folder


@pytest.fixture(scope="module")
def chats():
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+{i}="}] for i in range(8)]})


FAST = ("qwen3_5", "gemma3")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MULTIMODAL]
)
def test_a_preset_adapts_the_language_model_alone(model_type, folders, train, chats, output):
    trainer = train(model=folders(model_type), data=chats, peft_config=lora_preset(), **SHORT)
    layers = adapted_layers(trainer.model)
    assert layers
    assert all(".language_model." in layer for layer in layers)
    assert {"prompts run once", "planned micro-batches"} <= {
        part for part, reason in trainer.fast_path.speed.facts().items() if reason == "yes"
    }
    trainer.save_model()
    assert trainer.describing.failures == {}
    report = merge_adapter(output, f"{output}_merged")
    assert report.max_logit_difference < 1e-3 < report.adapter_effect
    config = json.loads((output.parent / f"{output.name}_merged" / "config.json").read_text())
    assert config["model_type"] == model_type
    text = load_model(str(output), Loading())
    assert set(adapted_layers(text)) == set(layers)


@pytest.mark.parametrize("asked", [{"target_modules": "all-linear"}, {"exclude_modules": "lm_head"}], ids=str)
def test_other_layers_are_adapted_when_they_are_asked_for(asked, folders, build, chats):
    trainer = build(model=folders("gemma3"), data=chats, peft_config=lora_preset(**asked))
    assert any("vision_tower" in layer for layer in adapted_layers(trainer.model))


def test_a_preset_may_be_used_for_several_models(folders, build, chats, saved_model):
    preset = lora_preset()
    build(model=folders("gemma3"), data=chats, peft_config=preset)
    assert preset.exclude_modules is None
    assert adapted_layers(build(model=saved_model, data=chats, peft_config=preset, output_dir="unused").model)


@pytest.mark.parametrize("preset", ["lora", "qlora"])
def test_the_language_model_alone_is_trained_merged_and_trained_further(preset, folders, train, build, output):
    """Its layers have other names than those of the whole model."""
    if preset == "qlora":
        pytest.importorskip("bitsandbytes")
    adapter = lora_preset(preset)
    loading = {"quantization_config": adapter.quantization_config} if preset == "qlora" else {}
    model = AutoModelForCausalLM.from_pretrained(folders("qwen3_5"), dtype=torch.float32, **loading)
    trainer = train(model=model, peft_config=adapter, **SHORT)
    trainer.save_model()
    layers = adapted_layers(trainer.model)
    assert not any("language_model" in layer for layer in layers)
    report = merge_adapter(output, f"{output}_merged")
    assert report.max_logit_difference < 1e-3 < report.adapter_effect
    assert set(adapted_layers(load_model(str(output), Loading()))) == set(layers)
    resumed = build(model=str(output), output_dir=f"{output}_further")
    assert set(adapted_layers(resumed.model)) == set(layers)


@pytest.mark.parametrize("auto_class", [AutoModelForImageTextToText, AutoModelForCausalLM])
def test_all_weights_are_trained_and_saved(auto_class, folders, train, output):
    trainer = train(model=auto_class.from_pretrained(folders("qwen3_5"), dtype=torch.float32), **SHORT)
    trainer.save_model()
    assert load_model(str(output), Loading()).config.get_text_config().num_hidden_layers > 0
    with safe_open(output / "model.safetensors", "pt") as file:
        assert any(".language_model.layers.0." in name for name in file.keys())  # noqa: SIM118


def test_a_whole_model_without_a_class_for_its_language_model_writes_text(folders):
    model = load_model(folders("mistral3"), Loading())
    ids = torch.tensor([[65, 66]])
    assert model.generate(ids, max_new_tokens=2).shape[1] > 2


@pytest.mark.parametrize("model_type", [*MULTIMODAL, "mistral4", "qwen3_vl"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_counts_all_weights(model_type, tied, tokenizer):
    """The language model is counted like a model of its own, and the towers beside it."""
    config = CONFIG_MAPPING[model_type]()
    config.tie_word_embeddings = tied
    model = small_model(config, tokenizer)
    text, _ = text_part(model.config)
    parts = [model.get_decoder(), model.get_output_embeddings()]
    weights = {id(weight): weight.numel() for part in parts for weight in part.parameters()}
    assert Skeleton(text, Setup(device="cpu")).parameters == sum(weights.values())
    model.config.architectures = [type(model).__name__]
    planner = Planner(model.config, Setup(device="cpu"))
    assert planner.parameters == sum(weight.numel() for weight in model.parameters())


WEIGHTS = ("embeddings and head", "layers", "towers and projectors")
IN_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


@pytest.mark.parametrize(("model_type", "bits"), [("gemma3", 0), ("gemma4", 0), ("gemma3", 4), ("mistral3", 4)])
def test_planned_bytes_are_those_of_a_loaded_model(model_type, bits, tokenizer, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    if model_type == "gemma4":  # with embeddings for each layer, and both towers
        config.vision_config = CONFIG_MAPPING["gemma4_vision"]()
        config.audio_config = CONFIG_MAPPING["gemma4_audio"]()
    config.architectures = [families.CLASSES[model_type]]
    folder = save_tiny(tmp_path, tokenizer, small_model(config, tokenizer))
    setup = Setup(device="cpu", autocast=None, bits=bits, prompt=8, completion=8)
    load = Planner(read_config(folder), setup).estimate(setup).phases["load"]
    options = {"quantization_config": BitsAndBytesConfig(**IN_FOUR_BITS)} if bits else {}
    model_class = getattr(transformers, families.CLASSES[model_type])
    model = model_class.from_pretrained(folder, dtype=torch.float32, **options)
    tensors = [*model.parameters(), *model.buffers()]
    states = [state for weight in model.parameters() if (state := getattr(weight, "quant_state", None)) is not None]
    measured = sum(tensor.nbytes for tensor in tensors)
    measured += sum(state.absmax.nbytes + state.code.nbytes for state in states)
    planned = sum(load[part] for part in WEIGHTS)
    assert load["towers and projectors"] > 0.1 * planned
    assert planned == pytest.approx(measured, rel=0.01)
