"""What a checkpoint holds beside TRL's own state, so that a resumed run is the same run, and what a resumed run keeps
of its checkpoint, takes anew, or refuses: one table, which the guide shows. Every difference is said, none is silent.

- `drgrpo_rollouts_<rank>.pt`: the completions that were generated but not trained on yet. TRL forgets them, so a stock
  run that is interrupted between two generations resumes with other completions. Absent when the next step generates;
- `drgrpo_features.json`: the `state_dict` of each feature;
- `drgrpo_state.json`: L, the count of micro-batches, the batch geometry (which decides on pending completions), the
  running reward scale, and what tells this run from others: its id, objective and settings. It comes last: with it the
  checkpoint is complete, see `checkpoints.py`.
"""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from accelerate.utils import send_to_device
from datasets import Dataset

from trl_drgrpo.features.diagnostics.run_facts import adapter_facts, fields_of, objective_facts
from trl_drgrpo.features.resume.checkpoints import why_changed

logger = logging.getLogger(__name__)

FEATURES_FILE = "drgrpo_features.json"  # in every checkpoint
ON_RESUME = {
    # With the optimizer's state: torch restores them from there, whatever the arguments say.
    "kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "refused": ("optim", "loss_normalizer"),
    "anew": (
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
        *("max_grad_norm", "max_completion_length", "generation_kwargs", "chat_template_kwargs", "use_vllm"),
        *("max_tool_calling_iterations", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("curriculum", "curriculum_q_min", "max_sampling_rounds", "prior_pass_rates", "on_reward_error"),
        *("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "router_aux_loss_coef"),
        *("neftune_noise_alpha", "disable_dropout", "cast_lm_head_to_fp32", "optim_target_modules", "adapter_dtype"),
        *("correct_reward", "correct_threshold", "seed", "data_seed", "shuffle_dataset", "train_sampling_strategy"),
        *("bf16", "fp16", "tf32", "use_liger_kernel", "torch_compile", "dataset", "adapter"),
    ),
}
_ROWS = 64


def resume_facts(trainer: Any) -> dict[str, Any]:
    """The settings of the table, as a checkpoint records them; JSON-ready."""
    args, optimizer = trainer.args, trainer.given_optimizers[0]
    facts = fields_of(args, (*ON_RESUME["kept"], *ON_RESUME["anew"]))
    optim = type(optimizer).__name__ if optimizer else str(getattr(args.optim, "value", args.optim))
    facts["optim"] = optim.removesuffix("_fused")  # another implementation, the same state
    facts["adapter"] = adapter_facts(trainer.accelerator.unwrap_model(trainer.model))
    facts["dataset"] = dataset_mark(trainer.train_dataset)
    return json.loads(json.dumps(facts, default=str))


def run_state(trainer: Any, run_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's state file holds; JSON-ready. `settings`: its `resume_facts`, as they were at the start."""
    return {
        "loss_normalizer": trainer.loss_normalizer,
        "micro_step": trainer.micro_step,
        "geometry": geometry(trainer),
        "has_rollouts": trainer.pending_rollouts is not None,
        "run_id": run_id,
        "objective": objective_facts(trainer),
        "settings": settings,
    }


def geometry(trainer: Any) -> dict[str, int]:
    """Batch sizes and process count: with others, neither `micro_step` nor pending completions have a meaning."""
    fields = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    fields += ("num_iterations", "num_generations")
    return {**fields_of(trainer.args, fields), "num_processes": trainer.accelerator.num_processes}


def dataset_mark(dataset: Any) -> str | None:
    """Number of rows, columns, and a checksum of at most 64 rows, evenly spaced; `None` for streamed data.

    Example:

    ```python
    >>> dataset_mark(Dataset.from_dict({"prompt": ["1+1=", "2+2="]}))
    '2 rows of prompt (e1c28b4b)'

    ```
    """
    if not isinstance(dataset, Dataset):
        return None
    plain = dataset.with_format(None)  # a transform may draw random numbers
    rows = [plain[i] for i in range(0, len(plain), len(plain) // _ROWS + 1)]
    text = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)
    columns = ", ".join(sorted(dataset.column_names))
    return f"{len(dataset)} rows of {columns} ({xxhash.xxh3_64(text.encode()).hexdigest()[:8]})"


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, former and new value of what is in both and differs."""
    return [(name, before[name], value) for name, value in now.items() if name in before and before[name] != value]


def save_rollouts(checkpoint: Path, rank: int, micro_batches: list[dict[str, Any]] | None) -> None:
    """Write this rank's pending micro-batches into a checkpoint folder; `None`: leave no file of an older run."""
    if micro_batches is None:
        _rollouts_file(checkpoint, rank).unlink(missing_ok=True)
    else:
        checkpoint.mkdir(parents=True, exist_ok=True)  # of a rank on a disk of its own
        torch.save(micro_batches, _rollouts_file(checkpoint, rank))


def load_rollouts(
    checkpoint: Path, rank: int, device: torch.device, files: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """This rank's pending micro-batches on `device`; `None`, and the reason in the log, when they cannot be read.
    `files`: sizes and checksums, as the checkpoint's state lists them."""
    source = _rollouts_file(checkpoint, rank)
    if (mark := files.get(source.name)) and (reason := why_changed(checkpoint, source.name, mark)):
        logger.warning("Completions not trained on yet in %s are not used: %s.", checkpoint, reason)
        return None
    try:
        # Not onto the device at once: torch reads no storage onto "cpu:0", a process's name for its CPU.
        micro_batches: Any = send_to_device(torch.load(source, map_location="cpu", weights_only=True), device)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        logger.warning("%s cannot be read (%s: %s).", source, type(error).__name__, error)
        return None
    return micro_batches


def _rollouts_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"drgrpo_rollouts_{rank}.pt"


def random_state() -> Callable[[], None]:
    """Puts the random generators of Python, numpy and torch back to where they are now, when it is called."""
    states: Any = (
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()),  # of no device without any
    )

    def restore() -> None:
        for set_state, state in states:
            set_state(state)

    return restore
