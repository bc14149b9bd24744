"""The frame of every study: arms x seeds -> a results file that can be continued -> tables, a sentence, a picture.

A study is one file. Its docstring states the question, the arms, the measure and the rule that was declared before the
runs; its `STUDY` says how to measure, what to print and what to draw. `python recipes/studies/NAME.py` runs it. Its
numbers are kept in `recipes/results`; a test (`tests/docs/test_evidence.py`) makes the tables anew from them, and
finds each on the page.

Everywhere the same rule: two things differ if the 95% interval of their difference, taken seed by seed, leaves out 0.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported, so studies import this file first
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func

from trl_drgrpo.common.drawing import COLORS, save_figure
from trl_drgrpo.upstream.versions import provenance

Row = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study.

    Args:
        name (`str`): Of its file in `recipes/results`.
        page (`str`): The page beside it that shows it.
        seeds (`int`): How many the committed numbers have, from 0 on.
        settings (`dict`): All that the numbers depend on.
        quick (`dict`): The settings that a run in miniature changes.
        measure (`Callable`): Takes a [`Run`], fills its results.
        report (`Callable`): From the results to the tables and sentences that the page shows.
        draw (`Callable`): From the results to a figure.
        conclude (`Callable`): From the results to a sentence by the rule above, of numbers that the tables have.
        dark (`bool`): Whether the picture is drawn for dark pages, too.
    """

    name: str
    page: str
    seeds: int
    settings: dict[str, Any]
    quick: dict[str, Any]
    measure: Callable[["Run"], None]
    report: Callable[[Results], list[str]]
    draw: Callable[[Results], Any]
    conclude: Callable[[Results], str] = lambda results: ""
    dark: bool = False


class Run:
    """A run of a study and its file. What an earlier run with the same settings and versions has left there is kept.

    Args:
        study ([`Study`]): The study.
        seeds (`Sequence[int]`): Seeds.
        folder (`Path`): For the results file, and for models and trainers in a folder of the study's name.
        settings (`dict`, *optional*): Other ones than the study's.
        jobs (`int`, *optional*, defaults to `1`): Calls at a time, in processes of their own if more than one.

    Attributes:
        results (`dict[str, Any]`): Provenance, `settings` and the parts, as in the file.
    """

    def __init__(
        self, study: Study, seeds: Sequence[int], folder: Path, settings: dict[str, Any] | None = None, jobs: int = 1
    ):
        self.seeds, self.jobs, self.settings = seeds, jobs, study.settings if settings is None else settings
        self.output, self.folder = folder / f"{study.name}.json", folder / study.name
        self.folder.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python", "recipes/studies/" + Path(sys.argv[0]).name, *sys.argv[1:]])
        self.results: Results = {**provenance(command), "settings": self.settings}
        self._earlier: Results = {}
        if self.output.is_file():
            earlier = json.loads(self.output.read_text(encoding="utf-8"))
            same = json.loads(json.dumps(self.results))
            if all(earlier.get(key) == same[key] for key in ("settings", "versions")):
                self._earlier = earlier

    def keep(self, said: str) -> None:
        """Writes the file, and says on stderr what is new in it."""
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(self.results) + "\n", encoding="utf-8")
        partial.replace(self.output)
        print(said, file=sys.stderr)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A part without arms, made unless it is there."""
        self.results[name] = self._earlier.get(name)
        if self.results[name] is None:
            self.results[name] = make()
            self.keep(name)
        return self.results[name]

    def each(
        self,
        name: str,
        keys: Sequence[str],
        calls: Iterable[tuple[Any, ...]],
        measure: Callable[..., list[Row]],
        due: Callable[..., bool] = lambda *call: True,
    ) -> list[Row]:
        """The rows of a part, in the order of the calls; those that are missing are measured.

        Args:
            name (`str`): Of the part in the results.
            keys (`Sequence[str]`): Keys of a row that name the call that made it.
            calls (`Iterable[tuple]`): All calls of the part.
            measure (`Callable`): `f(settings, folder, *call)` -> rows; with several jobs it has to be picklable.
            due (`Callable`, *optional*): Whether a call is made now; by default each is.
        """
        rows = self.results.setdefault(name, self._earlier.get(name, []))
        place = {call: at for at, call in enumerate(calls)}

        def made_by(row: Row) -> tuple[Any, ...]:
            return tuple(row[key] for key in keys)

        done = {made_by(row) for row in rows}
        left = [(self.settings, self.folder, *call) for call in place if call not in done and due(*call)]
        for made in in_processes(measure, left, self.jobs):
            rows.extend(made)
            rows.sort(key=lambda row: place.get(made_by(row), len(place)))
            self.keep(f"{name}: {', '.join(map(str, made_by(made[0])))}")
        return rows


def in_processes(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Any]:
    """Results of a function for several calls as they end; several jobs are processes with a thread each."""
    if jobs == 1:
        yield from (function(*call) for call in calls)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:
        for future in as_completed([pool.submit(function, *call) for call in calls]):
            yield future.result()


def prepare() -> None:
    """Quiet, offline, on one thread: models so small gain little from more."""
    from trl_drgrpo.cli.short_commands import stay_offline_and_quiet

    stay_offline_and_quiet()


def main(study: Study) -> None:
    """The command line of a study: runs it, prints its tables, writes numbers and picture."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=study.seeds, help="seeds, from 0 on (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, a core each (default: 1)")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see that it runs")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies"), help="(default: %(default)s)")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds: got {args.seeds}; expected at least 2. An interval needs more than one run.")
    prepare()
    folder, settings = args.output_dir, study.settings
    if args.quick:  # its models are not those of the study
        folder, settings = folder / "quick", {**settings, **study.quick}
    run = Run(study, range(args.seeds), folder, settings, args.jobs)
    study.measure(run)
    run.keep(f"numbers: {run.output}")
    print("\n\n".join(filter(None, [*study.report(run.results), study.conclude(run.results)])))
    if args.quick:
        print("in miniature: these numbers show that the study runs, and nothing else", file=sys.stderr)
    print(f"what they mean: recipes/studies/{study.page}.md; ± is a 95% interval over seeds", file=sys.stderr)
    try:
        figure, path = study.draw(run.results), run.output.with_suffix(".png")
        print(f"picture: {save_figure(figure, path)}", file=sys.stderr)
        if study.dark:
            save_figure(darkened(figure), path.with_stem(f"{path.stem}_dark"))
    except ImportError:
        print('no picture, matplotlib is missing: pip install "trl-drgrpo[report]"', file=sys.stderr)


