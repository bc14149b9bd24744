"""The model card: TRL's metadata, repaired, and a text that states what was really run, with curves and a snippet.

TRL's card calls a model with a local base "a fine-tuned version of None", writes `licence: license`, and says nothing
of objective, rewards or settings; PEFT's card names the base by its path on the machine and drops TRL's tags. Here
`card_facts.py` reads the run, `card.md.jinja` lays it out, and what is left of secrets or paths is taken out at the
end. Curves are drawn where matplotlib is installed (`trl-drgrpo[report]`) and two points exist.
"""

import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.drawing import draw_panels, save_figure
from trl_drgrpo.common.hub_errors import is_hub_id
from trl_drgrpo.common.secrets import redacted
from trl_drgrpo.features.model_card import card_facts
from trl_drgrpo.features.model_card.card_facts import objective_of, plain_data, template

# Metric -> title of its panel, which evaluations share.
PANELS = {"reward": "mean reward", "completions/mean_length": "mean completion length (tokens)"}


def curves(history: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points `(step, value)` of each metric of each panel, without panels that have fewer than two points."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    logged = dict.fromkeys(name for entry in history for name in entry)
    for metric, title in PANELS.items():
        names = [name for name in logged if name.partition(" (")[0].removeprefix("eval_") == metric]
        lines = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in names}
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        if lines:
            panels[title] = lines
    return panels


def draw_curves(history: list[dict[str, Any]], target: Path) -> bool:
    """Write the picture; returns whether there is one: not without matplotlib, nor without two points."""
    panels = curves(history)
    if not panels:
        return False
    with suppress(ImportError):
        save_figure(draw_panels(panels, 5.5, 3.5), target)
        return True
    return False


def is_conversational(dataset: Any) -> bool:
    """Whether the prompts of a dataset are messages; `False` for a stream, which is not read for this."""
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        return False
    return isinstance(dataset[0].get("prompt"), list)


PICTURE = "card/curves.png"  # no underscore in front: transformers does not upload such files


def write_card(trainer: Any, metadata: ModelCardData, readme: Path, dataset_name: str | None = None) -> None:
    """Write the card of a run to `readme`, in one step. While the run trains the card says so, and no picture is
    drawn. `metadata` is what TRL would put into the card; it is repaired in place."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_adapter = hasattr(model, "peft_config")
    _repair(metadata, model, is_adapter, dataset_name or card_facts.dataset_id(trainer.train_dataset))
    text = card_text(trainer, model, is_adapter, readme.parent, dataset_name)
    content = f"---\n{redacted(metadata.to_yaml(), vars(trainer.args))}\n---\n{text}"
    write_whole(readme, content)


def card_text(trainer: Any, model: Any, is_adapter: bool, folder: Path, dataset_name: str | None) -> str:
    """The card without its metadata, in Markdown. `folder` is where the card will be; the picture goes below it."""
    args = trainer.args
    history = card_facts.history_by_split(trainer.state.log_history, trainer.eval_dataset)
    formula, notes = objective_of(trainer)
    drawn = not trainer.is_in_train and draw_curves(history, folder / PICTURE)
    settings = card_facts.changed_settings(args)
    dataset, evaluation = trainer.train_dataset, trainer.eval_dataset
    splits = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    values = {
        "name": trainer.hub_model_id or Path(args.output_dir).absolute().name,
        "model_class": type(model).__name__,
        "base": card_facts.base_model_of(model),
        "base_class": card_facts.kind_of(model),
        # A processor takes images, too.
        "is_text_only": hasattr(trainer.processing_class, "convert_tokens_to_ids"),
        "model_id": repr(trainer.hub_model_id or "."),
        "is_chat": is_conversational(dataset),
        "formula": "\n".join(formula),
        "notes": notes,
        "dataset_name": dataset_name if is_hub_id(dataset_name) else card_facts.dataset_id(dataset),
        "columns": list(getattr(dataset, "column_names", None) or []),
        "prompts": _size(dataset),
        "splits": {split: _size(data) for split, data in splits.items() if data is not None},
        "rewards": card_facts.reward_rows(trainer),
        "metrics": card_facts.metric_rows(history),
        "picture": PICTURE if drawn else "",
        "training": card_facts.training_rows(trainer),
        "adapter": card_facts.adapter_rows(model),
        "is_adapter": is_adapter,
        "settings": yaml.safe_dump(settings, sort_keys=True, allow_unicode=True) if settings else "# none",
        "machine": card_facts.machine_rows(trainer),
        "citation": textwrap.dedent(trainer._paper["citation"]),
    }
    values = redacted(values, vars(args))  # before Markdown's escapes take them apart
    return template("card.md.jinja").render(values, trainer=trainer, args=args, state=trainer.state)


def _size(dataset: Any) -> str | None:
    return f"{len(dataset):,}" if hasattr(dataset, "__len__") else None  # a stream is not counted


def _repair(data: ModelCardData, model: Any, is_adapter: bool, dataset_name: str | None) -> None:
    """Hub metadata: corrects TRL's values and adds PEFT's."""
    data.pop("licence")  # a misspelled placeholder; the license is the author's to state
    data.base_model = card_facts.base_model_of(model)
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
    if data.pipeline_tag is None and "CausalLM" in card_facts.kind_of(model):
        data.pipeline_tag = "text-generation"
