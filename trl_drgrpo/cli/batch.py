"""Shared by commands that take many rows through a model: reading rows, going on with them, writing them.

`search`, `eval` and `label-steps` write their file problem by problem, in groups with seeds of their own. Beside
`found.jsonl` lies `found.search.json` with everything that the rows depend on and the groups that are whole; the same
command, started again, goes on behind the last of them: lines behind it, a torn one among them, are cut off, so that
the file ends up the same, byte by byte. Another command does not touch it.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.data import check_prompts, load_data, prompted, rename_columns
from trl_drgrpo.common.disk import refuse_irregular, room_needed, sole_writer, write_whole
from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.ranges import RANGES, refuse_outside, whole
from trl_drgrpo.common.rows import column_values
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.rewards.columns import ask, check_columns

Row = dict[str, Any]
# Options that no row depends on.
_NOT_IN_THE_ROWS = ("output", "sft_output", "command", "run", "places")
# Key of the note beside a file. After each group: problems that are done, and lines of the file.
_GROUPS = "whole_groups"


def prompt_rows(
    values: Mapping[str, Any],
    rewards: Iterable[tuple[str, Callable, Sequence[str]]] = (),
    dataset: Any = None,
    limit: int | None = None,
) -> list[Row]:
    """Return rows with `prompt` and the columns that the rewards need.

    Args:
        values (`Mapping[str, Any]`): Keys of `train` that name and shape data: `dataset_name`, `dataset_config`,
            `dataset_train_split`, `rename_columns`, `prompt_template` and `system_prompt`.
        rewards (`Iterable[tuple]`): Name, reward function, and columns that it gets beside the dataset's.
        dataset ([`~datasets.Dataset`], *optional*): The split, in place of the one that is named.
        limit (`int`, *optional*): Only so many of the first rows.

    Raises:
        [`InputError`]: A missing column, values that no reward can read, a program that is not there.
    """
    source = values["dataset_name"]
    if dataset is None:
        split = values.get("dataset_train_split") or "train"
        dataset = load_data(source, name=values.get("dataset_config"), split=split)
    dataset = rename_columns(dataset, values.get("rename_columns") or ())
    columns = check_prompts(dataset, source)
    gold_columns = [column for column in columns if column != "prompt"]
    for name, reward, more_columns in rewards:
        check_columns(reward, [*columns, *more_columns], name)
        ask(reward, "check_values", column_values(dataset, gold_columns))
        ask(reward, "check")
    # Values are checked in all rows, also with a limit.
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    dataset = prompted(dataset, values.get("prompt_template"), values.get("system_prompt"))
    return [dict(row) for row in dataset]


def refuse_low_numbers(args: argparse.Namespace, **lowest: int) -> None:
    """Refuse a number of a command that is lower than this, and a seed that NumPy does not take."""
    for field, least in lowest.items():
        allowed = whole(least, optional=True, remedy="Give a larger number.")
        refuse_outside(field, getattr(args, field), allowed)
    if getattr(args, "seed", None) is not None:
        refuse_outside("seed", args.seed, RANGES["seed"])


def digest(value: object) -> str:
    """Return a short name for a value that JSON knows, equal for equal values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def facts_of(args: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the rows of a command depend on: its options and its data."""
    options = {name: value for name, value in vars(args).items() if name not in _NOT_IN_THE_ROWS}
    return {**options, "dataset_digest": digest(rows)}


def completed_rows(
    path: str | Path,
    kind: str,
    facts: Mapping[str, Any],
    total: int,
    group: int,
    noun: str,
    more: Callable[[int], Iterable[tuple[int, list[Row]]]],
    status: Callable[[list[Row]], str],
    field: str = "output",
) -> list[Row]:
    """Return all rows of a command: the rows in its file, and the others, each written as soon as it is there.

    Args:
        path (`str` or `Path`): JSON Lines file.
        kind (`str`): What is done, for messages and for the name of the file beside it: `"search"`.
        facts (`Mapping[str, Any]`): What the rows depend on: settings, model, data; values that JSON knows.
        total (`int`): Problems.
        group (`int`): Problems of a group.
        noun (`str`): What is counted: `"problems"`.
        more (`Callable`): From the number of problems that are done, whole groups, to pairs: how many are done then,
            and their new rows. Not called where all are done.
        status (`Callable`): From new rows to what is said of all so far.
        field (`str`): The setting that the file comes from.

    Raises:
        `InputError`: The file is one of another command, another process writes to it, or no file can be written
            there.
    """
    path = Path(path)
    # As the note gives them back, in which tuples are lists and keys are texts: they are compared with it.
    facts = scrubbed(json.loads(json.dumps(facts)))
    refuse_irregular(field, path)
    beside = path.with_suffix(f".{kind}.json")
    with sole_writer(field, path, is_file=True):
        groups = _whole_groups(path, beside, kind, facts, field)
        # Rows up to a line that was torn off.
        lines = []
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
        rows = list(takewhile(bool, map(_read, lines)))
        # Groups that the note has and the file has lost are done again.
        while groups[-1][1] > len(rows):
            groups.pop()
        first, end = groups[-1]
        rows = rows[:end]

        def note() -> None:
            content = {**facts, _GROUPS: groups}
            write_whole(beside, json.dumps(content) + "\n")

        def what_is_safe() -> str:
            return (
                f"{groups[-1][0]} of {total} {noun} are complete in {path}: make room, and run the same command again "
                "to continue."
            )

        with room_needed(path.parent, what_is_safe):
            # The note comes first: a file without it would belong to no command.
            note()
            with path.open("ab") as file:
                file.truncate(sum(map(len, lines[:end])))
        if first:
            console.log(f"{first} of {total} {noun} are in {path} already")
        if first == total:
            return rows
        progress = console.progress_over(total, first, noun)
        with room_needed(path.parent, what_is_safe), path.open("ab") as file, progress as show:
            for done, new_rows in more(first):
                file.write(to_lines(new_rows).encode())
                file.flush()
                rows += new_rows
                # A group has seeds of its own, so only a whole one may be gone on behind.
                if done % group == 0 or done == total:
                    groups.append((done, len(rows)))
                    note()
                show(status(new_rows), done)
    return rows


def _whole_groups(path: Path, beside: Path, kind: str, facts: Mapping[str, Any], field: str) -> list[tuple[int, int]]:
    """Return the groups that the file holds; refuse a file of another command."""
    expected = f"a new file, or one of the same {kind}"
    if not path.exists():
        # A note without its file is one of an interrupted start; any other file of that name is somebody's.
        if beside.exists() and _GROUPS not in beside.read_text(encoding="utf-8", errors="replace"):
            got = f"{path}, beside which {beside.name} was not written by this command"
            raise InputError(field, got, expected, "Name another file.")
        return [(0, 0)]
    # There may be no note, or one that somebody has edited.
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
        groups = [(int(done), int(rows)) for done, rows in before.pop(_GROUPS, [])]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        got = f"{path}, which exists and was not written by this command"
        raise InputError(field, got, expected, "Name another file.") from None
    for name in {**before, **facts}:
        old = before.get(name)
        new = facts.get(name)
        if old != new:
            got = f"{path}, written with {name} {shortened(old)}, not {shortened(new)}"
            remedy = "Run the same command to continue, name another file, or delete this one."
            raise InputError(field, got, expected, remedy)
    return groups or [(0, 0)]


def _read(line: bytes) -> Row:
    """Return the row in a line of the file; an empty one where the line was torn off."""
    if not line.endswith(b"\n"):
        return {}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON Lines."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    return "".join(lines)


def write_rows(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file, whole or not at all."""
    write_result(Path(path), to_lines(rows))


def write_result(path: Path, text: str) -> None:
    """Write a result, whole or not at all, after it was printed: on a full disk it is in the output above."""
    with room_needed(path.parent, lambda: "The results are those printed above."):
        write_whole(path, text)
