"""One guard around everything that describes a run and takes no part in it.

Model card, run log, statistics, warnings, progress, the memory plan: none of it may end a run or cost a save. What
fails is left out, said once per place (with its traceback, unless the system refused), and counted.
`KeyboardInterrupt` and `SystemExit` pass.

A guarded block holds work of one process only. Exchanges between ranks stay outside, and a rank whose block failed
takes part in them with an empty value: one that left them out would let the others wait forever.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_drgrpo.upstream.hooks import Feature

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)

T = TypeVar("T")
METRIC = "drgrpo/description_errors"
CARD = "The model card"  # a place, as the guard names it


class DescriptionGuard:
    """Context manager around blocks that describe a run.

    Attributes:
        failures (`Counter[str]`): How often each place failed.
        tell (`Callable[[str, Exception], None]`, *optional*): Told the place and the error of each first failure.

    Example:

    ```python
    >>> guard = DescriptionGuard()
    >>> with guard("The model card"):
    ...     1 / 0
    >>> guard.value("The model card", lambda: 1 / 0, otherwise=0)
    0
    >>> guard.failures
    Counter({'The model card': 2})

    ```
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.tell: Callable[[str, Exception], None] | None = None

    @contextmanager
    def __call__(self, place: str) -> Iterator[None]:
        """Go on behind the block when it fails. `place`: what fails there, as the beginning of a sentence."""
        try:
            yield
        except Exception as error:  # whatever a library, a disk or a bug of ours does
            self.failed(place, error)

    def value(self, place: str, make: Callable[[], T], otherwise: T) -> T:
        """Result of `make`, or `otherwise` where it fails."""
        with self(place):
            return make()
        return otherwise

    @contextmanager
    def around(self, place: str, manager: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Guard the beginning and the end of a block, not the block itself, whose errors `manager` does not see."""
        # A `with` statement would hand an error of the block to `manager`: `close` ends it as if there were none.
        stack = ExitStack()
        with self(place):
            stack.enter_context(manager())
        try:
            yield
        finally:
            with self(place):
                stack.close()

    def failed(self, place: str, error: Exception) -> None:
        """Count a failure, and say it if it is the first of its place."""
        self.failures[place] += 1
        if self.failures[place] > 1:
            return
        is_of_system = isinstance(error, OSError)  # a full disk: its message says all, no line of code does
        message = "%s failed%s: the run goes on without it. Further failures there are counted in %s."
        reason = f" ({error})" if is_of_system else ""
        logger.warning(message, place, reason, METRIC, exc_info=None if is_of_system else error)
        if self.tell is not None:
            self.tell(place, error)


class DescribingCallback(TrainerCallback):
    """Base of callbacks that describe a run: their events are guarded, also those of a subclass."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # Each class guards the events that it defines itself; inherited ones are guarded already.
        for name, event in list(vars(cls).items()):
            if hasattr(DescribingCallback, name) and name.startswith("on_"):
                setattr(cls, name, _guarded(event))

    @cached_property
    def describing(self) -> DescriptionGuard:
        """Its own until a trainer that counts gives it another one."""
        return DescriptionGuard()

    def on_step_numbers(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, numbers: dict[str, float]
    ) -> None:
        """Called at the end of each optimizer step with its own metrics, whatever `logging_steps` is. Where
        `control.should_log` is set, `on_log` follows for the same step."""


def _guarded(event: Callable[..., T]) -> Callable[..., T | None]:
    @wraps(event)
    def guarded(self: DescribingCallback, *args: Any, **kwargs: Any) -> T | None:
        with self.describing(f"{type(self).__name__}.{event.__name__}"):
            return event(self, *args, **kwargs)
        return None

    return guarded


class DescribingFeature(DescribingCallback, Feature):
    """Base of features that describe a run: their events as callbacks are guarded, and count with the trainer's."""

    def __init__(self, trainer: "TrainerProtocol | None" = None):
        super().__init__(trainer)
        if trainer is not None:
            self.describing = trainer.describing
