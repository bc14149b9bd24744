"""When a checkpoint folder counts as complete, and what a run does with one that does not."""

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
import xxhash
from runs import short_run
from tiny import tiny_model
from transformers.trainer_callback import TrainerState

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.cli.job import run_folder
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume import checkpoints
from trl_drgrpo.features.resume.checkpoints import (
    PART_FILE,
    STATE_FILE,
    begin_checkpoint,
    file_marks,
    finish_checkpoint,
    newest_complete_checkpoint,
    read_state,
    require_complete,
    why_incomplete,
)
from trl_drgrpo.features.resume.resume_state import RunState, load_rollouts, save_rollouts


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint of three files."""
    folder = tmp_path / "checkpoint-3"
    begin_checkpoint(folder)
    (folder / "optimizer.pt").write_bytes(b"12345")
    (folder / "README.md").write_text("a card")
    (folder / "trainer_state.json").write_text("{}")
    finish_checkpoint(folder, {"files": file_marks(folder), "run_id": "a", "saved_at": 1.0})
    return folder


def flip(path):
    """Another bit pattern of the same size, at another time: clocks of file systems are coarser than a test."""
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(path, (0, 0))


def test_a_complete_one(folder):
    marks = json.loads((folder / STATE_FILE).read_text())["files"]
    assert {name: mark["bytes"] for name, mark in marks.items()} == {"optimizer.pt": 5, "trainer_state.json": 2}
    assert marks["optimizer.pt"]["xxh3_128"] == xxhash.xxh3_128(b"12345").hexdigest()
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
        (lambda f: flip(f / "optimizer.pt"), "optimizer.pt was changed after it was written (its checksum differs)"),
        (lambda f: flip(f / STATE_FILE), f"{STATE_FILE} cannot be read (Expecting value: line 1 column 1 (char 0))"),
        (lambda f: swap(f / STATE_FILE, '"bytes": 5', '"bytes": 6'), f"{STATE_FILE} cannot be read (its checksum"),
        (lambda f: (f / "trainer_state.json").write_text("{"), "trainer_state.json cannot be read"),
        (lambda f: (f / "trainer_state.json").write_text("[]"), "trainer_state.json holds no state"),
        (lambda f: (f / "trainer_state.json").unlink(), "it holds no trainer_state.json"),
        (begin_checkpoint, "it is incomplete: the run died while saving it"),
    ],
)
def test_a_damaged_one_is_refused_and_skipped(damage, reason, folder, caplog):
    damage(folder)
    assert why_incomplete(folder).startswith(reason)
    reason = re.escape(reason)
    with pytest.raises(InputError, match=f"^resume_from_checkpoint: got .*checkpoint-3, but {reason}.*; expected"):
        require_complete(folder)
    with pytest.raises(InputError, match=reason):
        run_folder(resume(folder), dry_run=True).__enter__()
    assert newest_complete_checkpoint(folder.parent) is None
    assert re.search(f"{folder} is skipped: {reason}", caplog.text)


def resume(folder):
    return {"resume_from_checkpoint": str(folder)}


def swap(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_sizes_are_judged_without_reading(folder, monkeypatch):
    flip(folder / "optimizer.pt")
    assert why_incomplete(folder, checksums=False) == ""
    monkeypatch.setattr(checkpoints, "_checksum_once", lambda *a: pytest.fail("was read"))
    (folder / "optimizer.pt").write_bytes(b"")
    assert why_incomplete(folder) == "optimizer.pt has 0 bytes instead of 5"


def test_rollouts_may_be_lost_but_not_changed(tmp_path, caplog):
    folder = tmp_path / "checkpoint-1"
    save_rollouts(folder, 0, [{"completion_ids": torch.tensor([[1, 2]])}])
    (folder / "trainer_state.json").write_text("{}")
    files = file_marks(folder)
    assert load_rollouts(folder, 0, torch.device("cpu"), files) is not None
    rollouts = folder / "drgrpo_rollouts_0.pt"
    content = bytearray(rollouts.read_bytes())
    content[content.index(torch.tensor([1, 2]).numpy().tobytes())] = 3  # torch loads it without a word
    rollouts.write_bytes(content)
    os.utime(rollouts, (0, 0))
    assert load_rollouts(folder, 0, torch.device("cpu"))[0]["completion_ids"].tolist() == [[3, 2]]
    assert load_rollouts(folder, 0, torch.device("cpu"), files) is None
    assert "are not used: drgrpo_rollouts_0.pt was changed after it was written" in caplog.text
    finish_checkpoint(folder, {"files": files})
    assert why_incomplete(folder) == ""


# Which of several: (step, run, time of writing) -> the newest


def written(output_dir, step, run_id, saved_at):
    folder = output_dir / f"checkpoint-{step}"
    begin_checkpoint(folder)
    (folder / "trainer_state.json").write_text("{}")
    finish_checkpoint(folder, {"files": file_marks(folder), "run_id": run_id, "saved_at": saved_at})
    return folder


@pytest.mark.parametrize(
    ("folders", "newest", "said"),
    [
        ([(9, "a", 10.0), (10, "a", 20.0)], 10, ""),
        (
            [(4, "a", 10.0), (5, "a", 20.0), (2, "b", 30.0)],
            2,
            "it belongs to run a, but the last run to save here is b",
        ),
        (
            [(4, "a", 10.0), (8, "a", 20.0), (5, "a", 30.0)],
            5,
            "the run was resumed from an earlier step: checkpoint-5 was written",
        ),
    ],
    ids=["one run", "two runs", "went back"],
)
def test_the_newest_is_of_the_run_that_wrote_last(folders, newest, said, tmp_path, caplog):
    for each in folders:
        written(tmp_path, *each)
    assert newest_complete_checkpoint(tmp_path) == tmp_path / f"checkpoint-{newest}"
    assert said in caplog.text
    assert ("is skipped" in caplog.text) == bool(said)


def test_damage_leads_back_within_the_run_only(tmp_path, caplog):
    written(tmp_path, 1, "a", 10.0)
    written(tmp_path, 3, "b", 20.0)
    flip(written(tmp_path, 4, "b", 30.0) / "trainer_state.json")
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    flip(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert newest_complete_checkpoint(tmp_path) is None
    assert "checkpoint-1 is skipped: it belongs to run a" in caplog.text


def test_a_checkpoint_of_plain_trl_on_top_of_ours_is_named(tmp_path, caplog):
    written(tmp_path, 1, "a", 10.0)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert "plain TRL wrote it, and it may be incomplete" in caplog.text
    assert f"set resume_from_checkpoint={tmp_path / 'checkpoint-2'}" in caplog.text


def test_the_time_of_writing_never_goes_back(tmp_path, monkeypatch):
    numbers = dict.fromkeys(("loss_normalizer", "micro_step"), 1)
    facts = {name: {} for name in ("reward_scale", "value_baseline", "geometry", "objective", "settings")}
    state = RunState(**numbers, **facts, run_id="a", has_rollouts=False)
    for step, clock in ((1, 100.0), (2, 50.0), (3, 200.0)):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        begin_checkpoint(tmp_path / f"checkpoint-{step}")
        state.save(tmp_path / f"checkpoint-{step}")
    times = [read_state(tmp_path / f"checkpoint-{step}")["saved_at"] for step in (1, 2, 3)]
    assert times == [100.0, 101.0, 200.0]


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


FILES = ["our state", "rotation"]
RARE = ("model.safetensors", "optimizer.pt", "trainer_state.json")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in RARE]


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
        with pytest.raises(InputError, match="checkpoint-2, but it is incomplete"):
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
