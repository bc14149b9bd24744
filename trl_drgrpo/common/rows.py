"""Every row of a dataset, looked at before a model loads: prompts that TRL cannot read, and what columns hold.

Arrow counts the nulls of a column and finds empty texts without making Python objects, so 100,000 rows cost
milliseconds. Of a stream the first rows are read, and none of one that a generator makes: what feeds it may be gone
when it is read again.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError

if TYPE_CHECKING:
    import pyarrow

STREAMED_ROWS = 1000
_BATCH = 10_000


@dataclass(frozen=True)
class ColumnValues:
    """
    What a column holds.

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


def check_prompt_values(dataset: Any, field: str, where: str = "") -> None:
    """Checks that every prompt of a split is a text that is not empty, or a list of messages. The message names the
    first row that does not fit; `where` adds words on where the rows are: `" of train.jsonl"`."""
    found = _first_bad_prompt(dataset)
    if found is None:
        return
    row, problem, others = found
    more = f" and in {others} more" if others else ""
    raise InputError(
        field,
        f"{problem} as the prompt in row {row} (the first is 0){where}{more}",
        "a non-empty string, or a list of messages with role and content",
        'Drop such rows, or convert the column; a message is {"role": "user", "content": "..."}.',
    )


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
    if taken := [name for name in rows[0] if name in own_columns]:
        remedy = f"Rename it, for example `--rename_columns {taken[0]}=given_{taken[0]}`: this command writes its own."
        raise InputError(field, f"a column {taken[0]!r}", "a dataset without it", remedy)
    for number, row in enumerate(rows):
        if problem := prompt_problem(row.get("prompt")):
            expected = "a non-empty string, or a list of messages with role and content"
            raise InputError(f"{field}, row {number} (from 0)", f"{problem} as the prompt", expected, "Fix the row.")


def prompt_problem(prompt: Any) -> str:
    """Problem of a prompt (a text, or messages); empty if none. Only a tool call may lack content."""
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
    return ""


