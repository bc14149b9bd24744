"""TRL's metrics of the loss, with their meaning kept when rows are regrouped and left out.

TRL logs each micro-batch's mean over tokens and later averages these means. With micro-batches of unequal size that
would weigh tokens unequally, and rows that are left out would be missing. Here numerators and denominators are summed
over the window of an optimizer step and logged once, at its end.

- `clip_ratio/*`: over all rows. A token without advantage is never counted as clipped, so rows that were left out add
  0 to the numerator and their tokens to the denominator.
- `kl`: over all rows (none is left out with a KL term).
- `entropy`: over the rows that were run.
"""

import math
from collections import defaultdict
from typing import Any

_EXTREMES = {"min": min, "max": max}


class WindowMetrics:
    """Collects what the micro-batches of one window log.

    Args:
        clips_rows (`bool`): Whether importance ratios are per sequence, so that clip ratios count rows, not tokens.
    """

    def __init__(self, clips_rows: bool):
        self.clips_rows = clips_rows
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}

    def add(self, plan: dict[str, Any], metrics: dict[str, list[float]], ranks: int) -> None:
        """Take in what one micro-batch logged: means over its tokens or rows on all `ranks`, extremes over its
        rows."""
        for name, values in metrics.items():
            for value in values:
                kind = name.rpartition("_")[2]
                if kind in _EXTREMES and name.startswith("clip_ratio/"):
                    if not math.isnan(value):  # of fillers only
                        self.extremes[name] = _EXTREMES[kind](value, self.extremes.get(name, value))
                    continue
                weight = plan["rows"] * ranks if self._counts_rows(name) else plan["loss_tokens"]
                self.sums[name] += value * weight
                self.weights[name] += weight

    def finish(self, window: dict[str, Any]) -> dict[str, list[float]]:
        """The window's metrics, one value each, and a fresh start. `window` has `rows` and `loss_tokens` of the window
        on all ranks, and whether it `leaves_out` rows that have tokens."""
        result = {}
        for name, total in self.sums.items():
            weight = self.weights[name]
            if name.startswith("clip_ratio/"):
                weight = window["rows"] if self._counts_rows(name) else window["loss_tokens"]
            elif not weight:
                continue  # nothing was run, so there is no mean
            result[name] = [total / max(weight, 1)]
        for name, value in self.extremes.items():
            extreme = _EXTREMES[name.rpartition("_")[2]]
            result[name] = [extreme(value, 0.0) if window["leaves_out"] else value]
        self._clear()
        return result

    def _counts_rows(self, name: str) -> bool:
        return self.clips_rows and name.startswith("clip_ratio/")
