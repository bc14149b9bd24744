"""Mixtures of experts, and other families than the tiny Qwen2 of all other tests: two steps, a card, a saved model."""

import re
from functools import partial

import pytest
import torch
from datasets import Dataset
from gradient_runs import EXACT, Watching, difference, gradients
from peft import LoraConfig, get_peft_model
from runs import assert_same_weights, logged, weights
from tiny import InDouble, random_weights
from tiny_families import DENSE, EXPERTS, configuration_with_states, tiny
from transformers import AutoModelForCausalLM

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.speed import SpeedPart
from trl_drgrpo.host_proof.recording import LORA

SAVES = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def trained(train, tokenizer, output):
    """A trainer after two steps and a save; its weights have moved and can be loaded."""

    def trained(family, **fields):
        model = tiny(family, tokenizer)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = train(model=model, **SAVES, **fields)
        trainer.save_model()
        assert any(not torch.equal(start[name], value) for name, value in weights(trainer).items())
        loaded = AutoModelForCausalLM.from_pretrained(output)
        assert_same_weights(weights(trainer), dict(loaded.named_parameters()))
        assert trainer.describing.failures == {}
        return trainer

    return trained


slow = pytest.mark.slow


# The weight that each architecture declares, by default; 0 switches the loss off, and the planned micro-batches on.
@pytest.mark.parametrize(
    ("family", "given", "weight"),
    [
        ("GptOss", None, "0.001"),
        ("Mixtral", 0.05, "0.05"),
        *[pytest.param(family, None, "0.001", marks=slow) for family in ("Qwen3Moe", "Mixtral")],
        pytest.param("Qwen3Moe", 0.05, "0.05", marks=slow),
        pytest.param("GptOss", 0.05, "0.05", marks=slow),
        *[pytest.param(family, 0.0, None, marks=slow) for family in EXPERTS],
    ],
)
def test_experts_train_and_save(family, given, weight, trained, output):
    trainer = trained(family, router_aux_loss_coef=given)
    card = (output / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"router's load-balancing loss, weight ([\d.]+)\.$", card, re.MULTILINE)
    assert (stated[1] if stated else None) == weight
    assert ("aux_loss" in trainer.state.log_history[0]) == (weight is not None)
    assert trainer.fast_path.plans == (weight is None)


def test_experts_resume_bit_for_bit(trained, train, tokenizer, output):
    # The file holds each expert by itself, the model all of them as one tensor.
    whole, checkpoint = trained("Qwen3Moe"), str(output / "checkpoint-1")
    resumed = train(model=tiny("Qwen3Moe", tokenizer), **SAVES, resume=checkpoint)
    assert_same_weights(weights(whole), weights(resumed))
    resumed.state.best_model_checkpoint = checkpoint  # as load_best_model_at_end=True leaves it
    resumed._load_best_model()
    best = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_same_weights(weights(resumed), dict(best.named_parameters()))


@slow
@pytest.mark.parametrize("family", DENSE)
def test_other_families_train_and_save(family, trained):
    trained(family)


LONG_PROMPTS = Dataset.from_dict({"prompt": [f"What is {i} plus {i * i}? Think step by step: " for i in range(8)]})


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", pytest.param("Cohere2", marks=slow)])
def test_models_with_sliding_windows_share_prompts_and_train_as_in_trls_micro_batches(family, train, tokenizer):
    """The windows of 16 tokens begin within prompts and within completions."""
    settings = {"optim": "sgd", "max_steps": 2, "data": LONG_PROMPTS}
    ours = train(model=tiny(family, tokenizer), **settings)
    theirs = train(model=tiny(family, tokenizer), micro_batching="upstream", **settings)
    assert logged(ours, "drgrpo/upstream_token_frac")[-1] < 0.6
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-4, atol=1e-6)


# Longer than a chunk of the delta rule: behind shorter ones, completions fill up as many chunks as whole rows.
LONGER_PROMPTS = Dataset.from_dict({"prompt": [3 * prompt for prompt in LONG_PROMPTS["prompt"]]})


# A delta rule beside attention, Mamba 2 beside attention and in one layer with it, convolutions alone.
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3_5Text", {}),
        ("Lfm2", {"num_iterations": 2, "beta": 0.1, "lora": True, "max_steps": 4}),
        pytest.param("NemotronH", {"num_iterations": 2, "max_steps": 4}, marks=slow),
        pytest.param("FalconH1", {"beta": 0.1}, marks=slow),
        pytest.param("Lfm2", {"pad_to_multiple_of": 8}, marks=slow),
    ],
)
def test_completions_start_from_the_states_of_their_prompt_and_never_from_each_others(family, settings, tokenizer):
    def run(trainer_class, **more):
        fields = {"max_steps": 2, **settings, **more}
        lora = fields.pop("lora", False)
        model = random_weights(AutoModelForCausalLM.from_config, configuration_with_states(family, tokenizer)).double()
        if lora:
            model = random_weights(partial(get_peft_model, model), LoraConfig(**LORA)).double()
        with InDouble():
            return gradients(trainer_class, fields, model=model, prompts=LONGER_PROMPTS["prompt"], lora=lora)

    Watching.plans_seen = []
    ours = run(Watching)
    assert max(len(pack) for plan in Watching.plans_seen if plan for pack in plan["packs"]) == 4
    assert difference(ours, run(DrGRPOTrainer, micro_batching="upstream")) <= EXACT


def test_checkpointed_layers_start_from_states_too(train, tokenizer):
    def run(**settings):
        model = random_weights(AutoModelForCausalLM.from_config, configuration_with_states("Lfm2", tokenizer))
        settings = {"optim": "sgd", "max_steps": 2, "data": LONGER_PROMPTS, "gradient_checkpointing": True, **settings}
        return train(model=model, **settings)

    ours, theirs = run(), run(micro_batching="upstream")
    assert ours.fast_path.speed.uses[SpeedPart.SHARED_PROMPTS] > 0
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-4, atol=1e-6)
    refused = run(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert refused.fast_path.speed.uses[SpeedPart.SHARED_PROMPTS] == 0
    assert "from the states of a prompt" in refused.fast_path.speed.facts()[SpeedPart.SHARED_PROMPTS]
