"""When a checkpoint folder counts as complete, and what a run does with one that does not."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from runs import short_run
from transformers.trainer_callback import TrainerState

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.cli.job import check_given
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume import checkpoints
from trl_drgrpo.features.resume.checkpoints import (
    PART_FILE,
    STATE_FILE,
    begin_checkpoint,
    file_sizes,
    finish_checkpoint,
    newest_complete_checkpoint,
    require_complete,
    why_incomplete,
)
from trl_drgrpo.labs.check.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint of three files."""
    folder = tmp_path / "checkpoint-3"
    begin_checkpoint(folder)
    (folder / "optimizer.pt").write_bytes(b"12345")
    (folder / "README.md").write_text("a card")
    (folder / "trainer_state.json").write_text("{}")
    finish_checkpoint(folder, {"files": file_sizes(folder)})
    return folder


def test_a_complete_one(folder):
    assert json.loads((folder / STATE_FILE).read_text()) == {"files": {"optimizer.pt": 5, "trainer_state.json": 2}}
    assert not (folder / PART_FILE).exists()
    assert why_incomplete(folder) == ""
    assert require_complete(folder) is None
    (folder / "README.md").write_text("a card that somebody has edited")
    assert why_incomplete(folder) == ""


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "optimizer.pt").write_bytes(b""), "optimizer.pt has 0 bytes instead of 5"),
        (lambda f: (f / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda f: (f / "trainer_state.json").write_text("{"), "trainer_state.json cannot be read"),
        (lambda f: (f / "trainer_state.json").write_text("[]"), "trainer_state.json holds no state"),
        (lambda f: (f / "trainer_state.json").unlink(), "it holds no trainer_state.json"),
        (begin_checkpoint, "it was not written to its end: the run died while it was being saved"),
    ],
)
def test_a_damaged_one_is_refused_and_skipped(damage, reason, folder, caplog):
    damage(folder)
    assert why_incomplete(folder) == reason
    with pytest.raises(InputError, match=f"^resume_from_checkpoint: got .*checkpoint-3, but {reason}; expected"):
        require_complete(folder)
    with pytest.raises(InputError, match=reason):
        check_given({"model_name_or_path": "a/b", "dataset_name": "a/b", "reward_funcs": ["x"]} | resume(folder))
    assert newest_complete_checkpoint(folder.parent) is None
    assert f"{folder} is skipped: {reason}" in caplog.text


def resume(folder):
    return {"resume_from_checkpoint": str(folder)}


def test_a_stale_state_counts_no_more_once_writing_has_begun(folder):
    begin_checkpoint(folder)
    assert not (folder / STATE_FILE).exists()
    assert why_incomplete(folder) != ""


def test_plain_trl_leaves_nothing_but_its_own_state(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    assert why_incomplete(folder) == ""
    assert newest_complete_checkpoint(tmp_path) == folder


# A run that dies while it writes. `Death` leaves the same files as a kill; the real ones are in test_resume_kill.py.


class Death(BaseException):
    """Caught by nobody."""


@pytest.fixture
def run(settings, prompts, tokenizer, reward):
    settings |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "steps_per_generation": 4}
    return lambda: build(settings, prompts, tokenizer, reward)


@pytest.fixture(scope="module")
def whole(prompts, tokenizer, reward, tmp_path_factory):
    """The weights at the end of an uninterrupted run."""
    fields = {**short_run(tmp_path_factory.mktemp("whole")), "steps_per_generation": 4}
    trainer = build(fields, prompts, tokenizer, reward)
    trainer.train()
    return dict(trainer.model.named_parameters())


def build(fields, prompts, tokenizer, reward):
    return DrGRPOTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=reward,
        args=DrGRPOConfig(**fields),
        train_dataset=prompts,
        processing_class=tokenizer,
    )


