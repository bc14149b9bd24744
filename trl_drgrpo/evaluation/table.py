"""The result of an evaluation as rows of text: for the terminal, Markdown, the report and the model card.

In a model card it is a section in the text, and `model-index` in its metadata, which the Hub shows. The card that a
run writes stays as it is around them; written again, by a training that goes on, it states them no more, as they were
of another model. Data and models are named by their Hub ids; of local ones no path gets in.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.hub_errors import is_hub_id
from trl_drgrpo.common.markdown import plain

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_FEW_PROMPTS = 30


def title(content: Mapping[str, Any]) -> str:
    """Data and sampling in one line."""
    data = content["dataset"]
    sampling = content["sampling"]
    where = f"{data['name']}{', ' + data['config'] if data.get('config') else ''}, split {data['split']}"
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if (sampling.get(name) or off) != off:
            how += f", {name} {sampling[name]:g}"
    part = "" if is_whole(content) else f" (the first of {data['of']:,})"
    return (
        f"{where}: {counted(data['prompts'], 'prompt')}{part}, "
        f"{counted(sampling['num_samples'], 'completion')} of each "
        f"({how}, at most {sampling['max_completion_length']:,} tokens, seed {sampling['seed']}); "
        f"correct by {correct_by(content)}{_prompting(content['prompt'])}"
    )


def is_whole(content: Mapping[str, Any]) -> bool:
    """Tell whether all prompts of the split were evaluated."""
    data = content["dataset"]
    return data["prompts"] == data.get("of", data["prompts"])


def _prompting(prompt: Mapping[str, Any]) -> str:
    template = prompt["prompt_template"]
    system = prompt["system_prompt"]
    description = ""
    if template is not None:
        name = template if template.isidentifier() else "of its own"
        description = f"; prompt template {name}"
    if system is not None:
        description += "; with a system prompt"
    return description


def correct_by(content: Mapping[str, Any]) -> str:
    """The reward that decides on correctness, with its threshold."""
    rule = content["correct"]
    return rule["reward"] + (f" >= {rule['threshold']:g}" if rule["threshold"] is not None else "")


def table(content: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: one per model, and the difference below two."""
    ks = list(content["models"][0]["pass_at"])
    rewards = list(content["models"][0]["rewards"])
    head = ["model", *(f"pass@{k} [95%]" for k in ks), *(f"mean {name}" for name in rewards), "tokens", "cut off"]
    head.append("unscorable")
    rows = []
    for model in content["models"]:
        cells = [percent(model["pass_at"][k]) for k in ks]
        cells += ["–" if (mean := model["rewards"][name]) is None else f"{mean:.3g}" for name in rewards]
        unscorable = f"{model['unscorable']:,}" + (f" ({model['failed']:,} failed)" if model["failed"] else "")
        cells += [f"{model['length_mean']:.0f}", f"{model['truncated'] / model['completions']:.1%}", unscorable]
        rows.append([f"{model['role']}: {model['name']}", *cells])
    if content["difference"]:
        cells = [percent(content["difference"][k], signed=True) for k in ks]
        rows.append(["difference, paired", *cells, *[""] * (len(head) - 1 - len(cells))])
    return head, rows


def notes(content: Mapping[str, Any]) -> list[str]:
    """Method and caveats of the numbers, a sentence each."""
    lines = [f"Interval: {content['interval']}. pass@k: unbiased estimator of Chen et al., arXiv 2107.03374."]
    estimates = [estimate for model in content["models"] for estimate in model["pass_at"].values()]
    estimates += list((content["difference"] or {}).values())
    if any(estimate["value"] is not None and estimate["low"] is None for estimate in estimates):
        lines.append("No interval where all prompts have the same value: the bootstrap cannot give one.")
    if content["dataset"]["prompts"] < _FEW_PROMPTS:
        lines.append(f"Fewer than {_FEW_PROMPTS} prompts: the intervals are too narrow.")
    for model in content["models"]:
        for k, estimate in model["pass_at"].items():
            missing = model["prompts"] - estimate["prompts"]
            if missing:
                lines.append(
                    f"{model['role']}: {counted(missing, 'prompt')} with fewer than {k} scored "
                    f"completion{'s' * (k != '1')} left out of pass@{k}."
                )
    return lines


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """An estimate with its interval, in percent; a difference in percentage points.

    Example:

    ```python
    >>> percent({"value": 0.5, "low": 0.25, "high": 0.755})
    '50.0% [25.0, 75.5]'

    ```
    """
    if estimate["value"] is None:
        return "–"
    sign = "+" if signed else ""
    text = f"{100 * estimate['value']:{sign}.1f}{' points' if signed else '%'}"
    if estimate["low"] is None:
        return text
    return f"{text} [{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


