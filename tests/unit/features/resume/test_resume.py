"""What processes decide together, and what a signal does; `tests/trainer/test_resume.py` runs the rest."""

import os
import signal
from pathlib import Path

import pytest
from tiny import tiny_model

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, RewardError, Terminated


@pytest.fixture
def trainer(settings, prompts, tokenizer, reward, monkeypatch):
    """Stands behind its second optimizer step, in the middle of a generation batch; saves nothing, but notes it."""
    settings |= {"steps_per_generation": 6, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    args = DrGRPOConfig(**settings)
    trainer = DrGRPOTrainer(tiny_model(tokenizer), reward, args, prompts, processing_class=tokenizer)
    trainer.train()
    trainer.saved = []
    monkeypatch.setattr(trainer, "save_checkpoint_now", lambda: trainer.saved.append(trainer.micro_step))
    return trainer


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


def fail(resume):
    with pytest.raises(RewardError), resume.around_train():
        raise RewardError("f", "g", "h", "i")


def test_a_reward_that_fails_is_no_reason_to_save_twice_or_with_several_processes(trainer, monkeypatch, caplog):
    fail(trainer.resume)  # step 2 is saved already
    trainer.state.global_step = 3
    with_others(trainer, monkeypatch, True)
    fail(trainer.resume)
    assert "With several processes no checkpoint is saved" in caplog.text
    assert trainer.saved == []


def test_one_process_that_is_asked_to_end_ends_all(trainer, monkeypatch):
    trainer.state.global_step = 3
    with_others(trainer, monkeypatch, False)
    trainer.resume.on_step_begin(None, None, None)
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
    trainer.pending_rollouts = None
    if reason == "vLLM":
        trainer.args.use_vllm = True
    elif reason:
        monkeypatch.setattr(trainer, "gathered", lambda values: [*values, False])
    trainer.resume.on_checkpoint_loaded(Path(trainer.args.output_dir) / "checkpoint-2")
    assert (trainer.pending_rollouts is None) == bool(reason)
    assert ("but not bit for bit" in caplog.text) == (reason == "another rank has none")
    assert ("lack importance_sampling_ratio, which the run now needs" in caplog.text) == (reason == "vLLM")
