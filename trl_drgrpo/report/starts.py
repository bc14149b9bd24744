"""A run that crashed and was resumed did some steps twice: which entries of its log still count.

A folder in which a run was started anew, from step 0, holds that run only: nothing of the one before counts.
"""

from collections.abc import Sequence


class Starts:
    """The starts of a run.

    A line belongs to the last start at or before its time. If a later start began at a smaller step, the line's work
    was lost with the crash and done again: it is superseded. A later start at step 0 supersedes everything.

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
        anew = [position for position, (_, step) in enumerate(self._starts) if step == 0]
        self._of_this_run = self._starts[anew[-1] :] if anew else self._starts

    @property
    def began(self) -> float | None:
        """Unix time at which the run was started, for the last time from step 0."""
        return self._of_this_run[0][0] if self._of_this_run else None

    @property
    def resumed_at(self) -> list[int]:
        """Steps at which the run went on, in the order of time."""
        return [step for _, step in self._of_this_run[1:]]

    def superseded(self, step: int, time: float | None) -> bool:
        """Whether a later start did the line of this step again. A line without a Unix time is kept."""
        if time is None:
            return False
        return any(start > time and (began < step or began == 0) for start, began in self._starts)
