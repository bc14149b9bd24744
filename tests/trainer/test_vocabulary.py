"""Ids that a run uses and the model has no embedding for are refused before weights load, others are not."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tiny_bases import save_base
from transformers import AutoModelForCausalLM

from trl_drgrpo.common.errors import InputError


@pytest.fixture
def extended():
    """A tokenizer with a token that its model was not resized for."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    return tokenizer


@pytest.fixture
def without_weights(monkeypatch):
    """Loading fails: what is refused, is refused before."""

    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", load)


@pytest.fixture
def construct(settings, reward):
    from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

    def construct(model, prompts, tokenizer=None, **given):
        data = Dataset.from_dict({"prompt": prompts})
        return DrGRPOTrainer(model, reward, DrGRPOConfig(**settings), data, processing_class=tokenizer, **given)

    return construct


PLAIN = ["1+1="] * 8
ONE_THINKS = [*PLAIN, "1+2=<think>"]
CHAT = [[{"role": "user", "content": text}] for text in ONE_THINKS]


@pytest.mark.parametrize("prompts", [ONE_THINKS, CHAT], ids=["text", "chat"])
def test_a_prompt_with_a_token_that_was_added_is_refused(
    prompts, extended, saved_model, construct, without_weights, tmp_path
):
    with pytest.raises(InputError, match=r"'<think>' of id \d+ in row 8"):
        construct(saved_model, prompts, extended)
    save_tiny(tmp_path, extended, tiny_model(tiny_tokenizer()))  # the tokenizer of the folder, too
    with pytest.raises(InputError, match="'<think>'"):
        construct(str(tmp_path), prompts)


def test_the_embeddings_of_a_model_in_memory_count(extended, construct):
    model = tiny_model(tiny_tokenizer())
    with pytest.raises(InputError, match="'<think>'"):
        construct(model, ONE_THINKS, extended)
    model.resize_token_embeddings(len(extended))
    construct(model, ONE_THINKS, extended).train()


@pytest.mark.parametrize("kind", ["pad_token", "eos_token"])
def test_special_tokens_are_used_by_every_run(kind, saved_model, construct, without_weights):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({kind: "<new>"})
    with pytest.raises(InputError, match=rf"'<new>' of id \d+ in the {kind}"):
        construct(saved_model, PLAIN, tokenizer)


def test_new_tokens_that_no_prompt_uses_are_allowed(extended, saved_model, construct):
    construct(saved_model, PLAIN, extended).train()


def test_more_embeddings_than_tokens_are_allowed(tokenizer, construct, tmp_path):
    construct(save_base(tmp_path, tokenizer, vocab_size=len(tokenizer) + 40), PLAIN).train()


def test_a_model_in_memory_needs_its_tokenizer(tokenizer, construct):
    with pytest.raises(InputError, match="processing_class: got none"):
        construct(tiny_model(tokenizer), PLAIN)


# Tokens that are trained beside an adapter


@pytest.mark.parametrize("tied", [True, False])
def test_trained_tokens_of_tied_weights_count_in_the_head_as_well(tied, tokenizer, construct, tmp_path):
    base = save_base(tmp_path, tokenizer, tie_word_embeddings=tied)
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[40, 41])
    trainer = construct(base, PLAIN, peft_config=config)
    (tokens,) = [p for name, p in trainer.model.named_parameters() if "trainable_tokens_delta" in name]
    with torch.no_grad():
        tokens.add_(1.0)
    ids = torch.tensor([[40, 41, 42, 40, 41]])

    def assert_scored_as_by(model):
        inputs = {"prompt_ids": ids[:, :2], "prompt_mask": torch.ones(1, 2, dtype=torch.long)}
        inputs |= {"completion_ids": ids[:, 2:], "completion_mask": torch.ones(1, 3, dtype=torch.long)}
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, 1:-1]
        expected = torch.log_softmax(logits, -1).gather(-1, ids[:, 2:].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(trainer.completion_log_probs(inputs), expected)

    assert_scored_as_by(trainer.model)
    with trainer.model.disable_adapter():  # the reference
        assert_scored_as_by(AutoModelForCausalLM.from_pretrained(base))
    before = tokens.detach().clone()
    trainer.train()
    assert not torch.equal(tokens, before)


def test_an_adapter_on_embeddings_that_peft_would_put_on_the_head_is_refused(tokenizer, construct, tmp_path):
    base = save_base(tmp_path, tokenizer, tie_word_embeddings=True)
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    with pytest.raises(InputError, match="ensure_weight_tying"):
        construct(base, PLAIN, peft_config=config)
