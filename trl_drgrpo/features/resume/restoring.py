"""Checks that a run that goes on from a checkpoint is the same run, says what differs, and restores its state."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import send_to_device

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.output_folders import checkpoint_folders
from trl_drgrpo.features.diagnostics.run_facts import objective_facts
from trl_drgrpo.features.resume.checkpoints import (
    FEATURES_FILE,
    FORMAT,
    STATE_FILE,
    features_by_name,
    has_optimizer,
    read_state,
    rollouts_file,
    state_or_none,
    why_changed,
)
from trl_drgrpo.features.resume.fitting import refuse_misfit
from trl_drgrpo.features.resume.settings import ON_RESUME, geometry
from trl_drgrpo.upstream.batches import EXPERT_WEIGHTS, Rollouts

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)

_NOT_ALONE = ("model", "base", "reference")  # refused, or other values of the same weights: the dtype is said


def refuse_another_run(trainer: "TrainerProtocol", checkpoint: Path, settings: dict[str, Any]) -> None:
    """Refuse a run that differs from its checkpoint in the optimizer, the adapter or the objective."""
    # A checkpoint of plain TRL records no settings.
    before = (_state_of(checkpoint) or {"settings": {}})["settings"]
    if not has_optimizer(checkpoint):
        before = {name: value for name, value in before.items() if name != "optim"}
    refuse_another(before, settings, checkpoint)
    refuse_misfit(trainer, checkpoint)


def _state_of(checkpoint: Path) -> dict[str, Any] | None:
    state = read_state(checkpoint)
    if state is not None and state["format"] != FORMAT:
        remedy = "Resume with the trl-drgrpo version that wrote it."
        raise InputError(str(checkpoint / STATE_FILE), f"format {state['format']}", f"format {FORMAT}", remedy)
    return state


def restore(trainer: "TrainerProtocol", checkpoint: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Restore what a checkpoint holds beside weights, optimizer and scheduler.

    Returns its state, empty where it has none. `settings` are the run's `resume_facts`.
    """
    if not has_optimizer(checkpoint):
        message = "%s holds no optimizer state (save_only_model): the optimizer starts from scratch."
        logger.warning(message, checkpoint)
    file = checkpoint / FEATURES_FILE
    feature_states = {}
    if file.exists():
        feature_states = json.loads(file.read_text(encoding="utf-8"))
    for name, feature in features_by_name(trainer.features).items():
        feature.load_state_dict(feature_states.get(name))
    trainer.read_step_settings()
    state = _state_of(checkpoint)
    if state is None:
        _say_what_is_missing(trainer, checkpoint)
        return {}
    # L is part of the run: it stays, unless the user asks for another one, which is refused.
    loss_normalizer = state["loss_normalizer"]
    if trainer.args.loss_normalizer not in (None, loss_normalizer):
        raise InputError(
            "loss_normalizer",
            str(trainer.args.loss_normalizer),
            f"{loss_normalizer}, with which the run in {checkpoint} was started",
            "Changing L mid-run changes the step size: remove loss_normalizer, or start a new run.",
        )
    if loss_normalizer != trainer.loss_normalizer:
        message = "Keeping L = %d of the resumed run (max_completion_length is now %d)."
        logger.warning(message, loss_normalizer, trainer.loss_normalizer)
    trainer.loss_normalizer = loss_normalizer
    _say_what_changed(trainer, state, settings, checkpoint)
    _resume_position(trainer, state, checkpoint)
    # Epochs are steps over steps per epoch: the last step of an epoch may round to a little less than a whole number.
    trainer.advance_train_sampler(int((trainer.state.epoch or 0.0) + 1e-6))
    return state


def _say_what_changed(
    trainer: "TrainerProtocol",
    state: dict[str, Any],
    run_settings: dict[str, Any],
    checkpoint: Path,
) -> None:
    """Warn of settings that differ: they are allowed in the middle of a run, but never silent."""
    terms = changed(state["objective"], objective_facts(trainer))
    objective = [f"{name} {_in_words(was)} -> {_in_words(now)}" for name, was, now in terms]
    with_optimizer = ()
    if has_optimizer(checkpoint):  # torch restores these fields with its state, whatever the arguments say
        with_optimizer = ON_RESUME["kept"]
    replaced = []
    restored = []
    for name, was, now in differences(state["settings"], run_settings):
        if name in with_optimizer:
            restored.append(f"{name} {shortened(was)}, not {shortened(now)}")
        else:
            replaced.append(f"{name} {shortened(was)} -> {shortened(now)}")
    for message, differing in (
        ("The objective differs from that of %s: %s. The run continues with the new one.", objective),
        ("Settings differ from those of %s: %s. The run continues with the new ones.", replaced),
        ("Kept from the optimizer's state in %s: %s. To change them, start a new run from its weights.", restored),
    ):
        if differing:
            logger.warning(message, checkpoint, "; ".join(differing))


