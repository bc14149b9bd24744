"""Whose folder it is, what processes decide together, and what a signal does; `tests/trainer/test_resume.py` runs the
rest."""

import copy
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import runs

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, RewardError, Terminated
from trl_drgrpo.features.resume.checkpoints import STATE_FILE, newest_complete_checkpoint, read_state


@pytest.fixture
def build(build, prompts):
    each_step = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    return lambda **fields: build(**{**each_step, **fields, "eval_dataset": prompts.select(range(4))})


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def starts(folder):
    return [start["run_id"] for start in json.loads((folder / "_drgrpo" / "run.json").read_text())["starts"]]


def stops(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_used_folder(build, output, caplog):
    first = build()
    first.train()
    before = contents(output)

    other = build(per_device_eval_batch_size=4)
    assert "eval_reward" in other.evaluate()
    for attempt in (other.train, partial(build(save_strategy="no").train, resume_from_checkpoint=False)):
        with pytest.raises(InputError, match=r"^output_dir: got .* \(checkpoint-2 and 1 more checkpoint\)"):
            attempt()
    with pytest.raises(InputError, match="^overwrite_output_dir: got true beside resume_from_checkpoint true"):
        build(overwrite_output_dir=True).train(resume_from_checkpoint=True)
    assert contents(output) == before

    # The same trainer may go on in it: as a run of its own, which is the one to resume.
    first_id = first.run_id
    first.args.max_steps = 1
    first.train()
    assert first.run_id != first_id
    assert read_state(output / "checkpoint-1")["run_id"] == first.run_id
    assert newest_complete_checkpoint(output) == output / "checkpoint-1"
    assert f"checkpoint-2 is skipped: it belongs to run {first_id}" in caplog.text
    assert starts(output) == [first_id, first.run_id]


def test_overwriting_deletes_when_training_begins_and_no_sooner(build, output, monkeypatch):
    build().train()
    (output / "notes.txt").touch()
    before = contents(output)

    trainer = build(overwrite_output_dir=True, max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "create_optimizer", stops)  # the last of what is prepared before
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert contents(output) == before

    trainer.train()
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-1"]
    assert (output / "notes.txt").exists()
    assert starts(output) == [trainer.run_id]
    trainer.train(resume_from_checkpoint=True)  # what is in the folder is its own now
    assert (output / "checkpoint-1" / STATE_FILE).exists()


# Several processes, and signals


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prompts, tokenizer, reward):
    """Stands behind its second optimizer step, in the middle of a generation batch."""
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "steps_per_generation": 6}
    settings = {**runs.short_run(tmp_path_factory.mktemp("trained")), **fields}
    return runs.train(DrGRPOTrainer, settings, prompts, tokenizer, reward)


@pytest.fixture
def trainer(trained, monkeypatch):
    """The same for one test; saves nothing, but notes it."""
    monkeypatch.setattr(trained, "saved", [], raising=False)
    monkeypatch.setattr(trained, "save_checkpoint_now", lambda: trained.saved.append(trained.micro_step))
    monkeypatch.setattr(trained.args, "use_vllm", trained.args.use_vllm)  # put back as it is now
    monkeypatch.setattr(trained.state, "global_step", 2)
    monkeypatch.setattr(trained, "resume", copy.copy(trained.resume))
    rollouts = trained.pending_rollouts
    micro_step = trained.micro_step
    yield trained
    trained.set_pending_rollouts(rollouts)
    trained.set_micro_step(micro_step)


def with_others(trainer, monkeypatch, *values):
    """There are other processes, and they say this."""
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 1 + len(values))
    monkeypatch.setattr(trainer, "gathered", lambda own: [*own, *values])


def test_the_main_process_decides_for_all(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    decided = (None, "of-the-first")
    monkeypatch.setattr(trainer, "gathered", lambda values: [decided, *values])
    with trainer.resume.started(True) as checkpoint:
        assert (checkpoint, trainer.run_id) == (None, "of-the-first")
    decided = (InputError("output_dir", "a", "b", "c"), "")
    with pytest.raises(InputError, match="^output_dir: got a"), trainer.resume.started(True):
        pass


def test_processes_end_together_and_save_only_what_they_all_have(trainer, monkeypatch, caplog):
    def fail():
        with pytest.raises(RewardError), trainer.resume.around_train():
            raise RewardError("f", "g", "h", "i")

    fail()  # step 2 is saved already
    trainer.state.global_step = 3
    with_others(trainer, monkeypatch, False)
    fail()
    assert "With several processes no checkpoint is saved" in caplog.text
    trainer.resume.on_step_begin(None, None, None)
    assert trainer.saved == []
    with_others(trainer, monkeypatch, True)
    with pytest.raises(Terminated):
        trainer.resume.on_step_begin(None, None, None)
    assert trainer.saved == [4]


def test_the_signal_is_for_this_process_once_and_only_where_nobody_else_wants_it(trainer, caplog):
    with trainer.resume.around_train():
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        trainer.state.global_step = 0
        with pytest.raises(Terminated):
            trainer.resume.on_step_begin(None, None, None)
    assert caplog.messages == ["SIGTERM before the end of the first step: nothing is saved."]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with trainer.resume.around_train():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("reason", ["another rank has none", "vLLM", None])
def test_completions_are_used_by_all_ranks_or_none(reason, trainer, monkeypatch, caplog):
    trainer.set_pending_rollouts(None)
    if reason == "vLLM":
        trainer.args.use_vllm = True
    elif reason:
        monkeypatch.setattr(trainer, "gathered", lambda values: [*values, False])
    trainer.resume.on_checkpoint_loaded(Path(trainer.args.output_dir, "checkpoint-2"))
    assert (trainer.pending_rollouts is None) == bool(reason)
    assert ("but not bit for bit" in caplog.text) == (reason == "another rank has none")
    assert ("lack importance_sampling_ratio, which the run now needs" in caplog.text) == (reason == "vLLM")
