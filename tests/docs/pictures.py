"""Draws the pictures of README and guides that come from numbers in a guide: `python tests/docs/pictures.py`."""

import re
from pathlib import Path

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure

GUIDES = Path(__file__).parents[2] / "recipes" / "guides"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "README.md"
FAST_PATH = GUIDES / "images" / "fast_path.png"
# Case in a table of the guide -> label of its bar, by group.
BARS = {
    "whole step, 25% of the groups dead": {
        "base": "prompts of 64 tokens",
        "prompt-256": "prompts of 256",
        "prompt-512": "prompts of 512",
        "prompt-1024": "prompts of 1,024",
    },
    "training phase": {
        "log-normal lengths, median 38 of 128, 30% dead groups": "log-normal lengths, 30% dead",
        "LoRA (rank 16), log-normal lengths, 30% dead groups": "the same, LoRA",
        "lengths evenly spread from 1 to 128, 0% dead groups": "even spread of lengths, none dead",
        "all completions 128, prompts 8 to 16": "equal lengths, none dead: nothing to gain",
    },
}


def ratios(page: str) -> dict[str, tuple[float, float, float]]:
    """Median, least and most of each case's `2.15x (1.98 to 2.23)` under "stock / ours", by the case's first cell."""
    row = re.compile(r"^\| ([^|]+) \|.*?(\d+\.\d+)x \((\d+\.\d+) to (\d+\.\d+)\)", re.MULTILINE)
    tables = re.findall(r"^\| case[^\n]*stock / ours[^\n]*\n(?:\|[^\n]*\n)+", page, re.MULTILINE)
    return {case: (float(m), float(low), float(high)) for t in tables for case, m, low, high in row.findall(t)}


def draw_fast_path(path: Path = FAST_PATH) -> Path:
    """Bars of stock TRL's CPU time over ours, with the least and most of the pairs."""
    found = ratios(BENCHMARKS.read_text(encoding="utf-8"))
    figure, panels = new_figure(
        2, 1, 7.2, 3.4, sharex=True, gridspec_kw={"height_ratios": [len(bars) for bars in BARS.values()]}
    )
    for axes, color, (title, bars) in zip(panels, COLORS, BARS.items(), strict=False):
        medians, lows, highs = zip(*(found[case] for case in bars), strict=True)
        below = [median - low for median, low in zip(medians, lows, strict=True)]
        above = [high - median for median, high in zip(medians, highs, strict=True)]
        axes.barh(list(bars.values()), medians, xerr=[below, above], color=color, ecolor="#555555", height=0.65)
        for row, (median, high) in enumerate(zip(medians, highs, strict=True)):
            axes.annotate(f"{median:.2f}x", (high, row), xytext=(5, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("CPU time of stock TRL / ours (median, range)")
    panels[-1].set_xlim(0, 5.2)
    return save_figure(figure, path)


if __name__ == "__main__":
    draw_fast_path()
