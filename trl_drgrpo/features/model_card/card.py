"""The model card: TRL's metadata, repaired, and a text that states what was really run, with curves and a snippet.

TRL's card calls a model with a local base "a fine-tuned version of None", writes `licence: license`, and says nothing
of objective, rewards or settings; PEFT's card names the base by its path on the machine and drops TRL's tags. Here
functions read the facts of the run, `card.md.jinja` lays them out, and remaining secrets or paths are removed at the
end. Curves are drawn where matplotlib is installed (`trl-drgrpo[report]`) and two points exist.

Nothing is guessed: facts that the run does not know are left out. Names that others chose must not act in Markdown, so
they are escaped (`common/markdown.py`).
"""

import dataclasses
import platform
import re
import textwrap
from contextlib import suppress
from dataclasses import MISSING
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.drawing import draw_panels, save_figure
from trl_drgrpo.common.hub_errors import is_hub_id, is_local_path
from trl_drgrpo.common.secrets import redacted, scrubbed
from trl_drgrpo.features.model_card.example import Example, example_of
from trl_drgrpo.features.model_card.objective import lines_of, objective_of, plain_data, template
from trl_drgrpo.features.model_card.origin import origin_of
from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY
from trl_drgrpo.upstream.versions import installed_versions

# Metric -> title of its panel, which evaluations share.
PANELS = {"reward": "mean reward", "process/reward_mean": "mean step reward"}
PANELS |= {"completions/mean_length": "mean completion length (tokens)"}


