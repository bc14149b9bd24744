r"""Train a process reward model from labeled steps: token classification on `transformers.Trainer`.

A row of labeled steps: `{"prompt": text or messages, "steps": [text, ...], "labels": [true, false, ...]}`; a label may
be a number from 0 to 1 (soft: the share of rollouts that were accepted, for example) or `null` (not trained on). The
column was called `completions` in TRL's stepwise format and is accepted under that name. PRM800K (arXiv 2305.20050)
and Math-Shepherd (arXiv 2312.08935) records convert; one PRM800K record gives a row per alternative that the
annotators rated, each with the steps chosen before it.

For training a row becomes `[bos] prompt step separator step separator ...` with the step's label on the separator's
last token and -100 elsewhere: what [`TokenClassificationScorer`] reads back, through the same function. Deltas from
TRL's former PRM trainer: steps are never cut (a row whose steps do not fit is left out and counted), labels may be
missing, and the separator is noted in the model's config, so that the scorer cannot take another one. The loss is the
cross-entropy of each step's label, also where it is soft, averaged over the labeled steps of an optimizer step.
"""

import copy
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from trl_drgrpo.common.disk import room_needed
from trl_drgrpo.common.errors import DivergedError, InputError
from trl_drgrpo.common.finite import first_not_finite
from trl_drgrpo.common.hub_errors import hub_errors, is_hub_id
from trl_drgrpo.common.output_folders import checkpoint_folders, delete, drop_saved_links
from trl_drgrpo.common.ranges import refuse_bad_adapter, refuse_out_of_range
from trl_drgrpo.process_rewards.loading import Model, Tokenizer, is_causal, load_tokenizer
from trl_drgrpo.process_rewards.prm_inputs import Cleaner, encode_piecewise, prompt_without_system, texts_of
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR
from trl_drgrpo.process_rewards.steps.segmenter import joining_text

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Trainer,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

logger = logging.getLogger(__name__)

# The label of a token that is not trained on, as in transformers and torch.
IGNORED = -100
LABEL_NAMES = {0: "bad", 1: "good"}
Record = Mapping[str, Any]  # as a file or dataset has it
Row = dict[str, Any]  # `prompt`, `steps` and `labels`
Example = dict[str, list[Any]]  # `input_ids` and `labels`
Label = bool | float | None
Neutral = Literal["good", "bad", "ignore"]


def convert_prm800k(record: Record, neutral: Neutral = "good") -> list[Row]:
    """Convert a PRM800K record into rows of labeled steps.

    Args:
        record (`Mapping`): With `question.problem` and `label.steps`, as published.
        neutral (`str`, *optional*, defaults to `"good"`): Label of steps rated 0. The paper's best scores count
            them as good; TRL's converter counted them as bad; `"ignore"`: not trained on.

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
        problem = record["question"]["problem"]
        rated_steps = record["label"]["steps"]
    except (KeyError, TypeError) as error:
        raise _wrong_shape("PRM800K", f"no {error}", "'question.problem' and 'label.steps'") from error
    rows = []
    path = []  # the steps that were chosen so far
    for rated in rated_steps:
        alternatives = [_rated(alternative, neutral) for alternative in rated.get("completions") or ()]
        chosen = rated.get("chosen_completion")
        human = rated.get("human_completion")  # the annotator's own step, a record or its text
        for index, alternative in enumerate(alternatives):
            if index != chosen:
                # An alternative that was not followed ends a row of its own.
                rows.append(_row(problem, [*path, alternative]))
        if chosen is not None:
            path.append(alternatives[chosen])
        elif human:
            if isinstance(human, Mapping):
                human = human["text"]
            path.append((human, True))
        else:  # nobody went on from here
            break
    # The row of the path that was followed, up to where it ends.
    if path:
        rows.append(_row(problem, path))
    return rows


def convert_math_shepherd(record: Record) -> list[Row]:
    r"""Convert a Math-Shepherd record into a row of labeled steps.

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
    text = record.get("input")
    labeled = record.get("label")
    if not isinstance(text, str) or not isinstance(labeled, str):
        raise _wrong_shape("Math-Shepherd", f"the keys {sorted(record)}", "the texts 'input' and 'label'")
    begin = text.find("Step 1:")
    if begin < 0:
        raise _wrong_shape("Math-Shepherd", f"no 'Step 1:' in {text[:60]!r}", "numbered steps")
    # Each marker of two letters has a sign of one in the label: the k-th sign is k characters further left.
    markers = [match.start() for match in re.finditer("ки", text)]
    signs = [labeled[place - k : place - k + 1] for k, place in enumerate(markers)]
    kinds = set(signs)
    if not kinds <= {"+", "-"}:
        raise _wrong_shape("Math-Shepherd", f"the labels {sorted(kinds)}", "'+' or '-' in place of every 'ки'")
    prompt = text[:begin].replace("ки", "").strip()
    steps = []
    for place, sign in zip(markers, signs, strict=True):
        if place > begin:
            step = text[begin:place].strip()
            steps.append((step, sign == "+"))
            begin = place + len("ки")
    return [_row(prompt, steps)]


