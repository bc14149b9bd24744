"""Facts for the card beside the objective, read off the trainer: data, rewards, settings, metrics, machine.

Nothing is guessed: what the run does not know is left out. Every function returns rows (`name`, `value`) for a table.
"""

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.features.model_card.markdown_text import is_local_path, without_paths
from trl_drgrpo.upstream.versions import installed_versions

Rows = list[tuple[str, Any]]

# Of the machine or of the run's surroundings: no part of what others need to repeat it.
_SURROUNDINGS = ("output_dir", "run_name", "report_to", "disable_tqdm", "do_eval", "debug", "use_cpu", "tf32")
_SURROUNDINGS_START = ("hub_", "push_to_hub", "log_", "logging_", "trackio_", "save_", "resume_", "ddp_", "local_rank")
_SURROUNDINGS_START += ("overwrite_", "dataloader_", "accelerator_config", "deepspeed", "fsdp", "vllm_server_")
_PACKAGES = (
    "trl-drgrpo",
    "trl",
    "transformers",
    "torch",
    "accelerate",
    "datasets",
    "tokenizers",
    "peft",
    "bitsandbytes",
)


def is_hub_id(name: Any) -> bool:
    """Whether a name is that of a repository on the Hub, not a folder that is or was on this machine."""
    if not isinstance(name, str) or not name or is_local_path(name) or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def base_model_of(model: Any) -> str | None:
    """Hub id of the model that was trained or carries the adapter; `None` when it is no Hub model."""
    name = getattr(model.config, "_name_or_path", None)
    return name if is_hub_id(name) else None


