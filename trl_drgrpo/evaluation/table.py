"""The result of an evaluation as rows of text: for the terminal, Markdown, the report and the model card.

In a model card it is a section in the text, and `model-index` in its metadata, which the Hub shows. The rest of the
card stays unchanged. When a resumed training writes the card again, the results are gone, as they belonged to another
model. Data and models are named by their Hub ids; paths of local ones are left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.hub_errors import is_hub_id
from trl_drgrpo.common.markdown import plain

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

Result = Mapping[str, Any]  # of an evaluation, as `results.results` makes it
_FEW_PROMPTS = 30  # below, a percentile bootstrap covers less than the 95% that it claims


def title(content: Result) -> str:
    """Describe data and sampling in one line."""
    data = content["dataset"]
    sampling = content["sampling"]
    source = data["name"]
    if data.get("config"):
        source += f", {data['config']}"
    decoding = "greedy"
    if sampling["temperature"] != 0:
        decoding = f"temperature {sampling['temperature']:g}"
    # Only what is on: most evaluations sample without any of these.
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if (sampling.get(name) or off) != off:
            decoding += f", {name} {sampling[name]:g}"
    prompts = counted(data["prompts"], "prompt")
    if not is_whole(content):
        prompts += f" (the first of {data['of']:,})"
    description = (
        f"{source}, split {data['split']}: {prompts}, {counted(sampling['num_samples'], 'completion')} of each "
        f"({decoding}, at most {sampling['max_completion_length']:,} tokens, seed {sampling['seed']}); "
        f"correct by {correct_by(content)}"
    )
    template = content["prompt"]["prompt_template"]
    if template is not None:
        if not template.isidentifier():  # a text, not the name of one
            template = "of its own"
        description += f"; prompt template {template}"
    if content["prompt"]["system_prompt"] is not None:
        description += "; with a system prompt"
    return description


def is_whole(content: Result) -> bool:
    """Tell whether all prompts of the split were evaluated."""
    data = content["dataset"]
    return data["prompts"] == data.get("of", data["prompts"])


def correct_by(content: Result) -> str:
    """Return the reward that decides on correctness, with its threshold."""
    rule = content["correct"]
    if rule["threshold"] is None:
        return rule["reward"]
    return f"{rule['reward']} >= {rule['threshold']:g}"


def table(content: Result) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: one row per model, and the difference below two."""
    # The columns are those of the first model; all of them have the same. `k` is a text here, as a key of JSON.
    ks = list(content["models"][0]["pass_at"])
    rewards = list(content["models"][0]["rewards"])
    head = ["model"]
    head += [f"pass@{k} [95%]" for k in ks]
    head += [f"mean {name}" for name in rewards]
    head += ["tokens", "cut off", "unscorable"]
    rows = []
    for model in content["models"]:
        cells = [f"{model['role']}: {model['name']}"]
        cells += [percent(model["pass_at"][k]) for k in ks]
        for name in rewards:
            mean = model["rewards"][name]
            text = "–"
            if mean is not None:
                text = f"{mean:.3g}"
            cells.append(text)
        # Completions that were cut or not scored say how far the numbers before them can be trusted.
        cells.append(f"{model['length_mean']:.0f}")
        cells.append(f"{model['truncated'] / model['completions']:.1%}")
        unscorable = f"{model['unscorable']:,}"
        if model["failed"]:
            unscorable += f" ({model['failed']:,} failed)"
        cells.append(unscorable)
        rows.append(cells)
    if content["difference"]:
        cells = ["difference, paired"]
        cells += [percent(content["difference"][k], signed=True) for k in ks]
        rows.append(cells + [""] * (len(head) - len(cells)))  # rewards and lengths have no interval
    return head, rows