# By the name of a data format: a record to its rows.
FORMATS: dict[str, Callable[[Record], list[Row]]] = {
    "stepwise": lambda record: [dict(record)],
    "prm800k": convert_prm800k,
    "math_shepherd": convert_math_shepherd,
}


def labeled_steps(
    records: Iterable[Record],
    source: str,
    data_format: str = "stepwise",
    *,
    labels: str = "labels",
    neutral: Neutral = "good",
) -> list[Row]:
    """Convert the records of a file or dataset into rows of labeled steps.

    Args:
        records (`Iterable[Mapping]`): The records.
        source (`str`): Where they are from, for messages.
        data_format (`str`, *optional*, defaults to `"stepwise"`): `"stepwise"`, `"prm800k"` or `"math_shepherd"`.
        labels (`str`, *optional*, defaults to `"labels"`): Column with the labels, for `"stepwise"`.
        neutral (`str`, *optional*, defaults to `"good"`): As in [`convert_prm800k`].

    Returns:
        `list[dict]`: Rows with `prompt`, `steps` and `labels`, checked.

    Raises:
        `InputError`: A row that does not fit.
    """
    formats = {**FORMATS, "prm800k": partial(convert_prm800k, neutral=neutral)}
    if data_format not in formats:
        raise InputError("format", repr(data_format), f"one of {', '.join(FORMATS)}", "Name the shape of the file.")
    if data_format != "stepwise":
        labels = "labels"  # the converters' own
    rows = []
    for line, record in enumerate(records, start=1):
        try:
            rows += checked_rows(formats[data_format](record), labels)
        except InputError as error:
            # The checks see one record at a time, and do not know its line.
            raise error.under(f"{source}, row {line}") from error
    return rows


def checked_rows(rows: Iterable[Record], labels_in: str = "labels") -> list[Row]:
    """Check rows and reduce them to `prompt`, `steps` and `labels`.

    Args:
        rows (`Iterable[Mapping]`): `steps` may be called `completions`; further keys are left out.
        labels_in (`str`, *optional*, defaults to `"labels"`): Key of the labels.

    Returns:
        `list[dict]`.

    Raises:
        `InputError`: A missing key, steps that are not texts, labels that are neither booleans nor numbers from 0 to
            1, or not one per step.
    """
    checked = []
    for index, row in enumerate(rows):
        field = f"labeled row {index}"
        steps = row.get("steps", row.get("completions"))
        labels = row.get(labels_in)
        if "prompt" not in row or not isinstance(steps, (list, tuple)) or not isinstance(labels, (list, tuple)):
            expected = f"the keys 'prompt', 'steps' (list of texts) and '{labels_in}' (list of labels)"
            raise InputError(field, f"{sorted(row)}", expected, "Rename or add what is missing.")
        if len(steps) != len(labels):
            got = f"{len(labels)} labels for {len(steps)} steps"
            raise InputError(field, got, "one label per step", "Label every step (null: leave out).")
        if not all(isinstance(step, str) for step in steps):
            raise InputError(field, "steps that are not strings", "strings", "Write steps as strings.")
        checked_labels = []
        for label in labels:
            if label is not None and not (isinstance(label, (bool, int, float)) and 0 <= label <= 1):
                remedy = "1 or true: good, 0 or false: bad, between them: soft, null: not trained on."
                expected = "true, false, null or a number from 0 to 1"
                raise InputError(field, f"the label {label!r}", expected, remedy)
            if label in (0, 1):
                label = bool(label)
            checked_labels.append(label)
        checked.append({"prompt": row["prompt"], "steps": list(steps), "labels": checked_labels})
    return checked


