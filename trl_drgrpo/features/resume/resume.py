"""Checkpoints hold what a resumed run needs to be the same run, and one is saved before a run fails.

What TRL and transformers restore is enough only between two generation batches of the first epoch. Added here:

- `drgrpo_rollouts_<rank>.pt`: the completions that were generated but not trained on yet. TRL forgets them, so a stock
  run that is interrupted between two generations resumes with other completions. Absent when the next step generates;
- `drgrpo_features.json`: the `state_dict` of each feature;
- `drgrpo_state.json`: L, the count of micro-batches, the batch geometry (which decides on pending completions), the
  running reward scale, and what tells this run from others: its id, objective and settings. It comes last: with it the
  checkpoint is complete, see `checkpoints.py`.

What a resumed run keeps of its checkpoint, takes anew, or refuses is in `settings.py`; whether the weights of a
checkpoint fit the model, in `fitting.py`; what a resumed run takes back, in `restoring.py`.

Why not transformers' `JITCheckpointCallback` for SIGTERM: `train()` then returns as if it had finished, it goes on for
3 s and more after the signal, and it saves between backward and optimizer step, which no resume can repeat. (Measured
with `enable_jit_checkpoint=True`, transformers 5.23, steps of 0.6 s: sent in step 2, saved in step 9, exit status 0.)
"""

import json
import logging
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_drgrpo.common.disk import on_sigterm, room_needed, sole_writer
from trl_drgrpo.common.errors import DiskFullError, InputError, RewardError, Terminated
from trl_drgrpo.common.output_folders import drop_saved_links
from trl_drgrpo.common.reading import reading
from trl_drgrpo.features.diagnostics.run_facts import objective_facts
from trl_drgrpo.features.resume.checkpoints import (
    FEATURES_FILE,
    begin_checkpoint,
    check_output_of_run,
    choose_start,
    delete_old_checkpoints,
    delete_run,
    features_by_name,
    finish_checkpoint,
    rollouts_file,
    why_incomplete,
)
from trl_drgrpo.features.resume.settings import geometry, options_of_rewards, resume_facts
from trl_drgrpo.upstream.batches import Rollouts
from trl_drgrpo.upstream.hooks import Feature
from trl_drgrpo.upstream.logged_metrics import Unlogged

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)


def _model_folders(trainer: "TrainerProtocol") -> dict[str, str]:
    """Return folders or Hub ids of a run's models, by their role."""
    # Folders that the output folder must not be.
    model = trainer.unwrapped_model
    folders = {"the model": getattr(model, "name_or_path", None)}
    for name, config in getattr(model, "peft_config", {}).items():
        folders[f"the base of adapter {name}"] = config.base_model_name_or_path
    for number, reward in enumerate(trainer.reward_funcs, start=1):
        folders[f"reward {number}"] = getattr(reward, "name_or_path", None)
    # A model that was built in memory has an empty name, and a function has none.
    return {role: folder for role, folder in folders.items() if isinstance(folder, str) and folder}


