"""The measurement on a real trainer: its sums are gradients, its batches are the run's own."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from runs import length_reward

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer, dr_grpo_loss
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.labs.study.probe import measure_model, score_sums
from trl_drgrpo.upstream.batch_rows import token_batch


@pytest.fixture
def build(settings, prompts, tokenizer, model):
    def make(reward=length_reward, peft_config=None, data=prompts, **changes):
        return DrGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=DrGRPOConfig(**{**settings, **changes}),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    return make


def even_sum(completion_ids, **kwargs):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def test_the_direction_of_dr_grpo_is_the_gradient_of_its_loss(build):
    """The sums against autograd through the specification, over a batch in several forwards."""
    trainer = build()
    trainer.model.train()
    batch, inputs = next(sampled_batches(trainer))
    tokens, mask = token_batch(inputs), batch.trained_mask
    mask = mask * (torch.arange(mask.size(1)) < torch.arange(5, 5 + len(mask)).unsqueeze(1))  # what a tool wrote
    rewards, lengths = batch.rewards.numpy(), mask.sum(dim=1).numpy()
    weights = OBJECTIVES["dr_grpo"].token_weights(rewards, lengths, 4, trainer.loss_normalizer)
    found = score_sums(trainer, tokens, mask, weights[None])[0]

    log_probs = trainer.score_tokens(trainer.model, tokens)[0]
    dr_grpo_loss(log_probs, None, batch.advantages, mask, trainer.loss_normalizer).backward()
    expected = torch.cat([-p.grad.flatten() for p in trainer.model.parameters()]).numpy()
    assert np.linalg.norm(expected) > 1e-4
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_model_is_measured(build):
    seen = []
    found = measure_model(build(reward=even_sum), 4, lambda number, rollouts: seen.append(rollouts))
    assert found.batches == len(seen) == 4
    assert all(len(rollouts.lengths) == 8 for rollouts in seen)
    pass_rate = found.changes["dr_grpo"]["pass_rate"]
    assert np.isfinite(pass_rate.value)
    assert pass_rate.standard_error > 0


@pytest.mark.slow
def test_a_learnable_reward_rises_along_every_objective(build):
    def low_first_token(completion_ids, **kwargs):
        return [float(ids[0] < 128) for ids in completion_ids]

    trainer = build(
        reward=low_first_token,
        data=Dataset.from_dict({"prompt": [f"{i}=" for i in range(64)]}),
        per_device_train_batch_size=256,
        gradient_accumulation_steps=1,
        max_completion_length=1,
    )
    found = measure_model(trainer, 16)
    for name in OBJECTIVES:
        assert found.changes[name]["pass_rate"].z > 2, name


def test_a_continuous_reward_needs_a_threshold(build):
    with pytest.raises(InputError, match="correct_threshold: got none; expected a reward of 0 or 1"):
        measure_model(build(reward=length_reward), 3)
    seen = []
    measure_model(build(correct_threshold=2.0), 3, lambda number, rollouts: seen.append(rollouts))
    assert all(((rollouts.rewards >= 2) == rollouts.right).all() for rollouts in seen)


def test_nothing_is_trained(build):
    trainer = build(reward=even_sum)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    measure_model(trainer, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_of_a_lora_run_only_the_adapter_is_looked_at(build):
    trainer = build(peft_config=LoraConfig(r=2, target_modules="all-linear"))
    trainer.model.train()
    batch, inputs = next(sampled_batches(trainer))
    mask = batch.trained_mask
    sums = score_sums(trainer, token_batch(inputs), mask, np.ones((1, len(mask))))
    assert sums.shape[1] == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert sums.shape[1] < sum(p.numel() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, "top_p: got 0.9; expected 1.0, so that all tokens can be sampled"),
        ({"top_k": 20}, "top_k: got 20"),
        ({"min_p": 0.1}, "min_p: got 0.1"),
    ],
)
def test_a_sampler_that_is_not_the_policy_is_refused(build, changes, message):
    with pytest.raises(InputError, match=message):
        measure_model(build(**changes), 3)


def test_too_few_batches_and_too_many_parameters_are_refused(build, monkeypatch):
    with pytest.raises(InputError, match="batches: got 2"):
        measure_model(build(), 2)
    monkeypatch.setattr("trl_drgrpo.labs.study.probe.MEMORY_LIMIT", 1000)
    with pytest.raises(InputError, match="trainable parameters: got .* Measure with LoRA"):
        measure_model(build(), 3)


def test_a_reward_that_is_missing_is_refused(build):
    trainer = build(reward=lambda completion_ids, **kwargs: [None, *[1.0] * (len(completion_ids) - 1)])
    with pytest.raises(InputError, match="1 of 8 completions without a reward"):
        measure_model(trainer, 3)