def curves(history: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points `(step, value)` of each metric of each panel, where there are two or more."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    logged = dict.fromkeys(chain(*history))
    for metric, title in PANELS.items():
        if metric == "reward" and PROCESS_ONLY in logged:  # the outcome reward is always 0
            continue
        lines = {}
        for name in logged:
            if name.partition(" (")[0].removeprefix("eval_") == metric:
                points = [(entry["step"], entry[name]) for entry in history if name in entry]
                if len(points) > 1:
                    lines[name] = points
        if lines:
            panels[title] = lines
    return panels


def draw_curves(history: list[dict[str, Any]], target: Path) -> bool:
    """Write the picture. Return whether there is one: it needs matplotlib and two points."""
    panels = curves(history)
    if not panels:
        return False
    with suppress(ImportError):
        save_figure(draw_panels(panels, 5.5, 3.5), target)
        return True
    return False


PICTURE = "card/curves.png"  # no underscore in front: transformers does not upload such files


def write_card(trainer: Any, metadata: ModelCardData, readme: Path, dataset_name: str | None = None) -> None:
    """Write the card of a run to `readme`, in one step.

    While the run trains, the card says so, and no picture is drawn. `metadata`: TRL's, which is repaired in place.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_adapter = hasattr(model, "peft_config")
    _repair(metadata, model, is_adapter, dataset_name or dataset_id(trainer.train_dataset))
    text = card_text(trainer, model, is_adapter, readme.parent, dataset_name)
    content = f"---\n{redacted(metadata.to_yaml(), vars(trainer.args))}\n---\n{text}"
    write_whole(readme, content)


def card_text(trainer: Any, model: Any, is_adapter: bool, folder: Path, dataset_name: str | None) -> str:
    """Return the card without its metadata, in Markdown. The picture goes below `folder`, where the card will be."""
    args = trainer.args
    history = history_by_split(trainer.state.log_history, trainer.eval_dataset)
    formula, notes = objective_of(trainer)
    drawn = not trainer.is_in_train and draw_curves(history, folder / PICTURE)
    settings = changed_settings(args)
    dataset = trainer.train_dataset
    splits = trainer.eval_dataset
    if not isinstance(splits, dict):
        splits = {"": splits}
    values = {
        "name": trainer.hub_model_id or Path(args.output_dir).absolute().name,
        "model_class": type(model).__name__,
        "base": base_model_of(model),
        "base_class": kind_of(model),
        "base_source": origin_of(getattr(model.config, "_name_or_path", None)).get("source"),
        "revision": (args.model_init_kwargs or {}).get("revision"),
        # A tokenizer, and not a processor, which takes images as well.
        "is_text_only": hasattr(trainer.processing_class, "convert_tokens_to_ids"),
        "model_id": repr(trainer.hub_model_id or "."),
        "example": example_of(trainer, model),
        "formula": "\n".join(formula),
        "notes": notes,
        "dataset_name": dataset_name if is_hub_id(dataset_name) else dataset_id(dataset),
        "columns": list(getattr(dataset, "column_names", None) or []),
        "prompts": _size(dataset),
        "splits": {split: _size(data) for split, data in splits.items() if data is not None},
        "rewards": reward_rows(trainer),
        "metrics": metric_rows(history),
        "picture": PICTURE if drawn else "",
        "training": training_rows(trainer),
        "adapter": adapter_rows(model),
        "is_adapter": is_adapter,
        "settings": yaml.safe_dump(settings, sort_keys=True, allow_unicode=True) if settings else "# none",
        "machine": machine_rows(trainer),
        "citation": textwrap.dedent(trainer._paper["citation"]),
    }
    values["example"] = Example(**redacted(vars(values["example"]), vars(args)))
    values = redacted(values, vars(args))  # before the template, whose escapes would break secrets up
    return template("card.md.jinja").render(values, trainer=trainer, args=args, state=trainer.state)


def _size(dataset: Any) -> str | None:
    if not hasattr(dataset, "__len__"):  # a stream is not counted
        return None
    return f"{len(dataset):,}"


def _repair(data: ModelCardData, model: Any, is_adapter: bool, dataset_name: str | None) -> None:
    """Correct TRL's values in the Hub metadata, and add PEFT's."""
    data.pop("licence")  # TRL's misspelled placeholder; only the author can state the license
    data.base_model = base_model_of(model)
    license_of_base = origin_of(getattr(model.config, "_name_or_path", None)).get("license")
    if license_of_base:
        data.license = license_of_base
    data.library_name = "transformers"
    data.model_name = data.model_name or None
    if dataset_name and is_hub_id(dataset_name):
        data.datasets = dataset_name
    elif not is_hub_id(data.datasets):
        data.datasets = None
    tags = set(data.tags or [])
    if is_adapter:
        data.library_name = "peft"
        tags |= {"transformers", *(plain_data(config.peft_type).lower() for config in model.peft_config.values())}
        if data.base_model:
            tags.add(f"base_model:adapter:{data.base_model}")
    data.tags = sorted(tags)
    if data.pipeline_tag is None and "CausalLM" in kind_of(model):
        data.pipeline_tag = "text-generation"


def without_paths(values: Any) -> Any:
    """Replace every path of the machine in nested mappings and lists by `"(local path)"`."""
    if isinstance(values, dict):
        return {name: without_paths(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return list(map(without_paths, values))
    if is_local_path(values):
        return "(local path)"
    return values


Rows = list[tuple[str, Any]]

# Settings of the machine and the run's surroundings, which nobody needs to repeat the run.
_SURROUNDINGS = ("output_dir", "run_name", "report_to", "disable_tqdm", "do_eval", "debug", "use_cpu", "tf32")
_SURROUNDINGS_START = ("hub_", "push_to_hub", "log_", "logging_", "trackio_", "save_", "resume_", "ddp_", "local_rank")
_SURROUNDINGS_START += ("overwrite_", "dataloader_", "accelerator_config", "deepspeed", "fsdp", "vllm_server_")
_PACKAGES = ["trl-drgrpo", "trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "peft"]
_PACKAGES += ["bitsandbytes"]
_ADAPTER = {"adapter": "peft_type", "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_ADAPTER |= {"rsLoRA": "use_rslora", "target modules": "target_modules", "modules trained in full": "modules_to_save"}


def base_model_of(model: Any) -> str | None:
    """Return the Hub id of the base model, or of the model that it was converted from; `None` if neither has one."""
    name = getattr(model.config, "_name_or_path", None)
    if is_hub_id(name):
        return name
    return origin_of(name).get("base_model")


def kind_of(model: Any) -> str:
    """Return the class of the model, or of the base under an adapter."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return type(model).__name__


def dataset_id(dataset: Any) -> str | None:
    """Return the Hub id that the dataset itself reports; `None` for local, generated and streamed data."""
    checksums = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for source in checksums:
        name = str(source).partition("hf://datasets/")[2].partition("@")[0]
        if name and is_hub_id(name):
            return name
    return None


def reward_rows(trainer: Any) -> list[tuple[str, str, str]]:
    """Return name, kind and weight of each reward."""
    rows = []
    weights = trainer.reward_weights.tolist()
    for name, func, weight in zip(trainer.reward_func_names, trainer.reward_funcs, weights, strict=True):
        kind = "model" if isinstance(func, torch.nn.Module) else "function"
        rows.append((name, kind, f"{weight:g}"))
    scorer = trainer.step_scorer
    if scorer:
        for name, func, weight in zip(scorer.names, scorer.funcs, scorer.weights, strict=True):
            rows.append((name, f"step reward{_source(func)}", f"{weight:g}"))
    return rows


def _source(func: Any) -> str:
    """Name a model that scores steps: by its id with the revision, or by its folder."""
    source = getattr(func, "source", "")
    if not source:
        return ""
    name, at_revision, revision = source.partition(" at revision ")
    if is_hub_id(name):
        return f": {source}"
    return f": {Path(name).name}{at_revision}{revision}, a local model"


def training_rows(trainer: Any) -> Rows:
    """Return optimizer, batch geometry, sampling and progress of the run (`training.jinja`)."""
    args = trainer.args
    (optimizer, scheduler) = trainer.given_optimizers
    groups = [{"lr": args.learning_rate, "weight_decay": args.weight_decay}]
    if optimizer is not None:
        groups = optimizer.param_groups
    processes = trainer.accelerator.num_processes
    lines = lines_of(
        "training.jinja",
        args=args,
        state=trainer.state,
        trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * processes,
        processes=processes,
        rates=" and ".join(sorted({f"{group.get('initial_lr', group['lr']):g}" for group in groups})),
        decay=" and ".join(sorted({f"{group.get('weight_decay', 0):g}" for group in groups})),
        optimizer=optimizer and type(optimizer).__name__,
        scheduler=scheduler and type(scheduler).__name__,
    )
    rows = []
    for line in lines:
        name, _, value = line.partition(": ")
        rows.append((name, value))
    return rows


def adapter_rows(model: Any) -> Rows:
    """Return the adapter and the quantization of its base; empty for a full model that is not quantized."""
    rows: Rows = []
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if name == "ref":  # TRL's copy of an adapter that was there before
            continue
        for label, key in _ADAPTER.items():
            value = plain_data(getattr(config, key, None))
            if value in (None, [], ""):
                continue
            if isinstance(value, list):
                value = ", ".join(sorted(value))
            rows.append((label, value))
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        values = quantization if isinstance(quantization, dict) else quantization.to_dict()
        shown_keys = (
            "quant_method",
            "load_in_4bit",
            "load_in_8bit",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
        )
        shown = [f"{key} {plain_data(values[key])}" for key in shown_keys if values.get(key) not in (None, False)]
        rows.append(("base model quantized", ", ".join(shown) or type(quantization).__name__))
    return rows


def history_by_split(history: list[dict[str, Any]], evaluation: Any) -> list[dict[str, Any]]:
    """Return the log history with the split in the names of metrics, `eval_reward (<split>)`.

    Only where `trainer.eval_dataset` has several splits: TRL logs them all under one name, and only their runtime
    under names of their own.
    """
    if not isinstance(evaluation, dict):
        return history
    labeled = []
    for entry in history:
        split = next((split for split in evaluation if f"eval_{split}_runtime" in entry), None)
        if split is not None:
            entry = {name if name in ("step", "epoch") else f"{name} ({split})": entry[name] for name in entry}
        labeled.append(entry)
    return labeled


_WORTH_A_LINE = re.compile(
    r"(reward|reward_std|kl|entropy|loss|grad_norm)(/|$)|rewards/|process_rewards/|process/reward"
    r"|completions/mean_length|completions/clipped_ratio|drgrpo/dead_groups"
)


def metric_rows(history: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return name, first and last logged value of each metric worth a line, and the step of the last."""
    values: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for name, value in entry.items():
            stem = name.removeprefix("eval_").partition(" (")[0]
            if isinstance(value, (int, float)) and _WORTH_A_LINE.match(stem):
                values.setdefault(name, []).append((int(entry.get("step", 0)), float(value)))
    rows = []
    # Evaluations first, and among them and the others the rewards.
    for name in sorted(values, key=lambda name: (not name.startswith("eval_"), not name.endswith("reward"), name)):
        _, first = values[name][0]
        step, last = values[name][-1]
        rows.append((name, f"{first:.4g}", f"{last:.4g}", f"{step}"))
    return rows


def changed_settings(args: Any) -> dict[str, Any]:
    """Return every field that somebody has set to another value than its default.

    Without secrets and paths of the machine.
    """
    derived = getattr(args, "derived", {})  # a plain GRPOConfig does not record them
    shown = {}
    for field in dataclasses.fields(args):
        is_surrounding = field.name in _SURROUNDINGS or field.name.startswith(_SURROUNDINGS_START)
        if is_surrounding or not field.init:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(args, field.name)
        # A value that the configuration has made from its default was not set by anybody.
        passed, effective = derived.get(field.name, (value, value))
        if value != default and (passed != default or value != effective):
            shown[field.name] = plain_data(value)
    return without_paths(scrubbed(shown))


def machine_rows(trainer: Any) -> Rows:
    """Return hardware, training time where transformers has logged it, and the packages that the result depends on."""
    accelerator = trainer.accelerator
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    rows: Rows = [("device", f"{accelerator.num_processes} x {name}")]
    runtimes = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    if runtimes:
        rows.append(("training time since the last start", f"{runtimes[-1]:,.0f} s"))
    # torch's own version names its build, which the package metadata may not.
    versions = {"Python": platform.python_version(), **installed_versions(_PACKAGES), "torch": torch.__version__}
    return rows + list(versions.items())
