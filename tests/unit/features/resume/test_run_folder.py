"""Which run an output folder holds, and how another one is kept from it."""

import json
from pathlib import Path

import pytest
from tiny import tiny_model
from transformers import TrainerCallback

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume.checkpoints import (
    STATE_FILE,
    begin_checkpoint,
    choose_start,
    delete_run,
    finish_checkpoint,
    newest_complete_checkpoint,
    run_in,
)
from trl_drgrpo.features.resume.resume_state import RunState


def write(output_dir, *names):
    for name in names:
        path = output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def complete(output_dir, step, run_id, saved_at=1.0):
    folder = output_dir / f"checkpoint-{step}"
    begin_checkpoint(folder)
    (folder / "trainer_state.json").write_text("{}")
    finish_checkpoint(folder, {"files": {}, "run_id": run_id, "saved_at": saved_at})
    return folder


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["notes.txt", "data/train.jsonl", "card/curves.png", "checkpoint-notes.md"],
        ["_drgrpo/run.json", "_drgrpo/metrics.jsonl"],  # of a run that died before its first checkpoint
        ["checkpoint-1/drgrpo_state.part", "checkpoint-1/trainer_state.json"],  # or in the middle of it
        ["checkpoint-1/notes.txt"],
        ["model/model.safetensors", "results.json"],  # a demo's
        ["model.safetensors", "config.json"],  # a base model
    ],
)
def test_a_free_folder(files, tmp_path):
    write(tmp_path, *files)
    assert run_in(tmp_path) == ""
    assert choose_start(tmp_path, None, overwrite=False) is None
    assert choose_start(tmp_path / "new", None, overwrite=False) is None


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["checkpoint-1/trainer_state.json"], "checkpoint-1"),  # of plain TRL
        (["checkpoint-1/drgrpo_state.json", "checkpoint-9/trainer_state.json"], "checkpoint-9 and 1 more checkpoint"),
        ([f"checkpoint-{step}/drgrpo_state.json" for step in (8, 9, 10)], "checkpoint-10 and 2 more checkpoints"),
        (["model.safetensors", "training_args.bin"], "a saved model, model.safetensors"),
        (["model-00001-of-00002.safetensors", "training_args.bin"], "a saved model, model-00001-of-00002.safetensors"),
        (["adapter_model.safetensors", "training_args.bin"], "a saved model, adapter_model.safetensors"),
    ],
)
def test_a_folder_with_a_run_is_refused_with_the_ways_out(files, found, tmp_path):
    write(tmp_path, *files)
    assert run_in(tmp_path) == found
    with pytest.raises(InputError, match=f"^output_dir: got .*, which holds another run \\({found}\\)") as refused:
        choose_start(tmp_path, None, overwrite=False)
    go_on = "resume_from_checkpoint=True), or --resume" if "checkpoint" in found else "no checkpoint to resume from"
    replace = "To replace it: DrGRPOConfig(overwrite_output_dir=True), or --overwrite_output_dir true"
    for way in (go_on, replace, "another output_dir"):
        assert way in refused.value.remedy
    assert choose_start(tmp_path, None, overwrite=True) is None


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    folder = complete(tmp_path / "mine", 1, "a")
    assert choose_start(tmp_path / "mine", True, overwrite=False) == folder
    assert choose_start(tmp_path / "mine", str(folder), overwrite=False) == folder
    assert choose_start(tmp_path / "new", str(folder), overwrite=False) == folder
    complete(tmp_path / "copy", 2, "a")
    assert choose_start(tmp_path / "copy", str(folder), overwrite=False) == folder
    complete(tmp_path / "other", 2, "b")
    with pytest.raises(InputError, match="other, which holds another run"):
        choose_start(tmp_path / "other", str(folder), overwrite=False)


def test_a_checkpoint_that_cannot_be_resumed_is_no_leave_to_begin_anew(tmp_path):
    folder = complete(tmp_path, 1, "a")
    (folder / "trainer_state.json").unlink()
    with pytest.raises(InputError, match=r"which holds another run \(checkpoint-1\)"):
        choose_start(tmp_path, True, overwrite=False)


