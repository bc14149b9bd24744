"""Records of a run that a report reads, from any trainer: plain data, checked when it is read.

A run log may be half-written, or written by another version. So every value is checked here, once: in the place of a
number anything else becomes `None`, in the place of a text anything else becomes a text, and the rest of the report
need not check again. Lines that cannot be read, since the file grows, was torn by a crash or is damaged, are counted,
not fatal.

A run that crashed and was resumed did some steps twice: `Starts` says which entries of its log still count. A folder
in which a run was started anew, from step 0, holds that run only: nothing from before counts.

Completions are indexed first; the text of few of them is read later.

**In a run log.** 100,000 completions are easily a gigabyte. So the file is read once line by line without being
parsed: the head of a line says its step and group. Then as many lines as can be parsed in seconds, spread over the
run, are looked at; and the groups chosen from them are loaded on their own.

**From plain TRL**, with `log_completions=True`: one Parquet file per logged step. Columns: `step`, `prompt`,
`completion`, one per reward function, extras of the reward functions, `advantage`. Rows of one prompt are consecutive.
The number of tokens is not among them: it is counted with the tokenizer of the newest checkpoint, where there is one.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import grpo_zscores
from trl_drgrpo.rewards.scoring import TABLE_COLUMNS, read_parquet

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass
class Span:
    """Consecutive tokens of a completion that share their advantage.

    Args:
        text (`str`): Decoded text, special tokens kept.
        advantage (`float` or `None`): Weight of each of these tokens in the loss.
        step (`int` or `None`): Index of the step they belong to; `None` without process rewards.
        step_reward (`float` or `None`): The step's reward.
        masked (`bool`): Whether the loss leaves them out (tool results).
        level (`int` or `None`): Forks in front of them; `None` in a group without forks.
    """

    text: str
    advantage: float | None = None
    step: int | None = None
    step_reward: float | None = None
    masked: bool = False
    level: int | None = None


@dataclass
class Row:
    """One completion.

    Args:
        spans (`list[Span]`): Its text, in order.
        rewards (`dict[str, float or None]`): Per reward function; `None` = unscorable.
        reward (`float` or `None`): Their weighted sum.
        advantage (`float` or `None`): The outcome advantage that it was trained with.
        length (`int` or `None`): In tokens.
        truncated (`bool` or `None`): Whether it was cut at the maximal length.
        right (`bool` or `None`): Whether it counts as correct, where the run defines that.
        zscore (`float` or `None`): GRPO's advantage, `(r - mean) / (std + 1e-4)`.
        cut (`int`): Characters left out of the middle of its text, to keep the report small.
    """

    spans: list[Span]
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    length: int | None = None
    truncated: bool | None = None
    right: bool | None = None
    zscore: float | None = None
    cut: int = 0

    @property
    def text(self) -> str:
        """Text of the whole completion."""
        return "".join(span.text for span in self.spans)


@dataclass
class Group:
    """The completions of one prompt in one generation batch.

    Args:
        step (`int`): Optimizer step at which they were recorded.
        mode (`str`): `"train"` or `"eval"`.
        index (`int`): Number of the group in its batch.
        prompt (`str`): The prompt as text.
        rows (`list[Row]`): Its `G` completions.
        baseline, std (`float` or `None`): Mean and sample standard deviation of the scorable rewards.
        columns (`dict[str, str]`): The prompt's other dataset columns, as short texts.
        prompt_cut (`int`): Characters left out of the prompt.
        forks (`list[int]`): Branches at each fork on the way from the prompt to a completion; empty without forks.
    """

    step: int
    mode: str
    index: int
    prompt: str
    rows: list[Row]
    baseline: float | None = None
    std: float | None = None
    columns: dict[str, str] = field(default_factory=dict)
    prompt_cut: int = 0
    forks: list[int] = field(default_factory=list)


# `True` is an `int` for Python: the two checks of numbers refuse it.


def number(value: object) -> float | None:
    """Return a finite number unchanged, and `None` for anything else, also an integer beyond the range of floats."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    return None


def whole(value: object) -> int | None:
    """Return an integer of at most 64 bits unchanged, and `None` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    return None


def text(value: object) -> str:
    """Return a text unchanged, and anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def flag(value: object) -> bool | None:
    """Return a boolean unchanged, and `None` for anything else."""
    if isinstance(value, bool):
        return value
    return None


def listed(value: object) -> list[Any]:
    """Return a list unchanged, and an empty one for anything else."""
    if isinstance(value, list):
        return value
    return []


def mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, and an empty one for anything else."""
    if isinstance(value, Mapping):
        return value
    return {}


def finish_group(group: Group) -> Group:
    """
    Compute baseline, std and GRPO's z-scores from the rewards where they were not recorded. In place.

    Rows without a reward are left out of the statistics and have no z-score; where all rewards are equal the z-scores
    are 0.
    """
    rewards = [row.reward for row in group.rows if row.reward is not None]
    if group.baseline is None and rewards:
        group.baseline = statistics.fmean(rewards)
    # A single reward has no deviation.
    if len(rewards) > 1:
        if group.std is None:
            group.std = statistics.stdev(rewards)
        zscores = iter(grpo_zscores(rewards))
        for row in group.rows:
            if row.reward is not None:
                row.zscore = next(zscores)
    return group


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; `None` if there is no file, or something else in it."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; `None` for anything else, also for nesting beyond the stack."""
    # A crash may tear a character in two.
    with suppress(ValueError, RecursionError):
        value = json.loads(content.decode("utf-8", errors="replace"))
        if isinstance(value, dict):
            return value
    return None


class JsonLines:
    """The JSON objects of a file, one per line.

    Args:
        path (`Path`): The file; one that is missing has no lines.

    Attributes:
        unreadable (`int`): Lines that were no JSON object, so far.
    """

    def __init__(self, path: Path):
        self.path = path
        self.unreadable = 0

    def raw(self) -> Iterator[tuple[int, bytes]]:
        """Yield offset in the file and bytes of every line that is not empty."""
        if not self.path.is_file():
            return
        # As bytes: offsets count them, and a character that a crash has torn must not end the reading.
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield offset, line
                offset += len(line)

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the object of a line. Any other line is counted, and `None`."""
        value = _parsed(line)
        self.unreadable += value is None
        return value

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, line in self.raw():
            value = self.parse(line)
            if value is not None:
                yield value


class Starts:
    """The starts of a run.

    A line belongs to the last start at or before its time. If a later start began at a smaller step, the line's work
    was lost with the crash and done again: it is superseded. A later start at step 0 supersedes everything.

    Args:
        starts (`Sequence[tuple[float, int]]`): Unix time and global step of every start.

    Attributes:
        began (`float` or `None`): Unix time at which the run was started, for the last time from step 0.
        resumed_at (`list[int]`): Steps at which the run went on, in the order of time.

    Example:

    ```python
    >>> starts = Starts([(100.0, 0), (200.0, 4)])
    >>> [starts.superseded(step=6, time=150.0), starts.superseded(4, 150.0), starts.superseded(6, 250.0)]
    [True, False, False]

    ```
    """

    def __init__(self, starts: Sequence[tuple[float, int]]):
        self._starts = sorted(starts)
        self.began: float | None = None
        self.resumed_at: list[int] = []
        for time, step in self._starts:
            # Started anew: nothing from before counts.
            if step == 0 or self.began is None:
                self.began = time
                self.resumed_at = []
            else:
                self.resumed_at.append(step)

    def superseded(self, step: int, time: float | None) -> bool:
        """Tell whether a later start did the line of this step again. A line without a Unix time still counts."""
        if time is None:
            return False
        return any(start > time and (began < step or began == 0) for start, began in self._starts)


# Two to three seconds of parsing.
PARSED_BYTES = 120_000_000
# Groups that are looked at whatever their size.
NEWEST = 100

# The keys of a line in the order in which the run log writes them: the head is read without parsing the whole line.
_HEAD = re.compile(rb'\s*\{"step":\s*(\d+),\s*"time":\s*(\d[\d.eE+-]*|null),\s*"mode":\s*"(\w+)",\s*"group":\s*(\d+)')


class RecordedCompletions:
    """The groups in a run log's `completions.jsonl`.

    Args:
        path (`Path`): The file.
        starts ([`Starts`]): Of the run: groups that a resumed run did again are left out.
        parsed_bytes (`int`, *optional*): How much of the file to parse when groups are looked at.
    """

    def __init__(self, path: Path, starts: Starts, parsed_bytes: int = PARSED_BYTES):
        self._lines = JsonLines(path)
        self._parsed_bytes = parsed_bytes
        newest = {}
        for offset, line in self._lines.raw():
            head = self._head(line)
            if head is None:
                continue
            step, time, mode, group = head
            if not starts.superseded(step, time):
                # The line that was written last counts, and at its own place in the order: a dictionary would keep
                # the place of the first one.
                newest.pop((mode, step, group), None)
                newest[mode, step, group] = (offset, len(line))
        self._entries = list(newest.values())
        self._damaged: set[int] = set()

    @property
    def groups(self) -> int:
        """Number of groups that are recorded."""
        return len(self._entries) - len(self._damaged)

    def __iter__(self) -> Iterator[Group]:
        for position in range(len(self._entries)):
            group = self.load(position)
            if group is not None:
                yield group

    @property
    def unreadable(self) -> int:
        """Number of lines that were no group."""
        return self._lines.unreadable

    def looked_at(self) -> Iterator[tuple[int, Group]]:
        """Yield number and content of the newest groups, then of others spread evenly, as `parsed_bytes` allows."""
        # Every stride-th group, so that what is parsed has about `parsed_bytes`, from the newest on.
        total = sum(size for _, size in self._entries)
        stride = max(1, math.ceil(total / self._parsed_bytes))
        numbers = range(len(self._entries) - 1, -1, -1)
        for position in (*numbers[:NEWEST], *numbers[NEWEST::stride]):
            group = self.load(position)
            if group is None:
                self._damaged.add(position)
            else:
                yield position, group

    def load(self, number: int) -> Group | None:
        """Read the group of that number; `None` if its line is damaged."""
        offset, size = self._entries[number]
        with self._lines.path.open("rb") as file:
            file.seek(offset)
            value = self._lines.parse(file.read(size))
        if value is None:
            return None
        return group_of(value)

    def _head(self, line: bytes) -> tuple[int, float | None, str, int] | None:
        """Return step, time, mode and group of a line."""
        match = _HEAD.match(line)
        if match:
            # Torn by a crash, or being written.
            if not line.rstrip().endswith(b"}"):
                self._lines.unreadable += 1
                return None
            step, time, mode, group = match.groups()
            seconds = None if time == b"null" else float(time)
            return int(step), seconds, mode.decode(), int(group)
        # Another tool wrote the keys in another order. A line that is no object is counted by `parse`.
        value = self._lines.parse(line)
        if value is None:
            return None
        step = whole(value.get("step"))
        if step is None:
            self._lines.unreadable += 1
            return None
        mode = text(value.get("mode", "train"))
        return step, number(value.get("time")), mode, whole(value.get("group")) or 0


def group_of(value: dict[str, Any]) -> Group:
    """Build a group from a line of `completions.jsonl`. Values of another type count as missing."""
    rows = [_recorded_row(mapping(row)) for row in listed(value.get("rows"))]
    columns = {}
    for name, entry in mapping(value.get("columns")).items():
        columns[str(name)] = text(entry)[:500]
    group = Group(
        step=whole(value.get("step")) or 0,
        mode=text(value.get("mode", "train")),
        index=whole(value.get("group")) or 0,
        prompt=text(value.get("prompt", "")),
        rows=rows,
        baseline=number(value.get("baseline")),
        std=number(value.get("std")),
        columns=columns,
        forks=_forks(value.get("forks"), len(rows)),
    )
    return finish_group(group)


def _forks(value: object, rows: int) -> list[int]:
    """Return the branches at each level, if complete trees of them are as many rows; else nothing."""
    branches_of_levels = listed(value)
    # A place with a single branch is no fork.
    if not rows or any((whole(branches) or 0) < 2 for branches in branches_of_levels):
        return []
    # With [2, 2] a parent has 4 completions, so that their number is a multiple of 4.
    if rows % math.prod(branches_of_levels):
        return []
    return branches_of_levels


def _recorded_row(value: Mapping[str, Any]) -> Row:
    spans = []
    for entry in listed(value.get("spans")):
        fields = mapping(entry)
        span = Span(
            text=text(fields.get("text", "")),
            advantage=number(fields.get("advantage")),
            step=whole(fields.get("step")),
            step_reward=number(fields.get("step_reward")),
            masked=fields.get("masked") is True,
            level=whole(fields.get("level")),
        )
        spans.append(span)
    rewards = mapping(value.get("rewards"))
    return Row(
        spans=spans,
        rewards={str(name): number(reward) for name, reward in rewards.items()},
        reward=number(value.get("reward")),
        advantage=number(value.get("advantage")),
        length=whole(value.get("length")),
        truncated=flag(value.get("truncated")),
        right=flag(value.get("right")),
    )


# Of a run with more rows every second group is looked at, or every third.
LOOKED_AT_ROWS = 120_000

_FIXED = ("prompt", "completion", *TABLE_COLUMNS)


class SavedCompletions:
    """The groups in a TRL run's `completions` folder.

    Args:
        folder (`Path`): Output folder of the run.

    Attributes:
        notes (`list[str]`): Messages about files that could not be read.
        one_is_correct (`bool`): Whether a reward of 1 makes a completion correct: set once all are known to be 0 or 1.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.notes: list[str] = []
        self.one_is_correct = False
        self._rows = 0
        self._groups: list[tuple[Path, int]] = []
        self._open: tuple[Path, list[Group]] | None = None
        unreadable = 0
        last_rows = None
        files = folder.glob("completions/completions_*.parquet")
        # By length first: TRL pads steps to five digits, and a longer run has more.
        for path in sorted(files, key=lambda path: (len(path.name), path.name)):
            try:
                table = read_parquet(path, columns=("prompt", "completion"))
                rows = [(row["prompt"], row["completion"]) for row in table]
            except (InputError, KeyError):
                unreadable += 1
                continue
            # TRL logs the same generations again while they are still trained on.
            if not rows or rows == last_rows:
                continue
            last_rows = rows
            self._rows += len(rows)
            prompts = [str(prompt) for prompt, _ in rows]
            for index in range(len(_group_sizes(prompts))):
                self._groups.append((path, index))
        if unreadable:
            self.notes.append(f"{unreadable} files of completions cannot be read (cut off?), left out.")

    @property
    def groups(self) -> int:
        """Number of groups that were saved; a group that was saved twice counts once."""
        return len(self._groups)

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The newest checkpoint's tokenizer; `None` if there is none."""
        from tokenizers import Tokenizer

        files = self._folder.glob("**/tokenizer.json")
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
            # The library raises a bare Exception for a file that it cannot read.
            try:
                return Tokenizer.from_file(str(path))
            except Exception:
                continue
        return None

    def looked_at(self) -> Iterator[tuple[int, Group]]:
        """Yield number and content of groups, spread evenly over the run, the newest first."""
        stride = max(1, math.ceil(self._rows / LOOKED_AT_ROWS))
        for position in range(len(self._groups) - 1, -1, -stride):
            yield position, self.load(position)

    def load(self, number: int) -> Group:
        """Read the group of that number."""
        path, index = self._groups[number]
        # Groups of one file are usually read in a row.
        if self._open is None or self._open[0] != path:
            self._open = (path, self._read_groups(path))
        group = self._open[1][index]
        if self.tokenizer is not None and any(row.length is None for row in group.rows):
            # The end token is not in the saved text, so it is not counted either.
            texts = [row.text for row in group.rows]
            encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            for row, encoding in zip(group.rows, encoded, strict=True):
                row.length = len(encoding.ids)
        for row in group.rows:
            if self.one_is_correct and row.reward is not None:
                row.right = row.reward == 1
        return group

    def _read_groups(self, path: Path) -> list[Group]:
        table = read_parquet(path)
        prompts = [conversation(row["prompt"]) for row in table]
        groups = []
        start = 0
        for index, size in enumerate(_group_sizes(prompts)):
            rows = list(map(_row, table[start : start + size]))
            step = int(table[start].get("step") or 0)
            group = Group(step, "train", index, prompts[start], rows)
            groups.append(finish_group(group))
            start += size
        return groups


