"""The probe: on states of which it is known what they tell, and states that tokens are drawn from."""

import re

import numpy as np
import pytest
import torch
from runs import length_reward

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.check.bias import sampled_batches
from trl_drgrpo.check.probe import (
    FOLDS,
    StateCollector,
    StopStates,
    _draw,
    concordant_pairs,
    joined,
    out_of_fold_scores,
    probe_correctness,
    stopping,
)
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream.batches import token_batch

PROMPTS, SIZE = 120, 8


def states(seed=0, signal=0.0, width=12, rate=0.4, longer=0):
    """States of which one dimension says with some distance whether the completion is correct."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(PROMPTS), SIZE)
    right = rng.random(len(prompts)) < np.broadcast_to(rate, PROMPTS)[prompts]
    values = rng.normal(size=(len(prompts), width))
    values[:, 3] += signal * right
    positions = rng.integers(1, 40, len(prompts)) + longer * ~right
    return StopStates(values.astype(np.float32), positions, right, prompts, np.full(len(prompts), 0.5))


def test_states_that_say_nothing_are_at_chance_and_the_error_covers_it():
    deviations = []
    for seed in range(24):
        found = probe_correctness(states(seed))
        deviations.append((found.states.value - 0.5) / found.states.standard_error)
    assert 0.6 < np.std(deviations) < 1.4
    assert abs(np.mean(deviations)) < 0.7


@pytest.mark.parametrize(("signal", "expected"), [(1.0, 0.76), (6.0, 1.0)])
def test_a_signal_is_found_as_far_as_it_goes(signal, expected):
    """Two normal distributions at distance s are told apart with probability Phi(s / sqrt(2))."""
    found = probe_correctness(states(signal=signal))
    assert found.states.value == pytest.approx(expected, abs=0.05)
    assert found.position.value == pytest.approx(0.5, abs=0.08)
    assert found.difference.value == pytest.approx(found.states.value - found.position.value)
    assert found.open_stops == 0.5


def test_the_distance_is_relative_and_without_noise():
    """12 dimensions of variance 1 and a shift by 6 where correct (4 in 10): 36 over 12 + 0.4 * 36; without it 0."""
    assert probe_correctness(states(signal=6.0)).apart == pytest.approx(36 / 26.4, rel=0.1)
    assert abs(np.mean([probe_correctness(states(seed)).apart for seed in range(6)])) < 0.003


def test_the_position_is_a_probe_of_its_own():
    found = probe_correctness(states(longer=15))
    assert found.position.value > 0.7
    assert found.difference.value < -0.1  # the states do not have it


def test_a_position_in_the_middle_is_found_too():
    """Neither short nor long: no line would tell it."""
    plain = states()
    middle = np.where(plain.right, 20, np.where(np.arange(len(plain.right)) % 2, 5, 35))
    found = probe_correctness(StopStates(plain.states, middle, plain.right, plain.prompts, plain.open_stops))
    assert found.position.value > 0.95


def test_that_a_prompt_is_hard_counts_nothing():
    rate = np.where(np.arange(PROMPTS) % 2, 0.15, 0.85)
    hard = states(rate=rate)
    hard.states[:, 0] = rate[hard.prompts]
    assert probe_correctness(hard).states.value == pytest.approx(0.5, abs=0.1)


def test_a_prompt_is_judged_by_a_probe_that_never_saw_it():
    """Each prompt has a direction of its own: known from its other completions, from other prompts it is not."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(40), SIZE)
    right = np.tile(np.arange(SIZE) % 2 == 0, 40)
    features = np.zeros((len(prompts), 40))
    features[np.arange(len(prompts)), prompts] = np.where(right, 1.0, -1.0)
    leaking, clean = rng.permutation(len(prompts)) % FOLDS, prompts % FOLDS

    def auc(folds):
        ordered, pairs = concordant_pairs(out_of_fold_scores(features, right, prompts, folds), right, prompts)
        return ordered.sum() / pairs.sum()

    assert auc(clean) == 0.5
    assert auc(leaking) > 0.9  # what the folds are for