@pytest.mark.parametrize("resume", [True, "checkpoint-1"])
def test_a_run_is_not_kept_and_deleted(resume, tmp_path):
    with pytest.raises(InputError, match=f"true beside resume_from_checkpoint {str(resume).lower()}; expected one of"):
        choose_start(tmp_path, resume, overwrite=True)


def test_deleting_a_run_leaves_the_rest(tmp_path, monkeypatch, caplog):
    complete(tmp_path, 1, "a")
    complete(tmp_path, 2, "a")
    write(tmp_path, "_drgrpo/run.json", "model.safetensors", "notes.txt", "checkpoint-notes.md")
    delete_run(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-notes.md", "model.safetensors", "notes.txt"]
    assert f"overwrite_output_dir: deleted {tmp_path / 'checkpoint-2'}, {tmp_path / 'checkpoint-1'}" in caplog.text
    caplog.clear()
    delete_run(tmp_path)
    assert caplog.text == ""


def test_nothing_is_resumed_from_a_run_that_was_half_deleted(tmp_path, monkeypatch):
    complete(tmp_path, 1, "a")
    complete(tmp_path, 2, "a")

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_run(tmp_path)
    assert newest_complete_checkpoint(tmp_path) is None
    assert run_in(tmp_path) == ""


# Trainers


@pytest.fixture
def build(settings, prompts, tokenizer, reward):
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}

    def build(reward=reward, **fields):
        return DrGRPOTrainer(
            model=tiny_model(tokenizer),
            reward_funcs=reward,
            args=DrGRPOConfig(**{**settings, **fields}),
            train_dataset=prompts,
            eval_dataset=prompts.select(range(4)),
            processing_class=tokenizer,
        )

    return build


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_used_folder(build, settings, caplog):
    folder = Path(settings["output_dir"])
    first = build()
    first.train()
    before = contents(folder)

    other = build(per_device_eval_batch_size=4)
    assert "eval_reward" in other.evaluate()
    for attempt in (lambda: other.train(), lambda: build(save_strategy="no").train(resume_from_checkpoint=False)):
        with pytest.raises(InputError, match=r"^output_dir: got .* \(checkpoint-2 and 1 more checkpoint\)"):
            attempt()
    with pytest.raises(InputError, match="^overwrite_output_dir: got true beside resume_from_checkpoint true"):
        build(overwrite_output_dir=True).train(resume_from_checkpoint=True)
    assert contents(folder) == before

    # The same trainer may go on in it: as a run of its own, which is the one to resume.
    first_id = first.run_id
    first.args.max_steps = 1
    first.train()
    assert first.run_id != first_id
    assert RunState.load(folder / "checkpoint-1").run_id == first.run_id
    assert newest_complete_checkpoint(folder) == folder / "checkpoint-1"
    assert f"checkpoint-2 is skipped: it belongs to run {first_id}" in caplog.text
    assert [start["run_id"] for start in starts(folder)] == [first_id, first.run_id]


def starts(folder):
    return json.loads((folder / "_drgrpo" / "run.json").read_text())["starts"]


def stops(*args, **kwargs):
    raise KeyboardInterrupt


class Stops(TrainerCallback):
    """Ends the first step before it is done."""

    on_step_begin = stops


def test_overwriting_deletes_when_training_begins_and_no_sooner(build, settings, monkeypatch):
    folder = Path(settings["output_dir"])
    build().train()
    (folder / "notes.txt").touch()
    before = contents(folder)

    trainer = build(overwrite_output_dir=True, max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "create_optimizer", stops)  # the last of what is prepared before
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert contents(folder) == before

    trainer.train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1"]
    assert (folder / "notes.txt").exists()
    assert [start["run_id"] for start in starts(folder)] == [trainer.run_id]
    trainer.train(resume_from_checkpoint=True)  # what is in the folder is its own now
    assert (folder / "checkpoint-1" / STATE_FILE).exists()


def test_a_run_that_died_before_its_first_checkpoint_may_be_started_again(build, settings):
    trainer = build()
    trainer.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(starts(Path(settings["output_dir"]))) == 1
    again = build(max_steps=1)
    again.train()
    assert again.state.global_step == 1
