"""Tells dataset columns from the other keywords of a step reward function, and takes rows of them.

The trainer passes its own keywords and the columns side by side. Whoever calls a user's function row by row (a step
verifier) or on other completions than the trainer's (rollouts) needs the columns alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# What the trainer passes to a step reward function next to the dataset's columns.
TRAINER_KEYWORDS = frozenset(
    {
        "prompts",
        "completions",
        "steps",
        "completion_ids",
        "step_ends",
        "trainer_state",
        "log_metric",
        "log_extra",
        "environments",
    }
)


def dataset_columns(keywords: Mapping[str, Any], num_rows: int) -> dict[str, Sequence[Any]]:
    """The keywords that are dataset columns.

    Args:
        keywords (`Mapping[str, Any]`): Arguments of a step reward function's call.
        num_rows (`int`): `B`, the number of completions.

    Returns:
        `dict[str, Sequence]`: Lists and tuples of length `B` under names that are not the trainer's own.
    """
    return {
        name: values
        for name, values in keywords.items()
        if name not in TRAINER_KEYWORDS and isinstance(values, (list, tuple)) and len(values) == num_rows
    }


def row_of(columns: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    """The values of one row, e.g. `{"answer": "18"}`."""
    return {name: values[row] for name, values in columns.items()}
