"""Held-out accuracy over process CPU time, as `demo --compare` and a study draw it.

A run is a dict of lists with an entry per evaluation: `seconds` of CPU time since training began, evaluations left
out, and `pass_rate`, the share of held-out problems that are solved.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedModel, TrainerCallback

from trl_drgrpo.common.drawing import COLORS, new_figure

Run = Mapping[str, Any]


class Pace(TrainerCallback):
    """Measures the model as it trains, on a clock that stands still meanwhile.

    Args:
        run (`dict[str, list]`): Gets an entry per evaluation; the first one, before training, if it is not there.
        measure (`Callable`): Takes the model and returns its pass rate.
        every_steps (`int`, *optional*): Evaluate after so many optimizer steps; without it, a derived class decides.
        clock (`Callable`, *optional*): Returns the time in seconds; by default the CPU time of this process.
    """

    def __init__(
        self,
        run: dict[str, list[float]],
        measure: Callable[[PreTrainedModel], float],
        every_steps: int | None = None,
        clock: Callable[[], float] = time.process_time,
    ):
        self.run = run
        self.measure = measure
        self.every_steps = every_steps
        self.clock = clock
        self.begun = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = self.clock()
        # The start of a run: the first point of its curve.
        if not self.run["seconds"]:
            self.evaluate(kwargs["model"])

    def on_step_end(self, args, state, control, **kwargs):
        if self.every_steps and state.global_step % self.every_steps == 0:
            self.evaluate(kwargs["model"])

    def evaluate(self, model: PreTrainedModel) -> None:
        """Add an evaluation to the run."""
        with self.standing_still() as now:
            self.run["seconds"].append(round(now - self.begun, 2))
            self.run["pass_rate"].append(self.measure(model))

    @contextmanager
    def standing_still(self) -> Iterator[float]:
        """Stop the clock inside the block. Yield the time when it began."""
        now = self.clock()
        yield now
        # What the block took is taken off every later reading.
        self.begun += self.clock() - now


def reached(run: Run, target: float, x: str = "seconds") -> float:
    """Return the CPU seconds (or `tokens`) until the accuracy first is `target`, on the line between evaluations.

    Infinity where it never is.

    >>> reached({"seconds": [0.0, 4.0, 6.0], "pass_rate": [0.25, 0.5, 0.25]}, 0.375)
    2.0
    """
    # Interpolated, since evaluations are a tenth of a run apart.
    positions = run[x]
    rates = run["pass_rate"]
    for after, rate in enumerate(rates):
        if rate < target:
            continue
        if after == 0:
            return positions[0]
        # All earlier rates are below the target, so this is no division by 0.
        before = after - 1
        share = (target - rates[before]) / (rate - rates[before])
        return positions[before] + share * (positions[after] - positions[before])
    return math.inf


def height(run: Run, at: float, x: str = "tokens") -> float:
    """Return the pass rate of a run after so many tokens (or `seconds`), on the line between evaluations.

    >>> height({"tokens": [0, 10, 30], "pass_rate": [0.0, 1.0, 0.0]}, 20)
    0.5
    """
    return float(np.interp(at, run[x], run["pass_rate"]))


def draw_pace(panels: Mapping[str, Mapping[str, Sequence[Run]]], width: float = 3.2, height_: float = 3.4) -> Any:
    """
    Draw accuracy over CPU seconds, a panel per title: for each label the mean over its runs, and their range.

    Readable when a picture of three panels is shown 400 pixels wide. Labels stand in the first panel that has them.

    Args:
        panels (`Mapping[str, Mapping[str, Sequence[Run]]]`): Title -> label -> runs. A label has one color throughout.
        width, height_ (`float`): Size of a panel in inches.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    labels = dict.fromkeys(chain(*panels.values()))
    colors = dict(zip(labels, COLORS, strict=False))
    figure, drawn = new_figure(1, len(panels), width * len(panels), height_)
    labeled = set()
    for axes, (title, lines) in zip(drawn, panels.items(), strict=True):
        # For each label the range and the mean of its runs.
        for label, runs in lines.items():
            # Beyond the end of the shortest run the mean would be over fewer runs.
            end = min(run["seconds"][-1] for run in runs)
            seconds = np.linspace(0, end, 61)
            # (runs, 61), in percent: runs are evaluated at different times.
            rates = [100 * np.interp(seconds, run["seconds"], run["pass_rate"]) for run in runs]
            color = colors[label]
            lowest = np.min(rates, axis=0)
            highest = np.max(rates, axis=0)
            axes.fill_between(seconds, lowest, highest, color=color, alpha=0.15, linewidth=0)
            axes.plot(seconds, np.mean(rates, axis=0), color=color, linewidth=2.4)
        # Labels stand at the right, from the bottom up, so the first one is on top.
        new_labels = [label for label in lines if label not in labeled]
        for place, label in enumerate(reversed(new_labels)):
            axes.annotate(
                label,
                (0.98, 0.04 + 0.1 * place),
                xycoords="axes fraction",
                ha="right",
                color=colors[label],
                fontsize=13,
            )
        labeled |= lines.keys()
        axes.set_title(title, fontsize=13, loc="left")
        axes.set_xlabel("CPU seconds", fontsize=12)
        axes.tick_params(labelsize=11)
    drawn[0].set_ylabel("held-out accuracy, %", fontsize=12)
    return figure
