"""A run that crashed and was resumed did some steps twice: which entries of its log still count."""

from collections.abc import Sequence


class Starts:
    """The starts of a run.

    A line belongs to the last start at or before its time. If a later start began at a smaller step, the line's work
    was lost with the crash and done again: it is superseded.

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

    @property
    def resumed_at(self) -> list[int]:
        """Steps at which the run went on: those of every start but the first, in the order of time."""
        return [step for _, step in self._starts[1:]]

    def superseded(self, step: int, time: float | None) -> bool:
        """
        Whether a line was done again by a later start.

        Args:
            step (`int`): The line's global step.
            time (`float` or `None`): Its Unix time; without one the line is kept.

        Returns:
            `bool`.
        """
        return time is not None and any(start > time and began < step for start, began in self._starts)
