"""What a report reads of a run, whatever wrote it: plain data, checked when it is read.

A run log may be half-written, or written by another version. So every value is looked at here, once: what is no number
is `None`, what is no text becomes one, and the rest of the report need not ask again. Lines that cannot be read, since
the file grows, was torn by a crash or is damaged, are counted, not fatal.

A run that crashed and was resumed did some steps twice: `Starts` says which entries of its log still count. A folder
in which a run was started anew, from step 0, holds that run only: nothing of the one before counts.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_drgrpo.features.diagnostics.statistics import grpo_zscores


@dataclass
class Span:
    """Consecutive tokens of a completion that share their advantage.

    Args:
        text (`str`): Decoded text, special tokens kept.
        advantage (`float` or `None`): What the loss weighs each of these tokens with.
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
        right (`bool` or `None`): Whether it counts as correct, where the run says what does.
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
        """The whole completion."""
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


def number(value: Any) -> float | None:
    """A finite number as it is, anything else as `None`; a whole number that no float holds is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -sys.float_info.max <= value <= sys.float_info.max else None


def whole(value: Any) -> int | None:
    """An integer of at most 64 bits as it is, anything else as `None`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def text(value: Any) -> str:
    """A text as it is, anything else as JSON would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def flag(value: Any) -> bool | None:
    """True or false as they are, anything else as `None`."""
    return value if isinstance(value, bool) else None


def listed(value: Any) -> list[Any]:
    """A list as it is, anything else as an empty one."""
    return value if isinstance(value, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping as it is, anything else as an empty one."""
    return value if isinstance(value, Mapping) else {}


def finish_group(group: Group) -> Group:
    """
    Fill in what follows from the rewards where it was not recorded: baseline, std and GRPO's z-scores. In place.

    Rows without a reward are left out of the statistics and have no z-score; where all rewards are equal the z-scores
    are 0.
    """
    scored = [row for row in group.rows if row.reward is not None]
    rewards = [row.reward for row in scored if row.reward is not None]
    if group.baseline is None and rewards:
        group.baseline = statistics.fmean(rewards)
    if len(rewards) > 1:
        group.std = statistics.stdev(rewards) if group.std is None else group.std
        for row, zscore in zip(scored, grpo_zscores(rewards), strict=True):
            row.zscore = zscore
    return group


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds; `None` if it holds none. An `OSError` where there is no file to read."""
    return _parsed(path.read_bytes())


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
        """Offset in the file and bytes of every line that is not empty."""
        if not self.path.is_file():
            return
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield offset, line
                offset += len(line)

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object of a line; `None`, and counted, if it is none."""
        value = _parsed(line)
        self.unreadable += value is None
        return value

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, line in self.raw():
            if (value := self.parse(line)) is not None:
                yield value


class Starts:
    """The starts of a run.

    A line belongs to the last start at or before its time. If a later start began at a smaller step, the line's work
    was lost with the crash and done again: it is superseded. A later start at step 0 supersedes everything.

    Args:
        starts (`Sequence[tuple[float, int]]`): Unix time and global step of every start.

    Example:

    ```python
    >>> starts = Starts([(100.0, 0), (200.0, 4)])
    >>> [starts.superseded(step=6, time=150.0), starts.superseded(4, 150.0), starts.superseded(6, 250.0)]
    [True, False, False]

    ```
    """

    def __init__(self, starts: Sequence[tuple[float, int]]):
        self._starts = sorted(starts)
        anew = [position for position, (_, step) in enumerate(self._starts) if step == 0]
        self._of_this_run = self._starts[anew[-1] :] if anew else self._starts

    @property
    def began(self) -> float | None:
        """Unix time at which the run was started, for the last time from step 0."""
        return self._of_this_run[0][0] if self._of_this_run else None

    @property
    def resumed_at(self) -> list[int]:
        """Steps at which the run went on, in the order of time."""
        return [step for _, step in self._of_this_run[1:]]

    def superseded(self, step: int, time: float | None) -> bool:
        """Whether a later start did the line of this step again. A line without a Unix time is kept."""
        if time is None:
            return False
        return any(start > time and (began < step or began == 0) for start, began in self._starts)
