"""The model card: TRL's metadata, repaired, and a text that states what was really run, with curves and a snippet.

TRL's card calls a model with a local base "a fine-tuned version of None", writes `licence: license`, and says nothing
of objective, rewards or settings; PEFT's card names the base by its path on the machine and drops TRL's tags. Here
functions of facts read the run, `card.md.jinja` lays it out, and what is left of secrets or paths is taken out at the
end. Curves are drawn where matplotlib is installed (`trl-drgrpo[report]`) and two points exist.

Nothing is guessed: what the run does not know is left out. Names that others chose must not act in Markdown: they are
escaped (`common/markdown.py`).
"""

import dataclasses
import platform
import re
import textwrap
from collections.abc import Sized
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.drawing import draw_panels, save_figure
from trl_drgrpo.common.hub_errors import is_hub_id, is_local_path
from trl_drgrpo.common.secrets import redacted, scrubbed
from trl_drgrpo.features.model_card.example import example_of
from trl_drgrpo.features.model_card.objective import lines_of, objective_of, plain_data, template
from trl_drgrpo.features.model_card.origin import origin_of
from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY
from trl_drgrpo.upstream.argument_types import Data, EvalData, Optimizers
from trl_drgrpo.upstream.batches import ScoredBatch
from trl_drgrpo.upstream.versions import installed_versions

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

# Metric -> title of its panel, which evaluations share.
PANELS = {"reward": "mean reward", "process/reward_mean": "mean step reward"}
PANELS |= {"completions/mean_length": "mean completion length (tokens)"}


Points = list[tuple[int, float]]  # step and value


def curves(history: list[dict[str, Any]]) -> dict[str, dict[str, Points]]:
    """Return the points of each metric of each panel, without lines of fewer than two points."""
    points_of: dict[str, Points] = {}
    for entry in history:
        step = entry.get("step", 0)
        for name, value in entry.items():
            points_of.setdefault(name, []).append((step, value))
    panels: dict[str, dict[str, Points]] = {}
    for metric, title in PANELS.items():
        if metric == "reward" and PROCESS_ONLY in points_of:  # an outcome reward that is always 0
            continue
        for name, points in points_of.items():
            if _metric_of(name) == metric and len(points) > 1:
                panels.setdefault(title, {})[name] = points
    return panels


def _metric_of(name: str) -> str:
    """Return the name that a metric has in training: `reward` of `eval_reward (a)`, see `history_by_split`."""
    return name.removeprefix("eval_").partition(" (")[0]


def draw_curves(history: list[dict[str, Any]], target: Path) -> bool:
    """Write the picture and return whether there is one: not without matplotlib, nor without two points."""
    panels = curves(history)
    if not panels:
        return False
    with suppress(ImportError):
        save_figure(draw_panels(panels, 5.5, 3.5), target)
        return True
    return False


PICTURE = "card/curves.png"  # no underscore in front: transformers does not upload such files


def write_card(
    trainer: "TrainerProtocol",
    metadata: ModelCardData,
    readme: Path,
    dataset_name: str | None = None,
    optimizers: Optimizers = (None, None),
    newest: ScoredBatch | None = None,
) -> None:
    """Write the card of a run to `readme`, in one step.

    `metadata`: of TRL's card, repaired in place; further arguments as in [`card_text`].
    """
    # TRL's card is written first, and gives the metadata; its text is not used.
    _repair(metadata, trainer.unwrapped_model, dataset_name or dataset_id(trainer.train_dataset))
    text = card_text(trainer, readme.parent, dataset_name, optimizers, newest)
    content = f"---\n{redacted(metadata.to_yaml(), vars(trainer.args))}\n---\n{text}"
    write_whole(readme, content)


def card_text(
    trainer: "TrainerProtocol",
    folder: Path,
    dataset_name: str | None = None,
    optimizers: Optimizers = (None, None),
    newest: ScoredBatch | None = None,
) -> str:
    """Return the card without its metadata, in Markdown.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer of the run.
        folder (`Path`): Where the card will be; the picture goes below it.
        dataset_name (`str`, *optional*): Hub id of the data.
        optimizers (`tuple`, *optional*): Optimizer and scheduler that the trainer was given.
        newest ([`ScoredBatch`], *optional*): This rank's rows of the newest generation batch.
    """
    args = trainer.args
    model = trainer.unwrapped_model
    history = history_by_split(trainer.state.log_history, trainer.eval_dataset)
    formula, notes = objective_of(trainer)
    # During training a card is written at every checkpoint: only the last one is worth the seconds of a picture.
    is_drawn = not trainer.is_in_train and draw_curves(history, folder / PICTURE)
    settings = changed_settings(args)
    dataset = trainer.train_dataset
    splits = trainer.eval_dataset
    if not isinstance(splits, dict):
        splits = {"": splits}
    example = redacted(example_of(trainer, newest), vars(args))
    values = {
        "name": trainer.hub_model_id or Path(args.output_dir).absolute().name,
        "model_class": type(model).__name__,
        "base": base_model_of(model),
        "base_class": kind_of(model),
        "base_source": origin_of(getattr(model.config, "_name_or_path", None)).get("source"),
        "revision": (args.model_init_kwargs or {}).get("revision"),
        "is_text_only": not trainer.takes_images,
        "model_id": repr(trainer.hub_model_id or "."),
        "formula": "\n".join(formula),
        "notes": notes,
        "dataset_name": dataset_name if is_hub_id(dataset_name) else dataset_id(dataset),
        "columns": list(getattr(dataset, "column_names", None) or []),
        "prompts": _size(dataset),
        "splits": {split: _size(data) for split, data in splits.items() if data is not None},
        "rewards": reward_rows(trainer),
        "metrics": metric_rows(history),
        "picture": PICTURE if is_drawn else "",
        "training": training_rows(trainer, optimizers),
        "adapter": adapter_rows(model),
        "is_adapter": hasattr(model, "peft_config"),
        "settings": yaml.safe_dump(settings, sort_keys=True, allow_unicode=True) if settings else "# none",
        "machine": machine_rows(trainer),
        "citation": textwrap.dedent(trainer.citation),
    }
    values = redacted(values, vars(args))  # before Markdown's escapes take them apart
    return template("card.md.jinja").render(values, example=example, trainer=trainer, args=args, state=trainer.state)


