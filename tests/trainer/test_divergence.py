"""A run whose numbers are no longer finite ends with one line, and nothing of it is saved."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import length_reward
from safetensors.torch import load_file, save_file

from trl_drgrpo.common.errors import DivergedError, InputError, RewardError
from trl_drgrpo.features.resume.checkpoints import checkpoint_folders, finish_checkpoint, read_state

EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


def from_step(step, value):
    """`length_reward`, multiplied from this many finished optimizer steps on."""

    def reward(completion_ids, trainer_state, **kwargs):
        factor = value if trainer_state.global_step >= step else 1.0
        return [factor * number for number in length_reward(completion_ids)]

    return reward


def assert_finite(output):
    for folder in checkpoint_folders(output):
        assert all(weight.isfinite().all() for weight in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("value", "fields", "cause"),
    [
        (1e37, {}, "advantages of up to"),
        (1e30, {"max_grad_norm": 0.0}, "advantages of up to"),  # Adam's squares overflow: it would stand still
        (1.0, {"reward_weights": [1e37]}, "advantages of up to"),
    ],
)
def test_a_gradient_that_overflows_ends_the_run_before_its_step(value, fields, cause, train, output):
    first = 0 if fields.get("reward_weights") else 2
    with pytest.raises(DivergedError, match=cause) as raised:
        train(from_step(first, value), **{**EACH_STEP, **fields})
    message = str(raised.value)
    assert message.startswith(f"step {first + 1}: the norm of the gradient is inf")
    assert "\n" not in message
    assert (f"The last good checkpoint is {output / 'checkpoint-2'}" in message) == (first == 2)
    assert len(checkpoint_folders(output)) == first
    assert_finite(output)


@pytest.mark.parametrize("fields", [EACH_STEP, {}], ids=["a checkpoint", "the final model"])
def test_a_learning_rate_that_breaks_the_weights_saves_nothing(fields, train, output):
    with pytest.raises(DivergedError, match=r"^step 1: model\S* is NaN or infinite.* learning_rate 1e\+39 "):
        train(**fields, learning_rate=1e39, max_steps=1, lr_scheduler_type="constant")
    assert checkpoint_folders(output) == []
    assert not list(output.glob("*.safetensors"))


def test_weights_from_which_nothing_can_be_sampled_are_one_line(train, output):
    # finite, and so are the checkpoint's; the logits are not
    with pytest.raises(DivergedError, match="^step 1: the logits of the policy .* learning_rate 1e.10") as raised:
        train(**EACH_STEP, learning_rate=1e10)
    assert "No checkpoint before that is saved" in str(raised.value)
    assert raised.value.__cause__ is None


def test_rewards_whose_group_mean_overflows_name_the_remedy(train):
    def reward(completion_ids, **kwargs):
        return [3e38 - 1e38 * (i % 2) for i in range(len(completion_ids))]

    with pytest.raises(RewardError, match=r"compute_advantages: got -inf.* scale or clip"):
        train(reward)


def test_a_model_that_was_broken_before_is_refused_and_never_saved(model, train, build, output):
    next(model.parameters()).data[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"^model: got Qwen2ForCausalLM, in which model\.embed_tokens\.weight is NaN"):
        train(model=model)
    with pytest.raises(DivergedError):
        build(model=model).save_model(str(output))
    assert not list(output.glob("*.safetensors"))


@pytest.mark.parametrize("broken", ["weights", "optimizer"])
def test_a_checkpoint_that_was_saved_broken_is_refused_by_name(broken, train, output):
    train(**EACH_STEP, max_steps=2)
    folder = output / "checkpoint-2"
    if broken == "weights":
        file = folder / "model.safetensors"
        saved = load_file(file)
        saved["model.norm.weight"][0] = torch.inf
        save_file(saved, file, metadata={"format": "pt"})
    else:
        saved = torch.load(folder / "optimizer.pt", weights_only=True)
        saved["state"][0]["exp_avg_sq"].fill_(torch.inf)
        torch.save(saved, folder / "optimizer.pt")
    finish_checkpoint(folder, {key: value for key, value in read_state(folder).items() if key != "files"})
    for resume in (True, folder):
        with pytest.raises(InputError, match=re.escape(f"resume_from_checkpoint: got {folder}, in which ")) as raised:
            train(max_steps=3, resume=resume)
        assert f"such as {output / 'checkpoint-1'}" in str(raised.value)


def test_float16_may_overflow_until_scaling_is_not_the_reason(build, monkeypatch):
    trainer = build()
    scaler = SimpleNamespace(get_scale=lambda: 1.0)
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    trainer.on_grad_norm(float("inf"))
    scaler.get_scale = lambda: 0.5
    with pytest.raises(DivergedError):
        trainer.on_grad_norm(float("inf"))


def test_the_command_says_it_in_one_line_and_exits_with_1(saved_model, tmp_path, ran):
    reward = tmp_path / "rewards.py"
    reward.write_text("def huge(completions, **kwargs):\n    return [1e30 * len(text) for text in completions]\n")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(8)))
    argv = ["train", "--model_name_or_path", saved_model, "--dataset_name", str(data)]
    argv += ["--reward_funcs", f"{reward}:huge", "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    argv += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "8"]
    printed = ran([*argv, "--report_to", "none"], code=1)
    assert "Traceback" not in printed.err
    assert len(re.findall("the training has diverged", printed.err)) == 1
    assert not (Path(tmp_path) / "out" / "model.safetensors").exists()
