"""Ends a run whose numbers are no longer finite, before anything of it is saved.

One reward of 3e38 or a learning rate of 1e20 makes a gradient NaN, then every weight, and each checkpoint from there
on is a complete one of nothing. Three looks, each where the number is at hand or costs one pass over the weights:

- the norm of every gradient, before the optimizer step: the weights are still those of the step before;
- the trainable weights before each generation, which costs seconds: a model of NaN has no distribution, and on CUDA
  sampling from it takes the device down;
- weights and optimizer before anything is saved, and weights when training begins and ends.

With float16 a gradient that overflows is ordinary: the step is skipped and the scale of the loss halved. It is
divergence once that scale is below 1, where scaling is no longer the reason.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trl_drgrpo.common.errors import DivergedError, InputError
from trl_drgrpo.common.finite import first_not_finite, has_no_distribution
from trl_drgrpo.common.output_folders import checkpoint_folders, step_of
from trl_drgrpo.features.resume.checkpoints import why_incomplete
from trl_drgrpo.features.resume.resume import Resume
from trl_drgrpo.upstream.batches import CreditedBatch
from trl_drgrpo.upstream.hooks import Feature

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

# Beyond these the number itself is the likely cause. Rewards are of the order of 1, learning rates of 1e-6 to 1e-2.
_LARGE_ADVANTAGE = 1e4
_LARGE_RATE = 0.1
_ELSEWHERE = "a weight of another process"


class DivergenceGuard(Feature):
    """Raises a [`DivergedError`] in place of a step, a generation or a save with numbers that are not finite.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        resume ([`Resume`]): Knows the checkpoint that the run goes on from.
    """

    def __init__(self, trainer: "TrainerProtocol", resume: Resume):
        super().__init__(trainer)
        self._resume = resume
        self._is_writing = False
        self._began_at = 0  # optimizer steps of the checkpoint that the run goes on from
        self._advantages: torch.Tensor | None = None  # of this rank's newest generation batch

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Refuse weights that were not finite before this run took a step."""
        self._began_at = state.global_step
        name = self._broken_weight() or self._broken_moment()
        if not self._on_any_rank(name):
            return
        # The fault is the model's, or the checkpoint's: this run has not trained yet.
        name = name or _ELSEWHERE
        checkpoint = self._resume.resumed_from
        if checkpoint is None:
            model = getattr(self.trainer.model.config, "_name_or_path", "") or type(self.trainer.model).__name__
            remedy = "Training cannot repair it: take another model, or an earlier checkpoint of it."
            raise InputError("model", f"{model}, in which {name} is NaN or infinite", "finite weights", remedy)
        earlier = self._newest_checkpoint(before=state.global_step)
        remedy = "start a new run"
        if earlier is not None:
            remedy = f"name an earlier checkpoint, such as {earlier}"
        got = f"{checkpoint}, in which {name} is NaN or infinite"
        expected = "a checkpoint of finite numbers"
        raise InputError("resume_from_checkpoint", got, expected, f"The run that saved it had diverged: {remedy}.")

    def on_credit(self, batch: CreditedBatch) -> None:
        if batch.training:
            self._advantages = batch.advantages

    @contextmanager
    def generating(self, limits: Sequence[int] | None = None) -> Iterator[None]:
        self._refuse_broken_weights()
        try:
            yield
        except RuntimeError as error:
            if not has_no_distribution(error):
                raise
            raise self._diverged("the logits of the policy are NaN or infinite") from None

    def on_grad_norm(self, grad_norm: float) -> None:
        if math.isfinite(grad_norm):
            return
        # `None` for types other than float16, in which an overflow is never ordinary.
        scale = self.trainer.loss_scale
        if scale is None or scale < 1:
            raise self._diverged(f"the norm of the gradient is {grad_norm}", step=self.trainer.state.global_step + 1)

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        if self._is_writing:  # the model of a checkpoint, which was looked at
            yield
            return
        self._refuse_broken_weights()
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        if self._on_any_rank(self._broken_moment()):
            raise self._diverged("the state of the optimizer is NaN or infinite")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._refuse_broken_weights()  # also in a run that saves nothing

    def _refuse_broken_weights(self) -> None:
        name = self._broken_weight()
        if self._on_any_rank(name):
            raise self._diverged(f"{name or _ELSEWHERE} is NaN or infinite")

    def _on_any_rank(self, name: str | None) -> bool:
        """Tell whether any process found something, so that all of them end."""
        if not self.trainer.in_lockstep:  # each process holds all weights
            return name is not None
        return any(self.trainer.gathered([name is not None]))

    def _broken_weight(self) -> str | None:
        parameters = self.trainer.model.named_parameters()
        return first_not_finite((name, weight) for name, weight in parameters if weight.requires_grad)

    def _broken_moment(self) -> str | None:
        """Return an entry of the optimizer's state that is not finite; engines that split it up keep their own."""
        optimizer = self.trainer.optimizer
        if optimizer is None or self.trainer.in_lockstep:
            return None
        # Of Adam the two moments; of other optimizers whatever tensors they hold.
        moments = []
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    moments.append((f"the optimizer's {name}", value))
        return first_not_finite(moments)

    def _diverged(self, what: str, step: int | None = None) -> DivergedError:
        """Return the error of a step, the last one by default. A checkpoint of that step has the same weights."""
        if step is None:
            step = self.trainer.state.global_step
        saved = self._newest_checkpoint(before=step)
        if saved is None:
            remedy = "No checkpoint before that is saved: start the run again with that changed."
        else:
            remedy = f"The last good checkpoint is {saved}: start a new run from its weights with that changed."
        cause = f"Likely cause: {self._likely_cause()}."
        return DivergedError(f"step {step}: {what}, so the training has diverged and ends. {cause} {remedy}")

    def _newest_checkpoint(self, before: int) -> Path | None:
        """Return the newest complete checkpoint of fewer steps, of this run or of the one that it goes on from."""
        # The run that this one goes on from may lie in another folder.
        resumed = self._resume.resumed_from
        folders = checkpoint_folders(Path(self.trainer.args.output_dir))
        if resumed is not None:
            folders += checkpoint_folders(resumed.parent)
        earlier = [path for path in folders if step_of(path) < before and not why_incomplete(path, checksums=False)]
        if earlier:
            return max(earlier, key=step_of)
        return resumed if self._began_at < before else None  # a copy may have any name

    def _likely_cause(self) -> str:
        args = self.trainer.args
        # In the order of how surely a number explains it: advantages, the rate, the dtype.
        rate = args.learning_rate
        if self.trainer.optimizer is not None:
            # A schedule may have brought the rate of the moment down to 0.
            groups = self.trainer.optimizer.param_groups
            rate = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        if self._advantages is not None and self._advantages.numel():
            largest = self._advantages.abs().max().item()
            if largest > _LARGE_ADVANTAGE:
                return f"advantages of up to {largest:.2g} (scale or clip the rewards, or lower their weights)"
        if rate > _LARGE_RATE:
            return f"learning_rate {rate:g} (lower it)"
        if args.fp16:
            return "float16, whose range ends at 65,504 (use bf16)"
        clipping = f"max_grad_norm {args.max_grad_norm:g}" if args.max_grad_norm else "no max_grad_norm"
        return f"learning_rate {rate:g} with {clipping} (lower it)"