def _row(prompt: str, steps: list[tuple[str, Label]]) -> Row:
    return {
        "prompt": prompt,
        "steps": [text for text, _ in steps],
        "labels": [label for _, label in steps],
    }


def _rated(alternative: Record, neutral: Neutral) -> tuple[str, Label]:
    rating = alternative.get("rating")
    label_of_neutral = {"good": True, "bad": False, "ignore": None}
    labels = {
        1: True,
        0: label_of_neutral[neutral],
        -1: False,
        None: None,
    }
    if rating not in labels:
        raise _wrong_shape("PRM800K", f"the rating {rating!r}", "-1, 0, 1 or null")
    return alternative["text"], labels[rating]


def _wrong_shape(source: str, got: str, expected: str) -> InputError:
    return InputError(f"{source} record", got, expected, "Pass records as they were published.")


def train_prm(
    model: Model,
    rows: Sequence[Record],
    output_dir: str | Path,
    *,
    tokenizer: "Tokenizer | None" = None,
    eval_rows: Sequence[Record] | None = None,
    step_separator: str = DEFAULT_SEPARATOR,
    max_length: int = 2048,
    peft_config: "PeftConfig | None" = None,
    resume_from_checkpoint: str | bool | None = None,
    dataset_name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train a model that tells good steps from bad ones. Save it with its tokenizer and a card.

    Args:
        model (`str` or `PreTrainedModel`): Path or Hub id of a language model (it gets a new head of two classes), or
            a loaded `AutoModelForTokenClassification` with two.
        rows (`Sequence[Mapping]`): `prompt` (text or messages), `steps` (or `completions`: texts), `labels` (booleans;
            numbers from 0 to 1; `None` = not trained on).
        output_dir (`str` or `Path`): Output folder; loads in [`TokenClassificationScorer`], and in recipes as `prm`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): By default that of the model's path.
        eval_rows (`Sequence[Mapping]`, *optional*): Steps to measure on after training, and during it where
            `arguments` has an `eval_strategy`.
        step_separator (`str`, *optional*, defaults to an empty line): Text behind every step; no rule.
        max_length (`int`, *optional*, defaults to `2048`): Longer rows lose the left of their prompt.
        peft_config (`~peft.LoraConfig`, *optional*): Train an adapter and the head. Both are merged into the model
            that is saved, so that it loads like any other; checkpoints hold the adapter.
        resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint of the same run; `True`: the newest one in
            `output_dir`, if there is one.
        dataset_name (`str`, *optional*): What the card calls the data.
        arguments (`Mapping`, *optional*): Fields of `transformers.TrainingArguments` over the defaults: learning rate
            1e-5 (with an adapter 1e-4), 1 epoch, batches of 8, the CPU where there is no GPU, no intermediate
            checkpoints, no trackers.

    Returns:
        `dict[str, float]`: `loss` (mean over training), `rows`, `rows_left_out`, `good_frac` (mean label of the steps
        trained on) and, with `eval_rows`, `eval_loss`, `eval_chance_loss` (of the best constant answer),
        `eval_accuracy`, `eval_good_recall`, `eval_bad_recall` (shares of all, good and bad steps that are recognized
        at probability 1/2; NaN of none). A soft label counts as good above 1/2 and as bad below.

    Raises:
        `InputError`: Rows that do not fit, no row that can be trained on, labels of one kind only, a checkpoint that
            is not there.
        `DivergedError`: A weight or a gradient is NaN or infinite; nothing of it is saved.
    """
    # The data first: a row that does not fit is found before a model loads.
    refuse_out_of_range(arguments or {})
    step_separator = joining_text(step_separator)
    tokenizer = load_tokenizer(model, tokenizer)
    examples, left_out = tokenize_rows(rows, tokenizer, step_separator, max_length)
    held_out = None
    if eval_rows is not None:
        held_out, _ = tokenize_rows(eval_rows, tokenizer, step_separator, max_length)
        if not held_out:
            got = f"{len(eval_rows)} rows, all of them left out"
            raise InputError("eval_data", got, "labeled steps that fit", "Shorten the steps or raise max_length.")
    good_frac = _good_frac(examples)
    checkpoint = _checkpoint_to_resume(resume_from_checkpoint, Path(output_dir))
    settings = dict(arguments or {})
    if peft_config is not None:
        settings.setdefault("learning_rate", 1e-4)
    training_arguments = _training_arguments(output_dir, settings)
    if held_out is None and training_arguments.eval_strategy != "no":
        remedy = "Pass eval_rows (`--eval_data`), or leave it out."
        got = f"{training_arguments.eval_strategy.value!r} without data"
        raise InputError("eval_strategy", got, "steps to evaluate on as well", remedy)
    # Everything that was passed has been checked, so the model may load.
    dtype = torch.float32
    if peft_config is not None and training_arguments.bf16:
        dtype = torch.bfloat16  # of the frozen base; the adapter and the head are float32, see `_with_adapter`
    network = _with_head(model, training_arguments.seed, dtype)  # seeds before the new head is made
    # In the model's configuration, so that the scorer joins steps by the same text.
    network.config.step_separator = step_separator
    base = getattr(network.config, "_name_or_path", "")
    causal = is_causal(network)
    if peft_config is not None:
        network = _with_adapter(network, peft_config)
    # Our callback deletes old checkpoints, and transformers none, see `_limits_checkpoints`.
    limit = training_arguments.save_total_limit
    training_arguments.save_total_limit = None
    # Any id will do: padding is masked, and its labels are ignored.
    pad_id: Any = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    trainer = _trainer_class()(
        model=network,
        callbacks=[_limits_checkpoints(limit)],
        args=training_arguments,
        train_dataset=examples,  # type: ignore[arg-type]
        eval_dataset=held_out,  # type: ignore[arg-type]
        data_collator=partial(_padded, pad_id=pad_id),
        processing_class=tokenizer,
        compute_metrics=_recognized,
        compute_loss_func=_label_loss,
    )
    with room_needed(Path(output_dir), lambda: "Only earlier checkpoints in this folder are complete."):
        result = trainer.train(resume_from_checkpoint=checkpoint)
        if peft_config is not None:
            adapted: Any = trainer.accelerator.unwrap_model(trainer.model)
            # The adapter is added to the weights, so the folder loads without peft.
            merged = adapted.merge_and_unload()
            trainer.model = merged.to(merged.dtype)  # the head was trained in float32
            trainer.model_wrapped = trainer.model
        # A link in the folder would be written through, into the file that it points to.
        drop_saved_links(Path(output_dir))
        trainer.save_model(str(output_dir))
    numbers = {
        "loss": _mean_loss(trainer.state, float(result.training_loss), checkpoint),
        "rows": float(len(examples)),
        "rows_left_out": float(left_out),
        "good_frac": good_frac,
    }
    # Without held-out steps, the steps trained on are measured, for the warning alone.
    measured_on = "held-out"
    if held_out is None:
        measured_on = "training"
    measured = trainer.evaluate(held_out or examples[:_LOOKED_AT])  # type: ignore[arg-type]
    loss = measured["eval_loss"]
    chance = measured["eval_chance_loss"]
    if loss > 0.99 * chance:  # no better than the best constant answer
        logger.warning(_AT_CHANCE, measured_on, loss, chance)
    if held_out is not None:
        for name in _MEASURED:
            numbers[f"eval_{name}"] = float(measured[f"eval_{name}"])
    if trainer.is_world_process_zero():
        labels: set[float] = set()
        for example in examples:
            labels.update(example["labels"])
        # The card says what a score means, which depends on the labels: a probability, or the mean of soft ones.
        _write_card(
            trainer,
            base,
            dataset_name,
            step_separator=step_separator,
            max_length=max_length,
            causal=causal,
            peft_config=peft_config,
            numbers=numbers,
            soft=not labels <= {0, 1, IGNORED},
        )
    return numbers


def _checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: Path) -> str | None:
    """Return the checkpoint that a training goes on from; `None`: it begins anew."""
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        for folder in checkpoint_folders(output_dir):  # the newest one first
            if _is_checkpoint(folder):
                return str(folder)
        logger.warning("resume_from_checkpoint: %s holds no checkpoint, the training begins anew.", output_dir)
        return None
    if not _is_checkpoint(Path(resume_from_checkpoint)):
        got = f"{resume_from_checkpoint}, which is no checkpoint"
        remedy = "Name a checkpoint-<step> folder, or set it to True for the newest one in output_dir."
        raise InputError("resume_from_checkpoint", got, "a checkpoint", remedy)
    return str(resume_from_checkpoint)


def _trainer_class() -> Any:
    """Return a `Trainer` that ends, and saves nothing more, once a number is NaN or infinite."""
    from transformers import Trainer

    class FiniteTrainer(Trainer):
        def _diverged(self, name: str) -> DivergedError:
            rate = self.args.learning_rate
            folder = self.args.output_dir
            cause = f"Likely cause: learning_rate {rate:g} (lower it), or a base model that overflows."
            remedy = f"Checkpoints in {folder} are of earlier steps; start again with that changed."
            step = self.state.global_step
            return DivergedError(f"step {step}: {name} is NaN or infinite, so the training ends. {cause} {remedy}")

        # transformers tells the norm of the gradient in its logs alone.
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            if not math.isfinite(logs.get("grad_norm", 0.0)):
                raise self._diverged("the norm of the gradient")

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            # All weights are looked at, since the merge has just rounded them to the base's type.
            network: Any = self.model
            name = first_not_finite(network.named_parameters())
            if name is not None:
                raise self._diverged(name)
            super().save_model(output_dir, _internal_call)

    return FiniteTrainer


def _mean_loss(state: "TrainerState", reported: float, checkpoint: str | None) -> float:
    """Return the mean loss of all steps, also of those before a resume, which transformers leaves out.

    After a resume it is the mean over the steps that were logged; NaN where none was.
    """
    from transformers import TrainerState

    if checkpoint is None:
        return reported
    resumed = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
    # A checkpoint from before the first step leaves nothing out.
    if resumed.global_step == 0:
        return reported
    total = 0.0
    last_step = 0
    for entry in state.log_history:
        if "loss" in entry:  # the mean over the steps since the entry before
            total += entry["loss"] * (entry["step"] - last_step)
            last_step = entry["step"]
    if last_step == 0:
        return math.nan
    return total / last_step


_LOOKED_AT = 256  # examples trained on that are measured for the warning below
_AT_CHANCE = (
    "The loss on the %s steps ends at %.3f; always answering with the share of good steps gives %.3f. The model does "
    "not tell good steps from bad ones: train longer, raise learning_rate, add rows, or look at the labels."
)
_MEASURED = ("loss", "chance_loss", "accuracy", "good_recall", "bad_recall")


def tokenize_rows(
    rows: Sequence[Record], tokenizer: "PreTrainedTokenizerBase", step_separator: str, max_length: int
) -> tuple[list[Example], int]:
    """Make training examples from labeled steps.

    Args:
        rows (`Sequence[Mapping]`): As for [`train_prm`].
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        step_separator (`str`): Follows every step.
        max_length (`int`): Longest example in tokens.

    Returns:
        `tuple[list[dict], int]`: Examples with `input_ids` and `labels` (from 0 to 1, or -100 where nothing is
        learned), and how many rows were left out: steps that do not fit, or no labeled step with text.

    Raises:
        `InputError`: Rows that do not fit.
    """
    cleaner = Cleaner(tokenizer.all_special_tokens)
    examples = []
    checked = checked_rows(rows)
    for row in checked:
        # Steps without text are left out, as the scorer leaves them out, with their labels.
        texts, indices = texts_of(row["steps"], cleaner)
        prompt = cleaner.prompt(prompt_without_system(row["prompt"]))
        encoded = encode_piecewise(tokenizer, prompt, texts, step_separator).fit(max_length)
        if encoded is None:
            continue
        labels: list[float] = [IGNORED] * len(encoded.input_ids)
        is_labeled = False
        for position, index in zip(encoded.positions, indices, strict=True):
            label = row["labels"][index]
            if label is None:
                continue
            is_labeled = True
            if position is not None:
                labels[position] = float(label)
        if is_labeled and labels:
            examples.append({"input_ids": encoded.input_ids, "labels": labels})
    left_out = len(checked) - len(examples)
    if left_out:
        logger.warning(
            "%d of %d rows skipped: steps longer than %d tokens, or no label.", left_out, len(rows), max_length
        )
    return examples, left_out


def _good_frac(examples: Sequence[Example]) -> float:
    """Return the mean label. Labels of one kind are refused: training on them teaches nothing but that kind."""
    labels = []
    for example in examples:
        labels += [label for label in example["labels"] if label != IGNORED]
    share = 0.0
    if labels:
        share = sum(labels) / len(labels)
    if not 0.0 < share < 1.0:
        got = f"{len(labels)} labeled steps, {share:.0%} of them good"
        remedy = "Add rows, shorten the steps or raise max_length; a model cannot learn from one kind of label."
        raise InputError("data", got, "good and bad steps", remedy)
    return share


def _is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder was written up to its trainer's state, which is nearly the last."""
    try:
        text = (folder / "trainer_state.json").read_text("utf-8")
        return isinstance(json.loads(text), dict)
    except (OSError, ValueError):
        return False


