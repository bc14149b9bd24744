"""Results of a demo run, also of one that is going on, and its files."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.compare import STOCK_OBJECTIVES
from trl_drgrpo.labs.demo.evaluate import Evaluation
from trl_drgrpo.labs.demo.process import PROCESS_SETTINGS, step_numbers
from trl_drgrpo.upstream.versions import installed_versions

REQUIRED_GAIN_POINTS = 40.0
MADE_BY = "trl-drgrpo demo"
RESULTS_FILE, PLOT_FILE, MODEL_FOLDER = "results.json", "curves.png", "model"
REPORT_FILE, COMPARISON_FILE, START_FOLDER = "report.html", "comparison.html", "start"
_OWN = (RESULTS_FILE, PLOT_FILE, MODEL_FOLDER, REPORT_FILE, COMPARISON_FILE, START_FOLDER, *STOCK_OBJECTIVES)


@dataclass
class DemoResult:
    """Results of a run, also of one that is going on.

    Args:
        output_dir (`Path`): Folder of the files.
        seed, steps (`int`): Settings of the run.
        process (`bool`): Whether the lists are long and every line is rewarded, next to the outcome.
        problems (`list[tuple[int, ...]]`): The held-out problems, in the order of the completions.
        status (`str`): `"unfinished"` until everything is measured, then `"finished"`.
        before, after (`dict[str, Evaluation]`): Held-out measurements, keys `sampled` and `greedy`.
        curves (`dict[str, list]`): Per training step: `step`, `pass_rate` (0 to 1) and lengths in tokens.
        plot (`Path` or `None`): The plot, once drawn; stays `None` without matplotlib.
        report (`Path` or `None`): The page of `trl-drgrpo report` over the run, once written.
        stock (`dict[str, dict[str, Evaluation]]`): Held-out measurements after the runs by stock TRL, by objective.
        comparison (`Path` or `None`): The page over this run and those of stock TRL, if there were any.
        seconds (`dict[str, float]`): Wall-clock seconds per stage.
    """

    output_dir: Path
    seed: int
    steps: int
    problems: list[tuple[int, ...]]
    process: bool = False
    status: str = "unfinished"
    before: dict[str, Evaluation] = field(default_factory=dict)
    after: dict[str, Evaluation] = field(default_factory=dict)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    plot: Path | None = None
    report: Path | None = None
    stock: dict[str, dict[str, Evaluation]] = field(default_factory=dict)
    comparison: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        """Folder of the saved model."""
        return self.output_dir / MODEL_FOLDER

    @property
    def start_dir(self) -> Path:
        """Folder of the model that the run starts from: the shipped one, or with process rewards its warm start."""
        return self.output_dir / START_FOLDER if self.process else MODEL_DIR

    @property
    def results_file(self) -> Path:
        """The JSON file with all numbers; its `made_by` marks the folder as a demo's."""
        return self.output_dir / RESULTS_FILE

    @property
    def gain_points(self) -> float | None:
        """Gain in sampled held-out accuracy, in percentage points; `None` before the second measurement."""
        if "sampled" not in self.after:
            return None
        return 100 * (self.after["sampled"].accuracy - self.before["sampled"].accuracy)

    @property
    def learned(self) -> bool:
        """Whether the gain reaches what the demo claims."""
        return self.gain_points is not None and self.gain_points >= REQUIRED_GAIN_POINTS

    def numbers(self, evaluation: Evaluation) -> dict[str, float | None]:
        """All numbers of a measurement, those of its steps included."""
        return evaluation.numbers() | step_numbers(self.problems, evaluation.texts)

    def write(self) -> None:
        """Write every number so far to `results_file`."""
        numbers = {
            "made_by": MADE_BY,
            "status": self.status,
            "settings": {
                "seed": self.seed,
                "steps": self.steps,
                "held_out_problems": len(self.problems),
                "process": PROCESS_SETTINGS if self.process else None,
            },
            "before": {mode: self.numbers(evaluation) for mode, evaluation in self.before.items()},
            "after": {mode: self.numbers(evaluation) for mode, evaluation in self.after.items()},
            "stock": {
                name: {mode: self.numbers(evaluation) for mode, evaluation in found.items()}
                for name, found in self.stock.items()
            },
            "gain_points": self.gain_points,
            "required_gain_points": REQUIRED_GAIN_POINTS,
            "learned": self.learned,
            "seconds": {stage: round(seconds, 2) for stage, seconds in self.seconds.items()},
            "versions": installed_versions(),
            "curves": self.curves,
        }
        self.results_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record how long a stage takes."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


def check_output_dir(output_dir: Path) -> None:
    """
    Make sure that a run may write to a folder, before anything slow starts; create it if it is not there.

    An earlier demo's files are overwritten and unrelated files are left alone, but a file of the same name that no
    demo wrote is never touched.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "output_dir", f"'{output_dir}' ({error.strerror})", "a folder to write to", "Choose another folder."
        ) from error
    taken = [name for name in _OWN if (output_dir / name).exists()]
    if taken and not _is_a_demos(output_dir):
        raise InputError(
            "output_dir",
            f"'{output_dir}', which holds {', '.join(taken)}, not written by a demo",
            "a new or empty folder, or an earlier demo's",
            "Nothing was changed there. Choose another folder.",
        )


def _is_a_demos(output_dir: Path) -> bool:
    """Whether the results file in a folder says that a demo wrote it."""
    try:
        numbers = json.loads((output_dir / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(numbers, dict) and numbers.get("made_by") == MADE_BY
