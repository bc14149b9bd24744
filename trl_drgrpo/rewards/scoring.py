"""Rewards of saved completions: `trl-drgrpo score` without its command line.

Completions come as JSON Lines, CSV, or the Parquet files that TRL logs. With `log_completions=True` it writes
`completions/completions_<step>.parquet`: step, prompt, completion, the value of every reward function under its name,
the columns of `log_extra`, and the advantage. The dataset's other columns are not in it, so a reward that needs the
answer finds it in the dataset, by the prompt ([`with_columns_of`]).

Rewards are called as the trainer calls them, but on `batch_size` rows at a time: with one row per call, a failure and
a duration belong to one row. A reward that compares the completions of a group, or sends requests in parallel, needs
more. Then the call's time is divided among its rows, and an exception fails all of them.
"""

import csv
import io
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trl_drgrpo.common.disk import working_directory_kept
from trl_drgrpo.common.errors import InputError, shortened, speaks_for_itself, told
from trl_drgrpo.rewards.columns import NEVER_PASSED, Keywords, ask, parameters
from trl_drgrpo.rewards.contract import awaited, log_number, validate_rewards
from trl_drgrpo.rewards.texts import one_line, prompt_key

Row = dict[str, Any]
# Columns of TRL's table beside prompt, completion and the rewards; none is a column of the dataset.
TABLE_COLUMNS = ("step", "advantage")


def read_rows(path: str | Path, field: str = "data") -> list[Row]:
    """Return the rows of a file.

    Args:
        path (`str` or `Path`): A `.jsonl`, `.csv` or `.parquet` file; a folder stands for all Parquet files in it, or
            for all JSON Lines files, in the order of their names. CSV has texts only.
        field (`str`, *optional*, defaults to `"data"`): Name of the setting in error messages.

    Returns:
        `list[dict]`: One per row.

    Raises:
        [`InputError`]: No such file, another type of file, a line or a file that cannot be read (by
            its number), or no row.
    """
    file = Path(path)
    if file.is_dir():
        # Parquet first: the form in which TRL logs completions.
        parts = sorted(file.glob("*.parquet")) or sorted(file.glob("*.jsonl"))
        if not parts:
            expected = "a folder of .parquet or .jsonl files"
            raise InputError(field, f"{str(path)!r}, a folder without any", expected, "Name the folder that has them.")
        return [row for part in parts for row in read_rows(part, field)]
    if not file.is_file():
        expected = f"a {', '.join(_READERS)} file, or a folder of such files"
        raise InputError(field, f"{str(path)!r}, which is not a file", expected, "Check the path.")
    if file.suffix not in _READERS:
        remedy = "Rename the file to match its format."
        raise InputError(field, f"{str(path)!r}", f"a file that ends in {', '.join(_READERS)}", remedy)
    return _not_empty(_READERS[file.suffix](file, field), path, field)


def check_completions(rows: Iterable[Row]) -> None:
    """Refuse a row without a prompt or a completion, each a text or messages with text. The first is row 1."""
    for number, row in enumerate(rows, start=1):
        if {"mode", "group", "G", "rows"} <= row.keys():  # `completions.jsonl`, which a run logs
            remedy = "Name the folder of the run instead: `--data <output_dir>`."
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


def with_columns_of(rows: list[Row], dataset: list[Row]) -> list[Row]:
    """Return the rows with the columns that they lack, from the dataset's row of the same prompt. Refuses a prompt
    that the dataset does not have, or has with different columns."""
    # The dataset by prompt. The same row twice is no problem; two rows that differ in the answer are.
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
        dataset_row = by_prompt.get(prompt_key(row.get("prompt")))
        if dataset_row is None:
            got = f"a prompt that the dataset does not have: {shortened(row.get('prompt'))}"
            remedy = "Pass the dataset of the run, with the same system prompt."
            raise InputError(f"data, row {number}", got, "a prompt of --dataset", remedy)
        joined.append({**dataset_row, **row})  # the row's own values win
    return joined


