r"""Train a process reward model from labeled steps: token classification on `transformers.Trainer`.

A row of labeled steps: `{"prompt": text or messages, "steps": [text, ...], "labels": [true, false, ...]}`; a label may
be `null` (not trained on). The column was called `completions` in TRL's stepwise format and is accepted under that
name. PRM800K (arXiv 2305.20050) and Math-Shepherd (arXiv 2312.08935) records convert; one PRM800K record gives a row
per alternative that the annotators rated, each with the steps chosen before it.

For training a row becomes `[bos] prompt step separator step separator ...` with the step's label on the separator's
last token and -100 elsewhere: what [`TokenClassificationScorer`] reads back, through the same function. Deltas from
TRL's former PRM trainer: steps are never cut (a row whose steps do not fit is left out and counted), labels may be
missing, and the separator is noted in the model's config, so that the scorer cannot take another one.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors
from trl_drgrpo.common.ranges import refuse_out_of_range
from trl_drgrpo.process_rewards.formats import DEFAULT_SEPARATOR
from trl_drgrpo.process_rewards.loading import load_tokenizer
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, encode_piecewise, prompt_text
from trl_drgrpo.rewards.scoring import read_json_lines

logger = logging.getLogger(__name__)

IGNORED = -100
LABEL_NAMES = {0: "bad", 1: "good"}
Row = dict[str, Any]


def convert_prm800k(record: Mapping[str, Any], neutral: bool = True) -> list[Row]:
    """Rows of labeled steps from one PRM800K record.

    Args:
        record (`Mapping`): With `question.problem` and `label.steps`, as published.
        neutral (`bool`, *optional*, defaults to `True`): Label of steps rated 0. The paper's best scores count them as
            good; TRL's converter counted them as bad.

    Returns:
        `list[dict]`: One row for each alternative that was not followed, and one for the path that was.

    Raises:
        `InputError`: A record of another shape.

    Example:

    ```python
    >>> steps = [{"completions": [{"text": "a", "rating": -1}, {"text": "b", "rating": 1}], "chosen_completion": 1}]
    >>> rows = convert_prm800k({"question": {"problem": "?"}, "label": {"steps": steps}})
    >>> [(row["steps"], row["labels"]) for row in rows]
    [(['a'], [False]), (['b'], [True])]

    ```
    """
    try:
        problem, rated_steps = record["question"]["problem"], record["label"]["steps"]
    except (KeyError, TypeError) as error:
        raise _wrong_shape("PRM800K", f"no {error}", "'question.problem' and 'label.steps'") from error
    rows: list[Row] = []
    path: list[tuple[str, bool | None]] = []
    for rated in rated_steps:
        alternatives, chosen = rated.get("completions") or [], rated.get("chosen_completion")
        for index, alternative in enumerate(alternatives):
            if index != chosen:
                rows.append(_row(problem, [*path, _rated(alternative, neutral)]))
        if chosen is not None:
            path.append(_rated(alternatives[chosen], neutral))
        elif human := rated.get("human_completion"):
            path.append((human["text"] if isinstance(human, Mapping) else human, True))
        else:
            break
    if path:
        rows.append(_row(problem, path))
    return rows


def convert_math_shepherd(record: Mapping[str, Any]) -> list[Row]:
    r"""The row of labeled steps of one Math-Shepherd record.

    Args:
        record (`Mapping`): With `input` (question and steps, `ки` behind each step) and `label` (the same text with
            `+` or `-` in place of each `ки`), as published.

    Returns:
        `list[dict]`: One row. A marker before `Step 1:`, an annotation error of a few records, is left out.

    Raises:
        `InputError`: A record of another shape.

    Example:

    ```python
    >>> record = {"input": "1+1=? Step 1: 2 ки\nStep 2: so 3 ки", "label": "1+1=? Step 1: 2 +\nStep 2: so 3 -"}
    >>> convert_math_shepherd(record)
    [{'prompt': '1+1=?', 'steps': ['Step 1: 2', 'Step 2: so 3'], 'labels': [True, False]}]

    ```
    """
    text, labeled = record.get("input"), record.get("label")
    if not isinstance(text, str) or not isinstance(labeled, str):
        raise _wrong_shape("Math-Shepherd", f"the keys {sorted(record)}", "the texts 'input' and 'label'")
    begin = text.find("Step 1:")
    if begin < 0:
        raise _wrong_shape("Math-Shepherd", f"no 'Step 1:' in {text[:60]!r}", "numbered steps")
    # Each marker of two letters has a sign of one in the label: the k-th sign is k characters further left.
    markers = [match.start() for match in re.finditer("ки", text)]
    signs = [labeled[place - k : place - k + 1] for k, place in enumerate(markers)]
    if not set(signs) <= {"+", "-"}:
        raise _wrong_shape("Math-Shepherd", f"the labels {sorted(set(signs))}", "'+' or '-' in place of every 'ки'")
    steps: list[tuple[str, bool | None]] = []
    for place, sign in zip(markers, signs, strict=True):
        if place > begin:
            steps.append((text[begin:place].strip(), sign == "+"))
            begin = place + len("ки")
    return [_row(text[: text.find("Step 1:")].replace("ки", "").strip(), steps)]


FORMATS: dict[str, Callable[[Mapping[str, Any]], list[Row]]] = {
    "stepwise": lambda record: [dict(record)],
    "prm800k": convert_prm800k,
    "math_shepherd": convert_math_shepherd,
}


def read_labeled_steps(path: str | Path, data_format: str = "stepwise") -> list[Row]:
    """Read a JSON Lines file of labeled steps.

    Args:
        path (`str` or `Path`): The file.
        data_format (`str`, *optional*, defaults to `"stepwise"`): `"stepwise"`, `"prm800k"` or `"math_shepherd"`.

    Returns:
        `list[dict]`: Rows with `prompt`, `steps` and `labels`, checked.

    Raises:
        `InputError`: No such file, a line that is not JSON, a row that does not fit.
    """
    if data_format not in FORMATS:
        raise InputError("format", repr(data_format), f"one of {', '.join(FORMATS)}", "Name the shape of the file.")
    rows: list[Row] = []
    for line, record in enumerate(read_json_lines(path), start=1):
        try:
            rows += checked_rows(FORMATS[data_format](record))
        except InputError as error:
            raise error.under(f"{path}, row {line}") from error
    return rows


def checked_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows with exactly `prompt`, `steps` and `labels`.

    Args:
        rows (`Iterable[Mapping]`): `steps` may be called `completions`; further keys are left out.

    Returns:
        `list[dict]`.

    Raises:
        `InputError`: A missing key, steps that are not texts, labels that are not booleans (0 and 1 count) or not one
            per step.
    """
    checked: list[Row] = []
    for index, row in enumerate(rows):
        steps, labels = row.get("steps", row.get("completions")), row.get("labels")
        if "prompt" not in row or not isinstance(steps, (list, tuple)) or not isinstance(labels, (list, tuple)):
            expected = "the keys 'prompt', 'steps' (list of texts) and 'labels' (list of booleans)"
            raise InputError(f"labeled row {index}", f"{sorted(row)}", expected, "Rename or add what is missing.")
        if len(steps) != len(labels):
            got = f"{len(labels)} labels for {len(steps)} steps"
            raise InputError(f"labeled row {index}", got, "one label per step", "Label every step (null: leave out).")
        if not all(isinstance(step, str) for step in steps):
            remedy = "Write steps as strings."
            raise InputError(f"labeled row {index}", "steps that are not strings", "strings", remedy)
        if invalid := [label for label in labels if label not in (True, False, None)]:
            remedy = "1 or true: good, 0 or false: bad, null: not trained on."
            raise InputError(f"labeled row {index}", f"the label {invalid[0]!r}", "true, false or null", remedy)
        labels = [None if label is None else bool(label) for label in labels]
        checked.append({"prompt": row["prompt"], "steps": list(steps), "labels": labels})
    return checked


