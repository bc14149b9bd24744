"""One update, measured: token weights, changes where the truth is known, a real trainer."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from runs import length_reward
from tabular import expected_length, length_scores

from trl_drgrpo import dr_grpo_loss, group_advantages
from trl_drgrpo.check.bias import (
    OBJECTIVES,
    QUANTITIES,
    Rollouts,
    changes_per_step,
    gradient_weight,
    measure,
    measure_model,
    sampled_batches,
    score_sums,
)
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import STD_FLOOR
from trl_drgrpo.upstream.batches import token_batch

REWARDS, LENGTHS = np.array([1.0, 0.0, 0.0, 1.0]), np.array([2, 4, 3, 6])


def weights(name):
    return OBJECTIVES[name].token_weights(REWARDS, LENGTHS, num_generations=4, loss_normalizer=8)


def test_ours_is_the_gradient_of_the_specification():
    logps = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(1)
    dr_grpo_loss(logps, None, group_advantages(REWARDS.tolist(), 4).double(), mask, loss_normalizer=8).backward()
    assert torch.allclose(-logps.grad, torch.tensor(weights("dr_grpo")).unsqueeze(1) * mask, atol=1e-15)


def test_the_worked_example():
    assert weights("dr_grpo") == pytest.approx([0.5 / 32, -0.5 / 32, -0.5 / 32, 0.5 / 32])
    assert weights("grpo_without_std") == pytest.approx([0.5 / 8, -0.5 / 16, -0.5 / 12, 0.5 / 24])
    std = 1 / 3**0.5 + STD_FLOOR  # of (1, 0, 0, 1) with n - 1
    assert weights("grpo") == pytest.approx(np.array([0.5 / 8, -0.5 / 16, -0.5 / 12, 0.5 / 24]) / std)
    assert weights("dapo") == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / 15 / std)
    assert weights("dr_grpo_with_std") == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / 32 / std)
    # Token losses of the example: the loss is minus the weighted sum of tokens.
    assert -(weights("dr_grpo") * LENGTHS).sum() == -0.015625
    assert (weights("grpo_without_std") * LENGTHS).sum() == pytest.approx(0, abs=1e-15)


@given(st.lists(st.sampled_from([0.0, 1.0, 0.7]), min_size=8, max_size=8))
def test_advantages_of_a_group_sum_to_zero_and_equal_rewards_give_exactly_none(rewards):
    for objective in OBJECTIVES.values():
        advantages = objective.advantages(np.array(rewards), 4).reshape(-1, 4)
        assert advantages.sum(axis=1) == pytest.approx([0, 0], abs=1e-9)
        for group, values in zip(np.array(rewards).reshape(-1, 4), advantages, strict=True):
            assert (values == 0).all() == (len(set(group)) == 1)


def test_gradient_weight_without_std_is_a_parabola_and_with_std_its_root():
    assert gradient_weight(8, False) == pytest.approx([2 * k * (8 - k) / 8 for k in range(9)])
    with_std, without = gradient_weight(8, True), gradient_weight(8, False)
    for k in range(1, 8):  # std of k ones and 8 - k zeros: sqrt(k (8 - k) / 56)
        assert with_std[k] == pytest.approx(without[k] / ((k * (8 - k) / 56) ** 0.5 + STD_FLOOR))
    assert with_std[1] / with_std[4] > without[1] / without[4]  # the difficulty bias


@pytest.mark.parametrize("group", [1, 3])
def test_groups_that_do_not_fit_are_refused(group):
    with pytest.raises(InputError, match="num_generations"):
        OBJECTIVES["dr_grpo"].advantages(REWARDS, group)


GROUP, LONGEST, LOGITS = 8, 64, np.array([-2.0, -2.0])  # of the right and of the wrong state
P_RIGHT = 0.4


def drawn(rng, prompts=32):
    """A batch of the tabular policy, and the score of each row for the two logits, `(B, 2)`."""
    rows = prompts * GROUP
    states = np.where(rng.random(rows) < P_RIGHT, 0, 1)
    stop = (1 / (1 + np.exp(-LOGITS)))[states]
    lengths = rng.geometric(stop)
    stopped = lengths <= LONGEST
    lengths = np.minimum(lengths, LONGEST)
    scores = np.eye(2)[states] * length_scores(lengths, stopped, stop)[:, None]
    batch = Rollouts((states == 0).astype(float), states == 0, lengths, GROUP, LONGEST, stopped)
    return batch, scores


def measured(batches, seed=0):
    rng = np.random.default_rng(seed)
    found = [drawn(rng) for _ in range(batches)]
    return measure((batch, lambda weights, scores=scores: weights @ scores) for batch, scores in found)


def z(estimate):
    return estimate.value / estimate.standard_error


def test_a_divisor_per_row_is_biased_and_a_constant_one_is_not():
    changes = measured(40).changes
    for name in ("grpo", "grpo_without_std"):
        assert z(changes[name]["length_wrong"]) > 10
        assert z(changes[name]["length_right"]) < -10
    for name in ("dr_grpo", "dr_grpo_with_std"):
        assert abs(z(changes[name]["length_wrong"])) < 3
        assert abs(z(changes[name]["length_right"])) < 3


def test_the_estimate_agrees_with_a_step_that_is_taken():
    """The mean over many single steps of length `epsilon` along a batch's direction, lengths computed exactly."""
    rng, epsilon = np.random.default_rng(1), 1e-3
    grpo = list(OBJECTIVES).index("grpo")
    taken = []
    for _ in range(2000):
        batch, scores = drawn(rng)
        direction = batch.direction_weights()[grpo] @ scores
        moved = LOGITS + epsilon * direction / np.linalg.norm(direction)
        taken.append((expected_length(moved, LONGEST) - expected_length(LOGITS, LONGEST)) / epsilon)
    right, wrong = np.mean(taken, axis=0)
    found = measured(60, seed=2).changes["grpo"]
    assert found["length_wrong"].value == pytest.approx(wrong, abs=4 * found["length_wrong"].standard_error)
    assert found["length_right"].value == pytest.approx(right, abs=4 * found["length_right"].standard_error)
    assert found["length_wrong"].standard_error < 0.2 * wrong


