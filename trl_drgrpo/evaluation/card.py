"""Evaluations in a model card: a section in the text, and `model-index` in its metadata, which the Hub shows.

The card that a run writes stays as it is around them; written again, by a training that goes on, it states them no
more, as they were of another model. Data and models are named by their Hub ids; of local ones no path gets in.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from trl_drgrpo.evaluation.table import correct_by, markdown_row, notes, table, title
from trl_drgrpo.features.model_card.card_facts import is_hub_id, plain

MEASURED_WITH = "trl-drgrpo eval"
_START, _END = "<!-- trl-drgrpo eval -->", "<!-- /trl-drgrpo eval -->"
_DATA_FILES = (".json", ".jsonl", ".parquet", ".csv")
_BEFORE = "## Limits"  # of our own card; at the end of any other


def put_into_card(readme: Path, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """State evaluations of a model in its card, in the place of those that were stated before.

    Args:
        readme (`Path`): The card.
        evaluations (`Sequence[Mapping]`): Results, all of this model as it is now.
    """
    card = ModelCard.load(readme, ignore_metadata_errors=True)
    shown = [_without_paths(each) for each in evaluations]
    section = "\n".join([_START, "## Evaluation", *map(_part, shown), _END, ""])
    before, _, rest = card.text.partition(_START)
    text = before + rest.partition(_END)[2].lstrip("\n") if rest else card.text
    at = text.find(f"\n{_BEFORE}\n")
    card.text = f"{text.rstrip()}\n\n{section}" if at < 0 else f"{text[: at + 1]}{section}\n{text[at + 1 :]}"
    data: Any = card.data
    data.model_name = data.model_name or readme.absolute().parent.name
    others = [each for each in data.eval_results or [] if not _is_ours(each)]
    data.eval_results = others + [each for content in shown for each in _metadata(content)]
    part = readme.with_name(f"_{readme.name}")  # transformers uploads no file whose name begins like this
    part.write_text(str(card), encoding="utf-8", newline="\n")
    part.replace(readme)


def _part(content: Mapping[str, Any]) -> str:
    head, rows = table(content)
    lines = [markdown_row(head), "|" + "---|" * len(head)]
    lines += [markdown_row([plain(row[0]), *row[1:]]) for row in rows]
    said = [*notes(content), f"Measured with {content['made_by']}, {content['date']}."]
    return "\n".join(["", plain(title(content)), "", *lines, "", *(f"- {plain(each)}" for each in said), ""])


def _metadata(content: Mapping[str, Any]) -> list[EvalResult]:
    data, sampling = content["dataset"], content["sampling"]
    arguments = {name: value for name, value in sampling.items() if value is not None}
    (model,) = (each for each in content["models"] if each["role"] == "model")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=data["name"],
            dataset_name=data["name"],
            dataset_config=data.get("config"),
            dataset_split=data["split"],
            metric_type=f"pass@{k}",
            metric_name=f"pass@{k} by {correct_by(content)}",
            metric_value=round(estimate["value"], 4),
            metric_args={"measured_with": MEASURED_WITH, "prompts": estimate["prompts"], **arguments},
        )
        for k, estimate in model["pass_at"].items()
        if estimate["value"] is not None
    ]


def _is_ours(result: EvalResult) -> bool:
    return (result.metric_args or {}).get("measured_with") == MEASURED_WITH


def _without_paths(content: Mapping[str, Any]) -> dict[str, Any]:
    """A result as others may read it."""
    data = {**content["dataset"], "name": public_name(content["dataset"]["name"], "a local dataset")}
    models = [{**each, "name": public_name(each["name"], "a local model")} for each in content["models"]]
    own = [{**each, "name": "this one"} if each["role"] == "model" else each for each in models]
    return {**content, "dataset": data, "models": own}


def public_name(name: str, otherwise: str) -> str:
    """A Hub id or the name of a generated task as it is, of a local file its name, else other words."""
    path = Path(name)
    if path.suffix in _DATA_FILES:
        return path.name
    return name if is_hub_id(name) or name.startswith(("reasoning_gym:", "trl_drgrpo:")) else otherwise