def notes(content: Result) -> list[str]:
    """Return method and caveats of the numbers, a sentence each."""
    # The method first, then what limits the numbers of this result.
    lines = [f"Interval: {content['interval']}. pass@k: unbiased estimator of Chen et al., arXiv 2107.03374."]
    estimates = list((content["difference"] or {}).values())
    for model in content["models"]:
        estimates += model["pass_at"].values()
    if any(estimate["value"] is not None and estimate["low"] is None for estimate in estimates):
        lines.append("No interval where all prompts have the same value: the bootstrap cannot give one.")
    if content["dataset"]["prompts"] < _FEW_PROMPTS:
        lines.append(f"Fewer than {_FEW_PROMPTS} prompts: the intervals are too narrow.")
    for model in content["models"]:
        for k, estimate in model["pass_at"].items():
            missing = model["prompts"] - estimate["prompts"]
            if missing:
                completions = "completion" if k == "1" else "completions"
                lines.append(
                    f"{model['role']}: {counted(missing, 'prompt')} with fewer than {k} scored {completions} left out "
                    f"of pass@{k}."
                )
    return lines


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """Write an estimate with its interval, in percent; a difference in percentage points.

    Example:

    ```python
    >>> percent({"value": 0.5, "low": 0.25, "high": 0.755})
    '50.0% [25.0, 75.5]'

    ```
    """
    if estimate["value"] is None:
        return "–"
    sign, unit = ("+", " points") if signed else ("", "%")
    text = f"{100 * estimate['value']:{sign}.1f}{unit}"
    if estimate["low"] is None:
        return text
    return f"{text} [{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


def _markdown_lines(content: Result) -> list[str]:
    head, rows = table(content)
    # Names and prompts are the user's: `plain` keeps Markdown from reading them.
    lines = [plain(title(content)), "", markdown_row(head), "|" + "---|" * len(head)]
    for name, *cells in rows:
        lines.append(markdown_row([plain(name), *cells]))
    lines.append("")
    for note in (*notes(content), f"Measured with {content['made_by']}, {content['date']}."):
        lines.append(f"- {plain(note)}")
    return lines


def markdown_row(cells: Sequence[str]) -> str:
    """Write a line of a Markdown table."""
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun.

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
_BEFORE = "## Limits"  # the section goes before this heading of our own card, and to the end of any other


def put_into_card(readme: Path, evaluations: Sequence[Result]) -> None:
    """State evaluations of a model in its card, in the place of earlier ones.

    Args:
        readme (`Path`): The card.
        evaluations (`Sequence[Mapping]`): Results, all of this model as it is now.
    """
    from huggingface_hub import ModelCard

    card = ModelCard.load(readme, ignore_metadata_errors=True)  # a card by hand may have metadata that do not parse
    data: Any = card.data
    # The Hub shows results under a name; a card without one gets that of its folder.
    data.model_name = data.model_name or readme.absolute().parent.name
    # Results of other tools stay.
    eval_results = []  # replaced are those that this command wrote
    for result in data.eval_results or []:
        if (result.metric_args or {}).get("measured_with") != MEASURED_WITH:
            eval_results.append(result)
    lines = [_START, "## Evaluation"]
    for evaluation in map(_without_paths, evaluations):
        lines += ["", *_markdown_lines(evaluation), ""]
        eval_results += _metadata(evaluation)
    data.eval_results = eval_results
    # Between two marks, by which the next evaluation finds the section and replaces it.
    section = "\n".join([*lines, _END, ""])
    text, _, after_start = card.text.partition(_START)
    if after_start:  # the earlier section goes
        text += after_start.partition(_END)[2].lstrip("\n")
    at = text.find(f"\n{_BEFORE}\n")
    if at < 0:
        card.text = f"{text.rstrip()}\n\n{section}"
    else:
        card.text = f"{text[: at + 1]}{section}\n{text[at + 1 :]}"
    write_whole(readme, str(card))


def _metadata(content: Result) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    data = content["dataset"]
    arguments = {}
    for name, value in content["sampling"].items():
        if value is not None:
            arguments[name] = value
    model = next(candidate for candidate in content["models"] if candidate["role"] == "model")
    eval_results = []
    for k, estimate in model["pass_at"].items():
        if estimate["value"] is None:  # no prompt has `k` scored completions
            continue
        eval_results.append(
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
        )
    return eval_results


def _without_paths(content: Result) -> dict[str, Any]:
    """Return a result without the names of local folders."""
    data = content["dataset"] | {"name": public_name(content["dataset"]["name"], "a local dataset")}
    models = []
    for model in content["models"]:
        name = "this one"  # the model of the card, which may have been evaluated before it had a Hub id
        if model["role"] != "model":
            name = public_name(model["name"], "a local model")
        models.append(model | {"name": name})
    return {**content, "dataset": data, "models": models}


def public_name(name: str, otherwise: str) -> str:
    """Return a Hub id or a generated task unchanged, a local file by its name, and `otherwise` for anything else."""
    # A path shows the names of a user and of a machine, which a published card should not.
    path = Path(name)
    if path.suffix in _DATA_FILES:
        return path.name
    if is_hub_id(name) or name.startswith(("reasoning_gym:", "trl_drgrpo:")):
        return name
    return otherwise