def darkened(figure: Any) -> Any:
    """The same figure, light on dark as on GitHub's dark pages; what has a color keeps it, but for the dark blue."""
    from matplotlib.colors import to_hex

    figure.set_facecolor("#0d1117")
    for axes in figure.axes:
        axes.set_facecolor("#0d1117")
        axes.tick_params(colors="#c9d1d9")
        for part in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values()):
            part.set(**{"edgecolor" if part in axes.spines.values() else "color": "#c9d1d9"})
        for part in (*axes.lines, *axes.texts, *axes.collections):
            color = part.get_facecolor() if part in axes.collections else part.get_color()
            if to_hex(color) == COLORS[0]:
                part.set_color(COLORS[4])
    return figure


def rows_of(results: Results, part: str = "runs", **key: Any) -> list[Row]:
    """The rows of a part with these values, by seed."""
    rows = [row for row in results[part] if all(row[name] == value for name, value in key.items())]
    return sorted(rows, key=lambda row: row.get("seed", 0))


# Intervals, sentences, tables ---------------------------------------------------------------------------------------

# Student's t, 97.5% quantile, by degrees of freedom; above the last one the normal's 1.96 is near enough.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_MANY = 8  # comparisons; from so many on, the sentence mentions chance


class Interval(NamedTuple):
    """A mean and half the width of its 95% interval, in the unit of the values."""

    mean: float
    half_width: float

    def text(self, decimals: int = 1, signed: bool = False) -> str:
        """Both, rounded; `signed` for differences. A single value has no interval."""
        center = f"{self.mean:{'+' if signed else ''}.{decimals}f}"
        return f"{center} (one run)" if self.half_width == math.inf else f"{center} ± {self.half_width:.{decimals}f}"

    def __str__(self) -> str:
        return self.text()


def interval(values: Iterable[float]) -> Interval:
    """Mean and 95% interval by Student's t over independent values, one per seed; infinite with one value.

    >>> str(interval([1.0, 2.0, 3.0])), str(interval([1.0]))
    ('2.0 ± 2.5', '1.0 (one run)')
    """
    values = list(values)
    center, freedom = statistics.fmean(values), len(values) - 1
    if freedom == 0:
        return Interval(center, math.inf)
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96
    variance = math.fsum((value - center) ** 2 for value in values) / freedom
    return Interval(center, quantile * math.sqrt(variance / len(values)))


def mean(values: Iterable[float | None], decimals: int = 0) -> str:
    """The mean, rounded."""
    return f"{statistics.fmean(map(known, values)):.{decimals}f}"


def known(value: float | None) -> float:
    """A number of a file, NaN where it has none."""
    return math.nan if value is None else value


def paired(own: Sequence[float], reference: Sequence[float]) -> Interval:
    """Mean and 95% interval of differences, seed by seed."""
    return interval(a - b for a, b in zip(own, reference, strict=True))


def compared(title: str, found: Mapping[str, Interval], even: float = 0.0, decimals: int = 1) -> str:
    """Sentence on the intervals that lie above the value of no difference, below it, and around it.

    >>> compared("Points", {"a": Interval(3, 1), "b": Interval(-1, 2)})
    'Points: above 0 with a (+3.0 ± 1.0); not told apart from 0 with b (-1.0 ± 2.0).'
    """
    sides: dict[str, list[str]] = {f"above {even:g}": [], f"below {even:g}": [], f"not told apart from {even:g}": []}
    above, below, neither = sides.values()
    for label, each in found.items():
        low, high = each.mean - each.half_width, each.mean + each.half_width
        side = above if low > even else below if high < even else neither
        side.append(f"{label} ({each.text(decimals, signed=even == 0)})")
    parts = "; ".join(f"{side} with {' and '.join(labels)}" for side, labels in sides.items() if labels)
    chance = f" Of {len(found)} comparisons one in twenty would say so by chance." if len(found) >= _MANY else ""
    return f"{title}: {parts}.{chance}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["arm", "steps"], [["plain", "8"]]))
    | arm | steps |
    |---|---|
    | plain | 8 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