def _row(prompt: str, steps: list[tuple[str, bool | None]]) -> Row:
    return {"prompt": prompt, "steps": [text for text, _ in steps], "labels": [label for _, label in steps]}


def _rated(alternative: Mapping[str, Any], neutral: bool) -> tuple[str, bool | None]:
    rating = alternative.get("rating")
    labels = {1: True, 0: neutral, -1: False, None: None}
    if rating not in labels:
        raise _wrong_shape("PRM800K", f"the rating {rating!r}", "-1, 0, 1 or null")
    return alternative["text"], labels[rating]


def _wrong_shape(source: str, got: str, expected: str) -> InputError:
    return InputError(f"{source} record", got, expected, "Pass records as they were published.")


def train_prm(
    model: Any,
    rows: Sequence[Mapping[str, Any]],
    output_dir: str | Path,
    *,
    tokenizer: Any = None,
    eval_rows: Sequence[Mapping[str, Any]] | None = None,
    step_separator: str = DEFAULT_SEPARATOR,
    max_length: int = 2048,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train a model that tells good steps from bad ones, and save it with its tokenizer.

    Args:
        model (`str` or `PreTrainedModel`): Path or Hub id of a language model (it gets a new head of two classes), or
            a loaded `AutoModelForTokenClassification` with two.
        rows (`Sequence[Mapping]`): `prompt` (text or messages), `steps` (or `completions`: texts), `labels` (booleans;
            `None` = not trained on).
        output_dir (`str` or `Path`): Output folder; loads in [`TokenClassificationScorer`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): By default that of the model's path.
        eval_rows (`Sequence[Mapping]`, *optional*): Steps to measure on after training.
        step_separator (`str`, *optional*, defaults to a line break): Follows every step.
        max_length (`int`, *optional*, defaults to `2048`): Longer rows lose the left of their prompt.
        arguments (`Mapping`, *optional*): Fields of `transformers.TrainingArguments` over the defaults: learning rate
            1e-5, 1 epoch, batches of 8, the CPU where there is no GPU, no intermediate checkpoints, no trackers.

    Returns:
        `dict[str, float]`: `loss` (mean over training), `rows`, `rows_left_out`, `good_frac` (share of good steps
        among those trained on) and, with `eval_rows`, `eval_accuracy`, `eval_good_recall`, `eval_bad_recall` (shares
        of all, good and bad steps that are recognized at probability 1/2; NaN of none).

    Raises:
        `InputError`: Rows that do not fit, no row that can be trained on, labels of one kind only.
    """
    refuse_out_of_range(arguments or {})
    from transformers import DataCollatorForTokenClassification, Trainer

    tokenizer = load_tokenizer(model, tokenizer)
    examples, left_out = tokenize_rows(rows, tokenizer, step_separator, max_length)
    good_frac = _good_frac(examples)
    training_arguments = _training_arguments(output_dir, arguments or {})  # seeds before the new head is made
    network = _with_head(model, training_arguments.seed)
    network.config.step_separator = step_separator
    padded = _padding_right(tokenizer)
    trainer = Trainer(
        model=network,
        args=training_arguments,
        train_dataset=examples,  # type: ignore[arg-type]
        data_collator=DataCollatorForTokenClassification(padded),
        processing_class=tokenizer,
        compute_metrics=_recognized,
    )
    result = trainer.train()
    trainer.save_model(str(output_dir))
    numbers = {"loss": float(result.training_loss), "rows": float(len(examples))}
    numbers |= {"rows_left_out": float(left_out), "good_frac": good_frac}
    if eval_rows is not None:
        held_out, _ = tokenize_rows(eval_rows, tokenizer, step_separator, max_length)
        measured = trainer.evaluate(held_out)  # type: ignore[arg-type]
        numbers |= {key: float(measured[key]) for key in ("eval_accuracy", "eval_good_recall", "eval_bad_recall")}
    return numbers


def tokenize_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, step_separator: str, max_length: int
) -> tuple[list[dict[str, list[int]]], int]:
    """Training examples from labeled steps.

    Args:
        rows (`Sequence[Mapping]`): As for [`train_prm`].
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        step_separator (`str`): Follows every step.
        max_length (`int`): Longest example in tokens.

    Returns:
        `tuple[list[dict], int]`: Examples with `input_ids`, `attention_mask` and `labels` (0, 1, or -100 where nothing
        is learned), and how many rows were left out: steps that do not fit, or no labeled step with text.

    Raises:
        `InputError`: Rows that do not fit.
    """
    cleaner = Cleaner([*tokenizer.all_special_tokens, *END_TOKENS])
    examples: list[dict[str, list[int]]] = []
    checked = checked_rows(rows)
    for row in checked:
        labeled = [
            (text, label)
            for step, label in zip(row["steps"], row["labels"], strict=True)
            if (text := cleaner.step(step))
        ]
        prompt = cleaner.prompt(prompt_text(row["prompt"]))
        encoded = encode_piecewise(tokenizer, prompt, [text for text, _ in labeled], step_separator).fit(max_length)
        if encoded is None or all(label is None for _, label in labeled):
            continue
        labels = [IGNORED] * len(encoded.input_ids)
        for position, (_, label) in zip(encoded.positions, labeled, strict=True):
            if position is not None and label is not None:
                labels[position] = int(label)
        mask = [1] * len(labels)
        examples.append({"input_ids": encoded.input_ids, "attention_mask": mask, "labels": labels})
    left_out = len(checked) - len(examples)
    if left_out:
        logger.warning(
            "%d of %d rows skipped: steps longer than %d tokens, or no label.", left_out, len(rows), max_length
        )
    return examples, left_out


def _good_frac(examples: Sequence[Mapping[str, list[int]]]) -> float:
    """Share of good steps; training on one kind only teaches nothing but that kind."""
    labels = [label for example in examples for label in example["labels"] if label != IGNORED]
    share = sum(labels) / len(labels) if labels else 0.0
    if not 0.0 < share < 1.0:
        got = f"{len(labels)} labeled steps, {share:.0%} of them good"
        remedy = "Add rows, shorten the steps or raise max_length; a model cannot learn from one kind of label."
        raise InputError("data", got, "good and bad steps", remedy)
    return share


def _training_arguments(output_dir: str | Path, arguments: Mapping[str, Any]) -> Any:
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "learning_rate": 1e-5,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
    }
    return TrainingArguments(output_dir=str(output_dir), **{**defaults, **arguments})


def _with_head(model: Any, seed: int) -> Any:
    """A token classifier of two classes; the new head is drawn with the run's seed."""
    if not isinstance(model, (str, Path)):
        if model.config.num_labels != 2:
            remedy = "Load it with `num_labels=2`."
            raise InputError("model", f"a head of {model.config.num_labels} classes", "2 classes", remedy)
        return model
    from transformers import AutoModelForTokenClassification, set_seed

    set_seed(seed)
    with hub_errors("model", str(model), "a folder or the id of a language model on the Hub"):
        names = {"id2label": LABEL_NAMES, "label2id": {name: index for index, name in LABEL_NAMES.items()}}
        return AutoModelForTokenClassification.from_pretrained(model, num_labels=2, dtype=torch.float32, **names)


def _padding_right(tokenizer: Any) -> Any:
    """The tokenizer, padding on the right as the scorer does; the caller's stays as it is."""
    padded = copy.copy(tokenizer)
    padded.padding_side = "right"
    if padded.pad_token is None:
        padded.pad_token = padded.eos_token
    return padded


def _recognized(prediction: Any) -> dict[str, float]:
    """Shares of all, good and bad steps that are recognized."""
    predicted, labels = prediction.predictions.argmax(-1), prediction.label_ids
    counted = labels != IGNORED
    is_correct = predicted == labels
    kinds = {"accuracy": counted, "good_recall": labels == 1, "bad_recall": labels == 0}
    return {name: float(is_correct[kind].mean()) if kind.any() else float("nan") for name, kind in kinds.items()}
