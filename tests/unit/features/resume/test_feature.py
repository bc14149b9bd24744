"""The feature with a trainer that is a namespace: what it decides, restores and says."""

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl_drgrpo.common.errors import DiskFullError, InputError, RewardError, Terminated
from trl_drgrpo.features.resume import resume as room
from trl_drgrpo.features.resume.checkpoints import PART_FILE, STATE_FILE, TRAINER_STATE, finish_checkpoint, read_state
from trl_drgrpo.features.resume.resume import Resume
from trl_drgrpo.features.resume.resume_state import RunState
from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.objective.value_baseline import ValueBaseline
from trl_drgrpo.upstream.description import DescriptionGuard

GEOMETRY = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "num_generations": 4,
}


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """One process that has trained two steps of two micro-batches, in a folder of its own."""
    monkeypatch.setattr(room, "objective_facts", lambda trainer: dict(trainer.objective))
    monkeypatch.setattr(room, "resume_facts", lambda trainer: dict(trainer.settings))
    args = SimpleNamespace(
        output_dir=str(tmp_path),
        overwrite_output_dir=False,
        should_save=True,
        loss_normalizer=None,
        beta=0.0,
        forks=1,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        **GEOMETRY,
    )
    trainer = SimpleNamespace(
        args=args,
        state=SimpleNamespace(global_step=2, epoch=1.5),
        accelerator=SimpleNamespace(
            process_index=0, num_processes=1, device=torch.device("cpu"), wait_for_everyone=lambda: None
        ),
        objective={"beta": 0.0, "reward_funcs": ["length"]},
        settings={"optim": "adamw_torch", "learning_rate": 1e-2, "seed": 1},
        reward_scale=RunningRewardScale(),
        value_baseline=ValueBaseline(),
        step_scorer=None,
        loss_normalizer=12,
        micro_step=4,
        generate_every=2,
        pending_rollouts=None,
        epochs=[],
        saved=[],
        gathered=lambda values: values,
        describing=DescriptionGuard(),
        is_world_process_zero=lambda: True,
    )
    trainer.advance_train_sampler = trainer.epochs.append
    trainer.checkpoint_folder = lambda: tmp_path / f"checkpoint-{trainer.state.global_step}"
    trainer.save_checkpoint_now = lambda: trainer.saved.append(trainer.micro_step)
    trainer.resume = Resume(trainer)
    trainer.resume.run_id = "first"
    return trainer


@pytest.fixture
def saved(trainer):
    """Writes a checkpoint as the host and the feature do."""

    def save(step=2):
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        trainer.resume.on_checkpoint_begun(folder)
        (folder / "optimizer.pt").write_bytes(b"moments")
        (folder / TRAINER_STATE).write_text("{}")
        trainer.resume.complete(folder)
        return folder

    return save


# Which checkpoint


def start(resume, given):
    with resume.started(given) as checkpoint:
        return checkpoint


def test_a_run_begins_anew_and_says_so_where_there_is_nothing_to_resume(trainer, caplog):
    assert start(trainer.resume, None) is None
    assert caplog.text == ""
    first = trainer.resume.run_id
    assert start(trainer.resume, True) is None
    assert "to resume from: starting from scratch" in caplog.text
    assert len(first) == 12
    assert trainer.resume.run_id != first


def test_true_takes_the_newest_complete_checkpoint(trainer, saved):
    whole = saved(1)
    (saved(2) / STATE_FILE).unlink()
    (Path(trainer.args.output_dir) / "checkpoint-2" / PART_FILE).touch()
    assert start(Resume(trainer), True) == str(whole)


def test_another_run_in_the_folder_is_refused_until_it_may_be_overwritten(trainer, saved):
    folder = saved()
    begun = Resume(trainer)
    with pytest.raises(InputError, match=r"^output_dir: .*which holds another run \(checkpoint-2\)"):
        start(begun, None)
    trainer.args.overwrite_output_dir = True
    assert start(begun, None) is None
    begun.on_train_begin(trainer.args, None, None)
    assert not folder.exists()
    again = saved()  # of this trainer by now: a second call of train() deletes nothing
    assert start(begun, None) is None
    begun.on_train_begin(trainer.args, None, None)
    assert again.exists()


