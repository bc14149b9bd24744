"""Saved completions, read for scoring: JSON Lines, CSV, and the Parquet files that TRL logs.

With `log_completions=True` TRL writes `completions/completions_<step>.parquet`: step, prompt, completion, the value of
every reward function under its name, what rewards gave to `log_extra`, and the advantage. The dataset's other columns
are not in it, so a reward that needs the answer finds it in the dataset, by the prompt (`with_columns_of`).
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.rewards.text import prompt_key

Row = dict[str, Any]
READERS = (".jsonl", ".json", ".csv", ".parquet")
# What TRL's table has beside prompt, completion and the rewards; no dataset column.
TABLE_COLUMNS = ("step", "advantage")


def read_rows(path: str | Path, field: str = "data") -> list[Row]:
    """The rows of a file.

    Args:
        path (`str` or `Path`): A `.jsonl`, `.csv` or `.parquet` file; a folder stands for all Parquet files in it, in
            the order of their names. CSV has texts only.
        field (`str`, *optional*, defaults to `"data"`): Name of the setting in error messages.

    Returns:
        `list[dict]`: One per row.

    Raises:
        [`InputError`]: No such file, another type of file, a line or a file that cannot be read (by
            its number), or no row.
    """
    file = Path(path)
    if file.is_dir():
        parts = sorted(file.glob("*.parquet"))
        rows = [row for part in parts for row in read_parquet(part, field)]
    elif not file.is_file():
        expected = f"a {', '.join(READERS)} file, or a folder of Parquet files"
        raise InputError(field, f"{str(path)!r}, which is not a file", expected, "Check the path.")
    elif file.suffix == ".parquet":
        rows = read_parquet(file, field)
    elif file.suffix == ".csv":
        rows = _read_csv(file, field)
    elif file.suffix in READERS:
        rows = read_json_lines(file, field)
    else:
        remedy = "Rename the file to match its format."
        raise InputError(field, f"{str(path)!r}", f"a file that ends in {', '.join(READERS)}", remedy)
    return _not_empty(rows, path, field)


def check_completions(rows: Iterable[Row]) -> None:
    """Every row has a prompt and a completion, each a text or messages with text. The first is row 1."""
    for number, row in enumerate(rows, start=1):
        if {"mode", "group", "G", "rows"} <= row.keys():
            remedy = (
                "Score the table of a run with log_completions=True (<output_dir>/completions), or the samples of "
                "`trl-drgrpo eval` (_drgrpo/evaluations/samples)."
            )
            got = "a run log, whose texts are cut into spans and hold special tokens"
            raise InputError(f"data, row {number}", got, "a prompt and a completion per row", remedy)
        for column in ("prompt", "completion"):
            if column not in row:
                remedy = f"Rename the column that holds it: `--columns <column>={column}`."
                raise InputError(f"data, row {number}", f"the columns {', '.join(row)}", f"a {column}", remedy)
            if not _is_text(row[column]):
                got = f"a {column} of type {type(row[column]).__name__}: {shortened(row[column])}"
                expected = "a text, or a list of messages with role and content"
                raise InputError(f"data, row {number}", got, expected, "Fix the row, or drop it.")


def renamed(rows: list[Row], renamings: Iterable[str]) -> list[Row]:
    """Rows with columns renamed, each `old=new` as `rename_columns` in a recipe. Refuses another form, a column that
    is missing and a name that is taken."""
    for renaming in renamings:
        old, equals, new = renaming.partition("=")
        if not (old and equals and new):
            raise InputError("columns", repr(renaming), "old=new", "For example answer=solution.")
        names = {name for row in rows for name in row}
        if old not in names:
            expected = f"one of the columns {', '.join(sorted(names))} before the ="
            raise InputError("columns", repr(renaming), expected, "Put the name in the file on the left.")
        if new in names:
            got = f"{renaming!r}, but there is a column {new} already"
            raise InputError("columns", got, "a new name", f"Rename that one first: {new}=other.")
        rows = [{new if name == old else name: value for name, value in row.items()} for row in rows]
    return rows


def with_columns_of(rows: list[Row], dataset: list[Row]) -> list[Row]:
    """Rows with the columns that they lack, from the dataset's row of the same prompt. Refuses a prompt that the
    dataset does not have, or has with different columns."""
    by_prompt: dict[str, Row] = {}
    for number, row in enumerate(dataset, start=1):
        if "prompt" not in row:
            remedy = "Add it: completions are matched to rows by their prompt."
            raise InputError(f"dataset, row {number}", f"the columns {', '.join(row)}", "a prompt", remedy)
        if by_prompt.setdefault(prompt_key(row["prompt"]), row) != row:
            got = f"the prompt of an earlier row with other columns: {shortened(row['prompt'])}"
            raise InputError(f"dataset, row {number}", got, "different prompts", "Drop one of them.")
    joined = []
    for number, row in enumerate(rows, start=1):
        found = by_prompt.get(prompt_key(row.get("prompt")))
        if found is None:
            got = f"a prompt that the dataset does not have: {shortened(row.get('prompt'))}"
            remedy = "Pass the dataset of the run, with the same system prompt."
            raise InputError(f"data, row {number}", got, "a prompt of --dataset", remedy)
        joined.append({**found, **row})
    return joined


def read_json_lines(path: str | Path, field: str = "data") -> list[Row]:
    """The objects of a JSON Lines file, empty lines left out. Refuses a missing file, no row, and a line that is no
    object."""
    file = Path(path)
    if not file.is_file():
        raise InputError(field, f"{str(path)!r}, which is not a file", "a JSON Lines file", "Check the path.")
    rows: list[Row] = []
    for number, line in enumerate(_text(file, field).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            remedy = "Write one whole JSON object per line; a broken last line means that the file was truncated."
            raise InputError(f"{file}, line {number}", f"invalid JSON ({error})", "a JSON object", remedy) from error
        if not isinstance(row, dict):
            remedy = "Write one JSON object per line."
            raise InputError(f"{file}, line {number}", type(row).__name__, "a JSON object", remedy)
        rows.append(row)
    return _not_empty(rows, path, field)


def _not_empty(rows: list[Row], path: str | Path, field: str) -> list[Row]:
    if not rows:
        raise InputError(field, f"{str(path)!r} without rows", "at least one row", "Check the file.")
    return rows


def _read_csv(file: Path, field: str) -> list[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # completions are longer than the default of 128 KiB
    reader = csv.DictReader(io.StringIO(_text(file, field), newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                got = f"{'more' if None in row else 'fewer'} fields than the first line names"
                raise InputError(f"{file}, line {reader.line_num}", got, "one field per column", "Fix the quotes.")
            rows.append(dict(row))
    except csv.Error as error:
        remedy = "Fix the line; double a quote inside a field."
        raise InputError(
            f"{file}, line {reader.reader.line_num}", f"invalid CSV ({error})", "a row", remedy
        ) from error
    return rows


def read_parquet(file: Path, field: str = "data", columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a Parquet file; with `columns` these only, where it has them."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(file, columns=columns and list(columns)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(field, f"{str(file)!r} ({reason})", "a Parquet file", "Write the file again.") from error


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(field, f"{str(file)!r} ({error})", "a file of UTF-8 text", "Convert it.") from error


def _is_text(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    contents = [message.get("content") for message in value]
    return all(content is None or isinstance(content, str) or _is_parts(content) for content in contents)


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)