def read_json_lines(path: str | Path, field: str = "data") -> list[Row]:
    """Return the objects of a JSON Lines file, without empty lines. Refuses a missing file, no row, and a line that is
    no object."""
    file = Path(path)
    if not file.is_file():
        raise InputError(field, f"{str(path)!r}, which is not a file", "a JSON Lines file", "Check the path.")
    rows: list[Row] = []
    # Not `splitlines`: JSON strings may hold other line ends, such as U+2028.
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
            has_more = None in row  # the key of surplus fields; absent fields have the value `None`
            if has_more or None in row.values():
                got = f"{'more' if has_more else 'fewer'} fields than the first line names"
                raise InputError(f"{file}, line {reader.line_num}", got, "one field per column", "Fix the quotes.")
            rows.append(dict(row))
    except csv.Error as error:
        where = f"{file}, line {reader.reader.line_num}"
        remedy = "Fix the line; double a quote inside a field."
        raise InputError(where, f"invalid CSV ({error})", "a row", remedy) from error
    return rows


def read_parquet(file: Path, field: str = "data", columns: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of a Parquet file; with `columns` only these, as far as it has them."""
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


_READERS: dict[str, Callable[[Path, str], list[Row]]] = dict.fromkeys((".jsonl", ".json"), read_json_lines)
_READERS |= {".csv": _read_csv, ".parquet": read_parquet}


def _is_text(value: object) -> bool:
    """Tell whether a value is a text, or messages whose content is a text, parts, or nothing."""
    if not isinstance(value, list):
        return isinstance(value, str)
    for message in value:
        if not isinstance(message, dict):
            return False
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) for part in content):
                return False
        elif not (content is None or isinstance(content, str)):
            return False
    return True


_OWN_COUNT = "counted as failed by the reward itself; see the log above"


@dataclass
class RewardScores:
    """Results of one reward function, or step reward function, for `N` rows.

    Args:
        name (`str`): Name of the reward.
        rewards (`list`): `N` values, `float` or `None`; of a step reward function `N` lists of them, one per step.
        seconds (`list[float]`): `N` durations.
        failures (`dict[int, str]`): Reason by index of the row, if the call raised or returned nonsense.
        reported (`float`): Number of rows that the reward itself counted as failed (`rewards/<name>/failed_frac`)
            without raising, in calls of more than one row, where it is not known which they are.
        metrics (`dict[str, list[float]]`): Values logged by `log_metric`, per call.
        traceback (`str`): Traceback of the first failure.
    """

    name: str
    rewards: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    reported: float = 0.0
    metrics: dict[str, list[float]] = field(default_factory=dict)
    traceback: str = ""

    @property
    def num_failed(self) -> int:
        """Rows not scored because of a failure."""
        return len(self.failures) + round(self.reported)

    def summary(self) -> dict[str, Any]:
        """Return numbers for the table: mean, standard deviation (population), extremes, shares, time."""
        values: list[float | None] = []  # of all steps, where the rewards are those of steps
        for row in self.rewards:
            values += row if isinstance(row, list) else [row]
        scored = [value for value in values if value is not None]
        return {
            "rows": len(self.rewards),
            "mean": statistics.fmean(scored) if scored else None,
            "std": statistics.pstdev(scored) if scored else None,
            "min": min(scored, default=None),
            "max": max(scored, default=None),
            "none_frac": 1 - len(scored) / max(len(values), 1),
            "failed": self.num_failed,
            "seconds_mean": statistics.fmean(self.seconds),
            "seconds_max": max(self.seconds),
            "metrics": {name: statistics.fmean(values) for name, values in sorted(self.metrics.items())},
        }


def score_rows(
    reward_func: Callable,
    rows: Sequence[Row],
    name: str,
    batch_size: int = 1,
    on_progress: Callable[[int], None] | None = None,
    validate: Callable[[Any, Sequence[Row]], list[Any]] | None = None,
) -> RewardScores:
    """Call a reward function on saved completions.

    Args:
        reward_func (`Callable`): Synchronous or asynchronous.
        rows (`Sequence[dict]`): `N` rows with `prompt`, `completion` and columns; all with the same columns.
        name (`str`): Name of the reward, for its failures.
        batch_size (`int`, *optional*, defaults to 1): Rows per call.
        on_progress (`Callable`, *optional*): Called with the number of rows that are done.
        validate (`Callable`, *optional*): Makes a value per row of a call's result and its rows; by default a number
            or `None`.

    Returns:
        [`RewardScores`]

    Raises:
        [`InputError`]: The error of a reward with bad configuration; it is no failure of a row.
    """
    scores = RewardScores(name)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        logged: dict[str, list[float]] = {}
        begun = time.perf_counter()
        try:
            # A grader that changes the folder would have this command write its results there.
            with working_directory_kept(f"reward {name}"):
                output = awaited(reward_func(**_keywords(batch, logged)))
            rewards = validate(output, batch) if validate else validate_rewards(output, len(batch), name)
        except (Exception, SystemExit) as error:  # any error of a user's function is a row of the table
            if type(error) is InputError:  # not a subclass: a `RewardError` tells of one row
                raise
            rewards = [None] * len(batch)
            indices = range(start, start + len(batch))
            scores.failures |= dict.fromkeys(indices, told(error))
            if not speaks_for_itself(error):
                scores.traceback = scores.traceback or traceback.format_exc()
        seconds = (time.perf_counter() - begun) / len(batch)
        scores.rewards += rewards
        scores.seconds += [seconds] * len(batch)
        # A composition reports its parts' failures too. They may be of the same rows, so the largest share counts.
        failed_frac = 0.0
        for metric, values in logged.items():
            scores.metrics.setdefault(metric, []).extend(values)
            if metric.endswith("/failed_frac"):
                failed_frac = max(failed_frac, values[-1])
        if failed_frac > 0 and start not in scores.failures:  # else the call raised, and its rows are counted
            if len(batch) == 1:
                scores.failures[start] = _OWN_COUNT
            else:
                scores.reported += failed_frac * len(batch)
        if on_progress is not None:
            on_progress(start + len(batch))
    return scores


def unscored_rows(reward_func: Callable, rows: Sequence[Row], scores: RewardScores) -> list[Row]:
    """Return the rows that a reward could not score, with the columns that it reads.

    Args:
        reward_func (`Callable`): The reward.
        rows (`Sequence[dict]`): `N` rows.
        scores ([`RewardScores`]): Result of [`score_rows`]. Rows for which the call raised are left out.

    Returns:
        `list[dict]`: In their order: `row` (the first is 1), `reason` (that of the reward itself, see [`ask`], or
        `None`), and `columns` that it reads, mostly the gold answer, each as one short line.
    """
    names = {parameter.name for parameter in parameters(reward_func) or ()} - {"completion_ids"}
    unscored = []
    for index, (row, reward) in enumerate(zip(rows, scores.rewards, strict=True)):
        has_raised = scores.failures.get(index, _OWN_COUNT) != _OWN_COUNT
        if reward is not None or has_raised:  # of a call that raised, the error is told instead
            continue
        columns = {}
        lines = {}
        for name, value in row.items():
            if name not in ("prompt", "completion"):
                columns[name] = value
            if name in names:
                text = value if isinstance(value, str) and value.strip() else repr(value)
                lines[name] = one_line(text, 80)
        reason = ask(reward_func, "check_row", **columns)
        unscored.append({"row": index + 1, "reason": reason, "columns": lines})
    return unscored


def disagreements(graders: dict[str, Sequence[float | None]], tolerance: float) -> list[Row]:
    """Return the rows on which two graders differ; a row that only one of them could score counts too.

    Args:
        graders (`dict[str, Sequence]`): `N` rewards each.
        tolerance (`float`): Differences up to it do not count.

    Returns:
        `list[dict]`: One per pair of graders, in order: `first`, `second`, `count` and `rows` (the first is 1).
    """
    comparisons = []
    for first, second in itertools.combinations(graders, 2):
        rows = []
        pairs = zip(graders[first], graders[second], strict=True)
        for number, (a, b) in enumerate(pairs, start=1):
            if a is None or b is None:
                differs = a is not b  # both None: they agree that nothing can be said
            else:
                differs = abs(a - b) > tolerance
            if differs:
                rows.append(number)
        comparisons.append({"first": first, "second": second, "count": len(rows), "rows": rows})
    return comparisons


def _keywords(batch: Sequence[Row], logged: dict[str, list[float]]) -> Keywords:
    """Return the keywords of TRL's call. `trainer_state` is `None`, as there is no trainer."""
    columns = {}
    for name in batch[0]:
        columns[NEVER_PASSED.get(name, name)] = [row[name] for row in batch]  # `prompt` as `prompts`
    return {
        "completion_ids": [None] * len(batch),  # unless the file has them
        **columns,
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": partial(log_number, lambda metric, value: logged.setdefault(metric, []).append(value)),
    }
