"""The run log: `run.json`, and lines of metrics, warnings and recorded completions, which the report reads.

Completions are kept as text cut into spans of equal advantage, with rewards and steps. Which groups of a generation
batch are kept depends on their number alone, not on a random generator, so the same ones are kept after a resume. Each
rank makes the records of its own rows (`BatchSnapshot`, `spans_of`); the main process puts the groups together
(`group_records`) and writes (`RunLog`).
"""

import json
import math
import os
import re
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.secrets import without_credentials

if TYPE_CHECKING:  # the command line reads the names of files here, before anything heavy loads
    from trl_drgrpo.objective.fork_advantages import Forks
    from trl_drgrpo.process_rewards.steps.alignment import Aligner

COLUMN_CHARACTERS = 500
_OF_GROUP = ("index", "prompt", "columns")  # fields of a rank's row that its group holds


def recorded_groups(groups: int, most: int) -> list[int]:
    """
    Choose `most` groups (-1: all) of a generation batch, spread evenly, so that all ranks have some; ascending.

    Example:

    ```python
    >>> recorded_groups(8, 4), recorded_groups(2, 4), recorded_groups(3, -1), recorded_groups(8, 0)
    ([0, 2, 4, 6], [0, 1], [0, 1, 2], [])

    ```
    """
    # Evenly spread: of 8 groups and 3 records these are 0, 2 and 5.
    count = groups if most < 0 else min(groups, most)
    return [i * groups // count for i in range(count)]


def group_records(
    rows: Sequence[dict[str, Any]],
    num_generations: int,
    step: int,
    mode: str,
    first_group: int = 0,
    forks: "Forks | None" = None,
) -> list[dict[str, Any]]:
    """Return the lines of `completions.jsonl`.

    Args:
        rows (`Sequence[dict]`): From [`BatchSnapshot.records`], of all ranks, every group complete.
        num_generations (`int`): G.
        step (`int`): The optimizer step that is first trained on them; in an evaluation the steps done.
        mode (`str`): `"train"` or `"eval"`.
        first_group (`int`, *optional*): Groups of this step, or evaluation, in the batches before this one.
        forks ([`Forks`], *optional*): Of the batch.

    Returns:
        `list[dict]`: One per group. `baseline` and `std` (n - 1) are over the group's scorable rewards. `forks`: the
        branches at each level, `[b] * D`; only of groups that fork.
    """
    ordered = sorted(rows, key=itemgetter("index"))
    records = []
    for number, grouped in groupby(ordered, key=lambda row: row["index"] // num_generations):
        members = list(grouped)
        rewards = [row["reward"] for row in members if row["reward"] is not None]
        # The rows of a group have the same prompt and columns, so the record holds them once.
        first = members[0]
        record = {
            "step": step,
            "mode": mode,
            "group": first_group + number,
            "prompt": first["prompt"],
            "G": len(members),
            "baseline": readable(statistics.fmean(rewards)) if rewards else None,
            "std": readable(statistics.stdev(rewards)) if len(rewards) > 1 else None,
            "rows": [{name: row[name] for name in row if name not in _OF_GROUP} for row in members],
            "columns": first["columns"],
        }
        if forks is not None:
            record["forks"] = [forks.branches] * forks.depth
        records.append(record)
    return records


def spans_of(
    token_ids: list[int],
    advantages: Sequence[float],
    trained: Sequence[float],
    aligner: "Aligner",
    step_ends: Sequence[int] = (),
    step_rewards: Sequence[float | None] = (),
    cuts: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield runs of tokens of one kind; their texts joined are the decoded completion.

    Args:
        token_ids (`list[int]` of length `T`): The completion.
        advantages, trained (`Sequence[float]` of length `T`): Of each token; `trained` is 0 on those that are masked
            (tool results).
        aligner ([`Aligner`]): Of the run's tokenizer.
        step_ends (`Sequence[int]`, *optional*): Inclusive last tokens of the steps; empty without step rewards.
        step_rewards (`Sequence[float or None]`, *optional*): One per step.
        cuts (`Sequence[int]`, *optional*): Tokens before each fork, see [`Forks`]; `None` in a group without.
    """
    kinds = []
    for t, (_, advantage, mask) in enumerate(zip(token_ids, advantages, trained, strict=True)):
        level = None
        if cuts is not None:
            level = bisect_right(cuts, t)  # forks in front of the token
        step = bisect_left(step_ends, t)  # the first one that ends at the token or behind it
        kinds.append((advantage, step, mask <= 0, level))
    runs = [(kind, len(list(tokens))) for kind, tokens in groupby(kinds)]
    if not runs:
        return
    alignment = None
    if len(runs) == 1:  # a completion without steps and forks is not cut, and to align it would take longer
        text = aligner.decode(token_ids)
    else:
        alignment = aligner.align(token_ids)
        text = alignment.text
    token = 0
    start = 0
    for (advantage, step, masked, level), size in runs:
        token += size
        stop = len(text)
        if alignment and token < len(token_ids):  # the last run also has the characters that are not complete
            stop = min(max(alignment.lengths[token - 1], start), stop)
        span = {"text": text[start:stop], "advantage": readable(advantage), "step": None, "step_reward": None}
        if step < len(step_ends):  # behind the last one: the closing, which is no step
            span["step"] = step
            span["step_reward"] = readable(step_rewards[step])
        span["masked"] = masked
        if level is not None:
            span["level"] = level
        yield span
        start = stop


def logged_prompt(prompt: object) -> str:
    """Write a prompt to be read: a text as it is, messages as `role: content`, images as `<image>`.

    Example:

    ```python
    >>> logged_prompt([{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": "?"}]}])
    'user: <image>?'

    ```
    """
    if not isinstance(prompt, list):
        return str(prompt)
    # Messages stand apart, each behind its role.
    texts = []
    for message in prompt:
        text = str(message)
        if isinstance(message, Mapping):
            text = f"{message.get('role', '')}: {_content(message.get('content'))}"
        texts.append(text)
    return "\n\n".join(texts)


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(map(_content, content))
    if isinstance(content, Mapping):
        if content.get("type") == "text":
            return str(content.get("text") or "")
        return f"<{content.get('type')}>"
    return "" if content is None else str(content)


def short_text(value: object) -> str:
    """Write a dataset's value in at most 500 characters; images as `<image>`."""
    if _is_image(value):
        return "<image>"
    if isinstance(value, list | tuple) and value and all(map(_is_image, value)):
        return "<image>" * len(value)
    text = str(value)
    if len(text) > COLUMN_CHARACTERS:
        text = text[: COLUMN_CHARACTERS - 3] + "..."
    return text


def _is_image(value: object) -> bool:
    """Tell an image of Pillow, without importing it, or the bytes of one."""
    # As `datasets` stores an image that is not decoded.
    is_stored = isinstance(value, Mapping) and set(value) == {"bytes", "path"}
    return is_stored or isinstance(value, bytes) or (hasattr(value, "getpixel") and hasattr(value, "mode"))


def readable(value: float | None) -> float | None:
    """Round to six digits, which are enough to be read; `None` for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


FOLDER = "_drgrpo"
RUN = "run.json"
METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
WARNINGS = "warnings.jsonl"
FORMAT = 1
# Metrics for the report, which draws them. Trackers get them where there is no run log; TRL's own are left alone.
DETAILS = re.compile(
    r"difficulty/|completions/(truncated_|length_gap)|drgrpo/(micro_batches|useful_token_frac)|process/reward_quarter_"
    r"|sampling/(weight_|keep_probability|draws|groups_(generated|trained|dropped)|rounds)"
    r"|forks/(cut_position|sampled_token_frac)"
)
COMPLETIONS_BYTES = 256 * 2**20  # above this, older steps are thinned


class RunLog:
    """Writes the run log of one process, the main one.

    Nothing is written before `start`, so that an evaluation without training leaves no folder behind. Each method that
    writes raises `OSError` when the first file cannot be written; nothing is written after that.

    Args:
        output_dir (`Path`): Folder of the run.
        clock (`Callable[[], float]`, *optional*): Seconds since the epoch.
    """

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.time):
        self.folder = output_dir / FOLDER
        self._clock = clock
        self._content: dict[str, Any] | None = None  # of run.json, once started

    def start(self, step: int, start: dict[str, Any], facts: dict[str, Any]) -> None:
        """
        Write `run.json`; earlier starts in the folder are kept.

        `step`: optimizer steps done before this start. `start`: what belongs to it (`versions`, `device`,
        `processes`). `facts`: what belongs to the run (`model`, `objective`, `settings` and so on).
        """
        this_start = {"time": self._clock(), "step": step, **start}
        starts = [*self._earlier_starts(), this_start]
        self._content = {"format": FORMAT, "made_by": "trl-drgrpo", **facts, "starts": starts, "ended": None}
        self._write_run()
        for name in (METRICS, COMPLETIONS, WARNINGS):
            self._write(lambda name=name: _end_last_line(self.folder / name))

    def end(self, step: int, how: str) -> None:
        """Note that the run has ended after `step` optimizer steps: `"finished"`, or `"failed: <type of the
        error>"`."""
        if self._content is not None and self._content["ended"] is None:
            self._content["ended"] = {"time": self._clock(), "step": step, "how": how}
            self._write_run()

    def update(self, **facts: Any) -> None:
        """Put facts that became known during the run into `run.json`."""
        # Every log asks: the file is written again only where a fact is new.
        if self._content is not None and not facts.items() <= self._content.items():
            self._content |= facts
            self._write_run()

    def metrics(self, step: int, epoch: float | None, logs: Mapping[str, float | None]) -> None:
        """Append the numbers that `Trainer.log` was given. Those of an evaluation start with `eval_`."""
        numbers = {}
        mode = "train"
        for name, value in logs.items():
            if name.startswith("eval_"):
                mode = "eval"
            if isinstance(value, int | float) or value is None:
                numbers[name] = value
        self._append(METRICS, [{"step": step, "epoch": epoch, "mode": mode, "logs": numbers}])

    def completions(self, groups: Sequence[dict[str, Any]]) -> None:
        """Append recorded groups (see [`group_records`]), and thin the older ones where the file has grown too
        large."""
        self._append(COMPLETIONS, groups)
        self._write(lambda: _thin(self.folder / COMPLETIONS, COMPLETIONS_BYTES))

    def warning(self, step: int, cause: str, message: str) -> None:
        """Append a warning: `cause` is its name, `message` what was logged."""
        self._append(WARNINGS, [{"step": step, "cause": cause, "message": without_credentials(message)}])

    def _earlier_starts(self) -> list[Any]:
        try:
            # A damaged file, or one of another program, has no earlier starts.
            starts = json.loads((self.folder / RUN).read_text(encoding="utf-8"))["starts"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return starts if isinstance(starts, list) else []

    def _append(self, name: str, entries: Sequence[dict[str, Any]]) -> None:
        if self._content is None or not entries:
            return
        now = self._clock()
        # Step, time, mode and group come first: the report reads large files by the heads of their lines.
        lines = [to_json({"step": entry["step"], "time": now, **entry}) + "\n" for entry in entries]
        self._write(lambda: _append(self.folder / name, "".join(lines)))

    def _write_run(self) -> None:
        self._write(lambda: write_whole(self.folder / RUN, to_json(self._content, indent=1) + "\n"))

    def _write(self, write: Callable[[], None]) -> None:
        if self._content is None:
            return
        try:
            # Nothing exists before the first write, and a folder may be deleted while the run goes on.
            self.folder.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            # Nothing is written from here on: a log with holes would read as a whole one.
            self._content = None
            raise OSError(
                f"{self.folder} cannot be written ({error.strerror or error}): the run log ends here, and with it "
                "`trl-drgrpo report`. Make room, or set run_log=False."
            ) from error


def to_json(value: object, indent: int | None = None) -> str:
    """JSON as strict readers take it: NaN and infinity are null, characters stay as they are.

    Lone surrogates, which a completion's text may hold and UTF-8 cannot, become U+FFFD.

    Example:

    ```python
    >>> to_json({"kl": float("nan"), "text": "é"})
    '{"kl": null, "text": "é"}'

    ```
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        # NaN somewhere: to write it as Python does, and to read that with None for it, reaches every level.
        value = json.loads(json.dumps(value), parse_constant=lambda name: None)
        text = json.dumps(value, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _thin(path: Path, most: int) -> None:
    """Leave out every second step of the older half of a file's steps where it has more than `most` bytes.

    The file is whole at any time.
    """
    if not path.exists() or path.stat().st_size <= most:
        return
    with path.open("rb") as file:
        steps = set(map(_step_of, file))
    ordered = sorted(step for step in steps if step is not None)
    # The newest half stays: that is what somebody looks at. From the older one the first step stays, as the beginning.
    dropped = set(ordered[1 : len(ordered) // 2 : 2])
    if not dropped:
        return
    # The file is replaced in one step, so that a reader never sees a half of it.
    part = path.with_suffix(".part")
    with path.open("rb") as file, part.open("wb") as thinned:
        thinned.writelines(line for line in file if _step_of(line) not in dropped)
    part.replace(path)


def _step_of(line: bytes) -> int | None:
    """Read the step that a line begins with; `None` of a damaged line."""
    match = re.match(rb'\{"step": (\d+),', line)
    return int(match[1]) if match else None


def _end_last_line(path: Path) -> None:
    """End the last line of a file, which a crash may have cut short: the next one must not be glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