Completions = RecordedCompletions | SavedCompletions


def conversation(value: object) -> str:
    """Return a prompt or completion (text, or messages) as text: a single message's content, several with roles."""
    if not isinstance(value, list):
        return text(value)
    contents = []
    lines = []
    for message in map(mapping, value):
        contents.append(text(message.get("content")))
        lines.append(f"[{text(message.get('role', ''))}] {contents[-1]}")
    if len(contents) == 1:
        return contents[0]
    return "\n".join(lines)


def _group_sizes(prompts: list[str]) -> list[int]:
    """Return the sizes of the groups: runs of the same prompt, cut where a prompt was drawn twice in a row."""
    runs = [len(list(same)) for _, same in groupby(prompts)]
    # All groups have one size, which divides every run. A gcd of 1 means that the runs are no groups of one size.
    size = math.gcd(*runs)
    if size < 2:
        return runs
    return [size] * (len(prompts) // size)


def _row(row: dict[str, Any]) -> Row:
    """Build a row from a line of TRL's table, whose columns of numbers are rewards."""
    rewards = {}
    for name, value in row.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in _FIXED and (value is None or is_number):
            rewards[name] = number(value)
    # TRL does not save the weights: their sum stands for the weighted one.
    reward = None
    scored = [value for value in rewards.values() if value is not None]
    if scored:
        reward = sum(scored)
    advantage = number(row.get("advantage"))
    spans = [Span(conversation(row["completion"]), advantage)]
    return Row(spans=spans, rewards=rewards, reward=reward, advantage=advantage)
