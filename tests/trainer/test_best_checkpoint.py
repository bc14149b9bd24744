"""The best checkpoint by a metric of the evaluations, early stopping, and what the first log of a run says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from trl_drgrpo.common.errors import InputError

LEVELS = (0.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0)  # of the reward, by the optimizer steps done


def level(completions, trainer_state, **kwargs):
    """Varies within a group, so that weights move."""
    return [LEVELS[trainer_state.global_step] + i % 2 for i in range(len(completions))]


@pytest.fixture
def build(build, prompts):
    """Evaluates and saves at each of 6 steps, keeps two checkpoints, stops after two evaluations without a better."""
    each_step = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    each_step |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward"}  # the prefix may be left out
    given = {"reward": level, "eval_dataset": prompts.select(range(1)), **each_step, **best}
    return lambda **changes: build(**{**given, "callbacks": [EarlyStoppingCallback(2)], **changes})


def checkpoints(trainer):
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def is_loaded(trainer, name):
    saved = load_file(Path(trainer.args.output_dir) / name / "model.safetensors")
    return all(torch.equal(weight, saved[key]) for key, weight in trainer.model.state_dict().items() if key in saved)


def test_the_best_is_kept_loaded_and_known_to_a_resumed_run(build, caplog):
    trainer = build()
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_metric) == (4, 3.5)
    assert checkpoints(trainer) == ["checkpoint-2", "checkpoint-4"]
    assert is_loaded(trainer, "checkpoint-2")
    assert not is_loaded(trainer, "checkpoint-4")
    said = [message for message in caplog.messages if message.startswith("The loss is ")]
    assert len(said) == 1

    resumed = build()
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert (resumed.state.global_step, resumed.state.best_metric) == (4, 3.5)  # a new count of two
    assert resumed.state.best_model_checkpoint.endswith("checkpoint-2")
    assert is_loaded(resumed, "checkpoint-2")
    assert [message for message in caplog.messages if message.startswith("The loss is ")] == said


def test_an_evaluation_without_any_reward_is_never_the_best(build):
    def unscorable(completions, trainer_state, **kwargs):
        scored = level(completions, trainer_state)
        return [None] * len(completions) if trainer_state.global_step == 1 else scored

    trainer = build(reward=unscorable, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[1]["eval_reward"] is None
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"


def test_without_a_metric_the_held_out_reward_decides(build):
    trainer = build(metric_for_best_model=None)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.global_step) == (3.5, 4)
    assert is_loaded(trainer, "checkpoint-2")


def test_early_stopping_compares_by_the_held_out_reward_too(build):
    trainer = build(load_best_model_at_end=False, metric_for_best_model=None)
    trainer.train()
    assert trainer.state.global_step == 4
    with pytest.raises(InputError, match="^callbacks: got EarlyStoppingCallback with eval_strategy 'no'"):
        build(load_best_model_at_end=False, eval_strategy="no")


def test_the_learning_rate_falls_when_the_reward_stops_rising(build):
    schedule = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    trainer = build(**schedule, metric_for_best_model=None, max_steps=3, learning_rate=8e-3)
    trainer.train()  # rewards of 1.5, 3.5 and 2.5
    assert trainer._get_learning_rate() == 4e-3


def test_each_of_several_evaluation_sets_can_decide(build, prompts):
    def by_set(prompts, trainer_state, **kwargs):
        level = LEVELS[trainer_state.global_step]
        return [(-level if prompt.startswith("hard") else level) + i % 2 for i, prompt in enumerate(prompts)]

    easy = prompts.select(range(1))
    hard = easy.map(lambda row: {"prompt": "hard " + row["prompt"]})
    sets = {"hard": hard, "easy": easy}
    trainer = build(reward=by_set, eval_dataset=sets, metric_for_best_model="eval_hard_reward", max_steps=3)
    trainer.train()
    assert trainer.state.best_metric == -0.5
    assert is_loaded(trainer, "checkpoint-1")


def test_a_metric_that_no_evaluation_has_is_one_line(build):
    trainer = build(metric_for_best_model="eval_acc")
    with pytest.raises(InputError, match=r"^metric_for_best_model: got eval_acc; expected a metric of the ") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert trainer.evaluate()["eval_reward"] == 1.5  # of one's own, it is nobody's business