def _limits_checkpoints(limit: int | None) -> Any:
    """Return a callback that deletes checkpoints beyond a limit, the lowest steps first and never the newest.

    transformers goes by time stamps, and deletes the new ones where the clock was put back.
    """
    from transformers import TrainerCallback

    class LimitsCheckpoints(TrainerCallback):
        def on_save(
            self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
        ) -> None:
            if not limit or not state.is_world_process_zero:
                return
            newest = f"checkpoint-{state.global_step}"
            best = Path(state.best_model_checkpoint or "").name
            folders = checkpoint_folders(Path(str(args.output_dir)))[::-1]  # the lowest steps first
            removable = [path for path in folders if path.name not in (newest, best)]
            excess = max(len(folders) - limit, 0)
            for path in removable[:excess]:
                delete(path)

    return LimitsCheckpoints()


def _training_arguments(output_dir: str | Path, arguments: Mapping[str, Any]) -> Any:
    """Build transformers' training arguments over our defaults; a value that does not fit is an [`InputError`]."""
    from transformers import TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    settings: dict[str, Any] = {
        "learning_rate": 1e-5,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        **arguments,
    }
    try:
        training_arguments = TrainingArguments(output_dir=str(output_dir), **settings)
        for tracker in get_reporting_integration_callbacks(training_arguments.report_to):
            tracker()  # raises and names the package it lacks, before a model loads
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        cause = str(error).rstrip(".")
        got = f"a value that does not fit ({cause})"
        expected = "fields that transformers.TrainingArguments takes"
        raise InputError("arguments", got, expected, "Correct it.") from error
    return training_arguments


