r"""Labeled steps: reading them, checking them, and converting the two published shapes.

One row: `{"prompt": text or messages, "steps": [text, ...], "labels": [true, false, ...]}`; a label may be `null`
(not trained on). The column was called `completions` in TRL's stepwise format and is accepted under that name.
PRM800K (arXiv 2305.20050) and Math-Shepherd (arXiv 2312.08935) records convert; one PRM800K record gives a row per
alternative that the annotators rated, each with the steps chosen before it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.scoring.saved import read_json_lines

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
            raise InputError(
                f"labeled row {index}", "steps that are not strings", "strings", "Write steps as strings."
            )
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
