"""A run that is stopped and resumed ends with the weights of one that was not, bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.check.tiny import tiny_model
from trl_drgrpo.errors import InputError
from trl_drgrpo.runstate import STATE_FILE, RunState, load_rollouts, save_rollouts


def build(settings, prompts, tokenizer, reward):
    return DrGRPOTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=reward,
        args=DrGRPOConfig(**settings),
        train_dataset=prompts,
        processing_class=tokenizer,
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


GEOMETRIES = {
    "one generation per step": {},
    "two steps per generation": {"steps_per_generation": 4},
    "two iterations": {"num_iterations": 2},
    "misaligned": {"steps_per_generation": 3, "num_generations": 6},
    "into the second epoch": {"gradient_accumulation_steps": 4},  # 16 prompts, 4 per step
    "with running scale": {"scale_by_running_std": True, "steps_per_generation": 4},
}


@pytest.mark.parametrize("stop_at", [3, 5])
@pytest.mark.parametrize("extra", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_resumed_run_ends_like_an_uninterrupted_one(extra, stop_at, settings, prompts, tokenizer, reward):
    settings = {**settings, "max_steps": 7, "save_strategy": "steps", "save_steps": 1, **extra}
    whole = build(settings, prompts, tokenizer, reward)
    whole.train()

    resumed = build(settings, prompts, tokenizer, reward)
    resumed.train(resume_from_checkpoint=f"{settings['output_dir']}/checkpoint-{stop_at}")
    assert resumed.state.global_step == 7
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    assert resumed.reward_scale.state_dict() == whole.reward_scale.state_dict()


def test_without_our_state_the_resumed_run_is_another_one(settings, prompts, tokenizer, reward):
    # negative control: what TRL alone restores is not enough in the middle of a generation batch
    settings = {**settings, "max_steps": 5, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = build(settings, prompts, tokenizer, reward)
    whole.train()
    checkpoint = Path(settings["output_dir"]) / "checkpoint-3"
    for own in (*checkpoint.glob("drgrpo_rollouts_*"), checkpoint / STATE_FILE):
        own.unlink()
    resumed = build(settings, prompts, tokenizer, reward)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert any(not torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))


def test_resuming_without_a_checkpoint_starts_anew_and_says_so(settings, prompts, tokenizer, reward, caplog):
    trainer = build({**settings, "max_steps": 1}, prompts, tokenizer, reward)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 1
    assert f"No checkpoint in {settings['output_dir']} to resume from: starting anew." in caplog.text


@pytest.fixture
def checkpoint(settings, prompts, tokenizer, reward):
    settings.update(max_steps=2, save_strategy="steps", save_steps=1)
    build(settings, prompts, tokenizer, reward).train()
    return Path(settings["output_dir"]) / "checkpoint-1"


def test_L_stays_what_it_was(checkpoint, settings, prompts, tokenizer, reward, caplog):
    trainer = build({**settings, "max_completion_length": 20}, prompts, tokenizer, reward)
    assert trainer.loss_normalizer == 20
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.loss_normalizer == 12
    assert trainer.loss_constants()["max_completion_length"] == 12
    assert "Keeping L = 12 of the resumed run" in caplog.text


def test_another_L_in_so_many_words_is_refused(checkpoint, settings, prompts, tokenizer, reward):
    trainer = build({**settings, "loss_normalizer": 20}, prompts, tokenizer, reward)
    with pytest.raises(InputError, match="^loss_normalizer: got 20; expected 12, with which the run in"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert checkpoint.exists()


def test_a_checkpoint_of_plain_trl_is_taken_with_a_word(checkpoint, settings, prompts, tokenizer, reward, caplog):
    (checkpoint / STATE_FILE).unlink()
    trainer = build(settings, prompts, tokenizer, reward)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2
    assert "holds no Dr. GRPO state: going on with L = 12" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "unreadable content"),
        ('{"loss_normalizer": 12}', "unreadable content"),
        ('{"loss_normalizer": 1, "micro_step": 1, "reward_scale": {}, "format": 99}', "format 99; expected format 1"),
    ],
)
def test_a_damaged_state_is_one_clear_error(tmp_path, content, message):
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(InputError, match=message):
        RunState.load(tmp_path)


def test_state_round_trip(tmp_path):
    state = RunState(12, 7, {"count": 3, "mean": 0.5, "sum_of_squares": 1.0})
    assert RunState.load(tmp_path) is None
    state.save(tmp_path)
    assert RunState.load(tmp_path) == state
    assert json.loads((tmp_path / STATE_FILE).read_text())["loss_normalizer"] == 12


def test_rollouts_round_trip_per_rank(tmp_path):
    batches = [{"completion_ids": torch.tensor([[1, 2]]), "num_images": [0], "ref": None}]
    save_rollouts(tmp_path, 1, batches)
    assert load_rollouts(tmp_path, 0, torch.device("cpu")) is None
    loaded = load_rollouts(tmp_path, 1, torch.device("cpu"))
    assert loaded is not None
    assert torch.equal(loaded[0]["completion_ids"], batches[0]["completion_ids"])
    assert loaded[0]["num_images"] == [0]


def test_rollouts_are_saved_only_when_some_are_pending(settings, prompts, tokenizer, reward):
    settings = {**settings, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    build(settings, prompts, tokenizer, reward).train()
    # 4 micro-batches per generation, 2 per step: after step 1 half of them are left, after step 2 none
    files = [len(list(Path(settings["output_dir"]).glob(f"checkpoint-{n}/drgrpo_rollouts_*"))) for n in (1, 2)]
    assert files == [1, 0]
