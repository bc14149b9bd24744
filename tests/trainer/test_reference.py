"""The reference of KL is what the run starts from, whoever made it: at the first step KL is exactly 0."""

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from runs import logged
from tiny import random_weights, save_tiny, sizes, tiny_model
from tiny_bases import load, nf4, save_base
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2Model

from trl_drgrpo.common.errors import InputError


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture(scope="module")
def tied_base(tokenizer, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tied"), tokenizer, tie_word_embeddings=True)


def shifted(model):
    """The model after some training: what can be trained is elsewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


LORA = LoraConfig(r=4, target_modules="all-linear")


def adapted(base, config=LORA, name="default", **loading):
    return shifted(get_peft_model(load(base, **loading), copy.deepcopy(config), adapter_name=name))


def kl(trainer):
    """Values of two steps."""
    trainer.train()
    return logged(trainer, "kl")


def assert_starts_at_0(trainer):
    first, second = kl(trainer)
    assert first == 0
    assert second > 0


@pytest.fixture
def build(build):
    return lambda model, **given: build(model=model, **{"beta": 0.1, "max_steps": 2, **given})


# Full models


def resized(base, tokenizer):
    model = load(base)
    model.resize_token_embeddings(len(tokenizer) + 8)
    return model


def with_transformers_adapter(base, tokenizer):
    model = load(base)
    try:
        model.add_adapter(LORA)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers: {error}")  # 5.24 asks for a peft that is not released yet
    return shifted(model)


MODELS = {
    "changed": lambda base, tokenizer: shifted(load(base)),
    "merged": lambda base, tokenizer: adapted(base).merge_and_unload().requires_grad_(True),
    "resized": resized,
    "in memory": lambda base, tokenizer: tiny_model(tokenizer),
    "an adapter of transformers": with_transformers_adapter,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_of_a_passed_model_is_a_copy(name, base, tokenizer, build):
    model = MODELS[name](base, tokenizer)
    trainer = build(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_starts_at_0(trainer)
    after = dict(trainer.ref_model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in start.items())
    assert not any(parameter.requires_grad for parameter in after.values())
    assert not trainer.ref_model.training


def test_tied_weights_stay_tied(tied_base, build):
    trainer = build(shifted(load(tied_base)))
    reference = trainer.ref_model
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    assert reference.lm_head.weight is not trainer.model.lm_head.weight
    assert_starts_at_0(trainer)


# Adapters

KINDS = {
    "lora": LORA,
    "lora on embeddings": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "dora": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "modules trained in full": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[40, 41]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "adalora": AdaLoraConfig(target_modules=["q_proj"], total_step=10, tinit=1, tfinal=1),
    # Takes from the base what it puts into the adapter, and must not do so again for the copy.
    "pissa": LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa"),
    "virtual tokens": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_passed_adapter_is_a_copy_for_every_kind_and_name(kind, base, build):
    model = adapted(base, KINDS[kind], "mine")
    trainer = build(model)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("mine" in name.split(".") for name in trained)
    assert trainer.model.active_adapter == "mine"
    assert_starts_at_0(trainer)


def test_the_copy_is_of_the_active_adapter(base, build):
    model = adapted(base)
    model.add_adapter("second", LORA)
    model.set_adapter("second")
    assert_starts_at_0(build(shifted(model)))


def test_a_second_run_with_the_same_model_starts_from_what_the_first_made(base, build):
    first = build(adapted(base))
    assert kl(first)[0] == 0
    assert_starts_at_0(build(first.model))


def test_the_reference_of_an_adapter_on_a_quantized_base_starts_at_0(base, build):
    trainer = build(adapted(base, name="mine", quantization_config=nf4()), adapter_dtype="float32")
    assert_starts_at_0(trainer)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_initialization_that_changes_the_base_is_part_of_the_reference(init, base, build):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
    assert_starts_at_0(build(base, peft_config=config))


def test_a_new_adapter_needs_no_copy(base, build):
    trainer = build(base, peft_config=LORA)
    assert list(trainer.model.peft_config) == ["default"]
    assert_starts_at_0(trainer)


def test_a_copy_draws_no_random_numbers(base, build):
    """So a run with KL samples what it did in TRL."""
    states = []
    for beta in (0.0, 0.1):
        build(adapted(base), beta=beta)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_adapters_of_which_no_copy_can_be_the_reference_are_refused(base, build):
    both = adapted(base)
    both.add_adapter("second", LORA)
    both.base_model.set_adapter(["default", "second"])
    with pytest.raises(InputError, match="2 active adapters"):
        build(both)
    with pytest.raises(InputError, match="name 'ref'"):
        build(adapted(base, name="ref"))


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_that_peft_trains_in_the_base_leave_no_reference(bias, base, build):
    config = LoraConfig(r=2, target_modules=["q_proj"], bias=bias, task_type="CAUSAL_LM")
    with pytest.raises(InputError, match=f"model: got an adapter with bias='{bias}'"):
        build(adapted(base, config))
    with pytest.raises(InputError, match=f"peft_config: got an adapter with bias='{bias}'"):
        build(load(base), peft_config=config)
    build(load(base), peft_config=config, beta=0.0)


# The folder of an adapter as the model


@pytest.fixture(scope="module")
def adapter_folder(base, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    adapted(base).save_pretrained(folder)
    own = AutoTokenizer.from_pretrained(base)
    own.chat_template = "{{ messages[0]['content'] }} of the adapter"
    own.save_pretrained(folder)
    return str(folder)


def trainable(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_an_adapters_folder_is_trained_further(adapter_folder, base, build, output):
    trainer = build(adapter_folder)
    start = trainable(trainer)
    saved = dict(PeftModel.from_pretrained(load(base), adapter_folder).named_parameters())
    assert start
    assert all(torch.equal(saved[name], value) for name, value in start.items())
    assert_starts_at_0(trainer)
    assert all(not torch.equal(start[name], value) for name, value in trainable(trainer).items())
    trainer.save_model()
    assert PeftModel.from_pretrained(load(base), output).peft_config["default"].base_model_name_or_path == base


def test_with_the_tokenizer_that_was_saved_with_it(adapter_folder, settings, prompts, reward):
    from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

    trainer = DrGRPOTrainer(adapter_folder, reward, DrGRPOConfig(**settings), prompts)
    assert trainer.processing_class.chat_template.endswith("of the adapter")
    assert trainer.processing_class.padding_side == "left"


def test_on_a_quantized_base(adapter_folder, build):
    trainer = build(adapter_folder, quantization_config=nf4(), adapter_dtype="float32")
    assert trainer.model.is_loaded_in_4bit
    assert {p.dtype for p in trainable(trainer).values()} == {torch.float32}
    assert_starts_at_0(trainer)


def test_a_run_that_began_with_one_is_resumed(adapter_folder, build, tmp_path):
    def run(folder, resume=None):
        trainer = build(adapter_folder, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / folder))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-1"))
    values = trainable(whole)
    assert all(torch.equal(values[name], value) for name, value in trainable(resumed).items())
    assert logged(resumed, "kl")[-1] == logged(whole, "kl")[-1]


def test_a_second_adapter_on_top_is_refused(adapter_folder, base, build):
    for model in (adapter_folder, adapted(base)):
        with pytest.raises(InputError, match="a new adapter for a model that has one"):
            build(model, peft_config=LORA)


def test_a_folder_whose_base_is_gone_is_refused(base, tokenizer, build, tmp_path):
    model = adapted(base)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "moved")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="moved, which does not exist"):
        build(str(tmp_path / "adapter"))


# Heads that transformers would make at random


@pytest.fixture(scope="module")
def headless(tokenizer, tmp_path_factory):
    config = Qwen2Config(**sizes(tokenizer, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=False))
    config.architectures = ["Qwen2ForCausalLM"]
    folder = tmp_path_factory.mktemp("headless")
    save_tiny(folder, tokenizer, random_weights(Qwen2Model._from_config, config))
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("Qwen2Model", "Qwen2ForCausalLM"))
    return str(folder)


def test_a_policy_without_a_trained_head_is_refused(headless, build):
    with pytest.raises(InputError, match=r"without lm_head\.weight"):
        build(headless)


def test_the_base_of_an_adapter_too(headless, base, build, tmp_path):
    model = adapted(base)
    model.peft_config["default"].base_model_name_or_path = headless
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"without lm_head\.weight"):
        build(str(tmp_path))


def test_a_reward_model_without_a_trained_head_is_refused(base, tokenizer, build, tmp_path):
    with pytest.raises(InputError, match=r"reward_funcs.*without score\.weight"):
        build(base, reward=base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    save_tiny(tmp_path, tokenizer, model)
    build(base, reward=str(tmp_path))
