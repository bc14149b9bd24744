r"""The run log: what `trl-drgrpo report` reads, written while the run goes on.

A folder `_drgrpo` in the output folder (the underscore keeps it out of `push_to_hub`): `run.json` says what was run,
`metrics.jsonl`, `completions.jsonl` and `warnings.jsonl` hold one JSON object per line, appended and flushed. NaN and
infinity are written as null. A resumed run appends: every line carries its time, and `starts` in `run.json` the times
and steps at which the run began or began again, so that a reader can tell what was lost with a crash and done again.

`completions.jsonl` keeps to a number of bytes: older steps are thinned, the older the more.

When a file cannot be written, that is one error, and the log ends: nothing comes behind a line that may be cut short.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = "_drgrpo"
RUN, METRICS, COMPLETIONS, WARNINGS = "run.json", "metrics.jsonl", "completions.jsonl", "warnings.jsonl"
FORMAT = 1
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
        starts = [*self._earlier_starts(), {"time": self._clock(), "step": step, **start}]
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

    def metrics(self, step: int, epoch: float | None, logs: dict[str, Any]) -> None:
        """Append the numbers that `Trainer.log` was given. Those of an evaluation start with `eval_`."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float) or value is None}
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        self._append(METRICS, [{"step": step, "epoch": epoch, "mode": mode, "logs": numbers}])

    def completions(self, groups: Sequence[dict[str, Any]]) -> None:
        """Append recorded groups (see [`group_records`]), and thin the older ones where the file has grown too
        large."""
        self._append(COMPLETIONS, groups)
        self._write(lambda: _thin(self.folder / COMPLETIONS, COMPLETIONS_BYTES))

    def warning(self, step: int, cause: str, message: str) -> None:
        """Append a warning: `cause` is its name, `message` what was logged."""
        self._append(WARNINGS, [{"step": step, "cause": cause, "message": message}])

    def _earlier_starts(self) -> list[Any]:
        try:
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
        self._write(lambda: _replace(self.folder / RUN, to_json(self._content, indent=1) + "\n"))

    def _write(self, write: Callable[[], None]) -> None:
        if self._content is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            self._content = None
            raise OSError(
                f"{self.folder} cannot be written ({error.strerror or error}): the run log ends here, and with it "
                "`trl-drgrpo report`. Make room, or set run_log=False."
            ) from error


def to_json(value: Any, indent: int | None = None) -> str:
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
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="replace").decode("utf-8") if not text.isascii() else text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _thin(path: Path, most: int) -> None:
    """Leaves out every second step of the older half of a file's steps where it has more than so many bytes. The file
    is whole at any time."""
    if not path.exists() or path.stat().st_size <= most:
        return
    with path.open("rb") as file:
        steps = sorted({step for line in file if (step := _step_of(line)) is not None})
    dropped = set(steps[1 : len(steps) // 2 : 2])
    if not dropped:
        return
    part = path.with_suffix(".part")
    with path.open("rb") as file, part.open("wb") as kept:
        kept.writelines(line for line in file if _step_of(line) not in dropped)
    part.replace(path)


def _step_of(line: bytes) -> int | None:
    """The step that a line begins with; `None` of one that is damaged."""
    match = re.match(rb'\{"step": (\d+),', line)
    return int(match[1]) if match else None


def _end_last_line(path: Path) -> None:
    """A crash may have cut the last line short: what comes next must not be glued to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
            file.write(b"\n")
