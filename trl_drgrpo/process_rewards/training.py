"""Train a process reward model from labeled steps: token classification on `transformers.Trainer`.

A row becomes `[bos] prompt step separator step separator ...` with the step's label on the separator's last token and
-100 elsewhere: what [`TokenClassificationScorer`] reads back, through the same function. Deltas from TRL's former PRM
trainer: steps are never cut (a row whose steps do not fit is left out and counted), labels may be missing, and the
separator is noted in the model's config, so that the scorer cannot take another one.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors
from trl_drgrpo.common.ranges import refuse_out_of_range
from trl_drgrpo.process_rewards.encoding import encode_piecewise
from trl_drgrpo.process_rewards.loading import load_tokenizer
from trl_drgrpo.process_rewards.stepwise_data import checked_rows
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, prompt_text
from trl_drgrpo.process_rewards.token_classification import DEFAULT_SEPARATOR

logger = logging.getLogger(__name__)

IGNORED = -100
LABEL_NAMES = {0: "bad", 1: "good"}


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
    numbers = {
        "loss": float(result.training_loss),
        "rows": float(len(examples)),
        "rows_left_out": float(left_out),
        "good_frac": good_frac,
    }
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
        return AutoModelForTokenClassification.from_pretrained(
            model,
            num_labels=2,
            id2label=LABEL_NAMES,
            label2id={name: index for index, name in LABEL_NAMES.items()},
            dtype=torch.float32,
        )


def _padding_right(tokenizer: Any) -> Any:
    """The tokenizer, padding on the right as the scorer does; the caller's stays as it is."""
    import copy

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
