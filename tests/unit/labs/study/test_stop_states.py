"""States are those that tokens are drawn from, and are drawn where stopping is possible."""

import numpy as np
import pytest
import torch
from runs import length_reward

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.labs.study.generation_batches import sampled_batches
from trl_drgrpo.labs.study.stop_states import StateCollector, _draw, stopping
from trl_drgrpo.upstream.batch_rows import token_batch


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