def test_pairs_are_those_of_a_prompt_and_a_tie_is_half():
    scores = np.array([3.0, 1.0, 2.0, 0.0, 0.0, 9.0])
    right = np.array([True, False, False, True, False, False])
    ordered, pairs = concordant_pairs(scores, right, np.array([0, 0, 0, 1, 1, 1]))
    assert ordered.tolist() == [2.0, 0.5]
    assert pairs.tolist() == [2.0, 2.0]


def test_prompts_without_a_signal_have_no_say():
    mixed = states(signal=2.0)
    solved = StopStates(
        -mixed.states, mixed.positions, np.ones_like(mixed.right), mixed.prompts + PROMPTS, mixed.open_stops
    )
    together = probe_correctness(joined([mixed, solved]))
    assert together.states == probe_correctness(mixed).states
    assert together.prompts <= PROMPTS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (slice(SIZE), "prompts: got 1; expected at least 5"),
        (None, "correct completions: got 0 of 960; expected some of both kinds. Measure more batches"),
        (slice(3 * SIZE), "prompts with correct and incorrect completions: got 3 of 3; expected at least 5"),
    ],
)
def test_what_cannot_be_probed_is_refused(rows, message):
    found = states()
    right = np.zeros_like(found.right) if rows is None else found.right
    rows = rows or slice(None)
    some = StopStates(
        found.states[rows], found.positions[rows], right[rows], found.prompts[rows], found.open_stops[rows]
    )
    with pytest.raises(InputError, match=re.escape(message)):
        probe_correctness(some)


@pytest.fixture
def trainer(settings, prompts, tokenizer, model):
    return DrGRPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=DrGRPOConfig(**{**settings, "temperature": 0.7}),
        train_dataset=prompts,
        processing_class=tokenizer,
    )


def test_states_and_probabilities_against_plain_forwards(trainer):
    batch, inputs = next(sampled_batches(trainer))
    tokens = token_batch(inputs)
    states, log_stop = stopping(trainer, tokens)
    width = tokens.completion_width
    for row, mask in enumerate(batch.completion_mask.bool()):
        ids = tokens.input_ids[row][tokens.attention_mask[row].bool()][None]
        plain = trainer.model(input_ids=ids, output_hidden_states=True)
        count = int(mask.sum())
        predicting = slice(-count - 1, -1)
        assert torch.allclose(states[row, :count], plain.hidden_states[-1][0, predicting], atol=1e-5)
        probabilities = (
            (plain.logits[0, predicting] / 0.7).softmax(dim=1)[:, sorted(trainer.stop_token_ids)].sum(dim=1)
        )
        assert torch.allclose(log_stop[row, :count].exp(), probabilities, atol=1e-6)
    assert states.shape[:2] == log_stop.shape == (len(tokens.input_ids), width)


def test_each_completion_gives_one_state_of_its_own_tokens(trainer):
    batch, inputs = next(sampled_batches(trainer))
    mask = batch.trained_mask.clone()
    mask[:, 1] = 0  # written by a tool
    mask[0] = 0
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    collector = StateCollector(trainer)
    right = np.arange(len(mask)) % 2 == 0
    collector.add(token_batch(inputs), mask, right)
    assert torch.equal(torch.rand(1), expected)  # the sampler's generator goes on as without a probe
    assert [bool(part.right[0]) for part in collector.parts] == right[1:].tolist()  # the first has no token of its own
    written = mask[1:].sum(dim=1).tolist()
    assert all(0 <= part.positions[0] < count for part, count in zip(collector.parts, written, strict=True))
    assert all(0 < part.open_stops[0] < count / 4 for part, count in zip(collector.parts, written, strict=True))
    same = [inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist() for i in range(1, len(mask))]
    numbers = [int(part.prompts[0]) for part in collector.parts]
    assert [[a == b for b in same] for a in same] == [[a == b for b in numbers] for a in numbers]


def test_positions_are_drawn_by_the_probability_of_stopping():
    rng = np.random.default_rng(0)
    drawn = np.bincount([_draw(np.log([0.1, 0.3, 0.0001, 0.4]), rng) for _ in range(4000)], minlength=4) / 4000
    assert drawn == pytest.approx([0.125, 0.375, 0.0, 0.5], abs=0.03)