def test_the_main_process_decides_for_all(trainer):
    trainer.is_world_process_zero = lambda: False
    trainer.gathered = lambda values: [(Path("there"), "of-the-first"), *values]
    assert start(trainer.resume, True) == "there"
    assert trainer.resume.run_id == "of-the-first"
    trainer.gathered = lambda values: [(InputError("output_dir", "a", "b", "c"), ""), *values]
    with pytest.raises(InputError, match="^output_dir: got a"):
        start(trainer.resume, True)


# A reward that fails


def fail(resume):
    with pytest.raises(RewardError), resume.around_train():
        raise RewardError("f", "g", "h", "i")


def test_the_trainer_goes_back_to_the_boundary_before_it_is_saved(trainer, caplog):
    trainer.micro_step = 3
    trainer.resume.on_step_begin(None, None, None)
    random.random()
    trainer.resume.on_step_end(None, None, None)
    drawn = random.random()
    trainer.micro_step, trainer.pending_rollouts = 5, ["newer"]  # of the generation at micro-batch 4
    fail(trainer.resume)
    assert trainer.saved == [3]
    assert trainer.pending_rollouts is None
    assert random.random() == drawn
    assert "resume from" in caplog.text


def test_completions_of_a_generation_that_goes_on_are_kept(trainer):
    trainer.generate_every, trainer.micro_step, trainer.pending_rollouts = 4, 2, ["half used"]
    trainer.resume.on_step_begin(None, None, None)
    trainer.micro_step = 3
    fail(trainer.resume)
    assert (trainer.saved, trainer.pending_rollouts) == ([2], ["half used"])


def test_nothing_is_saved_before_the_first_step_twice_by_several_or_for_other_errors(trainer, saved, caplog):
    with pytest.raises(KeyError), trainer.resume.around_train():
        raise KeyError
    trainer.state.global_step = 0
    fail(trainer.resume)
    trainer.state.global_step = 2
    saved(2)
    fail(trainer.resume)  # that step is saved already
    trainer.state.global_step, trainer.accelerator.num_processes = 3, 2
    fail(trainer.resume)
    assert trainer.saved == []
    assert "With several processes no checkpoint is saved" in caplog.text


def test_a_full_disk_hides_no_reward_error(trainer, caplog):
    def full():
        raise DiskFullError("No room.")

    trainer.save_checkpoint_now = full
    fail(trainer.resume)
    assert "the run up to here cannot be saved. No room." in caplog.text


# SIGTERM


def test_one_process_that_is_asked_to_end_ends_all(trainer):
    trainer.accelerator.num_processes, trainer.gathered = 2, lambda values: [*values, False]
    trainer.resume.on_step_begin(None, None, None)
    trainer.gathered = lambda values: [*values, True]
    with pytest.raises(Terminated):
        trainer.resume.on_step_begin(None, None, None)
    assert trainer.saved == [4]