def _size(dataset: Data) -> str | None:
    """Return the number of rows; `None` for a stream, which is not counted."""
    if not isinstance(dataset, Sized):
        return None
    return f"{len(dataset):,}"


def _repair(data: ModelCardData, model: PreTrainedModel, dataset_name: str | None) -> None:
    """Correct TRL's values of the Hub metadata, and add PEFT's."""
    data.pop("licence")  # a misspelled placeholder; the license is the author's to state
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
    # TRL's tags, and those by which the Hub finds adapters.
    tags = set(data.tags or [])
    adapters = getattr(model, "peft_config", None)
    if adapters is not None:
        data.library_name = "peft"
        tags.add("transformers")
        for config in adapters.values():
            tags.add(plain_data(config.peft_type).lower())
        if data.base_model:
            tags.add(f"base_model:adapter:{data.base_model}")
    data.tags = sorted(tags)
    if data.pipeline_tag is None and "CausalLM" in kind_of(model):
        data.pipeline_tag = "text-generation"


def without_paths(values: object) -> Any:
    """Return nested mappings and lists with `"(local path)"` for every path of the machine."""
    if isinstance(values, dict):
        return {name: without_paths(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_paths(value) for value in values]
    return "(local path)" if is_local_path(values) else values


Rows = list[tuple[str, Any]]

# Of the machine or of the run's surroundings: no part of what others need to repeat it.
_SURROUNDINGS = ("output_dir", "run_name", "report_to", "disable_tqdm", "do_eval", "debug", "use_cpu", "tf32")
_SURROUNDINGS_START = ("hub_", "push_to_hub", "log_", "logging_", "trackio_", "save_", "resume_", "ddp_", "local_rank")
_SURROUNDINGS_START += ("overwrite_", "dataloader_", "accelerator_config", "deepspeed", "fsdp", "vllm_server_")
_PACKAGES = ["trl-drgrpo", "trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "peft"]
_PACKAGES += ["bitsandbytes"]
_ADAPTER = {"adapter": "peft_type", "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_ADAPTER |= {"rsLoRA": "use_rslora", "target modules": "target_modules", "modules trained in full": "modules_to_save"}
_QUANTIZATION = ("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def base_model_of(model: PreTrainedModel) -> str | None:
    """Return the Hub id of the model that was trained or carries the adapter, or that it was converted from; `None`
    when it is no Hub model."""
    name = getattr(model.config, "_name_or_path", None)
    if is_hub_id(name):
        return name
    return origin_of(name).get("base_model")  # of a local folder that was converted or merged


def kind_of(model: PreTrainedModel) -> str:
    """Return the class of the model, or of the one that carries the adapter."""
    unwrapped = getattr(model, "get_base_model", None)  # of PEFT
    if unwrapped is not None:
        model = unwrapped()
    return type(model).__name__


def dataset_id(dataset: Data) -> str | None:
    """Return the Hub id that the dataset itself reports; `None` for local, generated and streamed data."""
    # `hf://datasets/<id>@<revision>/<file>`: the address of each file that was downloaded for it.
    checksums = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for source in checksums:
        name = str(source).partition("hf://datasets/")[2].partition("@")[0]
        if name and is_hub_id(name):
            return name
    return None


def reward_rows(trainer: "TrainerProtocol") -> list[tuple[str, str, str]]:
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


def _source(func: "StepRewardFunction") -> str:
    """Return the source of a model that scores steps: its id with the revision, or the name of its folder."""
    source = getattr(func, "source", "")
    if not source:
        return ""
    name, at_revision, revision = source.partition(" at revision ")
    if is_hub_id(name):
        return f": {source}"
    return f": {Path(name).name}{at_revision}{revision}, a local model"


def training_rows(trainer: "TrainerProtocol", optimizers: Optimizers) -> Rows:
    """Return optimizer, batch geometry, sampling, and how far the run came (`training.jinja`)."""
    args = trainer.args
    optimizer, scheduler = optimizers
    # An optimizer of the user's own has rates and decays by group.
    rates = {f"{args.learning_rate:g}"}
    decays = {f"{args.weight_decay:g}"}
    if optimizer is not None:
        # `initial_lr`: a schedule has brought the rate of the moment down.
        rates = {f"{group.get('initial_lr', group['lr']):g}" for group in optimizer.param_groups}
        decays = {f"{group.get('weight_decay', 0):g}" for group in optimizer.param_groups}
    processes = trainer.accelerator.num_processes
    lines = lines_of(
        "training.jinja",
        args=args,
        state=trainer.state,
        trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * processes,
        processes=processes,
        rates=" and ".join(sorted(rates)),
        decay=" and ".join(sorted(decays)),
        optimizer=optimizer and type(optimizer).__name__,
        scheduler=scheduler and type(scheduler).__name__,
    )
    rows: Rows = []
    for line in lines:
        name, _, value = line.partition(": ")
        rows.append((name, value))
    return rows


def adapter_rows(model: PreTrainedModel) -> Rows:
    """Return the adapter and the quantization of its base; empty for a full model that is not quantized."""
    rows: Rows = []
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if name == "ref":  # TRL's copy of an adapter that was there before
            continue
        for label, key in _ADAPTER.items():
            value = plain_data(getattr(config, key, None))
            if isinstance(value, list):
                value = ", ".join(sorted(value))
            if value not in (None, ""):
                rows.append((label, value))
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        values = plain_data(quantization)
        shown = [f"{key} {values[key]}" for key in _QUANTIZATION if values.get(key) not in (None, False)]
        rows.append(("base model quantized", ", ".join(shown) or type(quantization).__name__))
    return rows


def history_by_split(history: list[dict[str, Any]], evaluation: EvalData | None) -> list[dict[str, Any]]:
    """Return the log history with the split in the names of metrics, `eval_reward (<split>)`, where
    `trainer.eval_dataset` has several: TRL calls them all the same."""
    if not isinstance(evaluation, dict):
        return history
    labeled = []
    for entry in history:
        mark = ""
        for split in evaluation:
            if f"eval_{split}_runtime" in entry:  # the one name in which TRL leaves the split
                mark = f" ({split})"
        labeled.append({name if name in ("step", "epoch") else f"{name}{mark}": entry[name] for name in entry})
    return labeled


_WORTH_A_LINE = re.compile(
    r"(reward|reward_std|kl|entropy|loss|grad_norm)(/|$)|rewards/|process_rewards/|process/reward"
    r"|completions/mean_length|completions/clipped_ratio|drgrpo/dead_groups"
)


def metric_rows(history: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return name, first and last logged value of each metric worth a line, and the step of the last.

    A value that was logged once is the last one alone: as both it would read as no change.
    """
    first: dict[str, float] = {}
    last: dict[str, tuple[float, int]] = {}
    logged_again: set[str] = set()
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and _WORTH_A_LINE.match(_metric_of(name)):
                if name in first:
                    logged_again.add(name)
                first.setdefault(name, value)
                last[name] = (value, int(entry.get("step", 0)))
    rows = []
    # Evaluations first, and in them the reward: the numbers that readers compare models by.
    for name in sorted(first, key=lambda name: (not name.startswith("eval_"), not name.endswith("reward"), name)):
        value, step = last[name]
        first_value = f"{first[name]:.4g}" if name in logged_again else ""
        rows.append((name, first_value, f"{value:.4g}", f"{step}"))
    return rows


def changed_settings(args: "DrGRPOConfig") -> dict[str, Any]:
    """Return every field that somebody has set to another value than its default, without secrets and paths of the
    machine: what the tables leave out."""
    derived = getattr(args, "derived", {})  # a plain GRPOConfig's were not recorded
    shown = {}
    for field in dataclasses.fields(args):
        if not field.init or field.name in _SURROUNDINGS or field.name.startswith(_SURROUNDINGS_START):
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(args, field.name)
        # The configuration derives some values from others: one that it made itself is nobody's setting.
        passed, effective = derived.get(field.name, (value, value))
        is_derived = passed == default and value == effective
        if value != default and not is_derived:
            shown[field.name] = plain_data(value)
    return without_paths(scrubbed(shown))


def machine_rows(trainer: "TrainerProtocol") -> Rows:
    """Return hardware, the time of the run where transformers has noted it, and the packages that it depends on."""
    accelerator = trainer.accelerator
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    rows: Rows = [("device", f"{accelerator.num_processes} x {name}")]
    runtimes = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    if runtimes:
        rows.append(("training time since the last start", f"{runtimes[-1]:,.0f} s"))
    # Of torch with its build, which metadata may not name.
    versions = {"Python": platform.python_version(), **installed_versions(_PACKAGES), "torch": torch.__version__}
    return rows + list(versions.items())
