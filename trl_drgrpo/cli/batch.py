"""What commands that take many rows through a model share: the rows they read, how they go on, how they write.

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
from trl_drgrpo.cli.data import check_prompts, prompted, rename_columns
from trl_drgrpo.common.disk import refuse_irregular, room_needed, sole_writer, write_whole
from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.rows import column_values
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.rewards.columns import ask, check_columns

Row = dict[str, Any]
# Options that no row depends on.
_NOT_IN_THE_ROWS = ("output", "sft_output", "command", "run", "places")


def prompt_rows(
    dataset: Any,
    source: str,
    rewards: Sequence[tuple[str, Any, Sequence[str]]],
    *,
    renamings: Sequence[str] = (),
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Rows with `prompt` and the columns that the rewards need.

    Args:
        dataset ([`~datasets.Dataset`]): A split.
        source (`str`): Its name, for messages.
        rewards (`Sequence[tuple]`): Name, reward function, and columns that it gets beside the dataset's.
        renamings, prompt_template, system_prompt: As in `train`.
        limit (`int`, *optional*): Only so many of the first rows.

    Raises:
        [`InputError`]: A missing column, values that no reward can read, a program that is not there.
    """
    dataset = rename_columns(dataset, list(renamings))
    columns = check_prompts(dataset, source)
    for name, reward, more in rewards:
        check_columns(reward, [*columns, *more], name)
        ask(reward, "check_values", column_values(dataset, [column for column in columns if column != "prompt"]))
        ask(reward, "check")
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    return [dict(row) for row in prompted(dataset, prompt_template, system_prompt)]


def digest(value: Any) -> str:
    """A short name for a value that JSON knows, equal for equal values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def facts_of(args: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    """What the rows of a command depend on: its options and its data."""
    given = {name: value for name, value in vars(args).items() if name not in _NOT_IN_THE_ROWS}
    return {**given, "dataset_digest": digest(rows)}


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
    """All rows of a command: those that its file holds, and the others, each written as soon as it is there.

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
    path, facts = Path(path), scrubbed(json.loads(json.dumps(facts)))
    refuse_irregular(field, path)
    beside = path.with_suffix(f".{kind}.json")
    with sole_writer(field, path, is_file=True):
        groups = _whole_groups(path, beside, kind, facts, field)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rows = list(takewhile(bool, map(_read, lines)))
        groups = [each for each in groups if each[1] <= len(rows)]
        first, kept = groups[-1]
        rows = rows[:kept]

        def note() -> None:
            write_whole(beside, json.dumps({**facts, _GROUPS: groups}) + "\n")

        def what_is_safe() -> str:
            return (
                f"{groups[-1][0]} of {total} {noun} are complete in {path}: make room, and run the same command again "
                "to continue."
            )

        with room_needed(path.parent, what_is_safe):
            note()  # first: a file without the note would belong to no command
            with path.open("ab") as file:
                file.truncate(sum(map(len, lines[:kept])))
        if first:
            console.log(f"{first} of {total} {noun} are in {path} already")
        if first == total:
            return rows
        progress = console.progress_over(total, first, noun)
        with room_needed(path.parent, what_is_safe), path.open("ab") as file, progress as show:
            for done, new in more(first):
                file.write(to_lines(new).encode())
                file.flush()
                rows += new
                if done % group == 0 or done == total:
                    groups.append([done, len(rows)])
                    note()
                show(status(new), done)
    return rows


_GROUPS = "whole_groups"  # after each: problems that are done, lines of the file


def _whole_groups(path: Path, beside: Path, kind: str, facts: Mapping[str, Any], field: str) -> list[list[int]]:
    """The groups that the file holds; refuses one of another command."""
    expected = f"a new file, or one of the same {kind}"
    if not path.exists():
        if beside.exists() and _GROUPS not in beside.read_text(encoding="utf-8", errors="replace"):
            got = f"{path}, beside which {beside.name} was not written by this command"
            raise InputError(field, got, expected, "Name another file.")
        return [[0, 0]]
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
        groups = [[int(done), int(rows)] for done, rows in before.pop(_GROUPS, [])] or [[0, 0]]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # none, or somebody edited it
        got = f"{path}, which exists and was not written by this command"
        raise InputError(field, got, expected, "Name another file.") from None
    for name in {**before, **facts}:
        if before.get(name) != facts.get(name):
            old, new = shortened(before.get(name)), shortened(facts.get(name))
            remedy = "Run the same command to continue, name another file, or delete this one."
            raise InputError(field, f"{path}, written with {name} {old}, not {new}", expected, remedy)
    return groups


def _read(line: bytes) -> Row:
    """A line of the file; empty for one that was torn off."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else {}
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def write_rows(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSON Lines file, whole or not at all."""
    write_result(Path(path), to_lines(rows))


def write_result(path: Path, text: str) -> None:
    """Writes a result, whole or not at all, after it was printed: on a full disk it is in the output above."""
    with room_needed(path.parent, lambda: "The results are those printed above."):
        write_whole(path, text)
