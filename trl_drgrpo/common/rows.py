"""Every row of a dataset, looked at before a model loads: prompts that TRL cannot read, and what columns hold.

100,000 rows take less than a second. Of a stream the first rows are read. One that a generator makes is read only
where the generator starts anew each time: what feeds it may be gone when it is read again. The rows that nobody has
looked at are checked when a batch comes (`check_batch`).
"""

import inspect
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import reading

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Split: TypeAlias = "Dataset | IterableDataset"
STREAMED_ROWS = 1000
_BATCH = 10_000  # rows that are read together


@dataclass(frozen=True)
class ColumnValues:
    """
    Kind of the values in a column, and its nulls.

    Args:
        kind (`str`): `"text"`, `"number"`, `"boolean"`, `"list"`, `"mapping"`, `"null"` (nothing else in it) or
            `"other"` (several kinds, or one that is none of these).
        rows (`int`): Rows that were looked at.
        nulls (`int`): Number of nulls, and of lists without a value.
        first_null (`int`, *optional*): Position of the first of those.
    """

    kind: str
    rows: int
    nulls: int
    first_null: int | None


def check_prompt_values(dataset: Split, field: str, where: str = "") -> None:
    """Check that every prompt of a split is a text that is not empty, or a list of messages.

    The message names the first row that does not fit; `where` adds the place of the rows: `" of train.jsonl"`.
    """
    batches = _batches(dataset, ["prompt"])
    _refuse_bad(chain.from_iterable(batch["prompt"] for batch in batches), field, where)


def _refuse_bad(prompts: Iterable[object], field: str, where: str = "") -> None:
    """Refuse prompts that cannot be read; the error names the first and counts the others."""
    got = ""
    later_problems = 0
    for row, prompt in enumerate(prompts):
        problem = prompt_problem(prompt)
        if problem and got:
            later_problems += 1
        elif problem:
            got = f"{problem} as the prompt in row {row} (the first is 0){where}"
    if not got:
        return
    if later_problems:
        got += f" and in {later_problems} more"
    raise InputError(
        field,
        got,
        "a non-empty string, or a list of messages with role and content",
        'Drop such rows, or convert the column; a message is {"role": "user", "content": "..."}.',
    )


def check_batch(rows: Sequence[Mapping[str, Any]], field: str) -> None:
    """Refuse rows of a stream that TRL cannot make one batch of: unreadable prompts, or columns that differ."""
    if all("prompt" in row for row in rows):
        _refuse_bad((row["prompt"] for row in rows), field, " of a batch")
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            different = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            got = f"row {number} of a batch (the first is 0), which differs from the first in the columns {different}"
            remedy = "Give each row every column; None stands for a missing value."
            raise InputError(field, got, "rows with the same columns", remedy)


def check_prompt_rows(rows: Sequence[Mapping[str, Any]], field: str, own_columns: Sequence[str] = ()) -> None:
    """Refuse rows in memory that a command cannot sample from.

    Args:
        rows (`Sequence[Mapping]`): Rows with a `prompt`.
        field (`str`): Flag or file that the rows come from.
        own_columns (`Sequence[str]`): Columns that the command writes itself.

    Raises:
        `InputError`: No rows, a column of the command's, or a prompt that cannot be read.
    """
    if not rows:
        raise InputError(field, "no rows", "at least one prompt", "Add prompts.")
    for column in rows[0]:
        if column in own_columns:
            remedy = f"Rename it, for example `--rename_columns {column}=given_{column}`: this command writes its own."
            raise InputError(field, f"a column {column!r}", "a dataset without it", remedy)
    _refuse_bad((row.get("prompt") for row in rows), field)


def prompt_problem(prompt: object) -> str:
    """Return the problem of a prompt (a text, or messages); empty if none. Only a tool call may lack content."""
    if prompt is None:
        return "null"
    if isinstance(prompt, str):
        return "" if prompt else "an empty text"
    if not isinstance(prompt, list):
        return f"{type(prompt).__name__} {prompt!r:.60}"
    if not prompt:
        return "an empty list"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"{message!r:.60}, which is not a message,"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"{message!r:.60}, a message without content,"
        # A text, or parts such as `{"type": "text", "text": ...}` and images.
        content = message.get("content") or ""
        is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not (isinstance(content, str) or is_parts):
            return f"{message!r:.60}, whose content is neither a text nor a list of parts,"
    return ""


