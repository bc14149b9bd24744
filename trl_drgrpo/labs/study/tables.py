"""Estimates of the one-step measurement, to read and to keep."""

import dataclasses
from typing import Any

from trl_drgrpo.labs.study.direction import QUANTITIES, REFERENCE, Changes, Estimate
from trl_drgrpo.labs.study.objectives import OBJECTIVES

_HEADINGS = {
    "length_right": "correct answers, tokens",
    "length_wrong": "incorrect answers, tokens",
    "length": "all answers, tokens",
    "pass_rate": "pass rate, points",
}
_SCALES = {"pass_rate": 100.0}  # shares become percentage points


def changes_table(changes: Changes) -> str:
    """A Markdown table of changes, one of their differences from Dr. GRPO, each with its standard error.

    Args:
        changes ([`Changes`]): Of the measurement.
    """
    title = f"Change per update of unit length, {changes.batches} batches, ± standard error"
    return "\n".join(
        [
            f"{title}:\n",
            *_rows(changes.changes, list(OBJECTIVES)),
            f"\nDifference from {OBJECTIVES[REFERENCE].label}, from the same batches:\n",
            *_rows(changes.differences, [name for name in OBJECTIVES if name != REFERENCE]),
        ]
    )


def _rows(estimates: dict[str, dict[str, Estimate]], objectives: list[str]) -> list[str]:
    lines = ["| objective | " + " | ".join(_HEADINGS[q] for q in QUANTITIES) + " |", "|---" * 5 + "|"]
    for name in objectives:
        cells = [_cell(estimates[name][quantity], _SCALES.get(quantity, 1.0)) for quantity in QUANTITIES]
        lines.append(f"| {OBJECTIVES[name].label} | " + " | ".join(cells) + " |")
    return lines


def _cell(estimate: Estimate, scale: float) -> str:
    if estimate.value != estimate.value:
        return "unknown"
    return f"{scale * estimate.value:+.3g} ± {scale * estimate.standard_error:.2g}"


def changes_as_dict(changes: Changes) -> dict[str, Any]:
    """The same as plain types for JSON; what is unknown is `None`.

    Args:
        changes ([`Changes`]): Of the measurement.
    """

    def plain(estimates: dict[str, dict[str, Estimate]]) -> dict[str, Any]:
        return {
            name: {
                quantity: {key: None if value != value else value for key, value in dataclasses.asdict(each).items()}
                for quantity, each in found.items()
            }
            for name, found in estimates.items()
        }

    return {
        "batches": changes.batches,
        "changes": plain(changes.changes),
        "differences_from_dr_grpo": plain(changes.differences),
    }
