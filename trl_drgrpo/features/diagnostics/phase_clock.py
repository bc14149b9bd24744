"""Seconds that a training step spends on generating, scoring and training, on the clock of the host.

- generate: TRL's generation, tools and custom rollouts included;
- score: the reward functions and the step reward functions, what they sample themselves included;
- train: the rest of the step: old and reference log-probabilities, planning, forward, backward, the optimizer.

No device is waited for: a phase ends when its calls return. Generation and scoring return values that the host needs,
so what an accelerator still computes then is counted as training.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GENERATE, SCORE, TRAIN = "generate", "score", "train"


class PhaseClock:
    """Adds up the seconds of each phase between two readings.

    Args:
        clock (`Callable[[], float]`, *optional*): Seconds since some moment.

    Example:

    ```python
    >>> ticks = iter([0.0, 1.0, 4.0, 10.0])
    >>> clock = PhaseClock(lambda: next(ticks))
    >>> clock.step_begins()
    >>> with clock.phase("generate"):
    ...     pass
    >>> clock.step_ends(tokens=50)
    >>> clock.read()
    {'time/generate_s': 3.0, 'time/score_s': 0.0, 'time/train_s': 7.0, 'time/tokens_per_s': 5.0}

    ```
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._running: str | None = None
        self._began: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._seconds = {GENERATE: 0.0, SCORE: 0.0}
        self._in_steps = 0.0
        self._finished = self._tokens = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase, `"generate"` or `"score"`; inside of another one, as that one. Outside of a step
        (evaluation) not at all."""
        if self._running is not None or self._began is None:
            yield
            return
        self._running, start = name, self._clock()
        try:
            yield
        finally:
            self._running = None
            self._seconds[name] += self._clock() - start

    def step_begins(self) -> None:
        """An optimizer step begins."""
        self._began = self._clock()

    def step_ends(self, tokens: int) -> None:
        """An optimizer step has ended. `tokens`: completion tokens generated in it over all ranks, 0 when it reused
        some."""
        if self._began is not None:
            self._in_steps += self._clock() - self._began
            self._finished += 1
            self._tokens += tokens
        self._began = None

    def read(self) -> dict[str, float]:
        """The metrics since the last reading, and a fresh start.

        Returns:
            `dict[str, float]`: `time/generate_s`, `time/score_s`, `time/train_s`: seconds per optimizer step;
            `time/tokens_per_s`: completion tokens per second of these steps. Empty when no step has ended.
        """
        if not self._finished:
            return {}
        seconds = {**self._seconds, TRAIN: max(self._in_steps - sum(self._seconds.values()), 0.0)}
        result = {f"time/{name}_s": total / self._finished for name, total in seconds.items()}
        if self._in_steps > 0:
            result["time/tokens_per_s"] = self._tokens / self._in_steps
        self._clear()
        return result