def _with_head(model: Model, seed: int, dtype: torch.dtype) -> Any:
    """Return a token classifier of two classes. The new head, and an adapter, are drawn with the run's seed."""
    if not isinstance(model, str | os.PathLike):
        if model.config.num_labels != 2:
            remedy = "Load it with `num_labels=2`."
            raise InputError("model", f"a head of {model.config.num_labels} classes", "2 classes", remedy)
        return model
    from transformers import AutoModelForTokenClassification, set_seed

    # transformers seeds when its trainer is built, which is after the head was drawn.
    set_seed(seed)
    with hub_errors("model", str(model), "a folder or the id of a language model on the Hub"):
        return AutoModelForTokenClassification.from_pretrained(
            model,
            num_labels=2,
            id2label=LABEL_NAMES,
            label2id={name: index for index, name in LABEL_NAMES.items()},
            dtype=dtype,
            # Without a value transformers would ask on stdin.
            trust_remote_code=False,
        )


def _with_adapter(network: "PreTrainedModel", peft_config: "PeftConfig") -> Any:
    """Return the model with an adapter. The adapter and the head are trained in float32."""
    from peft import get_peft_model

    refuse_bad_adapter(vars(peft_config), "peft_config.")
    config: Any = copy.copy(peft_config)  # the caller's stays as it is
    # For this task peft trains the head as a whole, so it gets no adapter.
    config.task_type = "TOKEN_CLS"
    config.exclude_modules = config.exclude_modules or ["score", "classifier"]
    try:
        adapted = get_peft_model(network, config)
    except ValueError as error:  # target_modules names layers that the model lacks
        got = f"one that does not fit the model ({error})"
        remedy = "Name layers of the model in target_modules."
        raise InputError("peft_config", got, "an adapter of this model", remedy) from error
    # The base may be in bfloat16, in which small steps of the optimizer are rounded away.
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def _padded(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """Return a batch, padded on the right as in the scorer: `input_ids`, `attention_mask` and `labels`, `(B, S)`."""
    tokens = []
    labels = []
    masks = []
    for example in examples:
        tokens.append(torch.tensor(example["input_ids"]))
        labels.append(torch.tensor(example["labels"], dtype=torch.float32))  # soft ones are between 0 and 1
        masks.append(torch.ones_like(tokens[-1]))
    return {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=pad_id),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def _label_loss(
    outputs: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of the labels `(B, S)`, which may be soft, per label of the optimizer step."""
    counted = labels != IGNORED
    good = labels[counted].float()
    targets = torch.stack([1 - good, good], dim=-1)  # (labels, 2)
    logits = outputs.logits[counted].float()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    # The sum is divided by the labels of all micro-batches, so that each label weighs the same.
    if num_items_in_batch is None:
        num_items_in_batch = counted.sum()
    return loss / num_items_in_batch


def _recognized(prediction: Any) -> dict[str, float]:
    """Return the shares of all, good and bad steps that are recognized, and the loss of the best constant answer."""
    labels = prediction.label_ids
    is_good = labels > 0.5
    is_bad = (labels >= 0) & (labels < 0.5)  # `IGNORED` is below 0
    is_correct = prediction.predictions.argmax(-1) == is_good
    counted_steps = {
        "accuracy": is_good | is_bad,
        "good_recall": is_good,
        "bad_recall": is_bad,
    }
    metrics = {}
    for name, counted in counted_steps.items():
        metrics[name] = math.nan
        if counted.any():
            metrics[name] = float(is_correct[counted].mean())
    # The best constant answer is the mean label; its loss is the entropy.
    good = float(labels[labels != IGNORED].mean())
    metrics["chance_loss"] = 0.0
    for share in (good, 1 - good):
        if share > 0:
            metrics["chance_loss"] -= share * math.log(share)
    return metrics


def _write_card(trainer: "Trainer", base: str, dataset_name: str | None, **facts: Any) -> None:
    """Write README.md beside the model: base, data, settings and the meaning of a score."""
    from huggingface_hub import ModelCard, ModelCardData

    # Local paths do not belong into a card's metadata.
    base_id = None
    if base and is_hub_id(base):
        base_id = base
    data_id = None
    datasets = None
    if dataset_name and is_hub_id(dataset_name):
        data_id = dataset_name
        datasets = [dataset_name]
    metadata = ModelCardData(
        base_model=base_id,
        datasets=datasets,
        library_name="transformers",
        pipeline_tag="token-classification",
        tags=["process-reward-model", "prm", "trl-drgrpo"],
    )
    folder = Path(str(trainer.args.output_dir))
    template = files("trl_drgrpo.process_rewards").joinpath("prm_card.md.jinja").read_text("utf-8")
    card = ModelCard.from_template(
        metadata,
        template_str=template,
        name=folder.absolute().name,
        kind=type(trainer.model).__name__,
        base=base_id,
        data=data_id or "local data",
        args=trainer.args,
        steps=trainer.state.global_step,
        **facts,
    )
    card.save(folder / "README.md")