def prompt_rows(dataset: Split) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number, prompt and environment's name of a split's rows; none of rows made on the fly, or with images."""
    columns = dataset.column_names or ["prompt", "environment"]  # a stream may not know them
    if "prompt" not in columns or {"image", "images"}.intersection(columns):
        return
    names = [name for name in ("prompt", "environment") if name in columns]
    number = 0
    for batch in _batches(dataset, names):
        for values in zip(*batch.values(), strict=True):
            if values[0] is not None:
                yield number, dict(zip(names, values, strict=True))
            number += 1


def column_values(dataset: Split, names: Sequence[str]) -> dict[str, ColumnValues]:
    """Return the contents of a split's columns, by name; empty for rows made on the fly."""
    if not names:
        return {}
    kinds: dict[str, set[str]] = defaultdict(set)
    nulls: dict[str, list[int]] = defaultdict(list)
    rows = 0
    # Raw: an image would be decoded, which takes long and says no more about its kind.
    for batch in _batches(dataset, names, raw=True):
        for name, values in batch.items():
            for row, value in enumerate(values, rows):
                kinds[name].add(_KINDS.get(type(value), "other"))
                if _is_nothing(value):
                    nulls[name].append(row)
        rows += len(batch[names[0]])
    if not rows:
        return {}
    contents = {}
    for name in names:
        kind = "other"
        # Nulls beside values are counted, and make no kind of their own.
        kinds_of_values = kinds[name] - {"null"} or {"null"}
        if len(kinds_of_values) == 1:
            (kind,) = kinds_of_values
        null_rows = nulls[name]
        first_null = null_rows[0] if null_rows else None
        contents[name] = ColumnValues(kind, rows, len(null_rows), first_null)
    return contents


def first_row(dataset: Split) -> dict[str, Any] | None:
    """Return the first row of a split; `None` for rows made on the fly, and for none."""
    if not _is_in_memory(dataset):
        if dataset.info.builder_name == "generator":  # its first row might be gone for the training
            return None
        return next(iter(dataset), None)
    if not len(dataset) or dataset.format["type"] == "custom":
        return None
    return dataset[0]


def _is_in_memory(dataset: Split) -> "TypeGuard[Dataset]":
    return hasattr(dataset, "__len__")


def _batches(dataset: Split, names: Sequence[str], raw: bool = False) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns in batches of rows. `raw`: as they are stored, images as bytes, say.

    Rows from a generator, or through a function of the user's, are not read: that may change the next ones.
    """
    # A split in memory with the format "custom" computes its rows when they are read (`set_transform`).
    if not _is_in_memory(dataset):
        if can_be_read_again(dataset):
            with reading("dataset_name", f"a stream, in its first {STREAMED_ROWS} rows", "data that can be read"):
                rows = list(islice(dataset, STREAMED_ROWS))
            yield {name: [row.get(name) for row in rows] for name in names}
    elif dataset.format["type"] != "custom":
        columns = dataset.select_columns(list(names)).with_format("arrow" if raw else None)
        for batch in cast("Iterator[Any]", columns.iter(_BATCH)):
            yield batch.to_pydict() if raw else batch


def known_length(dataset: Split) -> int | None:
    """Return the number of rows of a split; `None` for a stream that goes on behind the rows that are read."""
    if _is_in_memory(dataset):
        return len(dataset)
    if not can_be_read_again(dataset):
        return None
    # With fewer, the stream has ended.
    rows = sum(1 for _ in islice(dataset, STREAMED_ROWS))
    return rows if rows < STREAMED_ROWS else None


def can_be_read_again(stream: Split) -> bool:
    """Tell whether a stream surely starts from its first row whenever it is read."""
    # Files are opened anew for each pass. Whether a generator begins anew, only its function can tell.
    if stream.info.builder_name != "generator":
        return True
    generators = list(_generators(getattr(stream, "_ex_iterable", None)))
    return bool(generators) and all(_starts_anew(function, options) for function, options in generators)


def _generators(node: object) -> Iterator[tuple[object, Mapping[str, Any]]]:
    """Yield the functions behind a stream, with their options. `datasets` wraps an iterable once per operation."""
    wrapped = getattr(node, "ex_iterables", [])
    inner = getattr(node, "ex_iterable", None)
    if inner is not None:
        wrapped = [inner]
    for part in wrapped:
        yield from _generators(part)
    if not wrapped:
        builder = getattr(getattr(node, "generate_examples_fn", None), "__self__", None)
        yield getattr(getattr(builder, "config", None), "generator", None), getattr(node, "kwargs", {})


def _starts_anew(function: object, options: Mapping[str, Any]) -> bool:
    """Tell whether a function reads plain data only: an iterator, a queue, a file or a random generator goes on."""
    if isinstance(function, partial):
        return _starts_anew(function.func, {**options, **function.keywords, "": function.args})
    if not inspect.isfunction(function):
        return False
    # All that its body can name beside its own variables: arguments, names of functions around it, of its module.
    variables = inspect.getclosurevars(function)
    read = [*options.values(), *variables.nonlocals.values(), *variables.globals.values()]
    return all(map(_is_plain, read))


_PLAIN = (str, bytes, int, float, type(None), range, ModuleType)


def _is_plain(value: object) -> bool:
    """Tell whether reading a value does not change what it gives the next time."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if hasattr(value, "__next__"):
        return False
    return isinstance(value, _PLAIN) or callable(value) or hasattr(value, "column_names")  # the last: a dataset


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(item is None for item in value))