def dies_half_way(save, name):
    """A function that writes files, dying with half of `checkpoint-2/<name>` written."""

    def saves(*args, **kwargs):
        done = save(*args, **kwargs)
        for argument in args:
            path = getattr(argument, "name", argument)
            if isinstance(path, (str, Path)) and str(path).endswith(f"checkpoint-2/{name}"):
                Path(path).write_bytes(Path(path).read_bytes()[: Path(path).stat().st_size // 2])
                raise Death
        return done

    return saves


FILES = ["optimizer.pt", "our state", "rotation"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("model.safetensors", "trainer_state.json")]


@pytest.mark.parametrize("file", [*FILES, *OTHERS])
def test_a_run_that_dies_while_saving_goes_on_from_a_complete_checkpoint(
    file, run, whole, settings, monkeypatch, caplog
):
    output = Path(settings["output_dir"])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies_half_way(torch.save, file))
        save_file = dies_half_way(safetensors.torch.save_file, file)
        patch.setattr(transformers.modeling_utils, "safe_save_file", save_file)
        patch.setattr(TrainerState, "save_to_json", dies_half_way(TrainerState.save_to_json, file))
        if file == "our state":
            patch.setattr(checkpoints.Path, "replace", dies(lambda path: str(path).endswith(f"2/{PART_FILE}")))
        if file == "rotation":
            patch.setattr("shutil.rmtree", dies(lambda path: str(path).endswith("checkpoint-1")))
        with pytest.raises(Death):
            run().train()
    expected = "checkpoint-2" if file == "rotation" else "checkpoint-1"
    assert newest_complete_checkpoint(output) == output / expected
    assert (f"{output / 'checkpoint-2'} is skipped" in caplog.text) == (file != "rotation")
    if file != "rotation":
        with pytest.raises(InputError, match="checkpoint-2, but it was not written to its end"):
            run().train(resume_from_checkpoint=str(output / "checkpoint-2"))
    resumed = run()
    resumed.train(resume_from_checkpoint=True)
    for name, weight in resumed.model.named_parameters():
        assert torch.equal(weight, whole[name]), name


def dies(when):
    def function(path, *args, **kwargs):
        if when(path):
            raise Death
        return Path.rename(path, *args) if args else None

    return function


def test_the_best_checkpoint_is_kept(settings, prompts, tokenizer):
    calls = []

    def worse_and_worse(completion_ids, **kwargs):
        calls.append(1)
        return [float(sum(ids) % 3) - 10 * len(calls) for ids in completion_ids]

    settings |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "eval_strategy": "steps"}
    settings |= {"eval_steps": 1, "per_device_eval_batch_size": 4, "load_best_model_at_end": True}
    trainer = DrGRPOTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=worse_and_worse,
        args=DrGRPOConfig(**settings, metric_for_best_model="eval_reward"),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(4)),
        processing_class=tokenizer,
    )
    trainer.train()
    left = sorted(path.name for path in Path(settings["output_dir"]).glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-3"]


def test_a_failing_reward_does_not_write_the_resumed_checkpoint_again(run, settings, monkeypatch):
    # written again, it would be gone for good if the run died in the middle
    settings |= {"save_steps": 2, "max_steps": 2}
    run().train()
    checkpoint = Path(settings["output_dir"]) / "checkpoint-2"
    before = (checkpoint / STATE_FILE).stat().st_mtime_ns
    trainer = run()
    calls = iter([ValueError("judge is down")])
    trainer.reward_funcs[0] = raising(trainer.reward_funcs[0], calls)
    trainer.args.max_steps = 5
    with pytest.raises(ValueError, match="judge is down"):
        trainer.train(resume_from_checkpoint=os.path.relpath(checkpoint))  # the same folder by another name
    assert (checkpoint / STATE_FILE).stat().st_mtime_ns == before


def raising(func, errors):
    def reward(**kwargs):
        from trl_drgrpo.common.errors import RewardError

        error = next(errors, None)
        if error is not None:
            raise RewardError("reward", str(error), "an answer", "Start it.")
        return func(**kwargs)

    return reward