def _markdown_lines(content: Mapping[str, Any]) -> list[str]:
    head, rows = table(content)
    rows = [[plain(row[0]), *row[1:]] for row in rows]
    lines = [markdown_row(head), "|" + "---|" * len(head), *map(markdown_row, rows)]
    note_lines = [*notes(content), f"Measured with {content['made_by']}, {content['date']}."]
    return [plain(title(content)), "", *lines, "", *(f"- {plain(note)}" for note in note_lines)]


def markdown_row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Example:

    ```python
    >>> counted(1, "prompt"), counted(1319, "prompt")
    ('1 prompt', '1,319 prompts')

    ```
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


MEASURED_WITH = "trl-drgrpo eval"
_START = "<!-- trl-drgrpo eval -->"
_END = "<!-- /trl-drgrpo eval -->"
_DATA_FILES = (".json", ".jsonl", ".parquet", ".csv")
_BEFORE = "## Limits"  # of our own card; at the end of any other


def put_into_card(readme: Path, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """State evaluations of a model in its card, in the place of those that were stated before.

    Args:
        readme (`Path`): The card.
        evaluations (`Sequence[Mapping]`): Results, all of this model as it is now.
    """
    from huggingface_hub import ModelCard

    card = ModelCard.load(readme, ignore_metadata_errors=True)
    shown = [_without_paths(evaluation) for evaluation in evaluations]
    lines = [_START, "## Evaluation"]
    for evaluation in shown:
        lines += ["", *_markdown_lines(evaluation), ""]
    section = "\n".join([*lines, _END, ""])
    before, _, after_start = card.text.partition(_START)
    text = before + after_start.partition(_END)[2].lstrip("\n") if after_start else card.text
    at = text.find(f"\n{_BEFORE}\n")
    card.text = f"{text.rstrip()}\n\n{section}" if at < 0 else f"{text[: at + 1]}{section}\n{text[at + 1 :]}"
    data: Any = card.data
    data.model_name = data.model_name or readme.absolute().parent.name
    before = data.eval_results or []
    unrelated_results = [
        result for result in before if (result.metric_args or {}).get("measured_with") != MEASURED_WITH
    ]
    data.eval_results = unrelated_results + [entry for content in shown for entry in _metadata(content)]
    write_whole(readme, str(card))


def _metadata(content: Mapping[str, Any]) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    data = content["dataset"]
    sampling = content["sampling"]
    arguments = {name: value for name, value in sampling.items() if value is not None}
    (model,) = (candidate for candidate in content["models"] if candidate["role"] == "model")
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


def _without_paths(content: Mapping[str, Any]) -> dict[str, Any]:
    """A result as others may read it."""
    data = {**content["dataset"], "name": public_name(content["dataset"]["name"], "a local dataset")}
    models = [{**model, "name": public_name(model["name"], "a local model")} for model in content["models"]]
    renamed = [{**model, "name": "this one"} if model["role"] == "model" else model for model in models]
    return {**content, "dataset": data, "models": renamed}


def public_name(name: str, otherwise: str) -> str:
    """A Hub id or the name of a generated task as it is, of a local file its name, else other words."""
    path = Path(name)
    if path.suffix in _DATA_FILES:
        return path.name
    return name if is_hub_id(name) or name.startswith(("reasoning_gym:", "trl_drgrpo:")) else otherwise
