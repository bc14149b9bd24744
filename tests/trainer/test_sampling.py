"""Batches filled with live groups, in real runs."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from runs import assert_same_weights, short_run, weights
from tiny import tiny_model

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume.checkpoints import FEATURES_FILE
from trl_drgrpo.rewards.texts import prompt_key

PROMPTS = [f"prompt {i}: {'dead' if i % 3 == 0 else 'live'}" for i in range(60)]


def mixed(prompts, completion_ids, **kwargs):
    """Groups of dead prompts have equal rewards, the others' differ."""
    return [0.0 if "dead" in p else float(sum(ids) % 2) for p, ids in zip(prompts, completion_ids, strict=True)]


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


class Spy(DrGRPOTrainer):
    """Keeps the generation batches that are trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.rounds, self.drawn = [], [], []

    def collecting(self, inputs, generate):
        def spied(rows):
            self.rounds.append([row["prompt"] for row in rows])
            return generate(rows)

        first = len(self.rounds)
        batch = super().collecting(inputs, spied)
        self.drawn.append([prompt for rows in self.rounds[first:] for prompt in rows[::4]])
        self.batches.append(batch)
        return batch


@pytest.fixture
def settings(tmp_path):
    return {**short_run(tmp_path / "run"), "dynamic_sampling": True, "max_steps": 4, "run_log": False}


@pytest.fixture
def data():
    return Dataset.from_dict({"prompt": PROMPTS})


@pytest.fixture
def run(train, data):
    return lambda reward=mixed, **given: train(reward, **{"trainer_class": Spy, "data": data, **given})


def prompts_of(batch, tokenizer):
    return [tokenizer.decode(ids[m.bool()]) for ids, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]


def test_a_batch_is_full_of_live_groups(run, tokenizer):
    trainer = run()
    for batch in trainer.batches:
        assert len(batch["advantages"]) == 8
        texts = prompts_of(batch, tokenizer)
        assert texts[:4] == [texts[0]] * 4 != texts[4:] == [texts[4]] * 4
        groups = batch["advantages"].view(2, 4)
        assert (groups != 0).any(dim=1).all()
        torch.testing.assert_close(groups.sum(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    logged = trainer.state.log_history[:-1]
    assert any(step["sampling/rounds"] > 1 for step in logged)
    for step in logged:
        assert step["sampling/groups_trained"] == 2
        # in a batch of two the weight is 1 / (M - 1), with M the draw of the second live group
        assert step["sampling/weight_mean"] == step["sampling/weight_max"] in [1 / n for n in range(1, 20)]
        assert step["sampling/groups_generated"] >= step["sampling/groups_live"] >= 2


def test_all_dead_ends_at_the_cap_and_says_so_once(run, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = run(nothing)
    assert caplog.text.count("0 of 2 groups were live after the 20 prompts") == 1
    assert all(batch["advantages"].abs().sum() == 0 for batch in trainer.batches)
    assert trainer.state.log_history[0]["sampling/capped_frac"] == 1.0
    assert trainer.state.global_step == 4
    for drawn in trainer.drawn:
        assert len(set(drawn)) == len(drawn) == 20  # ten times the two of a batch, none of them twice
    assert len(trainer.rounds) < 40  # rounds grow with what is missing


@pytest.mark.parametrize(("iterations", "saved"), [(1, 2), (2, 3)])  # the latter in the middle of a batch's second use
def test_a_resumed_run_ends_like_an_uninterrupted_one(iterations, saved, run, tokenizer, output):
    fields = {"save_strategy": "steps", "save_steps": 1, "curriculum": True, "max_sampling_rounds": 8}
    fields["num_iterations"] = iterations
    model = tiny_model(tokenizer)  # a copy from before the run: transformers below 5.18 write into its config
    whole = run(**fields)
    folder = output / f"checkpoint-{saved}"
    state = json.loads((folder / FEATURES_FILE).read_text())["PromptSampling"]
    assert state["batches"] > 0
    assert state["pass_rates"]["counts"]
    resumed = run(**fields, model=model, resume=folder)
    assert_same_weights(weights(resumed), weights(whole))
    assert resumed.rounds == whole.rounds[len(whole.rounds) - len(resumed.rounds) :]
    assert resumed.sampling.batches == whole.sampling.batches


def test_a_stream_is_drawn_from_too(run, data):
    trainer = run(max_steps=2, data=data.to_iterable_dataset())
    assert all((batch["advantages"].view(2, 4) != 0).any(dim=1).all() for batch in trainer.batches)


def test_the_factor_of_daposs_mean_where_the_cap_was_reached(run):
    """Two of two groups weigh 1 under either mean; one of two weighs 2 under DAPO's and 1 under the unbiased one."""
    steps = run(dynamic_sampling="dapo", max_sampling_rounds=1, max_steps=6).state.log_history[:-1]
    live = [step for step in steps if step["sampling/groups_trained"]]
    assert {step["sampling/groups_trained"] for step in live} == {1, 2}
    for step in live:
        assert step["sampling/dapo_factor"] == step["sampling/weight_mean"] == 2 / step["sampling/groups_trained"]


def test_a_curriculum_keeps_what_is_uncertain(run, tmp_path):
    prior = tmp_path / "rates.jsonl"
    rows = [{"key": prompt_key(p), "pass_rate": 0.0 if "dead" in p else 0.5, "completions": 64} for p in PROMPTS]
    prior.write_text("\n".join(map(json.dumps, rows)) + "\n")
    fields = {"dynamic_sampling": False, "curriculum": True, "prior_pass_rates": str(prior), "curriculum_q_min": 0.2}
    trainer = run(**fields, max_steps=8)
    kept = [prompt for rows in trainer.rounds for prompt in rows[::4]]
    dead = sum("dead" in prompt for prompt in kept)
    assert len(kept) == 16  # one round per batch, whose groups are all trained on
    assert dead <= 3  # of 16; a third of the prompts are dead, and they are kept with probability 0.24
    steps = trainer.state.log_history[:-1]
    assert all(step["sampling/rounds"] == 1 for step in steps)
    assert any(step["sampling/draws"] > 2 for step in steps)
    assert len(trainer.sampling.pass_rates.counts) == 60


def test_evaluation_is_untouched(run, data):
    fields = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "max_steps": 1}
    trainer = run(**fields, eval_dataset=data.select(range(4)))
    before, rounds = len(trainer.rounds), trainer.sampling.batches
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics
    assert len(trainer.rounds) - before == 2  # 8 rows in batches of 4, nothing more
    assert trainer.sampling.batches == rounds


def test_too_few_prompts_for_the_rounds(run, data):
    with pytest.raises(InputError, match="max_sampling_rounds: got 10 with 9 rows of training data.* set at most 4"):
        run(data=data.select(range(9)))


def test_a_curriculum_needs_to_know_what_is_correct(run):
    def graded(completion_ids, **kwargs):
        return [sum(ids) % 5 / 4 for ids in completion_ids]

    with pytest.raises(InputError, match="^curriculum: got rewards of 'graded' other than 0 and 1.*correct_threshold"):
        run(graded, curriculum=True)
