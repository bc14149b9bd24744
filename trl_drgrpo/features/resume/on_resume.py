"""What a resumed run keeps of its checkpoint, what it takes anew, and what it refuses: one table, which the guide
shows. Every difference is said, none is silent.

Beside it, `objective_facts` (all taken anew) and the batch geometry, which decides on pending completions.
"""

import json
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.features.diagnostics.run_facts import adapter_facts, fields_of

ON_RESUME = {
    # With the optimizer's state: torch restores them from there, whatever the arguments say.
    "kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "refused": ("optim", "loss_normalizer"),
    "anew": (
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
        *("max_grad_norm", "max_completion_length", "generation_kwargs", "chat_template_kwargs", "use_vllm"),
        *("max_tool_calling_iterations", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("curriculum", "curriculum_q_min", "max_sampling_rounds", "on_reward_error"),
        *("seed", "data_seed", "shuffle_dataset", "bf16", "fp16", "dataset", "adapter"),
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


def refuse_changes(before: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuses another optimizer: it cannot read the state."""
    was, optim = before.get("optim"), now.get("optim")
    if was and optim and was != optim:
        remedy = "Keep it, or start a new run from the checkpoint's weights."
        raise InputError("optim", optim, f"{was}, whose state is in {checkpoint}", remedy)


def changes(before: dict[str, Any], now: dict[str, Any], has_optimizer: bool) -> tuple[list[str], list[str]]:
    """Settings that differ, in words: those that are kept as they were (none without the optimizer's state), and those
    that are taken anew."""
    differ = {name: value for name, value in now.items() if name in before and before[name] != value}
    is_kept = {name: has_optimizer and name in ON_RESUME["kept"] for name in differ}
    kept = [f"{name} {shortened(before[name])}, not {shortened(differ[name])}" for name in differ if is_kept[name]]
    anew = [f"{name} {shortened(before[name])} -> {shortened(differ[name])}" for name in differ if not is_kept[name]]
    return kept, anew