_KINDS = {type(None): "null", str: "text", bool: "boolean", int: "number", float: "number"}
_KINDS |= {list: "list", dict: "mapping"}


def check_images(dataset: Split, field: str) -> None:
    """Check the images of a split's rows: one picture in `image`, or a list in `images`, beside prompts of messages.

    transformers ends in a traceback where some rows have a picture and others have none.
    """
    columns = dataset.column_names or []
    column = "images" if "images" in columns else "image"
    if column not in columns or "prompt" not in columns:
        return
    # An empty list is a row without a picture, and its number is kept: a row with one may come before or behind it.
    row = 0
    first_empty: int | None = None
    has_pictures = False
    for batch in _batches(dataset, [column, "prompt"], raw=True):
        for images, prompt in zip(batch[column], batch["prompt"], strict=True):
            problem = _problem_of_images(images) if column == "images" else _problem_of_image(images)
            if not problem and isinstance(prompt, str):
                problem = "a picture beside a prompt of text"
            if images != []:
                has_pictures = True
            elif first_empty is None:
                first_empty = row
            if not problem and first_empty is not None and has_pictures:
                problem = "no picture, where other rows have one,"
                row = first_empty
            if problem:
                expected = "a list of pictures" if column == "images" else "one picture"
                raise InputError(
                    f"{field}, column {column}",
                    f"{problem} in row {row} (the first is 0)",
                    f"{expected} in every row, and messages as the prompt",
                    "Drop or split off such rows; the column images takes several pictures a row, image takes one.",
                )
            row += 1


def _problem_of_images(images: object) -> str:
    if not isinstance(images, list):
        return "null" if images is None else f"{type(images).__name__}, which is no list,"
    for image in images:
        problem = _problem_of_image(image)
        if problem:
            return problem
    return ""


def _problem_of_image(image: object) -> str:
    """Return the problem of a picture (as arrow stores it, a path or URL, an array, or decoded); empty if none."""
    if image is None:
        return "null"
    if isinstance(image, (bool, int, float)):
        return f"the number {image}"
    if isinstance(image, list) and not (image and isinstance(image[0], list)):  # lists of lists are an array
        return "a list"
    path = image
    # Its bytes win over its path, as in `datasets`.
    if isinstance(image, dict):
        path = image.get("path") if image.get("bytes") is None else None
    # Other texts may be URLs, or pictures in base64.
    if not isinstance(path, str) or "://" in path or not path.lower().endswith(_PICTURES):
        return ""
    return "" if os.path.isfile(path) else f"{path!r:.80}, a file that does not exist,"


_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def is_conversational(dataset: Split) -> bool:
    """Tell whether the prompts of a dataset are messages; `False` for a stream that cannot be read again."""
    if not _is_in_memory(dataset) and not can_be_read_again(dataset):
        return False
    first_row = next(iter(dataset), {})
    return isinstance(first_row.get("prompt"), list)