def describe_model(model: Any) -> str:
    """The model in a few words: its Hub id, or what kind of local model it is; never a path."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base_model_of(model) or f"a local model ({type(base).__name__})"


def dataset_id(dataset: Any) -> str | None:
    """Hub id that the dataset itself reports; `None` for local, generated and streamed data."""
    checksums = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for source in checksums:
        name = str(source).partition("hf://datasets/")[2].partition("@")[0]
        if name and is_hub_id(name):
            return name
    return None


def data_rows(trainer: Any, dataset_name: str | None) -> Rows:
    """The training and evaluation data."""
    dataset = trainer.train_dataset
    name = dataset_name if is_hub_id(dataset_name) else dataset_id(dataset)
    rows: Rows = [("training data", name or "local or generated data, not a dataset of the Hub")]
    rows.append(("prompts", f"{len(dataset):,}" if hasattr(dataset, "__len__") else "a stream, not counted"))
    columns = getattr(dataset, "column_names", None)
    rows.append(("columns", ", ".join(columns) if columns else "not known before the first row"))
    evaluation = trainer.eval_dataset
    splits = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    for split, data in splits.items():
        if data is not None:
            size = f"{len(data):,} prompts" if hasattr(data, "__len__") else "a stream"
            rows.append((f"evaluation data {split}".strip(), size))
    return rows


def reward_rows(trainer: Any) -> list[tuple[str, str, str]]:
    """Name, kind and weight of each reward."""
    weights = [f"{weight:g}" for weight in trainer.reward_weights.tolist()]
    kinds = ["model" if isinstance(func, torch.nn.Module) else "function" for func in trainer.reward_funcs]
    rows = list(zip(trainer.reward_func_names, kinds, weights, strict=True))
    if trainer.step_scorer:
        scorer = trainer.step_scorer
        steps = zip(scorer.names, scorer.weights, strict=True)
        rows += [(name, "step reward", f"{weight:g}") for name, weight in steps]
    return rows


def training_rows(trainer: Any) -> Rows:
    """Optimizer, batch geometry, sampling, and how far the run came."""
    args, state, seen = trainer.args, trainer.state, int(trainer.state.num_input_tokens_seen)
    processes = trainer.accelerator.num_processes
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    generated = args.generation_batch_size
    rows: Rows = [
        ("trained parameters", f"{sum(p.numel() for p in trainer.model.parameters() if p.requires_grad):,}"),
        ("optimizer steps", f"{state.global_step:,} of {state.max_steps:,}"),
        ("epochs", f"{state.epoch:.3g}" if state.epoch is not None else None),
        ("prompt and completion tokens seen", f"{seen:,}" if seen else None),
        *_optimizer_rows(trainer),
        ("gradient norm clipped at", f"{args.max_grad_norm:g}" if args.max_grad_norm else None),
        ("completions per prompt, G", args.num_generations),
        (
            "rows per optimizer step, B",
            f"{rows_per_step:,} ({args.per_device_train_batch_size} per device x "
            f"{args.gradient_accumulation_steps} accumulated x {processes} process{'es' * (processes > 1)})",
        ),
        ("prompts per optimizer step, P", f"{rows_per_step / args.num_generations:g}"),
        ("rows per generation batch", f"{generated:,}"),
        ("longest completion", f"{args.max_completion_length:,} tokens" if args.max_completion_length else "context"),
        ("sampling", f"temperature {args.temperature:g}, top_p {args.top_p:g}, top_k {args.top_k}"),
        ("generation", f"vLLM, {args.vllm_mode}" if args.use_vllm else "transformers"),
        ("micro-batching", f"{args.micro_batching} (the same gradient up to rounding)"),
        ("precision", "bfloat16" if args.bf16 else "float16" if args.fp16 else "as the model was loaded"),
        ("seed", args.seed),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _optimizer_rows(trainer: Any) -> Rows:
    """Optimizer and schedule: those that the trainer was given, else those of its arguments."""
    args, (optimizer, scheduler) = trainer.args, trainer.given_optimizers
    rates, decay = f"{args.learning_rate:g}", f"{args.weight_decay:g}"
    kind = f"{_name(args.optim)}, betas {args.adam_beta1:g} and {args.adam_beta2:g}"
    if optimizer is not None:
        groups = optimizer.param_groups
        rates = " and ".join(sorted({f"{group.get('initial_lr', group['lr']):g}" for group in groups}))
        decay = " and ".join(sorted({f"{group.get('weight_decay', 0):g}" for group in groups}))
        kind = f"{type(optimizer).__name__}, given to the trainer"
    schedule, warmup = _name(args.lr_scheduler_type), f"{args.get_warmup_steps(max(trainer.state.max_steps, 1))} steps"
    if scheduler is not None:
        schedule, warmup = f"{type(scheduler).__name__}, given to the trainer", None
    return [
        ("learning rate", f"{rates}, schedule {schedule}"),
        ("warm-up", warmup),
        ("optimizer", kind),
        ("weight decay", decay),
    ]


def adapter_rows(model: Any) -> Rows:
    """The adapter and the quantization of its base; empty for a full model that is not quantized."""
    rows: Rows = []
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if name == "ref":  # TRL's copy of an adapter that was there before
            continue
        rows.append(("adapter", f"{_name(config.peft_type)}"))
        fields = (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout"), ("use_rslora", "rsLoRA"))
        rows += [(label, getattr(config, key)) for key, label in fields if hasattr(config, key)]
        for key, label in (("target_modules", "target modules"), ("modules_to_save", "modules trained in full")):
            if value := getattr(config, key, None):
                rows.append((label, value if isinstance(value, str) else ", ".join(sorted(value))))
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        values = quantization if isinstance(quantization, dict) else quantization.to_dict()
        kept = ("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        text = ", ".join(f"{key} {_name(values[key])}" for key in kept if values.get(key) not in (None, False))
        rows.append(("base model quantized", text or type(quantization).__name__))
    return rows


def history_by_split(history: list[dict[str, Any]], evaluation: Any) -> list[dict[str, Any]]:
    """The log history with the split in the names of metrics, `eval_reward (<split>)`, where `trainer.eval_dataset`
    has several: TRL calls them all the same."""
    splits = list(evaluation) if isinstance(evaluation, dict) else []
    labeled = []
    for entry in history:
        split = next((split for split in splits if f"eval_{split}_runtime" in entry), None)
        named = (
            entry if split is None else {k if k in ("step", "epoch") else f"{k} ({split})": entry[k] for k in entry}
        )
        labeled.append(named)
    return labeled


def metric_rows(history: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Name, first and last logged value of each metric worth a line, and the step of the last."""
    wanted = ("reward", "reward_std", "rewards/", "process_rewards/", "process/reward", "kl", "entropy")
    wanted += ("completions/mean_length", "completions/clipped_ratio", "drgrpo/zero_signal", "loss", "grad_norm")
    values: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for name, value in entry.items():
            stem = name.removeprefix("eval_").partition(" (")[0]
            if isinstance(value, (int, float)) and any(
                stem == start or ("/" in start and stem.startswith(start)) or stem.startswith(f"{start}/")
                for start in wanted
            ):
                values.setdefault(name, []).append((int(entry.get("step", 0)), float(value)))
    order = sorted(values, key=lambda name: (not name.startswith("eval_"), not name.endswith("reward"), name))
    return [
        (name, f"{values[name][0][1]:.4g}", f"{values[name][-1][1]:.4g}", f"{values[name][-1][0]}") for name in order
    ]


def changed_settings(args: Any) -> dict[str, Any]:
    """Every field that is not at its default, without secrets and paths of the machine: what the tables leave out."""
    shown = {}
    for field in dataclasses.fields(args):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(args, field.name)
        surrounding = field.name in _SURROUNDINGS or field.name.startswith(_SURROUNDINGS_START)
        if surrounding or not field.init or value == default:
            continue
        shown[field.name] = _plain_data(value)
    return without_paths(scrubbed(shown))


def _plain_data(value: Any) -> Any:
    """A value as YAML can hold it: options for a model may be dtypes, paths, or configurations of their own."""
    if isinstance(value, Enum):
        return _plain_data(value.value)
    if isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): _plain_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain_data(each) for each in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return _plain_data(value.to_dict()) if hasattr(value, "to_dict") else str(value)


def machine_rows(trainer: Any) -> Rows:
    """Hardware, and how long the run took where transformers has noted it."""
    accelerator = trainer.accelerator
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    rows: Rows = [("device", f"{accelerator.num_processes} x {name}")]
    runtimes = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    if runtimes:
        rows.append(("training time since the last start", f"{runtimes[-1]:,.0f} s"))
    return rows


def versions() -> Rows:
    """The packages that the result depends on, as far as installed."""
    found = installed_versions(_PACKAGES) | {"torch": torch.__version__}  # with its build, which metadata may not name
    return [("Python", platform.python_version()), *found.items()]


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))