def test_the_pass_rate_of_a_policy_that_cannot_learn_it_does_not_change():
    for name in OBJECTIVES:
        assert abs(measured(20).changes[name]["pass_rate"].value) < 0.01


def test_standard_errors_are_those_of_repetition():
    values = [measured(10, seed).changes["grpo"]["length_wrong"] for seed in range(60)]
    spread = np.std([v.value for v in values], ddof=1)
    assert np.mean([v.standard_error for v in values]) == pytest.approx(spread, rel=0.3)


def test_differences_are_paired():
    found = measured(20)
    ours, theirs = found.changes["dr_grpo"]["length_wrong"], found.changes["grpo"]["length_wrong"]
    difference = found.differences_from_dr_grpo["grpo"]["length_wrong"]
    assert difference.value == pytest.approx(theirs.value - ours.value)
    assert found.differences_from_dr_grpo["dr_grpo"]["length_wrong"].value == 0


def test_in_one_and_the_same_batch_the_product_would_be_wrong():
    """Why batches are kept apart: with the diagonal, Dr. GRPO would seem to change the pass rate of pure noise."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(12, 50, 256))  # scores of rows that have nothing to do with the reward

    def batch(k):
        right = np.random.default_rng(k).random(256) < P_RIGHT
        return Rollouts(right.astype(float), right, np.full(256, 5), GROUP, LONGEST, right)

    batches = [batch(k) for k in range(12)]
    scores = [noise[k] for k in range(12)]
    pairs = [(b, lambda weights, s=s: weights @ s.T) for b, s in zip(batches, scores, strict=True)]
    found = measure(pairs).changes["dr_grpo"]["pass_rate"]
    assert abs(z(found)) < 3.5
    ours, passed = list(OBJECTIVES).index("dr_grpo"), QUANTITIES.index("pass_rate")
    within = []
    for k, each in enumerate(batches):
        direction = each.direction_weights()[ours] @ scores[k].T
        within.append(each.quantity_weights()[passed] @ scores[k].T @ direction / np.linalg.norm(direction))
    assert np.mean(within) > 10 * found.standard_error


def test_a_batch_without_a_right_answer_makes_that_quantity_unknown_and_no_other():
    rng = np.random.default_rng(0)
    directions, gradients = rng.normal(size=(5, len(OBJECTIVES), 3)), rng.normal(size=(5, 4, 3))
    gradients[2, 0] = np.nan
    found = changes_per_step(directions, gradients).changes["dr_grpo"]
    assert np.isnan(found["length_right"].value)
    assert np.isfinite(found["length_wrong"].value)


def test_a_batch_without_signal_is_a_step_of_length_zero():
    rng = np.random.default_rng(0)
    directions, gradients = rng.normal(size=(4, len(OBJECTIVES), 3)), rng.normal(size=(4, 4, 3))
    directions[1] = 0
    assert np.isfinite(changes_per_step(directions, gradients).changes["grpo"]["length"].value)


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
    found = measure_model(build(reward=even_sum), 4, lambda rollouts, *rest: seen.append(rollouts))
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
        assert z(found.changes[name]["pass_rate"]) > 2, name


def test_a_threshold_says_what_is_correct_of_a_continuous_reward(build):
    seen = []
    measure_model(build(correct_threshold=2.0), 3, lambda rollouts, *rest: seen.append(rollouts))
    assert all(((rollouts.rewards >= 2) == rollouts.right).all() for rollouts in seen)


def test_a_measurement_trains_no_weight(build):
    trainer = build(reward=even_sum)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    measure_model(trainer, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_lora_run_is_measured_on_its_adapter_alone(build):
    trainer = build(peft_config=LoraConfig(r=2, target_modules="all-linear"))
    trainer.model.train()
    batch, inputs = next(sampled_batches(trainer))
    mask = batch.trained_mask
    sums = score_sums(trainer, token_batch(inputs), mask, np.ones((1, len(mask))))
    assert sums.shape[1] == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert sums.shape[1] < sum(p.numel() for p in trainer.model.parameters())


def one_missing(completion_ids, **kwargs):
    return [None, *[1.0] * (len(completion_ids) - 1)]


@pytest.mark.parametrize(
    ("changes", "batches", "limit", "message"),
    [
        ({"top_p": 0.9}, 3, None, "top_p: got 0.9; expected 1.0, so that the policy is sampled as it is"),
        ({"top_k": 20}, 3, None, "top_k: got 20"),
        ({"min_p": 0.1}, 3, None, "min_p: got 0.1"),
        ({}, 3, 1000, "trainable parameters: got .* Measure with LoRA"),
        ({"reward": one_missing}, 3, None, "1 of 8 completions without a reward"),
        ({"reward": length_reward}, 3, None, "correct_threshold: got none; expected a reward of 0 or 1"),
    ],
)
def test_an_unmeasurable_bias_is_refused(build, monkeypatch, changes, batches, limit, message):
    if limit is not None:
        monkeypatch.setattr("trl_drgrpo.check.bias.MEMORY_LIMIT", limit)
    with pytest.raises(InputError, match=message):
        measure_model(build(**changes), batches)