def test_the_signal_is_for_this_process_once_and_only_where_nobody_else_wants_it(trainer):
    with trainer.resume.around_train():
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Terminated):
            trainer.resume.on_step_begin(None, None, None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with trainer.resume.around_train():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# A checkpoint is loaded


def test_what_was_saved_comes_back(trainer, saved, caplog):
    trainer.pending_rollouts = [{"ids": torch.arange(3)}]
    trainer.reward_scale.update(torch.tensor([1.0, 3.0]))
    trainer.run_was = trainer.reward_scale.state_dict()
    folder = saved()
    trainer.micro_step, trainer.pending_rollouts, trainer.reward_scale = 0, None, RunningRewardScale()
    trainer.resume = Resume(trainer)
    trainer.resume.on_checkpoint_loaded(folder)
    assert (trainer.micro_step, trainer.resume.run_id, trainer.epochs) == (4, "first", [1])
    assert trainer.reward_scale.state_dict() == trainer.run_was
    assert trainer.pending_rollouts[0]["ids"].tolist() == [0, 1, 2]
    assert caplog.text == ""


def test_what_changed_is_said(trainer, saved, caplog):
    folder = saved()
    trainer.objective = {"beta": 0.1, "reward_funcs": []}
    trainer.args.gradient_accumulation_steps, trainer.loss_normalizer, trainer.micro_step = 4, 20, 0
    (folder / "optimizer.pt").unlink()
    trainer.resume.on_checkpoint_loaded(folder)
    assert (trainer.loss_normalizer, trainer.micro_step) == (12, 0)
    for message in (
        "holds no optimizer state",
        "Keeping L = 12 of the resumed run (max_completion_length is now 20)",
        "beta 0.0 -> 0.1; reward_funcs length -> none",
        "Batch sizes changed (gradient_accumulation_steps 2 -> 4)",
    ):
        assert message in caplog.text
    trainer.args.loss_normalizer = 20
    with pytest.raises(InputError, match="^loss_normalizer: got 20; expected 12, with which the run in"):
        trainer.resume.on_checkpoint_loaded(folder)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (("return_to_go", "to_go", "reward"), "deepseekmath"),  # the default of 0.1.0, under its name of today
        (("return_to_go", "none", "reward"), "none"),
        (("min_increments", "to_go", "reward"), "to_go"),  # not known to 0.1.0: somebody's choice
        (("return_to_go", "to_go", "baseline"), "to_go"),
    ],
)
def test_a_run_of_0_1_0_keeps_its_credit(given, kept, trainer, saved, caplog):
    folder = saved()
    finish_checkpoint(folder, {**read_state(folder), "objective": None})
    trainer.args.step_credit, trainer.args.step_baseline, trainer.args.process_role = given
    trainer.resume.on_checkpoint_loaded(folder)
    assert trainer.args.step_baseline == given[1]  # without step rewards there is nothing to keep
    trainer.step_scorer = object()
    trainer.resume.on_checkpoint_loaded(folder)
    assert trainer.args.step_baseline == kept
    assert ("The default is now 'to_go'" in caplog.text) == (kept != given[1])
    again = saved(3)
    trainer.args.step_baseline = given[1]  # the same script, resumed once more
    trainer.resume.on_checkpoint_loaded(again)
    assert trainer.args.step_baseline == kept


def test_completions_that_lack_what_the_loss_reads_now_are_generated_anew(trainer, saved, caplog):
    trainer.pending_rollouts = [{"ids": torch.arange(3)}]
    folder = saved()
    trainer.pending_rollouts, trainer.args.beta, trainer.args.use_vllm = None, 0.1, True
    trainer.resume.on_checkpoint_loaded(folder)
    assert trainer.pending_rollouts is None
    assert "lack importance_sampling_ratio and ref_per_token_logps, which the run now needs" in caplog.text


def test_all_ranks_use_their_completions_or_none(trainer, saved, caplog):
    trainer.pending_rollouts = [{"ids": torch.arange(3)}]
    folder = saved()
    trainer.pending_rollouts, trainer.gathered = None, lambda values: [*values, False]
    trainer.resume.on_checkpoint_loaded(folder)
    assert trainer.pending_rollouts is None
    assert "the run continues, but not bit for bit" in caplog.text


def test_a_checkpoint_of_plain_trl_names_the_l_of_its_neighbors(trainer, saved, caplog):
    saved(1)
    plain = saved(2)
    (plain / STATE_FILE).unlink()
    trainer.loss_normalizer = 20
    trainer.resume.on_checkpoint_loaded(plain)
    assert "holds no Dr. GRPO state: continuing with L = 20" in caplog.text
    assert "were trained with L = 12. Set loss_normalizer=12 to keep it." in caplog.text


def test_the_state_says_what_the_trainer_was(trainer, saved):
    trainer.args.should_save = False
    assert not (saved(1) / STATE_FILE).exists()  # of another rank
    trainer.args.should_save = True
    state = RunState.load(saved(2))
    assert state.geometry == {**GEOMETRY, "num_processes": 1}
    assert (state.loss_normalizer, state.micro_step, state.has_rollouts) == (12, 4, False)
    assert state.objective == trainer.objective


def test_a_full_disk_names_the_newest_checkpoint_that_is_whole(trainer, saved):
    assert "No checkpoint of this run is saved" in trainer.resume._what_is_saved()
    folder = saved(1)
    (saved(2) / PART_FILE).touch()
    assert f"--resume_from_checkpoint {folder} " in trainer.resume._what_is_saved()