def _say_what_is_missing(trainer: "TrainerProtocol", checkpoint: Path) -> None:
    """Warn of a checkpoint of plain TRL, in a run that TRL began or, where another checkpoint is ours, continued."""
    logger.warning(
        "%s holds no Dr. GRPO state: continuing with L = %d. Completions not trained on yet are generated again, "
        "and the optimizer keeps its moments: after an objective other than Dr. GRPO, the first hundreds of steps "
        "are smaller. To avoid this, start a new run from the weights.",
        checkpoint,
        trainer.loss_normalizer,
    )
    states = filter(None, map(state_or_none, checkpoint_folders(checkpoint.parent)))
    normalizer = next((state["loss_normalizer"] for state in states), trainer.loss_normalizer)  # of the newest
    if normalizer != trainer.loss_normalizer:
        remedy = f"Set loss_normalizer={normalizer} to keep it."
        message = "Other checkpoints in %s were trained with L = %d. %s"
        logger.warning(message, checkpoint.parent, normalizer, remedy)


def _resume_position(trainer: "TrainerProtocol", state: dict[str, Any], checkpoint: Path) -> None:
    """Restore the position between two generations; with another geometry the next step generates anew."""
    # With other batch sizes, micro-batches and their count mean something else.
    sizes = changed(state["geometry"], geometry(trainer))
    if sizes:
        message = "Batch sizes changed (%s): completions not trained on yet are generated again."
        logger.warning(message, ", ".join(f"{name} {was} -> {now}" for name, was, now in sizes))
        return
    trainer.set_micro_step(state["micro_step"])
    if not state["has_rollouts"]:
        return
    # Keys of a micro-batch that the loss reads under settings that may have changed since it was made.
    needed = set()
    if trainer.args.beta:
        needed.add("ref_per_token_logps")
    if trainer.args.use_vllm and trainer.args.vllm_importance_sampling_correction:
        needed.add("importance_sampling_ratio")
    if trainer.args.router_aux_scope == "batch":
        needed.add(EXPERT_WEIGHTS)
    accelerator = trainer.accelerator
    rollouts = load_rollouts(checkpoint, accelerator.process_index, accelerator.device, state["files"])
    missing = needed.difference(*(rollouts or []))
    # All ranks or none: one that generates alone waits forever.
    if not all(trainer.gathered([rollouts is not None])):
        logger.warning("Completions not trained on yet are generated again: the run continues, but not bit for bit.")
    elif missing:
        message = "Completions not trained on yet lack %s, which the run now needs: they are generated again."
        logger.warning(message, " and ".join(sorted(missing)))
    else:
        trainer.set_pending_rollouts(rollouts)


def load_rollouts(
    checkpoint: Path,
    rank: int,
    device: torch.device,
    files: dict[str, Any],
) -> list[Rollouts] | None:
    """Return this rank's pending micro-batches on `device`; `None`, with the reason in the log, if unreadable.

    `files` are sizes and checksums, as the checkpoint's state lists them.
    """
    # Checked before it is loaded: rollouts were left out when the checkpoint was found complete.
    source = rollouts_file(checkpoint, rank)
    if source.name in files:
        reason = why_changed(checkpoint, source.name, files[source.name])
        if reason:
            logger.warning("Completions not trained on yet in %s are not used: %s.", checkpoint, reason)
            return None
    try:
        # Not onto the device at once: torch reads no storage onto "cpu:0", a process's name for its CPU.
        micro_batches = send_to_device(torch.load(source, map_location="cpu", weights_only=True), device)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        logger.warning("%s cannot be read (%s: %s).", source, type(error).__name__, error)
        return None
    return cast(list[Rollouts], micro_batches)


def _in_words(value: object) -> str:
    if isinstance(value, list):
        return " + ".join(map(str, value)) or "none"
    return str(value)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, former and new value of what is in both and differs."""
    return [(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, former and new value of what differs and may; of a mapping only the keys that do."""
    for name, was, value in changed(before, now):
        if name in _NOT_ALONE:
            continue
        if isinstance(was, dict) and isinstance(value, dict):
            for key in was | value:
                if was.get(key) != value.get(key):
                    yield f"{name}: {key}", was.get(key), value.get(key)
        else:
            yield name, was, value


def refuse_another(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse what the run cannot go on with: another optimizer, base of an adapter, or reference of the KL term.

    Args:
        before, now (`Mapping[str, Any]`): `resume_facts` of the checkpoint, and of the run that is to go on.
        checkpoint (`Path`): The checkpoint, for the message.

    Raises:
        `InputError`: Names the setting.
    """
    # A fact that is unknown on one side (`None`, where processes hold parts of the weights) refuses nothing.
    differing = {name: (was, value) for name, was, value in changed(before, now) if was and value}
    if "optim" in differing:
        was, value = differing["optim"]
        remedy = "Keep it, or start a new run from the checkpoint's weights."
        raise InputError("optim", value, f"{was}, whose state is in {checkpoint}", remedy)
    if any(before.get(name) != now.get(name) for name in ("dtype", "quantization")):
        return  # the same weights have other values then
    if "base" in differing:
        was, value = differing["base"]
        got = f"the base {now.get('model')}, {value}"
        expected = f"{before.get('model')}, {was}, on which the adapter in {checkpoint} was trained"
        raise InputError("model", got, expected, "Name that base, or start a new run.")
    if "reference" in differing:
        was, value = differing["reference"]
        expected = f"that of the run, {before.get('model')}, {was}"
        remedy = "It is the model that the run began with: build the trainer from that one, or start a new run."
        raise InputError("model", f"the reference of the KL term {now.get('model')}, {value}", expected, remedy)