def prompt_rows(dataset: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, prompt and name of the environment of a split's rows that have a prompt; none of rows made on the
    fly, or with images."""
    columns = dataset.column_names
    if _is_made_on_reading(dataset) or {"image", "images"}.intersection(columns or ()):
        return
    rows = islice(dataset, STREAMED_ROWS)
    if not _is_stream(dataset):
        if "prompt" not in columns:
            return
        rows = iter(dataset.select_columns([name for name in ("prompt", "environment") if name in columns]))
    for number, row in enumerate(rows):
        if row.get("prompt") is not None:
            yield number, row


def column_values(dataset: Any, names: Sequence[str]) -> dict[str, ColumnValues]:
    """Contents of a split's columns, by name; empty for rows made on the fly."""
    if not names or _is_made_on_reading(dataset) or (not _is_stream(dataset) and len(dataset) == 0):
        return {}
    if _is_stream(dataset):
        rows = list(islice(dataset, STREAMED_ROWS))
        return {name: _of_objects([row.get(name) for row in rows]) for name in names}
    backing = dataset.data.select(list(names))
    found = {name: _of_arrow(backing.column(name)) for name in names}
    if not any(values.nulls for values in found.values()):
        return {name: replace(values, rows=len(dataset)) for name, values in found.items()}
    import pyarrow as pa

    table = pa.concat_tables([table for _, table in _tables(dataset, list(names))])
    return {name: _of_arrow(table.column(name)) for name in names}


def _first_bad_prompt(dataset: Any) -> tuple[int, str, int] | None:
    """Row, problem, and number of further such rows."""
    if _is_made_on_reading(dataset):
        return None
    if _is_stream(dataset):
        suspects = [(i, row.get("prompt")) for i, row in enumerate(islice(dataset, STREAMED_ROWS))]
    elif all(_suspects(chunk) == [] for chunk in dataset.data.column("prompt").chunks):
        return None  # nor in those rows that a selection or a shuffle leaves
    else:
        suspects = [found for start, table in _tables(dataset, ["prompt"]) for found in _looked_at(table, start)]
    problems = [(row, problem) for row, prompt in suspects if (problem := prompt_problem(prompt))]
    return (*problems[0], len(problems) - 1) if problems else None


def _looked_at(table: "pyarrow.Table", start: int) -> Iterator[tuple[int, Any]]:
    """Row and prompt of those that need a second look."""
    import datasets

    column = table.column("prompt").combine_chunks()
    positions = _suspects(column)
    if positions is None:
        features = datasets.Features.from_arrow_schema(table.schema)
        yield from enumerate(datasets.Dataset(table, datasets.DatasetInfo(features=features))["prompt"], start)
    else:
        yield from ((start + i, column[i].as_py()) for i in positions)


def _is_stream(dataset: Any) -> bool:
    return not hasattr(dataset, "__len__")


def _is_made_on_reading(dataset: Any) -> bool:
    """Rows from a generator, or through a function of the user's: reading them may change what comes next."""
    if _is_stream(dataset):
        return dataset.info.builder_name == "generator"
    return dataset.format["type"] == "custom"


def _tables(dataset: Any, names: list[str]) -> Iterator[tuple[int, "pyarrow.Table"]]:
    plain = dataset.select_columns(names).with_format("arrow")
    for number, table in enumerate(plain.iter(_BATCH)):
        yield number * _BATCH, table


def _suspects(column: "pyarrow.Array") -> list[int] | None:
    """Positions of prompts that need a second look; `None` where the type says too little."""
    import pyarrow as pa

    pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made at run time

    kind: Any = column.type
    invalid = pc.is_null(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        invalid = pc.or_kleene(invalid, pc.equal(pc.binary_length(column), 0))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        fields = {each.name for each in kind.value_type} if pa.types.is_struct(kind.value_type) else set()
        if not {"role", "content"} <= fields or not pa.types.is_string(kind.value_type.field("role").type):
            return None
        messages = column.flatten()
        bad = pc.or_(pc.is_null(pc.struct_field(messages, "role")), pc.is_null(pc.struct_field(messages, "content")))
        parents = set(pc.list_parent_indices(column).filter(bad).to_pylist())
        invalid = pc.or_kleene(invalid, pc.equal(pc.list_value_length(column), 0))
        return sorted(parents | {i for i, is_invalid in enumerate(invalid.to_pylist()) if is_invalid})
    elif not pa.types.is_null(kind):
        return None
    return pc.indices_nonzero(pc.fill_null(invalid, True)).to_pylist()


def _of_arrow(column: Any) -> ColumnValues:
    pc: Any = importlib.import_module("pyarrow.compute")
    kind = _kind_of_arrow(column.type)
    if kind == "list":  # an empty one, or one of nulls alone, holds as little as a null
        column = column.combine_chunks()
        held = pc.list_parent_indices(column).filter(pc.is_valid(pc.list_flatten(column))).unique()
        nulls = len(column) - len(held)
        first = next(row for row, found in enumerate([*held.to_pylist(), -1]) if row != found) if nulls else None
        return ColumnValues(kind, len(column), nulls, first)
    first = pc.index(pc.is_null(column), True).as_py() if column.null_count else None
    return ColumnValues(kind, len(column), column.null_count, first)


def _kind_of_arrow(kind: Any) -> str:
    from pyarrow import types

    kinds = {
        "null": types.is_null,
        "text": lambda t: types.is_string(t) or types.is_large_string(t),
        "boolean": types.is_boolean,
        "number": lambda t: types.is_integer(t) or types.is_floating(t) or types.is_decimal(t),
        "list": lambda t: types.is_list(t) or types.is_large_list(t) or types.is_fixed_size_list(t),
        "mapping": types.is_struct,
    }
    return next((name for name, test in kinds.items() if test(kind)), "other")


def _of_objects(values: list[Any]) -> ColumnValues:
    kinds = {_kind_of_object(value) for value in values} - {"null"} or {"null"}
    empty = [value is None or (isinstance(value, list) and all(each is None for each in value)) for value in values]
    kind = kinds.pop() if len(kinds) == 1 else "other"
    return ColumnValues(kind, len(values), sum(empty), empty.index(True) if any(empty) else None)


def _kind_of_object(value: Any) -> str:
    kinds = {type(None): "null", str: "text", bool: "boolean", int: "number", float: "number"}
    kinds |= {list: "list", dict: "mapping"}
    return kinds.get(type(value), "other")
