"""Remarks on the first logged loss of a run: what looks like a fault there, or has no effect, and why."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_BOUNDS = ("epsilon", "epsilon_high", "delta")  # of the ratio of the policy to the one that sampled


def is_first_loss(logs: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a log has the first loss of a run, also of a resumed one; that of groups without a signal is none.

    Args:
        logs (`Mapping[str, Any]`): The newest log.
        history (`Sequence[Mapping]`): All logs of the run, the newest included.
    """
    return _has_loss(logs) and sum(map(_has_loss, history)) == 1


def _has_loss(logs: Mapping[str, Any]) -> bool:
    return "loss" in logs and logs.get("drgrpo/zero_signal_frac", 0) < 1


def first_loss_remarks(trainer: Any, loss: float) -> list[str]:
    """Remarks on a loss of about 0 and on clipping without effect.

    Args:
        trainer ([`DrGRPOTrainer`]): In training.
        loss (`float`): The first that was logged.

    Returns:
        `list[str]`: The first remark where every optimizer step holds whole groups whose advantages sum to 0, and
        nothing else is in the loss; the second where bounds of the ratio were set and each generation batch serves one
        optimizer step.
    """
    args = trainer.args
    remarks = []
    whole_groups = args.gradient_accumulation_steps % args.steps_per_generation == 0
    sum_to_zero = trainer.step_scorer is None and trainer.own_advantages is None
    nothing_else = not (args.beta or args.entropy_coef or args.use_adaptive_entropy or trainer.own_losses)
    if whole_groups and sum_to_zero and nothing_else:
        remarks.append(
            f"loss {loss:.2g} is as it should be: every importance ratio is 1 and the advantages of a group sum to 0, "
            "so only differences in length remain. The gradient still trains: watch the reward."
        )
    if args.gradient_accumulation_steps % trainer.generate_every == 0:
        defaults = {field.name: field.default for field in dataclasses.fields(args) if field.name in _BOUNDS}
        if bounds := [name for name, default in defaults.items() if getattr(args, name) != default]:
            remarks.append(
                f"{', '.join(bounds)}: no effect with one optimizer step per generation batch, where every ratio is 1 "
                "and nothing is clipped. Raise num_iterations or steps_per_generation if you want clipping."
            )
    return remarks
