"""A trainer whose checkpoints hold what a resumed run needs to be the same run, and that saves before it fails.

What TRL and transformers restore is enough only between two generation batches of the first epoch. Added here: the
completions not trained on yet, the count of micro-batches, the prompt order of later epochs, L, the reward scale.
"""

import logging
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from trl_drgrpo.advantages import RunningRewardScale
from trl_drgrpo.errors import InputError, RewardError
from trl_drgrpo.runstate import RunState, load_rollouts, save_rollouts
from trl_drgrpo.upstream import GRPOSeams

logger = logging.getLogger(__name__)


class ResumableTrainer(GRPOSeams):
    """`GRPOSeams` with exact resume. A subclass sets `loss_normalizer` and `reward_scale`."""

    loss_normalizer: int  # L, in tokens
    reward_scale: RunningRewardScale
    window_start: int = 0  # micro-batches processed when the current optimizer step began

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`trl.GRPOTrainer.train`], with two differences.

        When a reward function fails, a checkpoint is saved before the error; and `resume_from_checkpoint=True` without
        any checkpoint starts the run and says so.
        """
        folder = self.args.output_dir
        if resume_from_checkpoint is True and not (os.path.isdir(folder) and get_last_checkpoint(folder)):
            logger.warning("No checkpoint in %s to resume from: starting anew.", folder)
            resume_from_checkpoint = None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except RewardError:
            self._save_what_was_computed()
            raise

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        if self.pending_rollouts is not None:
            save_rollouts(checkpoint, self.accelerator.process_index, self.pending_rollouts)
        if self.args.should_save:
            RunState(self.loss_normalizer, self.micro_step, self.reward_scale.state_dict()).save(checkpoint)

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        state = RunState.load(checkpoint)
        if state is None:
            logger.warning("%s holds no Dr. GRPO state: going on with L = %d.", checkpoint, self.loss_normalizer)
            return
        if self.args.loss_normalizer not in (None, state.loss_normalizer):
            raise InputError(
                "loss_normalizer",
                str(self.args.loss_normalizer),
                f"{state.loss_normalizer}, with which the run in {checkpoint} was started",
                "Another L is another step size in the middle of a run: leave loss_normalizer out, or start anew.",
            )
        if state.loss_normalizer != self.loss_normalizer:
            message = "Keeping L = %d of the resumed run (max_completion_length is now %d)."
            logger.warning(message, state.loss_normalizer, self.loss_normalizer)
        self.loss_normalizer = state.loss_normalizer
        self.reward_scale.load_state_dict(state.reward_scale)
        self.micro_step = state.micro_step
        self.pending_rollouts = load_rollouts(checkpoint, self.accelerator.process_index, self.accelerator.device)
        self.advance_train_sampler(int((self.state.epoch or 0.0) + 1e-6))

    def _save_what_was_computed(self) -> None:
        """A checkpoint at the last finished optimizer step, for a run that is about to end with an error."""
        if self.accelerator.num_processes > 1:
            logger.error("A reward function failed. With several processes no checkpoint is saved at this point.")
            return
        if (self.micro_step - 1) // self.generate_every != self.window_start // self.generate_every:
            self.pending_rollouts = None  # those at hand are newer than the step that the run will resume from
        self.micro_step = self.window_start
        checkpoint = self.save_checkpoint_now()
        if checkpoint is not None:
            logger.error("A reward function failed. The run up to here is saved: resume from %s.", checkpoint)


class WindowStart(TrainerCallback):
    """Notes where an optimizer step began, so that an interrupted one can be repeated."""

    def __init__(self, trainer: ResumableTrainer):
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.window_start = self.trainer.micro_step