class Resume(Feature):
    """Exact resume, and a checkpoint before an error. Notes the state between two optimizer steps.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        optimizer (`torch.optim.Optimizer`, *optional*): The one that the trainer was given.

    Attributes:
        run_id (`str`): Of the run that trains or has trained last; kept when it is resumed.
        resumed_from (`Path`, *optional*): The checkpoint that the newest `train()` goes on from.
    """

    def __init__(self, trainer: "TrainerProtocol", optimizer: torch.optim.Optimizer | None = None):
        super().__init__(trainer)
        self._optimizer = optimizer
        self.run_id = ""
        self.resumed_from: Path | None = None
        self._has_begun = False  # whether the files in the output folder are this trainer's
        self._checkpoints_of_this_run: list[Path] = []  # the newest is the last: clocks may be put back
        self._settings: dict[str, Any] = {}  # that a checkpoint records
        self._reward_options: dict[str, Any] = {}  # as they are before anything is scored
        self._unlogged: Unlogged | None = None  # of the checkpoint, for the next log
        self._micro_step = 0  # micro-batches processed when the newest step began or ended
        self._restore_random_state: Callable[[], None] = lambda: None
        self._terminated = threading.Event()  # by SIGTERM: the optimizer step that is being made is the last one

    def on_trainer_built(self) -> None:
        self._reward_options = self.trainer.describing.value(
            "The record of the rewards", lambda: options_of_rewards(self.trainer), otherwise={}
        )

    @contextmanager
    def started(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Choose the checkpoint that `train()` resumes from, the same on all ranks.

        An incomplete or changed checkpoint is refused, and so is a folder of another run. `True` stands for the newest
        complete checkpoint of the run that wrote last; without one a run starts, and the log says so. Inside the block
        no other process writes to the folder.
        """
        # The lock on the folder is held until the run ends.
        with ExitStack() as alone:
            checkpoint, self.run_id = self._agreed_start(resume_from_checkpoint or None, alone)
            if checkpoint is None and resume_from_checkpoint:
                folder = self.trainer.args.output_dir
                logger.warning("No checkpoint in %s to resume from: starting from scratch.", folder)
            self._settings = self.trainer.describing.value(
                "The record of the settings",
                lambda: resume_facts(self.trainer, self._reward_options, self._optimizer),
                otherwise={},
            )
            if checkpoint:
                from trl_drgrpo.features.resume.restoring import refuse_another_run

                refuse_another_run(self.trainer, checkpoint, self._settings)
            # A rescue at this step does not write it again: a run that died in between would lose it.
            self._checkpoints_of_this_run = [checkpoint.resolve()] if checkpoint else []
            self.resumed_from = checkpoint
            yield str(checkpoint) if checkpoint else None

    def _agreed_start(self, resume: str | bool | None, alone: ExitStack) -> tuple[Path | None, str]:
        """Return the checkpoint to go on from, and the id of a run that begins anew.

        The main process decides for all, once nobody else writes to the folder.
        """
        decision: Path | Exception | None = None
        if self.trainer.is_world_process_zero():
            output_dir = Path(self.trainer.args.output_dir)
            overwrite = self.trainer.args.overwrite_output_dir
            try:
                # Before the choice: another process may be about to write there.
                alone.enter_context(sole_writer("output_dir", output_dir))
                if resume or not self._has_begun:  # a run that an earlier `train()` has left there is this one
                    decision = choose_start(output_dir, resume, overwrite and not self._has_begun)
                if not self._has_begun:
                    check_output_of_run(output_dir, resume, _model_folders(self.trainer))
            except (InputError, OSError) as error:
                decision = error  # all ranks raise it: the others would wait for one that ended here
        decision, run_id = self.trainer.gathered([(decision, uuid.uuid4().hex[:12])])[0]
        if isinstance(decision, Exception):
            raise decision
        return decision, run_id

    @contextmanager
    def around_train(self) -> Iterator[None]:
        """Save a checkpoint before the error of a reward function, or SIGTERM, ends the run."""
        self._terminated.clear()
        with on_sigterm(self._terminated.set):
            try:
                yield
            except RewardError:
                # To save a checkpoint takes all ranks, and the others do not know that one has failed.
                if self.trainer.accelerator.num_processes == 1:
                    self._save_step("A reward function failed")
                else:
                    logger.error(
                        "A reward function failed. With several processes no checkpoint is saved at this point: "
                        "resume from the last one."
                    )
                raise

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Begin: everything is loaded, and the first step comes next."""
        # Only now is another run deleted: everything that can be refused was refused before.
        settings = self.trainer.args
        if settings.overwrite_output_dir and not self._has_begun and settings.should_save:
            delete_run(Path(settings.output_dir))
        self._has_begun = True
        if self._unlogged is not None:
            self.trainer.logged_metrics.restore(self._unlogged)
            self._unlogged = None

    # The boundary between two optimizer steps, at which an interrupted one can be repeated as it would be.

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self._note_boundary()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if (self.trainer.state.epoch or 0) % 1:  # at 0, `on_epoch_begin` did, before the data loader drew its seed
            self._note_boundary()
        if any(self.trainer.gathered([self._terminated.is_set()])):
            self._save_step("SIGTERM")
            raise Terminated

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._note_boundary()  # an evaluation that fails must not count as part of the step

    def _note_boundary(self) -> None:
        # What a step changes before its end: the count, the generators, and metrics that are not logged yet.
        self._micro_step = self.trainer.micro_step
        self._restore_random_state = random_state()
        self.trainer.logged_metrics.mark_boundary()

    def _rewind(self) -> None:
        """Put the trainer back to the boundary, as far as a checkpoint records it."""
        trainer = self.trainer
        if trainer.micro_step > self._micro_step:
            newest_batch = (trainer.micro_step - 1) // trainer.generate_every
            if newest_batch != self._micro_step // trainer.generate_every:
                trainer.set_pending_rollouts(None)  # those at hand are newer than the step that the run resumes from
        trainer.set_micro_step(self._micro_step)
        self._restore_random_state()

    # Checkpoints

    def writing(self, folder: Path) -> AbstractContextManager[None]:
        """Make a full disk one error, of a checkpoint and of the model. Links are not written through."""
        if self.trainer.args.should_save:
            drop_saved_links(folder)
        return room_needed(folder, self._what_is_saved)

    def _what_is_saved(self) -> str:
        checkpoints = [path for path in self._checkpoints_of_this_run if not why_incomplete(path, checksums=False)]
        if not checkpoints:
            return "No checkpoint of this run is saved. Free disk space, then start it again."
        newest = checkpoints[-1]
        return (
            f"The run up to {newest} is saved. Free disk space, then continue with --resume_from_checkpoint {newest} "
            f'(in Python trainer.train(resume_from_checkpoint="{newest}")).'
        )

    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        if self.trainer.args.should_save:
            begin_checkpoint(checkpoint)
        self.trainer.accelerator.wait_for_everyone()  # no rank writes into a folder that still counts as complete

    def completing_checkpoint(self, checkpoint: Path) -> None:
        """Write the state of all features, and the state file last: with it the checkpoint counts as complete."""
        save_rollouts(checkpoint, self.trainer.accelerator.process_index, self.trainer.pending_rollouts)
        # Metrics since the last log: the resumed run logs the same mean as the unbroken one.
        unlogged = self.trainer.logged_metrics.unlogged()
        self.trainer.accelerator.wait_for_everyone()  # the state file says that all of it is there
        if self.trainer.args.should_save:
            feature_states = {}
            for name, feature in features_by_name(self.trainer.features).items():
                feature_states[name] = feature.state_dict()
                # One by one, so that the error names the feature that cannot be written.
                with reading("features", f"the state_dict of {name}", "what JSON can hold"):
                    json.dumps(feature_states[name])
            (checkpoint / FEATURES_FILE).write_text(json.dumps(feature_states) + "\n", encoding="utf-8")
            state = run_state(self.trainer, self.run_id, self._settings)
            finish_checkpoint(checkpoint, {**state, "unlogged": unlogged})
        self._checkpoints_of_this_run.append(checkpoint.resolve())

    def on_checkpoint_saved(self, checkpoint: Path, limit: int | None) -> None:
        if self.trainer.args.should_save:
            delete_old_checkpoints(checkpoint, limit, self.trainer.state.best_model_checkpoint)

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        from trl_drgrpo.features.resume.restoring import restore

        state = restore(self.trainer, checkpoint, self._settings)
        self._unlogged = state.get("unlogged")
        self.run_id = state.get("run_id", self.run_id)

    def _save_step(self, why: str) -> None:
        """Save a checkpoint at the last finished optimizer step, for a run that is about to end."""
        if self.trainer.state.global_step == 0:
            logger.error("%s before the end of the first step: nothing is saved.", why)
            return
        folder = self.trainer.checkpoint_folder()
        # The step may have saved its checkpoint already.
        if folder.resolve() not in self._checkpoints_of_this_run:
            self._rewind()
            try:
                self.trainer.save_checkpoint_now()
            except DiskFullError as error:
                logger.error("%s, and the run up to here cannot be saved. %s", why, error)
                return
        if self.trainer.is_world_process_zero():
            logger.error("%s. The run up to here is saved: resume from %s.", why, folder)


def run_state(trainer: "TrainerProtocol", run_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a state file, JSON-ready. `settings`: the `resume_facts` of the start."""
    return {
        "loss_normalizer": trainer.loss_normalizer,
        "micro_step": trainer.micro_step,
        "geometry": geometry(trainer),
        "has_rollouts": trainer.pending_rollouts is not None,
        "run_id": run_id,
        "objective": objective_facts(trainer),
        "settings": settings,
    }


def save_rollouts(checkpoint: Path, rank: int, micro_batches: list[Rollouts] | None) -> None:
    """Write this rank's pending micro-batches into a checkpoint folder; `None`: leave no file of an older run."""
    if micro_batches is None:
        rollouts_file(checkpoint, rank).unlink(missing_ok=True)
    else:
        checkpoint.mkdir(parents=True, exist_ok=True)  # of a rank on a disk of its own
        torch.save(micro_batches, rollouts_file(checkpoint, rank))


def random_state() -> Callable[[], None]:
    """Return a function that puts the random generators of Python, numpy and torch back to where they are now."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all()  # of no device without any

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        torch.cuda.set_rng_state_all(cuda_states)

    return restore
